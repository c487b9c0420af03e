"""Orders that the scheduler half has decided on and the worker half has not received yet.

All kinds share one list, so that the worker half carries them out in the order in which they were
decided. Any other order breaks requests: a request that declines one load and then asks for a loan
would lose the loan, and a request under the name of an aborted one would lose its heartbeats.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

from engine_ext.common.types import (
    EMPTY_STEP,
    LeaseCancel,
    LeaseGrant,
    LoanAnswer,
    LoanAsk,
    PullOrder,
    PushInquiry,
    PushOffer,
    PushRegistration,
    PushWithdrawal,
    RemoteSource,
    ReportCheck,
    SaveOrder,
    StepMetadata,
    TrackOrder,
)

T = TypeVar("T")
Decided = list[tuple[str, Any]]
"""Orders, each with its field of `StepMetadata`."""


class OrdersOfKind(Generic[T]):
    """The orders of one field of `StepMetadata` among all that were decided."""

    __slots__ = ("_decided", "_name")

    def __init__(self, name: str, decided: Decided) -> None:
        self._name = name
        self._decided = decided

    def append(self, order: T) -> None:
        self._decided.append((self._name, order))

    def __iadd__(self, orders: Iterable[T]) -> "OrdersOfKind[T]":
        self._decided += [(self._name, order) for order in orders]
        return self

    def __iter__(self) -> Iterator[T]:
        return (order for name, order in self._decided if name == self._name)


class Orders:
    """The fields of `StepMetadata`, while they are being filled."""

    def __init__(self) -> None:
        self._decided = decided = Decided()
        self.expects = OrdersOfKind[str]("expects", decided)
        self.expected_turns = OrdersOfKind[str]("expected_turns", decided)
        self.transfer_names = OrdersOfKind[tuple[str, str]]("transfer_names", decided)
        self.partial_offers = OrdersOfKind[PushOffer]("partial_offers", decided)
        self.cancels = OrdersOfKind[LeaseCancel]("cancels", decided)
        self.grants = OrdersOfKind[LeaseGrant]("grants", decided)
        self.loans = OrdersOfKind[LoanAnswer]("loans", decided)
        self.revokes = OrdersOfKind[str]("revokes", decided)
        self.tracks = OrdersOfKind[TrackOrder]("tracks", decided)
        self.asks = OrdersOfKind[LoanAsk]("asks", decided)
        self.inquiries = OrdersOfKind[PushInquiry]("inquiries", decided)
        self.pulls = OrdersOfKind[PullOrder]("pulls", decided)
        self.untracks = OrdersOfKind[str]("untracks", decided)
        self.offers = OrdersOfKind[PushOffer]("offers", decided)
        self.registrations = OrdersOfKind[PushRegistration]("registrations", decided)
        self.withdrawals = OrdersOfKind[PushWithdrawal]("withdrawals", decided)
        self.reclaims = OrdersOfKind[str]("reclaims", decided)
        self.confirmed_returns = OrdersOfKind[str]("confirmed_returns", decided)
        self.declines = OrdersOfKind[RemoteSource]("declines", decided)
        self.fences = OrdersOfKind[str]("fences", decided)
        self.saves = OrdersOfKind[SaveOrder]("saves", decided)
        self.failures = OrdersOfKind[str]("failures", decided)
        self.checks = OrdersOfKind[ReportCheck]("checks", decided)

    def __bool__(self) -> bool:
        return bool(self._decided)

    def take(self) -> StepMetadata:
        """Return all orders for the next step, and empty this object."""
        if not self._decided:
            return EMPTY_STEP
        meta = StepMetadata.of(self._decided)
        self._decided.clear()
        return meta
