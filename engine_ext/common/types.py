"""What an engine and the connector say to each other: plain records, no engine types, no torch.

The scheduler half and the worker half of a connector may live in different processes. They share
nothing but these records: a `StepMetadata` travels scheduler -> worker once per engine step, a
`TransferResults` comes back. Everything here pickles.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

from engine_ext.common.histogram import Histogram
from engine_ext.common.prefix_hashes import Keys

Clock = Callable[[], float]
"""Seconds, monotonic, from an origin of its own."""

BlockIds = tuple[tuple[int, ...], ...]
"""Block ids by KV-cache group, in token-position order: block k of a group holds tokens
[k * block_size, (k + 1) * block_size)."""


def num_blocks_in(block_ids: BlockIds) -> int:
    """Of all groups: what is kept as long as something may touch any of them."""
    return sum(map(len, block_ids))


class FinishStatus(enum.Enum):
    """How a request ended, as far as KV is concerned. Only the first two leave KV worth reading."""

    STOPPED = "stopped"
    LENGTH_CAPPED = "length_capped"
    ABORTED = "aborted"
    ERROR = "error"

    @property
    def leaves_kv(self) -> bool:
        return self in (FinishStatus.STOPPED, FinishStatus.LENGTH_CAPPED)


class EngineRequest(Protocol):
    """What a host's request offers the connector. Read, never written."""

    @property
    def request_id(self) -> str: ...
    @property
    def kv_transfer_params(self) -> Any:
        """Whatever the HTTP body carried: untrusted JSON, or None."""

    @property
    def prompt_token_ids(self) -> Sequence[int]: ...
    @property
    def token_ids(self) -> Sequence[int]:
        """Prompt and answer so far."""

    @property
    def content_keys(self) -> Keys | None:
        """What its KV depends on besides the token ids. None: on something that cannot be told, so
        nothing of it is ever offered or loaded."""

    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV stands in the host's blocks."""


class MatchedTokens(NamedTuple):
    """Answer of `get_num_new_matched_tokens`.

    `num_tokens`: tokens beyond the locally computed ones that can be loaded, 0 for none, None for
    "ask again next step". `is_async`: the load runs beside the engine's steps; the host allocates,
    parks the request and waits for its id in `TransferResults.finished_recving`.
    """

    num_tokens: int | None
    is_async: bool


class FinishDecision(NamedTuple):
    """Answer of `request_finished`.

    `delay_free`: the host keeps the request's blocks until its id turns up in
    `TransferResults.finished_sending`. `kv_transfer_params`: goes into the HTTP answer.
    """

    delay_free: bool
    kv_transfer_params: dict[str, Any] | None


class PeerAddress(NamedTuple):
    """Which engine, where its side channel is, and how many ranks answer there: `tp_size` of each
    of its `pp_size` stages."""

    engine_id: str
    host: str
    port: int
    tp_size: int = 1
    pp_size: int = 1


@dataclass(frozen=True, slots=True)
class RemoteSource:
    """A request's KV as it lies on another engine. Parsed and checked, see params.py."""

    address: PeerAddress
    request_id: str
    tp_size: int
    block_ids: BlockIds
    num_tokens: int | None
    """Tokens with KV in these blocks; None where an old peer does not say."""
    block_size: int | None = None
    """Tokens per block there; None where the peer does not say."""
    expires_at: float | None = None
    """Unix time, by the remote's clock, after which it will have dropped them."""
    is_revocable: bool = False
    """A turn that the remote may drop before that; readers that follow our leases hear of it."""


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    """Hold a finished request's blocks for `seconds` from now.

    `renewable`: heartbeats extend it. A turn's blocks, kept for the next turn, are not renewed.
    """

    request_id: str
    seconds: float
    renewable: bool = True
    block_ids: BlockIds = ()
    """The blocks in the order in which readers receive them, if checksums are required."""


@dataclass(frozen=True, slots=True)
class PullOrder:
    """READ `source`'s blocks into ours, from token position `first_token` to `last_token`.

    `first_token` is a multiple of the block size; `last_token` is exclusive. `local_block_ids`
    cover the request from position 0, so both sides are addressed by position.
    """

    request_id: str
    source: RemoteSource
    local_block_ids: BlockIds
    first_token: int
    last_token: int
    recomputes: bool = False
    """A failed load is computed into the same blocks: its report waits until nothing writes there
    any more. Otherwise it comes in time, and the host asks with a fence before it frees them."""
    is_proven: bool = False
    """The remote's KV is of this request's content. Without proof, only a stock engine is read:
    every other one would have given it."""


@dataclass(frozen=True, slots=True)
class PushTarget:
    """The prefill engine that is to write into our blocks, and what it may know the request by."""

    address: PeerAddress
    tp_size: int
    remote_request_id: str
    """What the router told both engines, or P's own id where the router asked P first."""
    transfer_id: str | None = None
    num_tokens: int | None = None
    """That P holds, where it has answered already."""


@dataclass(frozen=True, slots=True)
class PushRegistration:
    """D: these blocks wait for P's WRITE of token positions `first_token` to `last_token`.

    `first_token` is a multiple of the block size. `local_block_ids` cover the request from position
    0. The id comes back in `finished_recving` exactly once, whatever P does.
    """

    request_id: str
    target: PushTarget
    local_block_ids: BlockIds
    first_token: int
    last_token: int
    digest: bytes
    """Of the content that P must have prefilled, see proof.py."""
    recomputes: bool = False
    """As of a `PullOrder`."""


@dataclass(frozen=True, slots=True)
class PushInquiry:
    """D: this request takes no blocks before P holds its prompt.

    The id comes back in `TransferResults.ready` exactly once, whatever P does.
    """

    request_id: str
    target: PushTarget
    digest: bytes
    """As of a `PushRegistration`."""


@dataclass(frozen=True, slots=True)
class PushWithdrawal:
    """D: the request is not wanted any more, registered or not; P may free its blocks."""

    request_id: str
    target: PushTarget


@dataclass(frozen=True, slots=True)
class LeaseCancel:
    """P: an expected request ended without KV to read."""

    request_id: str
    transfer_id: str | None = None


@dataclass(frozen=True, slots=True)
class PushOffer:
    """P: this request's KV is ready for whoever registers. Comes with a `LeaseGrant` of its id.

    The blocks cover token positions 0 to `num_tokens`. Of a draft that is how far the KV stands
    while the request runs, and `digest` is of all that it will be.
    """

    request_id: str
    block_ids: BlockIds
    num_tokens: int
    digest: bytes
    transfer_id: str | None = None
    attempt: int = 0
    """Another one is of other blocks, or of the same ones filled again."""


@dataclass(frozen=True, slots=True)
class TrackOrder:
    """Heartbeat for a remote request from now on, on behalf of ours."""

    request_id: str
    address: PeerAddress
    remote_id: str
    """What the holder knows the request by."""


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """Copy these blocks to host memory after this step (see engine_ext/worker/staging.py)."""

    request_id: str
    block_ids: BlockIds


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """Scheduler -> worker, once per step. Applied in the order of the fields."""

    expects: tuple[str, ...] = ()
    """P: requests a remote will read; nothing is leased yet."""
    transfer_names: tuple[tuple[str, str], ...] = ()
    """P in push mode: ids in `expects`, and the router's `transfer_id` of each."""
    drafts: tuple[PushOffer, ...] = ()
    """P in push mode: of requests that run yet."""
    cancels: tuple[LeaseCancel, ...] = ()
    grants: tuple[LeaseGrant, ...] = ()
    """These leases start now; each id comes back in `finished_sending` exactly once."""
    revokes: tuple[str, ...] = ()
    """Leases to end before their time, because the blocks are wanted elsewhere."""
    tracks: tuple[TrackOrder, ...] = ()
    """D: requests to heartbeat for."""
    inquiries: tuple[PushInquiry, ...] = ()
    """D in push mode."""
    pulls: tuple[PullOrder, ...] = ()
    """D: each request id comes back in `finished_recving` exactly once."""
    untracks: tuple[str, ...] = ()
    """D: heartbeats that end."""
    offers: tuple[PushOffer, ...] = ()
    """P in push mode."""
    registrations: tuple[PushRegistration, ...] = ()
    """D in push mode."""
    withdrawals: tuple[PushWithdrawal, ...] = ()
    """D in push mode."""
    reclaims: tuple[str, ...] = ()
    """D in push mode: registrations whose blocks other requests need. Each is reported in
    `given_back` once P has said that it does not write, or in `finished_recving` if it has written;
    one that cannot be given back, in `ready`."""
    give_backs: tuple[str, ...] = ()
    """D in push mode: registrations that every rank has reported in `given_back`. They end as
    failed loads whose blocks nothing touches."""
    declines: tuple[RemoteSource, ...] = ()
    """D: KV that is not needed after all; the remote may free it. Nothing comes back."""
    fences: tuple[str, ...] = ()
    """D: requests that ended while they were loaded. Nobody waits for these loads any more; each id
    comes back in `finished_sending` exactly once, when nothing of ours touches its blocks. P: those
    that ended with a draft and no KV."""
    saves: tuple[SaveOrder, ...] = ()
    """With host buffers."""
    failures: tuple[str, ...] = ()
    """D: requests that wait for a load that could not be ordered. Each id comes back in
    `finished_recving` and `failed_recving` exactly once."""

    def without_loads(self) -> "StepMetadata":
        """The same, but that every load has failed, and its holder is told."""
        pushes = self.registrations
        failed = [order.request_id for orders in (self.pulls, pushes) for order in orders]
        withdrawn = [PushWithdrawal(order.request_id, order.target) for order in pushes]
        return replace(
            self,
            pulls=(),
            registrations=(),
            withdrawals=(*self.withdrawals, *withdrawn),
            declines=(*self.declines, *(order.source for order in self.pulls)),
            failures=(*self.failures, *failed),
        )

    def __bool__(self) -> bool:
        return self is not EMPTY_STEP and self != EMPTY_STEP


EMPTY_STEP = StepMetadata()


@dataclass(frozen=True, slots=True)
class LoadProblem:
    """Why a load failed. `is_of_pair`: the two engines cannot exchange KV, as far as this load
    shows; else only this request's KV was not to be had."""

    reason: str
    is_of_pair: bool


@dataclass(frozen=True, slots=True)
class TransferResults:
    """Worker -> scheduler. An id is reported once, and only if an order named it."""

    finished_sending: frozenset[str] = frozenset()
    """Blocks of these finished requests may be freed: the lease, or the fence, has ended."""
    finished_recving: frozenset[str] = frozenset()
    """Loads that ended, well or badly."""
    failed_recving: frozenset[str] = frozenset()
    """The part of `finished_recving` whose blocks hold no usable KV."""
    problems: Mapping[str, LoadProblem] = field(default_factory=dict, compare=False)
    """The reasons for some of `failed_recving`. There is none for a request that ended first."""
    ready: frozenset[str] = frozenset()
    """D in push mode: requests that may take blocks without waiting for P any longer."""
    given_back: frozenset[str] = frozenset()
    """D in push mode: requests of a `reclaims` order whose blocks P will not write. The blocks stay
    reserved until a `give_backs` order."""

    def __bool__(self) -> bool:
        loads = self.finished_recving or self.ready or self.given_back
        return bool(self.finished_sending or loads)

    def __and__(self, other: "TransferResults") -> "TransferResults":
        return TransferResults(
            self.finished_sending & other.finished_sending,
            self.finished_recving & other.finished_recving,
            self.failed_recving & other.failed_recving,
            {**other.problems, **self.problems},
            self.ready & other.ready,
            self.given_back & other.given_back,
        )

    def __or__(self, other: "TransferResults") -> "TransferResults":
        return TransferResults(
            self.finished_sending | other.finished_sending,
            self.finished_recving | other.finished_recving,
            self.failed_recving | other.failed_recving,
            {**other.problems, **self.problems},
            self.ready | other.ready,
            self.given_back | other.given_back,
        )


NO_RESULTS = TransferResults()

SHARED = -1
"""The group of a region that all KV-cache groups share."""

STATE = 0
"""In place of a group's window: its layers keep no tokens but a state (Mamba, linear attention). A
request has one block of it, which stands for all the tokens that were computed, and for no fewer.
"""


def chunked(num_tokens: int) -> int:
    """In place of a group's window: a token sees those of its own chunk, which are so many (Llama
    4's local attention)."""
    return -num_tokens


def first_seen(window: int, position: int) -> int:
    """The first of the tokens that the one at `position` sees; through a window or in its chunk."""
    is_chunk = window < 0
    return position - position % -window if is_chunk else max(0, position - window + 1)


@dataclass(frozen=True, slots=True)
class Region:
    """One registered stretch of KV memory: `num_blocks` blocks of one layer, or of all `members`.

    Block i starts at `base_addr + i * block_stride` and is `block_len` bytes long.
    """

    name: str
    base_addr: int
    block_len: int
    block_stride: int
    num_blocks: int
    device_id: int = 0
    mem_type: str = "DRAM"
    """NIXL's name: DRAM or VRAM."""
    group: int = 0
    """KV-cache group, an index into `CacheGeometry.group_windows`, or SHARED."""
    members: tuple[str, ...] = ()
    """Where one block holds several layers: their names, in the order they lie there."""
    tenants: tuple[str, ...] = ()
    """Of SHARED memory, by group: the layer whose blocks of that group lie there, or no name."""

    @property
    def layers(self) -> tuple[str, ...]:
        return self.members or (self.name,)


@dataclass(frozen=True, slots=True)
class CacheGeometry:
    """How one rank's blocks are laid out, and which part of the model's KV they hold."""

    block_size: int
    """Tokens per block."""
    num_blocks: int
    kv_cache_layout: str = "LBHNC"
    """Axes from outermost to innermost, see engine_ext/layout/blocks.py."""
    attn_backend_name: str = "CPU_ATTN"
    num_kv_heads: int | None = None
    """Of the model, over all ranks; 1 for latent attention (MLA), of which each rank has the whole.
    None: only engines laid out exactly alike can be read."""
    is_cut_by_tokens: bool = True
    """False: a head's part of a block is not its tokens one behind the other (vLLM's CPU_ATTN has
    all keys before all values), so that only blocks of as many tokens are alike."""
    tp_rank: int = 0
    pp_rank: int = 0
    group_windows: tuple[int | None, ...] = (None,)
    """Per KV-cache group: the tokens of its sliding window, None for full attention, STATE, or what
    `chunked` makes of a chunk's."""
    is_staged: bool = False
    """KV travels by way of host memory, see engine_ext/worker/staging.py."""
    may_load: bool = True
    """False: the host may hand a block out while a step under way still writes into it. Nothing is
    loaded into any."""
    max_model_len: int | None = None
    """Most tokens of one request; None: not known."""
    lookahead: int = 0
    """How many of the tokens behind its own a position's KV depends on: some layers that guess
    (EAGLE's, MTP's) take the next token, and each further MTP module one more."""

    @property
    def has_state(self) -> bool:
        return STATE in self.group_windows


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """How other engines know this one."""

    engine_id: str
    host: str
    """Side channel, where the handshake is answered. Not the HTTP address."""
    port: int
    tp_size: int = 1
    pp_size: int = 1
    dcp_size: int = 1
    pcp_size: int = 1
    compat_factors: dict[str, str] = field(default_factory=dict)
    """Facts that must be equal on both ends; hashed into the compatibility hash."""
    compat_hash: str | None = None
    """The host's own compatibility hash, where its peers compare that one (vLLM's)."""

    def is_at(self, address: PeerAddress) -> bool:
        """That is where this engine answers handshakes."""
        return (address.host, address.port) == (self.host, self.port)


SHORT_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
"""Bounds of vLLM 0.32's histograms, and so those of all in a fleet; as are those of bytes and
descriptors."""
BYTES = tuple(float(2**power) for power in range(11, 35, 2))
DESCRIPTORS = tuple(
    float(number)
    for number in (10, 20, 30, 50, 75, 100, 200, 400, 1000, 2000, 4000, 10000, 20000, 50000)
)
HANDSHAKE_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
LEASE_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 480.0)


@dataclass(slots=True)
class ConnectorStats:
    """Counters since start, except where a name says `active`. The owner thread writes it; others
    take a `snapshot`."""

    bytes_received: int = 0
    blocks_received: int = 0
    pulls_ok: int = 0
    pulls_failed: int = 0
    pulls_aborted: int = 0
    """Loads whose request ended first: neither ok nor failed."""
    pulls_active: int = 0
    pushes_ok: int = 0
    """WRITEs that ended well, on P."""
    pushes_failed: int = 0
    pushes_active: int = 0
    """Registrations on D and WRITEs on P that have not ended."""
    early_writes: int = 0
    """That began on P while their prompt was still computed: all parts of a push but the last."""
    early_blocks: int = 0
    """That these carry."""
    pushes_received: int = 0
    """Registrations that were written, on D."""
    pushes_missed: int = 0
    """Registrations that were not, on D."""
    pushes_aborted: int = 0
    """Registrations whose request ended first, on D: neither received nor missed."""
    pushes_given_back: int = 0
    """Registrations that gave their blocks back to other requests, on D."""
    pushes_awaited: int = 0
    """Requests that took no blocks before P held their prompt, on D."""
    leases_active: int = 0
    leases_granted: int = 0
    leases_released: int = 0
    leases_expired: int = 0
    leases_revoked: int = 0
    """Ended early, to make room."""
    quarantined_blocks_active: int = 0
    """Held because a transfer that nobody waits for any more may still touch them."""
    reads_unproven: int = 0
    """READs whose blocks may have changed under them: reported as failed, never used."""
    pulls_refused: int = 0
    """Not begun: no proof came from an engine that gives one, a turn that may end at any time is
    held by one that cannot say whether it has, or the two run different versions of ours."""
    proofs_unreadable: int = 0
    """Malformed, cut, or of another version: nothing was loaded. The scheduler half's count."""
    engine_id_clashes: int = 0
    """Loads that did not begin, because another engine with this engine's id has the KV. The
    scheduler half's count."""
    loads_verified: int = 0
    """READs whose blocks have the holder's checksums."""
    loads_unverified: int = 0
    """With `kv_checksum`: READs that were used without checksums, because the holder makes none or
    lays its blocks out otherwise."""
    loads_corrupted: int = 0
    """READs that failed because a block's checksum was not the holder's."""
    heartbeats_sent: int = 0
    heartbeats_received: int = 0
    notifications_unknown: int = 0
    notifications_failed: int = 0
    """That NIXL refused to send."""
    confirmations_late: int = 0
    """Readers that confirmed when the lease had ended: what they read may have been refilled."""
    notifications_unsealed: int = 0
    """From those who do not hold the shared secret: ignored."""
    metadata_accepted: int = 0
    """NIXL metadata of unauthenticated agents, validated and loaded."""
    metadata_refused: int = 0
    """NIXL metadata of unauthenticated agents that this engine did not load."""
    validators_lost: int = 0
    """Processes that such metadata ended, in place of this engine."""
    handshakes_ok: int = 0
    handshakes_failed: int = 0
    transfer_seconds: Histogram = field(default_factory=partial(Histogram, SHORT_SECONDS))
    """From post to end, by NIXL's own clock; of each READ and WRITE that ended well, as are the
    next three."""
    post_seconds: Histogram = field(default_factory=partial(Histogram, (0.001, *SHORT_SECONDS)))
    bytes_per_transfer: Histogram = field(default_factory=partial(Histogram, BYTES))
    descriptors_per_transfer: Histogram = field(default_factory=partial(Histogram, DESCRIPTORS))
    handshake_seconds: Histogram = field(default_factory=partial(Histogram, HANDSHAKE_SECONDS))
    """From the first dial to the peer's acceptance, on the dialling side."""
    lease_age_at_read_seconds: Histogram = field(default_factory=partial(Histogram, LEASE_SECONDS))
    """From a lease's grant to its last reader's confirmation, on the holding side."""

    def snapshot(self) -> "ConnectorStats":
        taken = replace(self)
        for name in _DISTRIBUTED:
            setattr(taken, name, getattr(self, name).copy())
        return taken


_DISTRIBUTED = tuple(each.name for each in fields(ConnectorStats) if each.type is Histogram)
