"""The scheduler half: what to lease, what to load, what to renew. No I/O and no threads.

It fills the next `StepMetadata` and remembers, per request, how far its transfers are:

    load:   offered --(allocated, tokens to load)--> loading --(reported)--> used
               +------(allocated, nothing to load; finished)--> used, and the holder is told
    lease:  expected --(finished with KV)--> leased --(reported)--> gone
               +-----(aborted)--> gone

A decode request loads the prompt that a prefill engine computed. A prefill request may load the
last turn from the decode engine that answered it, and is leased to the next reader itself.
"""

import enum
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from engine_ext.base.config import ConnectorConfig, LoadFailurePolicy
from engine_ext.base.proof import PrefixProof, digest
from engine_ext.base.types import (
    BlockIds,
    CacheGeometry,
    EngineIdentity,
    EngineRequest,
    FinishDecision,
    FinishStatus,
    LeaseCancel,
    LeaseGrant,
    MatchedTokens,
    PullOrder,
    PushOffer,
    PushRegistration,
    PushTarget,
    PushWithdrawal,
    RemoteSource,
    StepMetadata,
    TrackOrder,
    TransferResults,
)
from engine_ext.core.orders import Orders
from engine_ext.core.params import Role, TransferParams, parse
from engine_ext.core.retain import RetainedTurns
from engine_ext.core.support import refuse_unsupported
from engine_ext.layout.plan import without_holes
from engine_ext.push.names import base_id
from engine_ext.staging.stage import SavePlanner
from engine_ext.wire.errors import Rank
from engine_ext.wire.listener import HandshakeServer

logger = logging.getLogger(__name__)

NOTHING = MatchedTokens(0, False)
NOT_KEPT = FinishDecision(False, None)


class LoadState(enum.Enum):
    OFFERED = "offered"
    LOADING = "loading"
    USED = "used"


@dataclass(slots=True)
class Load:
    origin: RemoteSource | PushTarget
    """Whom we read from, or who writes to us."""
    role: Role
    num_tokens: int
    """Leading prompt tokens whose KV can be had, proven or trusted."""
    state: LoadState = LoadState.OFFERED


class SchedulerConnector:
    """One for all ranks of an engine; see engine_ext.core.connector for who calls what when. No
    request makes a method raise. The constructor raises UnsupportedError."""

    def __init__(
        self,
        config: ConnectorConfig,
        identity: EngineIdentity,
        geometry: CacheGeometry,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        refuse_unsupported(geometry, identity)
        self._config = config
        self._identity = identity
        self._block_size = geometry.block_size
        self._windows = geometry.group_windows
        self._unix_time = unix_time
        self._loads: dict[str, Load] = {}
        self._expected: dict[str, str | None] = {}
        """Request id -> the router's transfer id."""
        self._retaining: set[str] = set()
        self._leased: set[str] = set()
        self._retained = RetainedTurns(int(config.retain_share * geometry.num_blocks))
        self._listener: HandshakeServer | None = None
        self._orders = Orders()
        self._saves = SavePlanner(geometry.block_size) if geometry.is_staged else None

    @property
    def num_leased(self) -> int:
        return len(self._leased)

    def set_handshake_metadata(self, payloads: Mapping[Rank, bytes]) -> None:
        """Starts the listener. Raises OSError when the side channel cannot be bound."""
        self._listener = HandshakeServer(self._identity.host, self._identity.port, payloads)

    def shutdown(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def on_new_request(self, request: EngineRequest) -> None:
        params = parse(request.kv_transfer_params, self._config.transfer_mode)
        if params.problem is not None:
            logger.warning("request %s: %s", request.request_id, params.problem)
        if params.role is Role.PREFILL:
            self._expected[request.request_id] = params.transfer_id
            self._orders.expects.append(request.request_id)
        elif params.retain and self._config.bidirectional:
            self._retaining.add(request.request_id)
        if params.source is not None:
            self._offer(request, params, params.source)
        elif params.target is not None:
            self._await_push(request, params.target)

    def get_num_new_matched_tokens(
        self, request: EngineRequest, num_computed_tokens: int
    ) -> MatchedTokens:
        load = self._loads.get(request.request_id)
        if load is None or load.state is not LoadState.OFFERED:
            return NOTHING
        missing = load.num_tokens - num_computed_tokens
        if load.role is Role.PREFILL and missing < self._config.recompute_threshold:
            return NOTHING
        return MatchedTokens(missing, True) if missing > 0 else NOTHING

    def update_state_after_alloc(
        self, request: EngineRequest, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        load = self._loads.get(request.request_id)
        if load is None or load.state is not LoadState.OFFERED:
            return
        if num_external_tokens <= 0:
            self._decline(request.request_id, load)
            return
        first_token = load.num_tokens - num_external_tokens
        first_token -= first_token % self._block_size
        load.state = LoadState.LOADING
        if isinstance(load.origin, PushTarget):
            self._register(request, load.origin, block_ids, first_token, load.num_tokens)
            return
        self._orders.pulls.append(
            PullOrder(request.request_id, load.origin, block_ids, first_token, load.num_tokens)
        )

    @property
    def wants_steps(self) -> bool:
        """Whether `on_step` has anything to do."""
        return self._saves is not None

    def on_step(
        self, request_id: str, block_ids: BlockIds, num_computed_tokens: int, num_new_tokens: int
    ) -> None:
        """The step that is being built computes `num_new_tokens` of this request's tokens."""
        if self._saves is None:
            return
        if request_id in self._expected or request_id in self._retaining:
            self._orders.saves.append(
                self._saves.plan(request_id, block_ids, num_computed_tokens, num_new_tokens)
            )

    def load_failure_policy(self, request: EngineRequest) -> LoadFailurePolicy:
        """A prefill that cannot have the last turn's KV computes it: that is what it is for."""
        load = self._loads.get(request.request_id)
        if load is not None and load.role is Role.PREFILL:
            return "recompute"
        return self._config.load_failure_policy

    def drain(self) -> None:
        """The engine leaves: turns wait for nobody any more. Leases run on, for their readers."""
        for request_id in self._retained.clear():
            self._orders.revokes.append(request_id)

    def release(self, engine_id: str, request_id: str) -> bool:
        """Nobody will read this request's KV. True: it was held. A reader who comes all the same
        is told, and finds it for a moment more."""
        return engine_id == self._identity.engine_id and self.revoke(request_id)

    def revoke(self, request_id: str) -> bool:
        """The same, of a request of ours whose answer reached nobody."""
        if request_id not in self._leased:
            return False
        self._orders.revokes.append(request_id)
        return True

    def has_pending_work(self) -> bool:
        """True while `build_connector_meta` has something to hand over."""
        return bool(self._orders)

    def build_connector_meta(self) -> StepMetadata:
        return self._orders.take()

    def update_connector_output(self, results: TransferResults) -> None:
        self._leased -= results.finished_sending
        for request_id in results.finished_sending:
            self._retained.remove(request_id)
        for request_id in results.finished_recving:
            load = self._loads.get(request_id)
            if load is not None:
                load.state = LoadState.USED
                self._orders.untracks.append(request_id)

    def request_finished(
        self, request: EngineRequest, block_ids: BlockIds, status: FinishStatus
    ) -> FinishDecision:
        self._end_load(request.request_id)
        if self._saves is not None:
            self._saves.forget(request.request_id)
        has_kv = status.leaves_kv and request.num_computed_tokens > 0
        if request.request_id in self._expected:
            transfer_id = self._expected.pop(request.request_id)
            if has_kv:
                return self._lease(request, block_ids, transfer_id)
            self._orders.cancels.append(LeaseCancel(request.request_id, transfer_id))
            return NOT_KEPT
        if request.request_id in self._retaining:
            self._retaining.discard(request.request_id)
            return self._retain(request, block_ids) if has_kv else NOT_KEPT
        return NOT_KEPT

    def _offer(self, request: EngineRequest, params: TransferParams, source: RemoteSource) -> None:
        request_id = request.request_id
        if source.address.engine_id == self._identity.engine_id:
            # Both legs came to this engine: what is worth having is in our own prefix cache.
            self._orders.declines.append(source)
            return
        load = Load(source, params.role, self._loadable_tokens(request, params.role, source))
        self._loads[request_id] = load
        if params.role is Role.PREFILL and load.num_tokens < self._config.recompute_threshold:
            self._decline(request_id, load)
        elif params.role is Role.DECODE:
            self._orders.tracks.append(TrackOrder(request_id, source.address, source.request_id))

    def _await_push(self, request: EngineRequest, target: PushTarget) -> None:
        self._loads[request.request_id] = Load(target, Role.DECODE, self._most_tokens(request))
        name = target.transfer_id or base_id(request.request_id)
        self._orders.tracks.append(TrackOrder(request.request_id, target.address, name))

    def _register(
        self,
        request: EngineRequest,
        target: PushTarget,
        block_ids: BlockIds,
        first_token: int,
        last_token: int,
    ) -> None:
        self._orders.registrations.append(
            PushRegistration(
                request.request_id,
                target,
                block_ids,
                first_token,
                last_token,
                digest(request.prompt_token_ids),
            )
        )

    def _loadable_tokens(self, request: EngineRequest, role: Role, source: RemoteSource) -> int:
        """Tokens from position 0 whose KV the remote's blocks hold, and which are this prompt's."""
        if role is Role.PREFILL and not self._may_pull_turn(source):
            return 0
        held = self._held_tokens(source)
        if source.num_tokens is not None:
            held = min(held, source.num_tokens)
        held = min(held, self._most_tokens(request))
        if source.proof is None:
            return held if self._windows_reach(source, held) else 0
        proven = source.proof.proven_tokens(request.prompt_token_ids)
        if proven < held:
            logger.info(
                "request %s: %d of %d remote tokens are this prompt's",
                request.request_id,
                proven,
                held,
            )
        tokens = min(held, proven)
        return tokens if self._windows_reach(source, tokens) else 0

    def _most_tokens(self, request: EngineRequest) -> int:
        """A host that has the whole prompt computes its last token again. Where a group has a
        window, vLLM's block manager has by then given up the block in which that token's window
        begins, if it begins at the end of one; so the last token is left to compute."""
        has_windows = any(window is not None for window in self._windows)
        return request.num_prompt_tokens - has_windows

    def _held_tokens(self, source: RemoteSource) -> int:
        """At most what the remote's lists can hold. Groups with a window list only its end; a peer
        that does not tell its block size is taken to have ours."""
        block_size = self._block_size if source.proof is None else source.proof.block_size
        groups = zip(source.block_ids, self._windows, strict=False)
        lengths = [len(ids) for ids, window in groups if window is None]
        if not lengths:
            return source.num_tokens or 0
        return min(lengths) * block_size

    def _windows_reach(self, source: RemoteSource, num_tokens: int) -> bool:
        """Whether the remote keeps what the token behind `num_tokens` sees through a window: its
        lists end with its own last token, and it may have gone further than we can follow."""
        if source.num_tokens is None:
            return True
        block_size = self._block_size if source.proof is None else source.proof.block_size
        end = -(-source.num_tokens // block_size)
        kept = without_holes(source.block_ids, self._windows)
        return all(
            (end - len(ids)) * block_size <= max(0, num_tokens - window + 1)
            for ids, window in zip(kept, self._windows, strict=False)
            if window is not None
        )

    def _may_pull_turn(self, source: RemoteSource) -> bool:
        if not self._config.bidirectional:
            return False
        if source.expires_at is not None and source.expires_at <= self._unix_time():
            return False
        return source.proof is not None or self._config.trust_unproven_prefix

    def _end_load(self, request_id: str) -> None:
        load = self._loads.pop(request_id, None)
        if load is not None and load.state is LoadState.OFFERED:
            self._decline(request_id, load)
        elif load is not None and load.state is LoadState.LOADING:
            self._orders.untracks.append(request_id)
            if isinstance(load.origin, PushTarget):
                self._orders.withdrawals.append(PushWithdrawal(request_id, load.origin))

    def _decline(self, request_id: str, load: Load) -> None:
        load.state = LoadState.USED
        self._orders.untracks.append(request_id)
        if isinstance(load.origin, PushTarget):
            self._orders.withdrawals.append(PushWithdrawal(request_id, load.origin))
        else:
            self._orders.declines.append(load.origin)

    def _lease(
        self, request: EngineRequest, block_ids: BlockIds, transfer_id: str | None
    ) -> FinishDecision:
        self._leased.add(request.request_id)
        self._orders.grants.append(LeaseGrant(request.request_id, self._config.lease_duration))
        if self._config.transfer_mode == "push":
            num_tokens = request.num_computed_tokens
            tokens = digest(request.token_ids[:num_tokens])
            self._orders.offers.append(
                PushOffer(request.request_id, block_ids, num_tokens, tokens, transfer_id)
            )
        answer = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            **self._where(request, block_ids),
            "remote_blocks_expiry_time": None,
        }
        return FinishDecision(True, answer)

    def _retain(self, request: EngineRequest, block_ids: BlockIds) -> FinishDecision:
        num_blocks = -(-request.num_computed_tokens // self._block_size)
        if not self._retained.fits(num_blocks):
            return NOT_KEPT
        seconds = self._config.retain_seconds
        self._leased.add(request.request_id)
        self._orders.grants.append(LeaseGrant(request.request_id, seconds, renewable=False))
        self._orders.revokes += self._retained.add(request.request_id, num_blocks)
        answer = {
            "do_remote_prefill": False,
            "do_remote_decode": True,
            **self._where(request, block_ids),
            # Stock's readers compare it with this process's clock, whose offset they measured.
            "remote_blocks_expiry_time": time.perf_counter() + seconds,
            "retained_until": self._unix_time() + seconds,
        }
        return FinishDecision(True, answer)

    def _where(self, request: EngineRequest, block_ids: BlockIds) -> dict[str, Any]:
        """Where the KV is, in vLLM 0.32's words, and which tokens it is of, in ours."""
        num_tokens = request.num_computed_tokens
        num_blocks = -(-num_tokens // self._block_size)
        listed = tuple(group[:num_blocks] for group in block_ids)
        proof = PrefixProof.of(request.token_ids[:num_tokens], self._block_size)
        return {
            "remote_block_ids": [list(group) for group in without_holes(listed, self._windows)],
            "remote_engine_id": self._identity.engine_id,
            "remote_request_id": request.request_id,
            "remote_host": self._identity.host,
            "remote_port": self._identity.port,
            "tp_size": self._identity.tp_size,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": num_tokens,
            "transfer_mode": self._config.transfer_mode,
            "prefix_proof": proof.to_wire(),
        }
