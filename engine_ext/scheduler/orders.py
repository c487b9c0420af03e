"""Orders that the scheduler half has decided on and the worker half has not received yet."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

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
    SaveOrder,
    StepMetadata,
    TrackOrder,
)


@dataclass(slots=True)
class Orders:
    """The fields of `StepMetadata`, while they are being filled."""

    expects: list[str] = field(default_factory=list)
    expected_turns: list[str] = field(default_factory=list)
    transfer_names: list[tuple[str, str]] = field(default_factory=list)
    partial_offers: list[PushOffer] = field(default_factory=list)
    cancels: list[LeaseCancel] = field(default_factory=list)
    grants: list[LeaseGrant] = field(default_factory=list)
    loans: list[LoanAnswer] = field(default_factory=list)
    revokes: list[str] = field(default_factory=list)
    tracks: list[TrackOrder] = field(default_factory=list)
    asks: list[LoanAsk] = field(default_factory=list)
    inquiries: list[PushInquiry] = field(default_factory=list)
    pulls: list[PullOrder] = field(default_factory=list)
    untracks: list[str] = field(default_factory=list)
    offers: list[PushOffer] = field(default_factory=list)
    registrations: list[PushRegistration] = field(default_factory=list)
    withdrawals: list[PushWithdrawal] = field(default_factory=list)
    reclaims: list[str] = field(default_factory=list)
    confirmed_returns: list[str] = field(default_factory=list)
    declines: list[RemoteSource] = field(default_factory=list)
    fences: list[str] = field(default_factory=list)
    saves: list[SaveOrder] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any(_contents(self))

    def take(self) -> StepMetadata:
        """Return all orders for the next step, and empty this object."""
        contents = _contents(self)
        if not any(contents):
            return EMPTY_STEP
        meta = StepMetadata(*map(tuple, contents))
        for content in contents:
            content.clear()
        return meta


# This runs several times per engine step, where reflection would cost more than everything else.
# The fields are those of `StepMetadata`, in its order.
_contents: Callable[[Orders], tuple[list[Any], ...]] = attrgetter(*(f.name for f in fields(Orders)))
