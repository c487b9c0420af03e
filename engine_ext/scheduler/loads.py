"""KV that is loaded for our requests, and the state of each load.

    OFFERED --(blocks allocated, tokens to load)--> LOADING --(reported)--> USED
       |                                               +------(reported as failed)--> FAILED
       +------(allocated, nothing to load; finished; not worth it)--> USED, the source is notified

`engine_ext.scheduler.block_pressure` limits the blocks of pushes whose prompts P has not computed
yet. A push whose blocks were given back becomes OFFERED again.

A request that finishes while it is loading, or because its load failed, is fenced: a transfer may
still write into its blocks, so the host keeps them until the worker half reports that nothing
touches them. Reports about the load that arrive in the meantime are not passed on to the host.

Several answers to one prompt (`n`): hosts make one request of each answer, `0_cmpl-x`, `1_cmpl-x`,
all with the same params. The first one loads the remote KV and the others wait for it, because a
source frees its blocks when a reader is done. The others then find the KV in the host's own prefix
cache. They compute if there is none, or if the first request ended before.
"""

import enum
import re
import time
from collections import OrderedDict
from dataclasses import dataclass

from engine_ext.common.config import ConnectorConfig, LoadFailurePolicy
from engine_ext.common.latest import keep_latest
from engine_ext.common.load_failure import UNKNOWN, LoadFailures
from engine_ext.common.orders import (
    ConfirmReturn,
    Decline,
    FailLoad,
    Fence,
    PullOrder,
    PushInquiry,
    PushRegistration,
    PushWithdrawal,
    Reclaim,
    TrackOrder,
    Untrack,
)
from engine_ext.common.prefix_hashes import digest
from engine_ext.common.request_names import base_id
from engine_ext.common.states import after
from engine_ext.common.types import (
    BlockIds,
    CacheGeometry,
    Clock,
    EngineRequest,
    LoadProblem,
    PeerAddress,
    PushTarget,
    RemoteSource,
)
from engine_ext.layout.plan import to_fill
from engine_ext.scheduler.block_pressure import EarlyBlockLimit
from engine_ext.scheduler.orders import Orders
from engine_ext.scheduler.params import TransferRole

LATE_SECONDS = 5.0
"""How long after `push_registration_timeout` a request waits for the answer to its inquiry."""
MAX_FAMILIES = 4096
"""Families that are remembered, because a member may arrive after the first has ended."""

_CHILD = re.compile(r"[0-9]+_(.+)", re.DOTALL)


class RequestFamilies:
    """Remembers which request of each family (the answers to one prompt) arrived first."""

    def __init__(self) -> None:
        self._first: OrderedDict[str, str] = OrderedDict()

    def first_of(self, request_id: str) -> str:
        """Return the first request of the family, or the request itself if it has no siblings."""
        family = _family_of(request_id)
        return request_id if family is None else self._first.get(family, request_id)

    def join(self, request_id: str) -> None:
        """Note a request. The first of its family is to load."""
        family = _family_of(request_id)
        if family is not None and family not in self._first:
            keep_latest(self._first, family, request_id, MAX_FAMILIES)


def _family_of(request_id: str) -> str | None:
    found = _CHILD.fullmatch(request_id)
    return None if found is None else found[1]


class LoadState(enum.Enum):
    OFFERED = "offered"
    LOADING = "loading"
    FAILED = "failed"
    USED = "used"


class LoadEvent(enum.Enum):
    LOAD = "load"
    DECLINE = "decline"
    REPORT = "report"
    FAIL = "fail"


_NEXT = {
    (LoadState.OFFERED, LoadEvent.LOAD): LoadState.LOADING,
    (LoadState.OFFERED, LoadEvent.DECLINE): LoadState.USED,
    (LoadState.LOADING, LoadEvent.REPORT): LoadState.USED,
    (LoadState.LOADING, LoadEvent.FAIL): LoadState.FAILED,
}


@dataclass(slots=True)
class KVLoad:
    origin: RemoteSource | PushTarget
    """The engine that we read from, or that writes to us."""
    role: TransferRole
    num_tokens: int
    """Leading tokens whose KV can be loaded, verified or trusted."""
    is_proven: bool = False
    """For a read: prefix hashes show which content the remote holds."""
    state: LoadState = LoadState.OFFERED
    in_quarantine: bool = False
    """It has failed, and a READ may still write into the request's blocks."""
    is_stale: bool = False
    """The engine's weights have changed since the load began, so its KV is not used."""
    is_ready: bool = False
    """A push that waits for P no longer: P holds the prompt, never will, or answers no
    inquiries."""
    inquired_until: float | None = None
    """D has asked P whether it holds the prompt. The time until which it waits for the answer."""
    is_reclaimed: bool = False
    """D has asked P to give its blocks back."""
    is_returned: bool = False
    """Every rank of this engine has reported that its blocks were given back."""
    is_withdrawn: bool = False
    """Its registration ends as failed, because other requests need the blocks."""

    @property
    def is_early(self) -> bool:
        """True if it has blocks for a prompt that P is not known to hold."""
        is_push = isinstance(self.origin, PushTarget)
        return is_push and self.state is LoadState.LOADING and not self.is_ready

    def on(self, event: LoadEvent) -> None:
        """Raises IllegalEventError."""
        self.state = after(_NEXT, self.state, event)


class Loads:
    """One per engine. It writes the orders for the worker half into `orders`."""

    def __init__(
        self,
        orders: Orders,
        geometry: CacheGeometry,
        config: ConnectorConfig,
        early: EarlyBlockLimit | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._orders = orders
        self._clock = clock
        self._longest_inquiry = config.push_deadline + LATE_SECONDS
        self._geometry = geometry
        self._early = early or EarlyBlockLimit(geometry.block_size)
        self._recompute_threshold = config.recompute_threshold
        self._policy = config.load_failure_policy
        self._prefill_timeout = config.prefill_load_timeout
        self._loads: dict[str, KVLoad] = {}
        self._fenced: dict[str, PeerAddress] = {}
        """Fenced requests, with the engine that each was loaded from."""
        self.failures = LoadFailures()
        """The host takes the failure of a request with the request's next output."""
        self._siblings = RequestFamilies()

    def failure_policy(self, request_id: str) -> LoadFailurePolicy:
        """Return what the host does if the load fails, or now that it has failed.

        A prefill engine recomputes: computing prompts is its job. If a READ may still write into
        the blocks, the prefill leg fails, and the router sends another one without the offer.
        """
        load = self._loads.get(request_id)
        return self._policy if load is None else self._policy_of(load)

    def is_left_to_sibling(self, request_id: str) -> bool:
        """Return True if another answer to the same prompt loads the KV, or has loaded it."""
        self._siblings.join(request_id)
        return self._siblings.first_of(request_id) != request_id

    def waits_for_sibling(self, request_id: str) -> bool:
        if request_id in self._loads:
            return False
        return self.is_open(self._siblings.first_of(request_id))

    def is_open(self, request_id: str) -> bool:
        """Return True if KV is on offer for the request, or is being loaded."""
        load = self._loads.get(request_id)
        return load is not None and load.state in (LoadState.OFFERED, LoadState.LOADING)

    def offer(
        self,
        request_id: str,
        source: RemoteSource,
        role: TransferRole,
        num_tokens: int,
        is_proven: bool,
    ) -> None:
        """Note that a remote engine holds the KV of the request's first `num_tokens` tokens."""
        load = self._loads[request_id] = KVLoad(source, role, num_tokens, is_proven)
        if num_tokens < self._least_tokens(role):
            self._decline(request_id, load)
        elif role is TransferRole.DECODE:
            self._orders.append(TrackOrder(request_id, source.address, source.request_id))

    def await_push(self, request_id: str, target: PushTarget, num_tokens: int) -> None:
        """Note that `target` will write the KV of the request's first `num_tokens` tokens."""
        load = self._loads[request_id] = KVLoad(target, TransferRole.DECODE, num_tokens)
        if not num_tokens:
            self._decline(request_id, load)
            return
        name = target.transfer_id or base_id(request_id)
        self._orders.append(TrackOrder(request_id, target.address, name))

    def awaits_prompt(self, request: EngineRequest, *, is_short: bool) -> bool:
        """Return True if this push may not take blocks yet, because P does not hold its prompt and
        few blocks are free."""
        load = self._offered(request.request_id)
        if load is None or not isinstance(load.origin, PushTarget) or load.is_ready:
            return False
        if load.inquired_until is not None:
            # The worker half reports every inquiry earlier, unless its report is lost.
            load.is_ready = load.inquired_until <= self._clock()
            return not load.is_ready
        if not (is_short or load.is_reclaimed) and self._may_be_early(load):
            return False
        load.inquired_until = self._clock() + self._longest_inquiry
        content = digest(request.token_ids, request.content_keys or (), load.origin.num_tokens)
        self._orders.append(PushInquiry(request.request_id, load.origin, content))
        return True

    def is_passed_over(self, request_id: str) -> bool:
        """Return True while the request waits for P's answer. Until then it takes no blocks, and
        the host can skip it."""
        load = self._offered(request_id)
        return load is not None and load.inquired_until is not None and not load.is_ready

    def _may_be_early(self, load: KVLoad) -> bool:
        taken = sum(self._early.of(one.num_tokens) for one in self._loads.values() if one.is_early)
        return self._early.may_grow(taken, self._early.of(load.num_tokens))

    def ready(self, request_id: str) -> None:
        """Note that P holds the prompt, or never will, or cannot give the blocks back."""
        load = self._loads.get(request_id)
        if load is not None:
            load.is_ready, load.is_reclaimed = True, False

    def reclaim(self, num_tokens: int) -> bool:
        """Reclaim early registrations for a request of `num_tokens` tokens. Returns False if there
        is none to reclaim."""
        early = [(name, load) for name, load in self._loads.items() if load.is_early]
        if not early or not self._early.host_takes_back:
            return False
        needed = self._early.of(num_tokens)
        needed -= sum(self._early.of(load.num_tokens) for _, load in early if load.is_reclaimed)
        for name, load in reversed(early):
            if needed > 0 and not load.is_reclaimed:
                load.is_reclaimed = True
                self._orders.append(Reclaim(name))
                needed -= self._early.of(load.num_tokens)
        return True

    def take_back(self) -> None:
        """Note that the host queues a request whose blocks were given back for new blocks, whatever
        its load-failure policy."""
        self._early.host_takes_back = True

    def returned(self, request_id: str) -> None:
        """Note that P will not write the registered blocks. Once no transfer touches them,
        the load is reported as failed. The host then frees the blocks, and the request waits for
        blocks again."""
        load = self._loads.get(request_id)
        if load is not None and load.state is LoadState.LOADING:
            load.is_returned = True
            self._orders.append(ConfirmReturn(request_id))

    def is_returned(self, request_id: str) -> bool:
        """Return True if the load is reported as failed only because its blocks were given back."""
        load = self._loads.get(request_id)
        return load is not None and load.is_returned

    @property
    def has_waiting(self) -> bool:
        """True if a decode request has no blocks yet."""
        return any(
            load.role is TransferRole.DECODE and load.state is LoadState.OFFERED
            for load in self._loads.values()
        )

    def withdraw_newest_push(self) -> str | None:
        """Withdraw the newest registration, so that another request gets its blocks. Returns its
        request id, or None."""
        for request_id, load in reversed(self._loads.items()):
            is_push = load.state is LoadState.LOADING and isinstance(load.origin, PushTarget)
            if is_push and not load.is_withdrawn:
                load.is_withdrawn = True
                self._notify_holder(request_id, load.origin)
                return request_id
        return None

    def missing(self, request_id: str, num_computed_tokens: int) -> int:
        """Return the tokens to load beyond the computed ones, or 0 if a load is not worth it."""
        load = self._offered(request_id)
        if load is None:
            return 0
        missing = load.num_tokens - num_computed_tokens
        return 0 if missing < self._least_tokens(load.role) else missing

    def allocated(self, request: EngineRequest, block_ids: BlockIds, num_tokens: int) -> None:
        """Order the load of the last `num_tokens` offered tokens into `block_ids`, which cover the
        request from position 0. With `num_tokens` 0 nothing is loaded."""
        load = self._offered(request.request_id)
        if load is None:
            return
        if num_tokens <= 0:
            self._decline(request.request_id, load)
            return
        load.on(LoadEvent.LOAD)
        first_token = load.num_tokens - num_tokens
        first_token -= first_token % self._geometry.block_size
        self._order(request, load, to_fill(block_ids, self._geometry, first_token), first_token)

    def fail(self, request_id: str) -> None:
        """Handle an exception of `allocated`, after which the host waits for a load: report it as
        failed, unless it was ordered all the same."""
        loads = (one for one in self._orders if isinstance(one, PullOrder | PushRegistration))
        if any(order.request_id == request_id for order in loads):
            return
        self._orders.append(FailLoad(request_id))
        load = self._loads.get(request_id)
        if load is not None:
            load.state = LoadState.LOADING
            self._orders.append(Untrack(request_id))
            self._notify_holder(request_id, load.origin)

    def drop(self, request_id: str) -> None:
        """Give up the KV on offer, because the request will be computed with other weights."""
        load = self._loads.get(request_id)
        if load is None:
            return
        if load.state is LoadState.OFFERED:
            self._decline(request_id, load)
        elif load.state is LoadState.LOADING:
            load.is_stale = True
            if isinstance(load.origin, PushTarget):
                self._orders.append(PushWithdrawal(request_id, load.origin))

    def is_stale(self, request_id: str) -> bool:
        """Return True if the load in progress must be reported as failed."""
        load = self._loads.get(request_id)
        return load is not None and load.is_stale and load.state is LoadState.LOADING

    def reported(
        self, request_id: str, *, failed: bool, problem: LoadProblem | None = None
    ) -> None:
        """Note the worker half's report that the load has ended."""
        load = self._loads.get(request_id)
        if problem is not None:
            self.note_problem(request_id, problem)
        if load is None or load.state is not LoadState.LOADING:
            if problem is not None and request_id in self._fenced:
                # vLLM ends a request whose load failed before it passes on the report.
                self.failures.note(request_id, self._fenced[request_id], problem)
            return
        if failed and load.is_returned:
            origin, role = load.origin, load.role
            self._loads[request_id] = KVLoad(origin, role, load.num_tokens, is_reclaimed=True)
            return
        if failed:
            self.failures.note(request_id, load.origin.address, problem or UNKNOWN)
        is_over = failed and self._policy_of(load) == "fail"
        load.on(LoadEvent.FAIL if is_over else LoadEvent.REPORT)
        self._orders.append(Untrack(request_id))

    def note_problem(self, request_id: str, problem: LoadProblem) -> None:
        """Note why a load has failed: for a host that asks for `failure_policy` before it passes on
        the report."""
        load = self._loads.get(request_id)
        if load is not None and load.state is LoadState.LOADING:
            load.in_quarantine |= problem.in_quarantine

    def finish(self, request_id: str) -> bool:
        """Note that the request has ended, in whatever state its load is. Return True if it is
        fenced: the host then keeps its blocks until the fence is answered."""
        load = self._loads.pop(request_id, None)
        if load is None:
            return False
        if load.state is LoadState.OFFERED:
            self._decline(request_id, load)
        elif load.state is LoadState.LOADING:
            self._orders.append(Untrack(request_id))
            if isinstance(load.origin, PushTarget):
                self._orders.append(PushWithdrawal(request_id, load.origin))
        if load.state not in (LoadState.LOADING, LoadState.FAILED):
            return False
        self._fenced[request_id] = load.origin.address
        self._orders.append(Fence(request_id))
        return True

    def fence_answered(self, request_id: str) -> None:
        """Note that nothing touches the request's blocks any more."""
        self._fenced.pop(request_id, None)

    def is_fenced(self, request_id: str) -> bool:
        """Return True if the host hears about this request only through its fence."""
        return request_id in self._fenced

    def _policy_of(self, load: KVLoad) -> LoadFailurePolicy:
        if load.is_returned or load.state is LoadState.OFFERED:
            return "recompute"
        if load.role is TransferRole.PREFILL:
            return "fail" if load.in_quarantine else "recompute"
        return self._policy

    def _least_tokens(self, role: TransferRole) -> int:
        """Return the least number of tokens that is loaded. A prefill engine computes fewer
        ones."""
        return max(1, self._recompute_threshold if role is TransferRole.PREFILL else 1)

    def _offered(self, request_id: str) -> KVLoad | None:
        load = self._loads.get(request_id)
        return None if load is None or load.state is not LoadState.OFFERED else load

    def _order(
        self, request: EngineRequest, load: KVLoad, block_ids: BlockIds, first_token: int
    ) -> None:
        name, origin = request.request_id, load.origin
        where = block_ids, first_token, load.num_tokens
        recomputes = self._policy_of(load) == "recompute"
        if isinstance(origin, RemoteSource):
            timeout = None
            if load.role is TransferRole.PREFILL and self._early.host_takes_back:
                recomputes, timeout = False, self._prefill_timeout
            self._orders.append(
                PullOrder(name, origin, *where, recomputes, timeout, load.is_proven)
            )
            return
        # Without keys no token is offered, so nothing is registered.
        content = digest(request.token_ids, request.content_keys or (), origin.num_tokens)
        self._orders.append(PushRegistration(name, origin, *where, content, recomputes))

    def _decline(self, request_id: str, load: KVLoad) -> None:
        load.on(LoadEvent.DECLINE)
        self._orders.append(Untrack(request_id))
        self._notify_holder(request_id, load.origin)

    def _notify_holder(self, request_id: str, origin: RemoteSource | PushTarget) -> None:
        if isinstance(origin, PushTarget):
            self._orders.append(PushWithdrawal(request_id, origin))
        else:
            self._orders.append(Decline(origin))
