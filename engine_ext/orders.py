"""What the scheduler half has decided and the worker half has not heard yet."""

from dataclasses import dataclass, field, fields

from engine_ext.types import (
    EMPTY_STEP,
    LeaseCancel,
    LeaseGrant,
    PullOrder,
    PushOffer,
    PushRegistration,
    PushWithdrawal,
    RemoteSource,
    StepMetadata,
    TrackOrder,
)


@dataclass(slots=True)
class Orders:
    """The fields of `StepMetadata`, while they are being filled."""

    expects: list[str] = field(default_factory=list)
    cancels: list[LeaseCancel] = field(default_factory=list)
    grants: list[LeaseGrant] = field(default_factory=list)
    revokes: list[str] = field(default_factory=list)
    tracks: list[TrackOrder] = field(default_factory=list)
    pulls: list[PullOrder] = field(default_factory=list)
    untracks: list[str] = field(default_factory=list)
    offers: list[PushOffer] = field(default_factory=list)
    registrations: list[PushRegistration] = field(default_factory=list)
    withdrawals: list[PushWithdrawal] = field(default_factory=list)
    releases: list[RemoteSource] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any(getattr(self, one.name) for one in fields(self))

    def take(self) -> StepMetadata:
        """All of it, for the next step; nothing is left."""
        if not self:
            return EMPTY_STEP
        meta = StepMetadata(**{one.name: tuple(getattr(self, one.name)) for one in fields(self)})
        for one in fields(self):
            getattr(self, one.name).clear()
        return meta
