"""The scheduler half: what to load, what to hold, what to renew. No I/O and no threads.

It fills the next `StepMetadata`. `loads` knows what comes to our requests and `holds` what is kept
of them; this sequences the two, as the host calls.

A decode request loads the prompt that a prefill engine computed. A prefill request may load the
last turn from the decode engine that answered it, and is leased to the next reader itself.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from engine_ext.common.config import ConnectorConfig, LoadFailurePolicy
from engine_ext.common.load_failure import LoadFailures
from engine_ext.common.prefix_hashes import PrefixHashes, UnusableHashes
from engine_ext.common.support import refuse_unsupported
from engine_ext.common.types import (
    BlockIds,
    CacheGeometry,
    Clock,
    EngineIdentity,
    EngineRequest,
    FinishDecision,
    FinishStatus,
    LoadProblem,
    MatchedTokens,
    PeerAddress,
    PushWithdrawal,
    RemoteSource,
    StepMetadata,
    TransferResults,
)
from engine_ext.scheduler.answers import Answers
from engine_ext.scheduler.drafts import Drafts
from engine_ext.scheduler.holds import Holds
from engine_ext.scheduler.loadable import Loadable
from engine_ext.scheduler.loads import Loads
from engine_ext.scheduler.orders import Orders
from engine_ext.scheduler.params import TransferParams, TransferRole, parse
from engine_ext.scheduler.room import EarlyBlocks, HostBlockSupply, Lack
from engine_ext.scheduler.save_plan import SavePlanner
from engine_ext.wire.errors import Rank
from engine_ext.wire.listener import HandshakeServer

logger = logging.getLogger(__name__)

MAX_NAMESAKES = 16
"""Other engines with our engine_id that are logged, each once: a request may name any address."""


class SchedulerConnector:
    """One for all ranks of an engine; see engine_ext.connector for who calls what when. No
    request makes a method raise. The constructor raises UnsupportedError."""

    def __init__(
        self,
        config: ConnectorConfig,
        identity: EngineIdentity,
        geometry: CacheGeometry,
        unix_time: Callable[[], float] = time.time,
        *,
        clock: Clock = time.monotonic,
        host_takes_back: bool = True,
    ) -> None:
        """`host_takes_back`: it puts a request whose load was given back among those that wait for
        blocks, whatever its load-failure policy; see `load_failure_policy`."""
        refuse_unsupported(config, geometry, identity)
        self._config = config
        self._identity = identity
        self._unix_time = unix_time
        self._orders = Orders()
        self._loadable = Loadable(config, geometry)
        early = EarlyBlocks(
            geometry.block_size,
            geometry.num_blocks,
            len(geometry.group_windows),
            geometry.max_model_len,
            host_takes_back,
        )
        self._loads = Loads(self._orders, geometry.block_size, config, early)
        self._room = HostBlockSupply(clock)
        answers = Answers(identity, geometry, config.transfer_mode, unix_time)
        self._holds = Holds(self._orders, answers, config, geometry)
        self._saves = SavePlanner(geometry.block_size) if geometry.is_staged else None
        self._drafts = Drafts(self._orders, geometry.block_size)
        self._keeps_turns = config.bidirectional and not geometry.has_state
        self._has_state = geometry.has_state
        is_pushing = config.transfer_mode == "push" and config.writes_early
        self._writes_early = is_pushing and _can_write_early(geometry)
        self._listener: HandshakeServer | None = None
        self._proofs_unreadable = 0
        self._engine_id_clashes = 0
        self._namesakes: set[tuple[str, int]] = set()

    @property
    def num_leased(self) -> int:
        return self._holds.num_held

    @property
    def proofs_unreadable(self) -> int:
        """Since start; see ConnectorStats."""
        return self._proofs_unreadable

    @property
    def engine_id_clashes(self) -> int:
        """Since start; see ConnectorStats."""
        return self._engine_id_clashes

    def set_handshake_metadata(self, payloads: Mapping[Rank, bytes]) -> None:
        """Starts the listener. Told again, as by vLLM 0.33 when it wakes up, it goes on: a worker
        registers its memory once. Raises OSError when the side channel cannot be bound."""
        if self._listener is not None:
            return
        self._listener = HandshakeServer(
            self._identity.host, self._identity.port, payloads, self._config.access
        )

    def shutdown(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def backs_off(self, request: EngineRequest) -> int | None:
        """Of a prompt from whose state another engine goes on: how many of its last tokens are to
        be left out, for that engine computes the last one again, and a state that knows it would
        count it twice. Then one token is to be sampled, no more: a state stands for all that was
        ever computed. None: not such a prompt. To be asked before `on_new_request`, which is told
        of what is left."""
        if not self._has_state or request.content_keys is None:
            return None
        params = parse(request.kv_transfer_params, self._config.transfer_mode)
        if params.role is not TransferRole.PREFILL:
            return None
        return 0 if params.hands_over or len(request.token_ids) < 2 else 1

    def on_new_request(self, request: EngineRequest) -> None:
        params = parse(
            request.kv_transfer_params, self._config.transfer_mode, self._config.access.peers
        )
        if params.problem is not None:
            logger.warning("request %s: %s", request.request_id, params.problem)
        if params.refused is not None:
            problem = LoadProblem(params.problem or "", is_of_pair=True)
            self._loads.failures.note(request.request_id, params.refused, problem)
        origin = params.source or params.target
        is_sibling = origin is not None and self._loads.is_left_to_sibling(request.request_id)
        if params.role is TransferRole.PREFILL:
            self._holds.expect_reader(request, params.transfer_id, params.hands_over)
            if self._writes_early:
                self._drafts.expect(request, params.transfer_id)
        elif params.retain and self._keeps_turns and not is_sibling:
            # In mixed mode we are a stock engine to each that lacks the secret.
            is_firm = params.may_be_read_by_stock or self._config.access.is_mixed
            self._holds.expect_next_turn(request.request_id, is_firm)
        if is_sibling:
            return
        if params.source is not None:
            self._offer(request, params, params.source)
        elif params.target is not None and self._is_namesake(params.target.address):
            self._orders.withdrawals.append(PushWithdrawal(request.request_id, params.target))
        elif params.target is not None:
            most, told = self._loadable.most_tokens(request), params.target.num_tokens
            num_tokens = most if told is None else min(most, told)
            target = params.target
            if self._has_state:  # which is to be of these, and of no more
                target = replace(target, num_tokens=num_tokens)
            self._loads.await_push(request.request_id, target, num_tokens)

    def _offer(self, request: EngineRequest, params: TransferParams, source: RemoteSource) -> None:
        if source.address.engine_id == self._identity.engine_id:
            # A namesake's, or both legs came to this engine: what is worth having is in our own
            # prefix cache.
            self._is_namesake(source.address)
            self._orders.declines.append(source)
            return
        role, proof = params.role, params.proof
        if proof is UnusableHashes.UNREADABLE:
            self._proofs_unreadable += 1
            if role is TransferRole.DECODE:
                problem = LoadProblem("its prefix_proof is unreadable", is_of_pair=False)
                self._loads.failures.note(request.request_id, source.address, problem)
            logger.warning(
                "request %s: nothing is loaded from engine %s: its prefix_proof is malformed, cut, "
                "of another version, or of other blocks than the ones that are named",
                request.request_id,
                source.address.engine_id,
            )
        num_tokens = self._loadable.tokens(request, role, source, proof, self._unix_time())
        is_proven = isinstance(proof, PrefixHashes)
        self._loads.offer(request.request_id, source, role, num_tokens, is_proven)

    def _is_namesake(self, address: PeerAddress) -> bool:
        """It has our engine_id and is not us: counted, and logged once. Its KV is not loaded, as
        stock engines and routers know engines by that id, and would take one for the other."""
        ours = self._identity
        if address.engine_id != ours.engine_id or ours.is_at(address):
            return False
        self._engine_id_clashes += 1
        at = (address.host, address.port)
        if at not in self._namesakes and len(self._namesakes) < MAX_NAMESAKES:
            self._namesakes.add(at)
            logger.warning(
                "two engines have the engine_id %s: this one at %s:%d and another one at %s:%d. "
                "No KV moves between them. Give each engine an engine_id of its own.",
                ours.engine_id,
                ours.host,
                ours.port,
                *at,
            )
        return True

    def get_num_new_matched_tokens(
        self, request: EngineRequest, num_computed_tokens: int
    ) -> MatchedTokens:
        name = request.request_id
        if self._loads.waits_for_sibling(name):
            return MatchedTokens(None, False)
        lack = self._room.ask(name)
        is_short = lack is not Lack.NOTHING
        missing = self._loads.missing(name, num_computed_tokens)
        if missing and self._loads.awaits_prompt(request, is_short=is_short):
            self._room.pass_over(name)
            return MatchedTokens(None, False)
        if is_short:
            self._make_room(request.num_prompt_tokens, lack)
        return MatchedTokens(missing, missing > 0)

    @property
    def loads(self) -> Loads:
        """For a host whose scheduler takes back requests whose loads were given back."""
        return self._loads

    def _make_room(self, num_tokens: int, lack: Lack) -> None:
        """A request of so many tokens waits, and nothing that it could wait for is in sight: see
        `engine_ext.scheduler.room`."""
        if self._room.is_stalled() and (name := self._sacrifice()) is not None:
            logger.warning(
                "request %s: its KV is given up, for other requests need the blocks and nothing "
                "has moved for a while",
                name,
            )
        elif not self._loads.reclaim(num_tokens) and self._room.may_revoke_turn(lack):
            self._holds.revoke_oldest_turn()

    def update_state_after_alloc(
        self, request: EngineRequest, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        self._drafts.lost(request.request_id)
        self._room.admitted(request.request_id, runs=num_external_tokens <= 0)
        self._loads.allocated(request, block_ids, num_external_tokens)

    def fail_load(self, request_id: str) -> None:
        """`update_state_after_alloc` raised, and the host waits for a load all the same: it gets
        its report."""
        self._loads.fail(request_id)

    def _sacrifice(self) -> str | None:
        """Whose registration or, at an engine that decodes as well, whose lease ends early."""
        name = self._loads.withdraw_newest_push()
        if name is None and self._loads.has_waiting:
            name = self._holds.revoke_newest_lease()
        return name

    @property
    def wants_steps(self) -> bool:
        """Whether `on_step` has anything to do."""
        return self._saves is not None or bool(self._drafts)

    def wants_steps_of(self, request_id: str) -> bool:
        return request_id in self._drafts

    def on_step(
        self, request_id: str, block_ids: BlockIds, num_computed_tokens: int, num_new_tokens: int
    ) -> None:
        """The step that is being built computes `num_new_tokens` of this request's tokens, and the
        KV of `num_computed_tokens` stands in its blocks by now."""
        self._drafts.computed(request_id, block_ids, num_computed_tokens)
        if self._saves is not None and self._holds.is_expected(request_id):
            self._orders.saves.append(
                self._saves.plan(request_id, block_ids, num_computed_tokens, num_new_tokens)
            )

    def on_preempted(self, request_id: str) -> None:
        """The request's blocks are another's by now; it is computed again later."""
        self._room.preempted(request_id)
        self._drafts.lost(request_id)

    def load_failure_policy(self, request: EngineRequest) -> LoadFailurePolicy:
        return self._loads.failure_policy(request.request_id)

    @property
    def load_failures(self) -> LoadFailures:
        """What answers are to say of loads."""
        return self._loads.failures

    def drain(self) -> None:
        """The engine leaves or pauses: turns wait for nobody any more, and none is kept. Leases run
        on, for their readers."""
        self._holds.stop_keeping_turns()

    def resume(self) -> None:
        """The engine goes on: turns are kept again."""
        self._holds.keep_turns()

    def end_turns(self) -> bool:
        """What was computed until now is not what would be computed from now on. False: the turns
        that are firm stay, for nobody could tell their readers."""
        return self._holds.end_turns()

    def change_weights(self, request_ids: Iterable[str]) -> None:
        """The weights that these requests are, or were, computed with are no longer the engine's.
        Their leases end, and their turns, except firm ones. Nothing more is loaded for them: an
        offer is declined, and a load under way must be reported as failed (`is_stale_load`)."""
        for request_id in request_ids:
            self._holds.give_up(request_id)
            self._loads.drop(request_id)

    def is_stale_load(self, request_id: str) -> bool:
        return self._loads.is_stale(request_id)

    def release(self, engine_id: str, request_id: str) -> bool:
        """Nobody will read this request's KV. True: it was held. A reader who comes all the same
        is told, and finds it for a moment more."""
        return engine_id == self._identity.engine_id and self.revoke(request_id)

    def revoke(self, request_id: str) -> bool:
        """The same, of a request of ours whose answer reached nobody."""
        return self._holds.revoke(request_id)

    def has_pending_work(self) -> bool:
        """True while `build_connector_meta` has something to hand over."""
        return bool(self._orders)

    def build_connector_meta(self) -> StepMetadata:
        if self._room.has_late_starter():
            self._make_room(1, Lack.ROOM)
        self._room.next_step()
        return self._orders.take()

    def update_connector_output(self, results: TransferResults) -> TransferResults:
        """Returns what the host is to act upon: not the loads of requests that are fenced, whose
        blocks it keeps until they come in `finished_sending`. Called in every step, as a rule with
        nothing."""
        if not results:
            return results
        self._room.moved()
        for request_id in results.ready:
            self._loads.ready(request_id)
        for request_id in results.given_back:
            self._loads.give_back(request_id)
        fenced = {name for name in results.finished_recving if self._loads.is_fenced(name)}
        for request_id in results.finished_recving:
            failed, problem = request_id in results.failed_recving, results.problems.get(request_id)
            self._loads.reported(request_id, failed=failed, problem=problem)
            if not failed and request_id not in fenced:
                self._room.loaded(request_id)
        for request_id in results.finished_sending:
            self._holds.reported(request_id)
            self._loads.fence_answered(request_id)
        return replace(
            results,
            finished_recving=results.finished_recving - fenced,
            failed_recving=results.failed_recving - fenced,
        )

    def request_finished(
        self, request: EngineRequest, block_ids: BlockIds, status: FinishStatus
    ) -> FinishDecision:
        self._room.left(request.request_id)
        is_fenced = self._loads.finish(request.request_id)
        if self._saves is not None:
            self._saves.forget(request.request_id)
        has_kv = status.leaves_kv and request.num_computed_tokens > 0 and not is_fenced
        attempt = self._drafts.attempt_of(request.request_id)
        decision = self._holds.finish(request, block_ids, has_kv, attempt)
        is_fenced |= self._fence_draft(request.request_id, decision)
        return decision._replace(delay_free=True) if is_fenced else decision

    def fail_finish(self, request_id: str) -> FinishDecision:
        """`request_finished` raised: what it may have done is made consistent."""
        self._room.left(request_id)
        try:
            self._loads.finish(request_id)
        except Exception:
            logger.exception("request %s", request_id)
        decision = self._holds.fail(request_id)
        is_fenced = self._loads.is_fenced(request_id) | self._fence_draft(request_id, decision)
        return decision._replace(delay_free=True) if is_fenced else decision

    def _fence_draft(self, request_id: str, decision: FinishDecision) -> bool:
        """True: no lease keeps the request's blocks, from which a part may be written."""
        is_fenced = self._drafts.forget(request_id) and not decision.delay_free
        if is_fenced:
            self._orders.fences.append(request_id)
        return is_fenced


def _can_write_early(geometry: CacheGeometry) -> bool:
    """Host buffers have a step's KV when the step has ended, state is a request's only at its end,
    and groups with a window go last."""
    is_in_place = not geometry.is_staged and not geometry.has_state
    return is_in_place and None in geometry.group_windows
