"""The records that an engine and the connector exchange. They use no engine types and no torch.

The scheduler half and the worker half of a connector may run in different processes. They share
only these records and those of orders.py: a `StepMetadata` goes from scheduler to worker once per
engine step, and a `TransferResults` comes back. Everything here can be pickled.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from engine_ext.common.histogram import Histogram
from engine_ext.common.prefix_hashes import Keys

T = TypeVar("T")

Clock = Callable[[], float]
"""Seconds, monotonic, from an origin of its own."""

BlockIds = tuple[tuple[int, ...], ...]
"""Block ids by KV-cache group, in token-position order: block k of a group holds tokens
[k * block_size, (k + 1) * block_size)."""


def num_blocks_in(block_ids: BlockIds) -> int:
    """Return the number of blocks in all groups together."""
    return sum(map(len, block_ids))


class FinishStatus(enum.Enum):
    """How a request ended. Only the first two leave KV that is worth reading."""

    STOPPED = "stopped"
    LENGTH_CAPPED = "length_capped"
    ABORTED = "aborted"
    ERROR = "error"

    @property
    def leaves_kv(self) -> bool:
        return self in (FinishStatus.STOPPED, FinishStatus.LENGTH_CAPPED)


class EngineRequest(Protocol):
    """A request of the host, as the connector reads it. The connector never writes it."""

    @property
    def request_id(self) -> str: ...
    @property
    def kv_transfer_params(self) -> Any:
        """The field of the HTTP body: untrusted JSON, or None."""

    @property
    def prompt_token_ids(self) -> Sequence[int]: ...
    @property
    def token_ids(self) -> Sequence[int]:
        """The prompt, and the answer so far."""

    @property
    def content_keys(self) -> Keys | None:
        """The other content that the KV depends on, such as images or a LoRA adapter. None if some
        of it has no name that two engines could compare; then no KV is offered or loaded."""

    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is in the host's blocks."""


class MatchedTokens(NamedTuple):
    """The answer of `get_num_new_matched_tokens`.

    `num_tokens`: tokens beyond the locally computed ones that can be loaded, 0 for none, None for
    "ask again next step". `is_async`: the load runs beside the engine's steps; the host allocates,
    parks the request and waits for its id in `TransferResults.finished_recving`.
    """

    num_tokens: int | None
    is_async: bool


class FinishDecision(NamedTuple):
    """The answer of `request_finished`.

    `delay_free`: the host keeps the request's blocks until its id turns up in
    `TransferResults.finished_sending`. `kv_transfer_params`: a field of the HTTP answer.
    """

    delay_free: bool
    kv_transfer_params: dict[str, Any] | None


class PeerAddress(NamedTuple):
    """An engine, the address of its side channel, and the number of ranks that answer there:
    `tp_size` for each of its `pp_size` stages."""

    engine_id: str
    host: str
    port: int
    tp_size: int = 1
    pp_size: int = 1


LOAN_PREFIX = "loan-"


@dataclass(frozen=True, slots=True)
class RemoteSource:
    """The place of a request's KV on another engine. Parsed and checked, see
    scheduler/params.py."""

    address: PeerAddress
    request_id: str
    tp_size: int
    block_ids: BlockIds
    num_tokens: int | None
    """Tokens with KV in these blocks, or None from an old peer, which does not send it."""
    block_size: int | None = None
    """Tokens per block there, or None if the peer does not send it."""
    expires_at: float | None = None
    """Unix time of the remote's clock after which it has freed the blocks."""
    is_revocable: bool = False
    """A turn that the remote may free earlier. Readers that use our leases are notified."""

    @property
    def is_loan(self) -> bool:
        return self.request_id.startswith(LOAN_PREFIX)


@dataclass(frozen=True, slots=True)
class Holder:
    """An engine whose prefix cache may hold the first `expected_tokens` tokens of a request."""

    address: PeerAddress
    expected_tokens: int
    index: int = 0
    """Its place among the holders that the request names."""


@dataclass(frozen=True, slots=True)
class LoanRequest:
    """Another engine asks for a lease on the longest prefix of these blocks that the host's prefix
    cache holds. See engine_ext/scheduler/loans.py."""

    reader: str
    """The NIXL agent that asks."""
    sequence: int
    scheme: str
    """The name of the method that makes the keys."""
    keys: tuple[bytes, ...]
    is_cut: bool = False
    """The host has kept a part of what its cache holds for it, because other requests wait, too."""


@dataclass(frozen=True, slots=True)
class LoanReport:
    """The end of a `LoanAsk`: the loan, whose lease is renewed from then on, or None."""

    request_id: str
    source: RemoteSource | None = None
    last_key: bytes = b""
    """The key of the last block."""
    is_refused: bool = True
    """Without a loan: all holders have answered that they do not hold the prefix."""


@dataclass(frozen=True, slots=True)
class PushTarget:
    """The prefill engine that is to write into our blocks, and its names for the request."""

    address: PeerAddress
    tp_size: int
    remote_request_id: str
    """The id that the router sent to both engines, or P's own id if the router asked P first."""
    transfer_id: str | None = None
    num_tokens: int | None = None
    """Tokens that P holds, if it has answered already."""


class ReportCheck(NamedTuple):
    """Asks whether the end of a load, or of kept blocks, has still to be reported. See
    engine_ext/scheduler/report_deadlines.py."""

    request_id: str
    number: int
    """Tells the checks of one request apart."""
    is_load: bool


@dataclass(frozen=True, slots=True)
class LoadProblem:
    """Why a load failed. `is_of_pair`: as far as this load shows, the two engines cannot exchange
    KV for any request. Otherwise only this request is affected. `in_quarantine`: a READ may still
    write into the request's blocks."""

    reason: str
    is_of_pair: bool
    in_quarantine: bool = False


@dataclass(frozen=True, slots=True)
class TransferResults:
    """Worker -> scheduler. An id is reported once, and only if an order named it."""

    finished_sending: frozenset[str] = frozenset()
    """Blocks of these finished requests may be freed: the lease, or the fence, has ended."""
    finished_recving: frozenset[str] = frozenset()
    """Loads that ended, with or without success."""
    failed_recving: frozenset[str] = frozenset()
    """The part of `finished_recving` whose blocks hold no usable KV."""
    problems: Mapping[str, LoadProblem] = field(default_factory=dict, compare=False)
    """The reasons for some of `failed_recving`. A request that ended first has none."""
    ready: frozenset[str] = frozenset()
    """D in push mode: requests that may take blocks, because they wait for P no longer."""
    returned: frozenset[str] = frozenset()
    """D in push mode: requests of a `Reclaim` order whose blocks P will not write. The blocks stay
    reserved until a `ConfirmReturn` order."""
    loan_requests: tuple[LoanRequest, ...] = ()
    """Each is answered by a `LoanAnswer`."""
    loan_reports: tuple[LoanReport, ...] = ()
    lost: frozenset[ReportCheck] = frozenset()
    """The checks whose report was lost. The host passes them to `SchedulerConnector.recover`."""

    def __bool__(self) -> bool:
        loads = self.finished_recving or self.ready or self.returned or self.lost
        loans = self.loan_requests or self.loan_reports
        return bool(self.finished_sending or loads or loans)

    def __or__(self, other: "TransferResults") -> "TransferResults":
        both = {name: getattr(self, name) | getattr(other, name) for name in _REPORTED}
        return TransferResults(
            **both,
            problems={**other.problems, **self.problems},
            loan_requests=tuple(dict.fromkeys(self.loan_requests + other.loan_requests)),
            loan_reports=tuple(dict.fromkeys(self.loan_reports + other.loan_reports)),
        )


_REPORTED = ("finished_sending", "finished_recving", "failed_recving", "ready", "returned", "lost")
NO_RESULTS = TransferResults()

SHARED = -1
"""The group of a region that all KV-cache groups share."""

STATE = 0
"""The window of a group whose layers keep a state instead of tokens (Mamba, linear attention). A
request has one block of it, which includes all tokens that were computed, and no fewer."""


def chunked(num_tokens: int) -> int:
    """Return the window of a group in which a token sees the tokens of its own chunk of this size
    (Llama 4's local attention)."""
    return -num_tokens


def first_seen(window: int, position: int) -> int:
    """Return the first token that the token at `position` sees, through a window or in its
    chunk."""
    is_chunk = window < 0
    return position - position % -window if is_chunk else max(0, position - window + 1)


@dataclass(frozen=True, slots=True)
class Region:
    """A registered range of KV memory: `num_blocks` blocks of one layer, or of all `members`.

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
    """The names of the layers, in their order, if one block holds several."""
    tenants: tuple[str, ...] = ()
    """For SHARED memory, by group: the layer whose blocks of that group lie there, or an empty
    name."""

    @property
    def layers(self) -> tuple[str, ...]:
        return self.members or (self.name,)


class StateSection(NamedTuple):
    """A part of a state's block that the tensor ranks divide among them as they divide KV heads. A
    block is such sections, one behind the other."""

    items: int
    """Heads, or groups of channels, over all ranks. Of a single item every rank has a copy."""
    size: int
    """Bytes of an item."""


@dataclass(frozen=True, slots=True)
class CacheGeometry:
    """The layout of one rank's blocks, and the part of the model's KV that they hold."""

    block_size: int
    """Tokens per block. Where groups differ, the least common multiple of theirs, as for stock."""
    num_blocks: int
    kv_cache_layout: str = "LBHNC"
    """Axes from outermost to innermost, see engine_ext/layout/blocks.py."""
    attn_backend_name: str = "CPU_ATTN"
    num_kv_heads: int | None = None
    """KV heads of the model over all ranks. 1 for latent attention (MLA), which each rank has as a
    whole. None: only engines with exactly the same layout can be read."""
    is_cut_by_tokens: bool = True
    """False if a head's part of a kernel's block is not a sequence of tokens (vLLM's CPU_ATTN has
    all keys before all values, an indexer of sparse attention all keys before their scales). Then
    only kernel blocks of equal size are alike."""
    tp_rank: int = 0
    pp_rank: int = 0
    group_windows: tuple[int | None, ...] = (None,)
    """Per KV-cache group: the tokens of its sliding window, None for full attention, STATE, or the
    value of `chunked`."""
    group_block_sizes: tuple[int, ...] = ()
    """Per KV-cache group: the tokens of a block. Empty: `block_size` in all of them."""
    uncached_groups: frozenset[int] = frozenset()
    """Groups whose window the host's prefix cache does not keep: a load fills all their blocks."""
    group_kernel_sizes: tuple[int, ...] = ()
    """Per KV-cache group: the tokens of a kernel's block. A block is several of these, one behind
    the other, each laid out as `kv_cache_layout` says. Empty: a block is a kernel's block."""
    is_staged: bool = False
    """KV is transferred through host memory, see engine_ext/worker/staging.py."""
    may_load: bool = True
    """False if the host may reuse a block while a running step still writes into it. Then nothing
    is loaded into any block."""
    state_sections: tuple[StateSection, ...] = ()
    """The sections of a state's block, equal for all layers with a state. Empty if unknown."""
    lends: bool = False
    """The host lends what its prefix cache holds (engine_ext/scheduler/loans.py)."""
    max_model_len: int | None = None
    """The most tokens of one request, or None if that is not known."""
    lookahead: int = 0
    """The number of later tokens that a position's KV depends on. Draft layers (EAGLE, MTP) use the
    next token, and each further MTP module one more."""

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Tokens per block, by group."""
        return self.group_block_sizes or (self.block_size,) * len(self.group_windows)

    @property
    def kernel_sizes(self) -> tuple[int, ...]:
        return self.group_kernel_sizes or self.block_sizes

    @property
    def kernel_blocks(self) -> int:
        """The most kernel blocks that a block consists of."""
        pairs = zip(self.block_sizes, self.kernel_sizes, strict=True)
        return max(size // kernel for size, kernel in pairs)

    @property
    def has_state(self) -> bool:
        return STATE in self.group_windows


CONFIGURATION = "configuration"
"""The factor that is a digest of the model's configuration. The compatibility hash leaves it out:
vLLM's hash is that of stock, and engines of our release before this factor had none. Two engines
that both report it exchange KV only if it is equal."""


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """How other engines identify and reach this one."""

    engine_id: str
    host: str
    """The address of the side channel, and not of HTTP."""
    port: int
    tp_size: int = 1
    pp_size: int = 1
    dcp_size: int = 1
    pcp_size: int = 1
    compat_factors: dict[str, str] = field(default_factory=dict)
    """Facts that must be equal in both engines. The compatibility hash covers all of them but
    CONFIGURATION."""
    compat_hash: str | None = None
    """The host's own compatibility hash, if its peers compare that one (vLLM)."""

    def is_at(self, address: PeerAddress) -> bool:
        """Return True if this engine answers handshakes at the address."""
        return (address.host, address.port) == (self.host, self.port)


SHORT_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
"""The bounds of vLLM 0.32's histogram, so that all engines of a fleet have the same. The same holds
for bytes and descriptors."""
BYTES = tuple(float(2**power) for power in range(11, 35, 2))
DESCRIPTORS = tuple(
    float(number)
    for number in (10, 20, 30, 50, 75, 100, 200, 400, 1000, 2000, 4000, 10000, 20000, 50000)
)
HANDSHAKE_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
LEASE_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 480.0)


@dataclass(slots=True)
class ConnectorStats:
    """Counters since the start; fields named `active` are gauges. The owner thread writes them, and
    other threads take a `snapshot`."""

    bytes_received: int = 0
    blocks_received: int = 0
    pulls_ok: int = 0
    pulls_failed: int = 0
    pulls_aborted: int = 0
    """Loads whose request ended first. They count neither as ok nor as failed."""
    pulls_active: int = 0
    pushes_ok: int = 0
    """Successful WRITEs, on P."""
    pushes_failed: int = 0
    pushes_active: int = 0
    """Registrations on D and WRITEs on P that have not ended."""
    early_writes: int = 0
    """WRITEs that began on P while their prompt was being computed: all parts of a push but the
    last."""
    early_blocks: int = 0
    """Blocks of `early_writes`."""
    pushes_received: int = 0
    """Registrations that were written, on D."""
    pushes_missed: int = 0
    """Registrations that were not written, on D."""
    pushes_aborted: int = 0
    """Registrations whose request ended first, on D. They count neither as received nor as
    missed."""
    pushes_given_back: int = 0
    """Registrations that gave their blocks back to other requests, on D."""
    pushes_awaited: int = 0
    """Requests that took no blocks before P held their prompt, on D."""
    leases_active: int = 0
    leases_granted: int = 0
    leases_released: int = 0
    leases_expired: int = 0
    leases_revoked: int = 0
    """Leases that ended early, to free blocks."""
    quarantined_blocks_active: int = 0
    """Blocks that an abandoned transfer may still touch."""
    reads_unproven: int = 0
    """READs whose blocks may have changed meanwhile. They are reported as failed and never used."""
    pulls_refused: int = 0
    """READs that did not begin: an engine that sends prefix hashes sent none, a revocable turn is
    held by an engine that cannot report its end, or the two engines run different versions."""
    proofs_unreadable: int = 0
    """Prefix hashes that were malformed, cut, or of another version, so that nothing was loaded.
    Counted by the scheduler half."""
    engine_id_clashes: int = 0
    """Loads that did not begin, because another engine with this engine's id has the KV. Counted by
    the scheduler half."""
    loans_requested: int = 0
    """Requests for which other engines were asked for a loan of a prefix."""
    loans_received: int = 0
    """Those that got a loan. The others are computed."""
    loan_bytes_received: int = 0
    """The part of `bytes_received` that was lent."""
    loans_given: int = 0
    """Loans to other engines. An engine that joins a loan counts again."""
    loans_refused: int = 0
    """Other engines' requests for a loan that were refused."""
    loads_verified: int = 0
    """READs whose blocks matched the source's checksums."""
    loads_unverified: int = 0
    """With `kv_checksum`: READs that were used without checksums, because the source makes none or
    has another block layout."""
    loads_corrupted: int = 0
    """READs that failed because a block's checksum was not the source's."""
    heartbeats_sent: int = 0
    heartbeats_received: int = 0
    notifications_unknown: int = 0
    notifications_failed: int = 0
    """Notifications that NIXL refused to send."""
    confirmations_late: int = 0
    """Readers that confirmed after the end of the lease, so their blocks may have been refilled."""
    notifications_unsealed: int = 0
    """Notifications of senders without the shared secret. They are ignored."""
    metadata_accepted: int = 0
    """NIXL metadata of unauthenticated agents, validated and loaded."""
    metadata_refused: int = 0
    """NIXL metadata of unauthenticated agents that this engine did not load."""
    validators_lost: int = 0
    """Validator processes that such metadata crashed, instead of this engine."""
    handshakes_ok: int = 0
    handshakes_failed: int = 0
    transfer_seconds: Histogram = field(default_factory=partial(Histogram, SHORT_SECONDS))
    """From post to end, by NIXL's own clock. This and the next three count successful READs and
    WRITEs."""
    post_seconds: Histogram = field(default_factory=partial(Histogram, (0.001, *SHORT_SECONDS)))
    bytes_per_transfer: Histogram = field(default_factory=partial(Histogram, BYTES))
    descriptors_per_transfer: Histogram = field(default_factory=partial(Histogram, DESCRIPTORS))
    handshake_seconds: Histogram = field(default_factory=partial(Histogram, HANDSHAKE_SECONDS))
    """From the first dial to the acceptance of the peer, on the dialling side."""
    lease_age_at_read_seconds: Histogram = field(default_factory=partial(Histogram, LEASE_SECONDS))
    """From a lease's grant to its last reader's confirmation, on the holding side."""

    def snapshot(self) -> "ConnectorStats":
        taken = replace(self)
        for name in _DISTRIBUTED:
            setattr(taken, name, getattr(self, name).copy())
        return taken


_DISTRIBUTED = tuple(each.name for each in fields(ConnectorStats) if each.type is Histogram)
