"""The scheduler half: what to load, which blocks to hold, which leases to renew. It does no I/O and
has no threads.

It fills the next `StepMetadata`. `loads` has the KV that requests load, `held_blocks` the KV that
they leave; this class calls both in the order in which the host calls it.

A decode request loads the prompt that a prefill engine computed. A prefill request may load the
last turn from the decode engine that answered it, and is leased to the next reader itself.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from engine_ext.common.config import ConnectorConfig, LoadFailurePolicy
from engine_ext.common.load_failure import LoadFailures
from engine_ext.common.orders import Decline, Fence, PushWithdrawal, StepMetadata
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
    RemoteSource,
    TransferResults,
)
from engine_ext.scheduler.answer_params import AnswerParams
from engine_ext.scheduler.block_pressure import EarlyBlockLimit, HostBlockSupply, Shortage
from engine_ext.scheduler.held_blocks import HeldBlocks
from engine_ext.scheduler.loadable_tokens import LoadableTokens
from engine_ext.scheduler.loads import Loads
from engine_ext.scheduler.loans import Borrows, Loans, PrefixCache, PromptKeys, may_borrow
from engine_ext.scheduler.orders import Orders
from engine_ext.scheduler.params import TransferParams, TransferRole, parse
from engine_ext.scheduler.partial_offers import PartialOffers
from engine_ext.scheduler.report_deadlines import AwaitedReports
from engine_ext.scheduler.save_plan import SavePlanner
from engine_ext.wire.errors import Rank
from engine_ext.wire.listener import HandshakeServer

logger = logging.getLogger(__name__)

MAX_LOGGED_CLASHES = 16
"""Other engines with our engine_id that are logged, each once. A request may name any address."""


class SchedulerConnector:
    """One for all ranks of an engine; engine_ext.connector describes when the host calls what. No
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
        """`host_takes_back`: the host queues a request whose blocks were given back for new blocks,
        whatever its load-failure policy; see `load_failure_policy`."""
        refuse_unsupported(config, geometry, identity)
        self._config = config
        self._identity = identity
        self._unix_time = unix_time
        self._orders = Orders()
        self._awaited = AwaitedReports(self._orders, clock)
        self._loadable = LoadableTokens(config, geometry)
        early = EarlyBlockLimit(
            min(geometry.block_sizes),
            geometry.num_blocks,
            len(geometry.group_windows),
            geometry.max_model_len,
            host_takes_back,
        )
        self.loads = Loads(self._orders, geometry, config, early, clock)
        """For a host whose scheduler takes back requests whose blocks were given back, too."""
        self._supply = HostBlockSupply(clock)
        answers = AnswerParams(identity, geometry, config.transfer_mode, unix_time)
        self._held = HeldBlocks(self._orders, answers, config, geometry)
        self._loans = Loans(
            self._orders, geometry.block_size, geometry.num_blocks, config.checksums, self._awaited
        )
        self._borrows = Borrows(
            self._orders, self.loads, self._loadable, config, geometry.block_size, clock
        )
        self._may_borrow = may_borrow(geometry, identity)
        self.borrows = False
        """A request's `holders` are asked for loans."""
        self._saves = SavePlanner(geometry.block_size) if geometry.is_staged else None
        self._partial_offers = PartialOffers(self._orders, geometry.block_sizes)
        self._keeps_turns = config.bidirectional and not geometry.has_state
        self._has_state = geometry.has_state
        is_pushing = config.transfer_mode == "push" and config.writes_early
        self._writes_early = is_pushing and _can_write_early(geometry)
        self._listener: HandshakeServer | None = None
        self.proofs_unreadable = 0
        self.engine_id_clashes = 0
        """Both since start; see ConnectorStats."""
        self._engines_with_our_id: set[tuple[str, int]] = set()

    @property
    def num_leased(self) -> int:
        return self._held.num_held + len(self._loans)

    def lend_from(self, cache: PrefixCache) -> None:
        """Lend to other engines what the host's prefix cache holds. Only for a geometry that
        `lends`."""
        self._loans.lend_from(cache)

    def borrow_with(self, keys: PromptKeys) -> None:
        """Borrow what other engines' prefix caches hold, if this engine can. The host passes a
        request over while `get_num_new_matched_tokens` answers `(None, False)`, and keeps to
        `load_failure_policy`."""
        if self._may_borrow:
            self._borrows.borrow_with(keys)
            self.borrows = True

    def set_handshake_metadata(self, payloads: Mapping[Rank, bytes]) -> None:
        """Start the listener. A second call does nothing: vLLM 0.33 calls again at /wake_up, but
        workers register their memory once. Raises OSError if the side channel cannot be bound."""
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
        """Return how many of the prompt's last tokens to leave out, for a model with a state; None
        if the request is no prompt of another engine.

        The engine that continues from the state computes the last token again, and a state that
        includes this token would count it twice. Then only one token may be sampled, because a
        state includes everything that was ever computed. Call this before `on_new_request`, which
        gets the shortened prompt.
        """
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
            self.loads.failures.note(request.request_id, params.refused, problem)
        origin = params.source or params.target
        is_sibling = origin is not None and self.loads.is_left_to_sibling(request.request_id)
        if params.role is TransferRole.PREFILL:
            self._held.expect_reader(request, params.transfer_id, params.hands_over)
            if self._writes_early:
                self._partial_offers.expect(request, params.transfer_id)
        elif params.retain and self._keeps_turns and not is_sibling:
            # In mixed mode, engines without the secret treat this one as a stock engine.
            is_firm = params.may_be_read_by_stock or self._config.access.is_mixed
            self._held.expect_next_turn(request.request_id, is_firm)
        if params.holders:
            self._borrows.name(request.request_id, params.holders)
        if is_sibling:
            return
        if params.source is not None:
            self._offer(request, params, params.source)
        elif params.target is not None and self._has_our_id(params.target.address):
            self._orders.append(PushWithdrawal(request.request_id, params.target))
        elif params.target is not None:
            most, held = self._loadable.limit(request), params.target.num_tokens
            num_tokens = most if held is None else min(most, held)
            target = params.target
            if self._has_state:  # the state must include these tokens, and no more
                target = replace(target, num_tokens=num_tokens)
            self.loads.await_push(request.request_id, target, num_tokens)

    def _offer(self, request: EngineRequest, params: TransferParams, source: RemoteSource) -> None:
        if source.address.engine_id == self._identity.engine_id:
            # Another engine with our id, or both legs came to this engine. Then our own prefix
            # cache has the KV.
            self._has_our_id(source.address)
            self._orders.append(Decline(source))
            return
        role, proof = params.role, params.proof
        if proof is UnusableHashes.UNREADABLE:
            self.proofs_unreadable += 1
            if role is TransferRole.DECODE:
                problem = LoadProblem("its prefix_proof is unreadable", is_of_pair=False)
                self.loads.failures.note(request.request_id, source.address, problem)
            logger.warning(
                "request %s: nothing is loaded from engine %s: its prefix_proof is malformed, cut, "
                "of another version, or of other blocks than the ones that are named",
                request.request_id,
                source.address.engine_id,
            )
        num_tokens = self._loadable.count(request, role, source, proof, self._unix_time())
        is_proven = isinstance(proof, PrefixHashes)
        self.loads.offer(request.request_id, source, role, num_tokens, is_proven)

    def _has_our_id(self, address: PeerAddress) -> bool:
        """Return True if another engine has our engine_id; count it, and log it once.

        Its KV is not loaded: stock engines and routers identify engines by this id and would
        confuse the two.
        """
        ours = self._identity
        if address.engine_id != ours.engine_id or ours.is_at(address):
            return False
        self.engine_id_clashes += 1
        at = (address.host, address.port)
        if (
            at not in self._engines_with_our_id
            and len(self._engines_with_our_id) < MAX_LOGGED_CLASHES
        ):
            self._engines_with_our_id.add(at)
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
        if self.loads.waits_for_sibling(name) or self._borrows.waits(request, num_computed_tokens):
            return MatchedTokens(None, False)
        shortage = self._supply.ask(name)
        is_short = shortage is not Shortage.NONE
        missing = self.loads.missing(name, num_computed_tokens)
        if missing and self.loads.awaits_prompt(request, is_short=is_short):
            self._supply.pass_over(name)
            return MatchedTokens(None, False)
        if is_short:
            self._make_room(request.num_prompt_tokens, shortage)
        return MatchedTokens(missing, missing > 0)

    def is_passed_over(self, request_id: str) -> bool:
        """Return True while the request waits for a report of the worker half, and takes no
        blocks. Until then the host need not look at it."""
        return self.loads.is_passed_over(request_id) or self._borrows.is_passed_over(request_id)

    def _make_room(self, num_tokens: int, shortage: Shortage) -> None:
        """Free blocks for a request of so many tokens that lacks blocks: see
        `engine_ext.scheduler.block_pressure`."""
        if self._loans.make_room():
            return
        if self._supply.is_stalled() and (name := self._sacrifice()) is not None:
            logger.warning(
                "request %s: its KV is given up, because other requests need the blocks and "
                "nothing has moved for a while",
                name,
            )
        elif not self.loads.reclaim(num_tokens) and self._supply.may_revoke_turn(shortage):
            self._held.revoke_oldest_turn()

    def update_state_after_alloc(
        self, request: EngineRequest, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        self._partial_offers.lost(request.request_id)
        self._supply.admitted(request.request_id, runs=num_external_tokens <= 0)
        self._loans.room_found()
        self._borrows.allocated(request.request_id, num_external_tokens)
        if num_external_tokens > 0:
            self._awaited.load(request.request_id)
        self.loads.allocated(request, block_ids, num_external_tokens)

    def fail_load(self, request_id: str) -> None:
        """Handle an exception of `update_state_after_alloc`: the host waits for the load's report,
        and gets it."""
        self._awaited.load(request_id)
        self.loads.fail(request_id)

    def _sacrifice(self) -> str | None:
        """End the newest registration or, at an engine that decodes as well, the newest lease.
        Return its request id, or None."""
        name = self.loads.withdraw_newest_push()
        if name is None and self.loads.has_waiting:
            name = self._held.revoke_newest_lease()
        return name

    @property
    def wants_steps(self) -> bool:
        """True if `on_step` has anything to do."""
        return self._saves is not None or bool(self._partial_offers)

    def wants_steps_of(self, request_id: str) -> bool:
        return request_id in self._partial_offers

    def on_step(
        self, request_id: str, block_ids: BlockIds, num_computed_tokens: int, num_new_tokens: int
    ) -> None:
        """Note that the step being built computes `num_new_tokens` of the request's tokens, and
        that the KV of `num_computed_tokens` is in its blocks."""
        self._partial_offers.computed(request_id, block_ids, num_computed_tokens)
        if self._saves is not None and self._held.is_expected(request_id):
            self._orders.append(
                self._saves.plan(request_id, block_ids, num_computed_tokens, num_new_tokens)
            )

    def on_preempted(self, request_id: str) -> None:
        """Note that the request has lost its blocks and is computed again later."""
        self._supply.preempted(request_id)
        self._loans.make_room()
        self._partial_offers.lost(request_id)

    def load_failure_policy(self, request: EngineRequest) -> LoadFailurePolicy:
        return self.loads.failure_policy(request.request_id)

    @property
    def load_failures(self) -> LoadFailures:
        """The failed loads that answers report."""
        return self.loads.failures

    def drain(self) -> None:
        """Note that the engine leaves or pauses: it retains no turns any more. Leases continue for
        their readers."""
        self._held.stop_retaining()
        self._loans.stop()

    def resume(self) -> None:
        """Note that the engine continues: it retains turns again."""
        self._held.resume_retaining()
        self._loans.resume()

    def end_turns(self) -> bool:
        """End all turns, because the engine would compute other KV from now on. Return False if
        firm turns stay, whose readers cannot be notified."""
        self._loans.revoke_all()
        return self._held.end_turns()

    def revoke_loans(self) -> None:
        """End all loans, because the host's prefix cache is reset."""
        self._loans.revoke_all()

    def change_weights(self, request_ids: Iterable[str]) -> None:
        """Note that the engine no longer has the weights with which these requests were computed.

        Their leases and turns end, except firm turns. Nothing more is loaded for them: an offer is
        declined, and a load in progress must be reported as failed (`is_stale_load`).
        """
        self._loans.revoke_all()
        for request_id in request_ids:
            self._held.revoke_unless_firm(request_id)
            self._borrows.drop(request_id)
            self.loads.drop(request_id)

    def is_stale_load(self, request_id: str) -> bool:
        return self.loads.is_stale(request_id)

    def release(self, engine_id: str, request_id: str) -> bool:
        """Release KV that no engine will read. Return False if the request holds nothing. A reader
        that still asks is notified, and finds the KV for a moment more."""
        return engine_id == self._identity.engine_id and self.revoke(request_id)

    def revoke(self, request_id: str) -> bool:
        """Release the KV of a request of this engine whose answer was not delivered."""
        return self._held.revoke(request_id)

    def has_pending_work(self) -> bool:
        """True while `build_connector_meta` has something to hand over."""
        return bool(self._orders)

    def build_connector_meta(self) -> StepMetadata:
        if self._supply.next_step():
            self._make_room(1, Shortage.BLOCKS)
        self._borrows.step()
        self._awaited.step()
        return self._orders.take()

    def recover(self, results: TransferResults) -> TransferResults:
        """Return the results with the reports that were lost. The host calls this first, wherever
        it acts on results."""
        return self._awaited.recover(results) if results.lost else results

    def update_connector_output(self, results: TransferResults) -> TransferResults:
        """Return the results that the host is to act on: all except loads of fenced requests, whose
        blocks the host keeps until their ids come in `finished_sending`. Called in every step, and
        mostly without results."""
        if not results:
            return results
        self._supply.moved()
        for request_id in results.ready:
            self.loads.ready(request_id)
        for request_id in results.returned:
            self.loads.returned(request_id)
        # The host frees the blocks of a fenced request when the fence is answered. A report of its
        # load would free them a second time.
        fenced = {name for name in results.finished_recving if self.loads.is_fenced(name)}
        for request_id in results.finished_recving:
            self._awaited.reported(request_id, is_load=True)
            failed, problem = request_id in results.failed_recving, results.problems.get(request_id)
            self.loads.reported(request_id, failed=failed, problem=problem)
            if not failed and request_id not in fenced:
                self._supply.loaded(request_id)
        for request_id in results.finished_sending:
            self._awaited.reported(request_id, is_load=False)
            self._held.reported(request_id)
            self._loans.reported(request_id)
            self.loads.fence_answered(request_id)
        for request in results.loan_requests:
            self._loans.ask(request)
        self._borrows.update(results)
        return replace(
            results,
            finished_recving=results.finished_recving - fenced,
            failed_recving=results.failed_recving - fenced,
        )

    def request_finished(
        self, request: EngineRequest, block_ids: BlockIds, status: FinishStatus
    ) -> FinishDecision:
        self._supply.left(request.request_id)
        self._loans.room_found()
        is_fenced = self.loads.finish(request.request_id)
        if self._saves is not None:
            self._saves.forget(request.request_id)
        has_kv = status.leaves_kv and request.num_computed_tokens > 0 and not is_fenced
        attempt = self._partial_offers.attempt_of(request.request_id)
        decision = self._held.finish(request, block_ids, has_kv, attempt)
        is_fenced |= self._fence_partial_offer(request.request_id, decision)
        if borrowed := self._borrows.finish(request.request_id):
            params = {**(decision.kv_transfer_params or {}), **borrowed}
            decision = decision._replace(kv_transfer_params=params)
        return self._kept(request.request_id, decision, is_fenced)

    def _kept(self, request_id: str, decision: FinishDecision, is_fenced: bool) -> FinishDecision:
        """Return the decision, and await the report that ends it."""
        if is_fenced or decision.delay_free:
            self._awaited.keep(request_id)
        return decision._replace(delay_free=True) if is_fenced else decision

    def fail_finish(self, request_id: str) -> FinishDecision:
        """Handle an exception of `request_finished`: make consistent what it may have done."""
        self._supply.left(request_id)
        try:
            self.loads.finish(request_id)
        except Exception:
            logger.exception("request %s", request_id)
        self._borrows.finish(request_id)
        decision = self._held.fail(request_id)
        is_fenced = self.loads.is_fenced(request_id) | self._fence_partial_offer(
            request_id, decision
        )
        return self._kept(request_id, decision, is_fenced)

    def _fence_partial_offer(self, request_id: str, decision: FinishDecision) -> bool:
        """Fence a request whose blocks may be read by a WRITE in progress and are kept by no lease.
        Return True if there was a partial offer like that."""
        is_fenced = self._partial_offers.forget(request_id) and not decision.delay_free
        if is_fenced:
            self._orders.append(Fence(request_id))
        return is_fenced


def _can_write_early(geometry: CacheGeometry) -> bool:
    """Return True if KV can be written while the prompt is computed. Host buffers get a step's KV
    when the step has ended, a state is complete only at the request's end, and groups with a window
    are written last."""
    is_in_place = not geometry.is_staged and not geometry.has_state
    return is_in_place and None in geometry.group_windows
