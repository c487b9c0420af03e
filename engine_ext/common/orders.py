"""Orders of the scheduler half to the worker half: one `StepMetadata` goes there with each step of
the engine. Everything here can be pickled."""

from dataclasses import dataclass
from typing import TypeVar

from engine_ext.common.types import (
    BlockIds,
    PeerAddress,
    PushTarget,
    RemoteSource,
    ReportCheck,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    """Hold a finished request's blocks for `seconds` from now.

    `renewable`: heartbeats extend it. The lease of a retained turn is not renewed. `extension`: by
    so many seconds at most; None for the configuration's.
    """

    request_id: str
    seconds: float
    renewable: bool = True
    block_ids: BlockIds = ()
    """The blocks in the order in which readers receive them, if checksums are required."""
    extension: float | None = None


@dataclass(frozen=True, slots=True)
class LoanAnswer:
    """The answer to a `LoanRequest`. An empty `loan_id` refuses. A `LeaseGrant` comes with a loan's
    first answer."""

    reader: str
    sequence: int
    loan_id: str
    block_ids: BlockIds
    num_tokens: int
    last_key: bytes
    """The key of the last block."""
    may_hold_more: bool = False
    """The host's cache may hold more of the prefix, but lends no more of it now."""


@dataclass(frozen=True, slots=True)
class LoanAsk:
    """Ask these engines, one after the other, to lend the longest prefix of these blocks to a
    request. The first loan of `least_tokens` tokens or more counts. It ends in exactly one
    `LoanReport`, unless the request is named in a later `Untrack`."""

    request_id: str
    holders: tuple[PeerAddress, ...]
    scheme: str
    keys: tuple[bytes, ...]
    least_tokens: int


@dataclass(frozen=True, slots=True)
class PullOrder:
    """READ `source`'s blocks into ours, from token position `first_token` to `last_token`.

    `first_token` is a multiple of the block size; `last_token` is exclusive. `local_block_ids`
    cover the request from position 0, so both sides are addressed by position. In a group with a
    window the READ fills every block of the list; a hole stands for a block that it must not fill.
    """

    request_id: str
    source: RemoteSource
    local_block_ids: BlockIds
    first_token: int
    last_token: int
    recomputes: bool = False
    """After a failed load the host computes into the same blocks. So the failure is reported when
    nothing writes there any more. Otherwise it is reported at once, and the host fences the blocks
    before it frees them."""
    timeout: float | None = None
    """Seconds for the connection, and for the READ besides the time that its bytes take; None for
    the timeouts of the configuration."""
    is_proven: bool = False
    """Prefix hashes show that the remote's KV is of this request's content. Without hashes only a
    stock engine is read: every other engine would have sent them."""


@dataclass(frozen=True, slots=True)
class PushRegistration:
    """D: these blocks wait for P's WRITE of token positions `first_token` to `last_token`.

    `first_token` is a multiple of the block size. `local_block_ids` cover the request from position
    0. The id is returned in `finished_recving` exactly once, whatever P does.
    """

    request_id: str
    target: PushTarget
    local_block_ids: BlockIds
    first_token: int
    last_token: int
    digest: bytes
    """The hash of the content that P must have prefilled: see `prefix_hashes.digest`."""
    recomputes: bool = False
    """As in a `PullOrder`."""


@dataclass(frozen=True, slots=True)
class PushInquiry:
    """D: this request takes no blocks before P holds its prompt.

    The id is returned in `TransferResults.ready` exactly once, whatever P does.
    """

    request_id: str
    target: PushTarget
    digest: bytes
    """As in a `PushRegistration`."""


@dataclass(frozen=True, slots=True)
class PushWithdrawal:
    """D: the request needs no KV any more, registered or not. P may free its blocks."""

    request_id: str
    target: PushTarget


@dataclass(frozen=True, slots=True)
class LeaseCancel:
    """An expected request ended without KV to read. `is_turn`: no prefill engine was to write
    it."""

    request_id: str
    transfer_id: str | None = None
    is_turn: bool = False


@dataclass(frozen=True, slots=True)
class PushOffer:
    """P: this request's KV is ready for an engine that registers. A `LeaseGrant` comes with it. The
    blocks cover token positions 0 to `num_tokens`."""

    request_id: str
    block_ids: BlockIds
    num_tokens: int
    digest: bytes
    transfer_id: str | None = None
    attempt: int = 0
    """Another attempt has other blocks, or the same ones filled again."""


@dataclass(frozen=True, slots=True)
class PartialOffer(PushOffer):
    """P: an offer while the request runs. `num_tokens` are computed so far; `digest` covers the
    whole prompt."""


@dataclass(frozen=True, slots=True)
class TrackOrder:
    """Send heartbeats for a remote request from now on, for the sake of our request."""

    request_id: str
    address: PeerAddress
    remote_id: str
    """The source's name of the request."""


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """Copy these blocks to host memory after this step (see engine_ext/worker/staging.py)."""

    request_id: str
    block_ids: BlockIds


@dataclass(frozen=True, slots=True)
class Expect:
    """P: a remote will read this request; nothing is leased yet."""

    request_id: str
    transfer_id: str | None = None
    """In push mode: the router's name of the transfer."""


@dataclass(frozen=True, slots=True)
class ExpectTurn:
    """D: this request's KV is to be retained. A reader may be faster than the grant."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Revoke:
    """End this lease early, because the blocks are needed."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Untrack:
    """D: end this request's heartbeats, and its `LoanAsk` or `PushInquiry`."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Decline:
    """D: this KV is not needed after all, so the remote may free it. Nothing is returned."""

    source: RemoteSource


@dataclass(frozen=True, slots=True)
class Fence:
    """D: this request ended during its load. P: it ended without KV after a partial offer. The id
    is returned in `finished_sending` exactly once, when no transfer of ours touches its blocks."""

    request_id: str


@dataclass(frozen=True, slots=True)
class FailLoad:
    """D: this request waits for a load that could not be ordered. The id is returned in
    `finished_recving` and `failed_recving` exactly once."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Reclaim:
    """D in push mode: other requests need the blocks of this registration. It is reported in
    `returned` when P has answered that it does not write, in `finished_recving` if P has written,
    or in `ready` if the blocks cannot be given back."""

    request_id: str


@dataclass(frozen=True, slots=True)
class ConfirmReturn:
    """D in push mode: every rank has reported this registration in `returned`. It ends as a failed
    load whose blocks nothing touches."""

    request_id: str


LeaseOrder = Expect | ExpectTurn | LeaseCancel | LeaseGrant | LoanAnswer | Revoke
LoadOrder = TrackOrder | LoanAsk | PullOrder | Untrack | Decline | Fence | FailLoad
PushOrder = PushInquiry | PushOffer | PushRegistration | PushWithdrawal | Reclaim | ConfirmReturn
Order = LeaseOrder | LoadOrder | PushOrder | SaveOrder | ReportCheck


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """Scheduler -> worker, once per step: orders in the sequence in which they were decided.

    They are carried out in this sequence. Any other one breaks requests: a request that declines
    one load and then asks for a loan would lose the loan, and a request under the name of an
    aborted one would lose its heartbeats.
    """

    orders: tuple[Order, ...] = ()

    def all(self, kind: type[T]) -> tuple[T, ...]:
        """Return the orders of one kind."""
        return tuple(order for order in self.orders if isinstance(order, kind))

    def without_loads(self) -> "StepMetadata":
        """Return the same orders, with every load failed and every source notified."""
        orders: list[Order] = []
        for order in self.orders:
            match order:
                case PullOrder(request_id, source):
                    orders += [Decline(source), FailLoad(request_id)]
                case PushRegistration(request_id, target):
                    orders += [PushWithdrawal(request_id, target), FailLoad(request_id)]
                case _:
                    orders.append(order)
        return StepMetadata(tuple(orders))

    def __bool__(self) -> bool:
        return bool(self.orders)


EMPTY_STEP = StepMetadata()
