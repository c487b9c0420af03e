"""Which sequences run next, and which blocks they get.

Continuous batching with chunked prefill. A step begins with the sequences that decode, in order of
admission, one token each. Then it computes prompts, oldest first, and admits loaded and waiting
sequences while the step may have more tokens, or, with a target for the time between two tokens,
until that time is used up (common/step_budget.py). If blocks run out, the sequence that was
admitted last gives up its own and is computed again later, or is handed back if the request asks
for that.

Where every live sequence is, and every block that outlives one:

waiting ──────────────> running ──────> finished
   │                    ^     │            │ a remote still reads its blocks
   v                    │     v            v
 parked ─────────────> loaded waiting    delayed ──> freed
   │ aborted
   v
orphaned ──> freed when the load has ended

The connector is called where vLLM's v1 scheduler calls one, in the same order. An exception out of
a hook ends only the request that the hook was about.
"""

import enum
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from engine_ext.common import resume_payload
from engine_ext.common.step_budget import StepBudget
from engine_ext.common.step_costs import StepFit, StepWork
from engine_ext.common.types import (
    NO_RESULTS,
    BlockIds,
    EngineRequest,
    FinishDecision,
    FinishStatus,
    TransferResults,
)
from engine_ext.reference.answer import with_progress
from engine_ext.reference.block_manager import BlockManager, require
from engine_ext.reference.config import EngineConfig
from engine_ext.reference.messages import ABORTED, HANDED_BACK, Counters, Finish, failed
from engine_ext.reference.sequence import REMOTE_CACHED, Sequence
from engine_ext.scheduler.admission import FIELD, FINISH_REASON, hands_back, judge, prefills
from engine_ext.scheduler.scheduler import SchedulerConnector

logger = logging.getLogger(__name__)

T = TypeVar("T")


def loan_scheme(block_size: int) -> str:
    """Return how this engine names the blocks of its cache, for loans."""
    return f"disagg-engine blake2b-256 {block_size}"


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next `num_tokens` tokens of a sequence, to be run through the model."""

    seq: Sequence
    num_tokens: int

    @property
    def end(self) -> int:
        return self.seq.num_computed_tokens + self.num_tokens

    @property
    def reaches_end(self) -> bool:
        """Whether the sequence's next token can be sampled after it."""
        return self.end == self.seq.num_tokens


@dataclass(slots=True)
class SchedulerStep:
    """What one step does: the scheduler fills it in, the engine core carries it out."""

    budget: int
    """Tokens that may still be added."""
    chunks: list[Chunk] = field(default_factory=list)
    fresh_blocks: list[int] = field(default_factory=list)
    """Newly handed out, to be computed into, with stale contents."""
    ended: list[Sequence] = field(default_factory=list)
    """Ended while being scheduled."""
    num_preempted: int = 0
    must_ask_again: bool = False
    """The connector cannot answer yet for a waiting request."""

    def add(self, seq: Sequence, num_tokens: int) -> None:
        self.chunks.append(Chunk(seq, num_tokens))
        self.budget -= num_tokens


def work_of(chunks: list[Chunk]) -> StepWork:
    """Return what a step computes. A chunk of one token costs what a decoding request does."""
    lengths = [(chunk.num_tokens, chunk.seq.num_computed_tokens) for chunk in chunks]
    contexts = sum(before for count, before in lengths if count == 1)
    return StepWork.of([one for one in lengths if one[0] > 1], contexts)


class _Admission(enum.Enum):
    DONE = enum.auto()
    NO_ROOM = enum.auto()
    LATER = enum.auto()
    """Not now, for a reason that does not concern the sequences behind it."""


class Scheduler:
    def __init__(
        self,
        config: EngineConfig,
        blocks: BlockManager,
        connector: SchedulerConnector,
        counters: Counters,
        step_fit: StepFit,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._blocks = blocks
        self._connector = connector
        self._counters = counters
        self._clock = clock
        target, most = config.target_itl_ms, config.tokens_per_step
        self._step_budget = None if target is None else StepBudget(target, step_fit, most)
        self._held_up_since: float | None = None
        """Since when the next prompt waits that the last step had no time for."""
        self.waiting: deque[Sequence] = deque()
        """Holds no blocks. First come, first served; the preempted come first."""
        self.parked: dict[str, Sequence] = {}
        """Remote KV is on its way into their blocks."""
        self.loaded: deque[Sequence] = deque()
        """Remote KV has arrived."""
        self.running: list[Sequence] = []
        """In order of admission."""
        self.orphaned: dict[str, list[int]] = {}
        """Blocks of requests aborted while a load may still write into them."""
        self.delayed: dict[str, list[int]] = {}
        """Blocks of finished requests, or of loans, that a remote still reads; two may share a
        block."""
        self._undelivered = NO_RESULTS
        """Results that the connector got while it raised; it gets them once more."""

    def add(self, seq: Sequence) -> None:
        """A request whose hook raises ends here, see `seq.finish`."""
        seq.queued_at = self._clock()
        self.waiting.append(seq)
        try:
            self._connector.on_new_request(seq)
        except Exception:
            self._end_for_hook(seq)
        else:
            self._take_load_failure(seq)

    def schedule(self) -> SchedulerStep:
        step = SchedulerStep(budget=self._config.tokens_per_step)
        self._schedule_decodes(step)
        self._begin_prompts(step)
        for seq in self.running:
            if seq.num_uncomputed_tokens > 1:
                self._schedule_prefill(seq, step)
        if not step.num_preempted:
            while self.loaded and self._has_room(step):
                seq = self.loaded[0]
                num_loaded_blocks = -(-seq.num_computed_tokens // self._blocks.block_size)
                self._start(seq, seq.block_ids[num_loaded_blocks:], step)
            self._schedule_waiting(step)
        return step

    def advance(self, seq: Sequence, num_tokens: int) -> None:
        """The KV of `num_tokens` more tokens is in the blocks."""
        seq.num_computed_tokens += num_tokens
        self._blocks.commit(seq)

    def distrust(self, seq: Sequence) -> None:
        """The KV of `seq` is broken: no other sequence is to start from it."""
        self._blocks.forget(seq.block_ids)

    def abort(self, request_id: str) -> Sequence | None:
        """None if there is none. What an ended request keeps for others is given up."""
        seq = next((seq for seq in self.live() if seq.request_id == request_id), None)
        if seq is not None:
            self.finish(seq, ABORTED)
        elif request_id in self.delayed:
            self._ask(self._connector.revoke, request_id, default=False)
        return seq

    def finish(self, seq: Sequence, finish: Finish) -> None:
        """Ends a live sequence. Its blocks stay as long as a remote may read or write them."""
        is_parked = seq.request_id in self.parked
        self._remove(seq)
        seq.finish = finish
        must_delay = self._request_finished(seq, finish)
        blocks = self._blocks.detach(seq)
        if must_delay:
            self.delayed[seq.request_id] = blocks
        elif is_parked:
            self.orphaned[seq.request_id] = blocks
        else:
            self._blocks.free(blocks)

    def update_transfers(self, results: TransferResults) -> list[Sequence]:
        """Returns the sequences that a failed load ended."""
        results = self._ask(self._connector.recover, results, default=results)
        undelivered, self._undelivered = self._undelivered, NO_RESULTS
        try:
            passed_on = self._connector.update_connector_output(undelivered | results)
            # This engine has already acted on those that are delivered once more.
            results = replace(
                results,
                finished_recving=results.finished_recving & passed_on.finished_recving,
                failed_recving=results.failed_recving & passed_on.failed_recving,
            )
        except Exception:
            logger.exception("connector: update_connector_output raised")
            self._undelivered = results
        for request_id in results.finished_sending:
            self._free_held(self.delayed.pop(request_id, None), request_id)
        ended = []
        arrived = [
            seq for seq in self.parked.values() if seq.request_id in results.finished_recving
        ]
        for request_id in results.finished_recving - self.parked.keys():
            self._free_held(self.orphaned.pop(request_id, None), request_id)
        for seq in arrived:
            self._remove(seq)
            if seq.request_id not in results.failed_recving:
                self._accept_load(seq)
            elif not self._survives_failed_load(seq):
                ended.append(seq)
        return ended

    @property
    def scheme(self) -> str:
        """This property, `find` and `pin` implement engine_ext.scheduler.loans.PrefixCache, and
        with `keys_of` engine_ext.scheduler.loans.PromptKeys."""
        return loan_scheme(self._blocks.block_size)

    def find(self, keys: Seq[bytes]) -> BlockIds:
        return (tuple(self._blocks.find(keys)),)

    def pin(self, loan_id: str, block_ids: BlockIds) -> None:
        (blocks,) = block_ids
        self._blocks.allocate(0, sharing=blocks)
        self.delayed[loan_id] = list(blocks)

    def keys_of(self, request: EngineRequest) -> Seq[bytes]:
        return self._blocks.digests_of(request) if isinstance(request, Sequence) else ()

    def drain(self) -> None:
        self._ask(self._connector.drain, default=None)

    def release(self, engine_id: str, request_id: str) -> bool:
        return self._ask(self._connector.release, engine_id, request_id, default=False)

    def live(self) -> Iterator[Sequence]:
        yield from self.waiting
        yield from self.parked.values()
        yield from self.loaded
        yield from self.running

    def _remove(self, seq: Sequence) -> None:
        if self.parked.pop(seq.request_id, None) is not None:
            return
        for queue in (self.running, self.loaded, self.waiting):
            if seq in queue:
                queue.remove(seq)
                return

    def check_integrity(self) -> None:
        """Raises IntegrityError."""
        ids = Counter(seq.request_id for seq in self.live())
        ids.update([*self.orphaned, *self.delayed])
        require(all(count == 1 for count in ids.values()), "a request is in two places")
        for seq in self.waiting:
            require(not seq.block_ids, f"{seq.request_id} waits and holds blocks")
            require(seq.num_computed_tokens == 0, f"{seq.request_id} waits and has KV")
        for seq in self.live():
            room = len(seq.block_ids) * self._blocks.block_size
            require(seq.num_computed_tokens <= room, f"{seq.request_id} has KV without blocks")
        held = [seq.block_ids for seq in self.live()]
        self._blocks.check_integrity([*held, *self.orphaned.values(), *self.delayed.values()])

    def _schedule_decodes(self, step: SchedulerStep) -> None:
        index = 0
        while index < len(self.running) and step.budget > 0:
            seq = self.running[index]
            if seq.num_uncomputed_tokens == 1:
                while (fresh := self._blocks.grow(seq)) is None:
                    last = self.running[-1]
                    self._preempt(last, step)
                    if last is seq:
                        return
                step.fresh_blocks += fresh
                step.add(seq, 1)
            index += 1

    def _begin_prompts(self, step: SchedulerStep) -> None:
        since, self._held_up_since = self._held_up_since, None
        if self._step_budget:
            waited = 0.0 if since is None else self._clock() - since
            self._step_budget.begin(len(step.chunks), work_of(step.chunks).contexts, waited)

    def _schedule_prefill(self, seq: Sequence, step: SchedulerStep) -> None:
        """It got all of its blocks when it was admitted."""
        num_tokens = min(seq.num_uncomputed_tokens, step.budget)
        if self._step_budget and num_tokens > 1:
            num_tokens = self._step_budget.take(num_tokens, seq.num_computed_tokens)
        if num_tokens:
            step.add(seq, num_tokens)

    def _schedule_waiting(self, step: SchedulerStep) -> None:
        passed_over: list[Sequence] = []
        while self.waiting and self._has_room(step):
            seq = self.waiting[0]
            if self._step_budget and self._step_budget.is_used_up:
                self._held_up_since = seq.queued_at
                break
            try:
                admission = self._admit(seq, step)
            except Exception:
                self._end_for_hook(seq)
                step.ended.append(seq)
                continue
            if admission is _Admission.NO_ROOM:
                break
            if admission is _Admission.LATER:
                passed_over.append(self.waiting.popleft())
        self.waiting.extendleft(reversed(passed_over))

    def _has_room(self, step: SchedulerStep) -> bool:
        return step.budget > 0 and len(self.running) < self._config.max_num_seqs

    def _admit(self, seq: Sequence, step: SchedulerStep) -> _Admission:
        prefix = self._blocks.find_prefix(seq)
        local = len(prefix) * self._blocks.block_size
        matched = self._connector.get_num_new_matched_tokens(seq, local)
        if matched.num_tokens is None:
            step.must_ask_again = True
            return _Admission.LATER
        external = min(matched.num_tokens, seq.num_tokens - local)
        is_prefill = prefills(seq.kv_transfer_params)
        verdict = judge(self._threshold(seq), local, external, seq.num_tokens, prefills=is_prefill)
        if verdict.is_refused:
            # For the connector, a request whose KV is not at hand is an aborted one.
            self.finish(seq, Finish(FINISH_REASON, FinishStatus.ABORTED, verdict.stop_reason))
            seq.kv_transfer_answer = {"cache_hit_rate": verdict.rate, FIELD: verdict.threshold}
            step.ended.append(seq)
            return _Admission.DONE
        if external > 0 and not matched.is_async:
            raise NotImplementedError("this engine loads remote KV beside its steps only")
        if external > 0 and len(self.parked) >= self._config.max_num_seqs:
            return _Admission.LATER
        fresh = self._blocks.admit(seq, prefix)
        if fresh is None:
            return _Admission.NO_ROOM
        seq.num_computed_tokens = local
        if seq.num_prefix_hit_tokens is None:
            of_prompt = min(local, seq.num_prompt_tokens)
            seq.num_prefix_hit_tokens = seq.num_cached_tokens = of_prompt
            self._counters.prompt_tokens_cached += of_prompt
        if external > 0:
            self._park(seq, external)
        else:
            self._start(seq, fresh, step)
        return _Admission.DONE

    def _threshold(self, seq: Sequence) -> float:
        own = seq.cache_hit_threshold
        return self._config.global_cache_hit_threshold if own is None else own

    def _park(self, seq: Sequence, num_external: int) -> None:
        seq.num_external_tokens = num_external
        self._remove(seq)
        self.parked[seq.request_id] = seq
        try:
            self._connector.update_state_after_alloc(seq, seq.blocks_by_group(), num_external)
        except Exception:
            # Its blocks stay: the load may have been ordered.
            logger.exception("connector: a hook raised for %s", seq.request_id)
            self._connector.fail_load(seq.request_id)

    def _start(self, seq: Sequence, fresh: list[int], step: SchedulerStep) -> None:
        try:
            self._connector.update_state_after_alloc(seq, seq.blocks_by_group(), 0)
        except Exception:
            self._end_for_hook(seq)
            step.ended.append(seq)
            return
        self._remove(seq)
        self.running.append(seq)
        step.fresh_blocks += fresh
        self._schedule_prefill(seq, step)

    def _preempt(self, seq: Sequence, step: SchedulerStep) -> None:
        is_asked = hands_back(seq.kv_transfer_params, self._config.hand_back)
        if is_asked and resume_payload.logprobs_fit(seq.num_output_tokens, seq.sampling.logprobs):
            self.finish(seq, HANDED_BACK)
            step.ended.append(seq)
        else:
            self._compute_again(seq)
        self._counters.preemptions += 1
        step.num_preempted += 1

    def _compute_again(self, seq: Sequence) -> None:
        self._ask(self._connector.on_preempted, seq.request_id, default=None)
        self._remove(seq)
        self._blocks.free(self._blocks.detach(seq))
        seq.num_computed_tokens = 0
        seq.queued_at = self._clock()
        self.waiting.appendleft(seq)

    def _accept_load(self, seq: Sequence) -> None:
        loaded = seq.num_computed_tokens + seq.num_external_tokens
        # The last token always runs here: its logits did not travel.
        seq.num_computed_tokens = min(loaded, seq.num_tokens - 1)
        of_prompt = min(loaded, seq.num_prompt_tokens)
        seq.num_cached_tokens = of_prompt
        before = loaded - seq.num_external_tokens
        self._counters.prompt_tokens_fetched += max(0, of_prompt - before)
        self._blocks.commit(seq)
        self.loaded.append(seq)

    def _survives_failed_load(self, seq: Sequence) -> bool:
        """Its blocks are freed only by way of `finish`, which asks whether something may still
        write into them. A load is reported as failed only when nothing writes any more, so a
        sequence that is computed again may get the same blocks."""
        self._take_load_failure(seq)
        policy = self._ask(self._connector.load_failure_policy, seq, default="fail")
        if policy != "recompute":
            self.finish(seq, failed("this request's KV cache could not be loaded from the remote"))
            return False
        self._compute_again(seq)
        return True

    def _take_load_failure(self, seq: Sequence) -> None:
        take = self._connector.load_failures.take
        seq.load_failure = self._ask(take, seq.request_id, default=None)

    def _request_finished(self, seq: Sequence, finish: Finish) -> bool:
        """Sets the answer for the caller; returns whether the blocks must stay."""
        try:
            decision = self._connector.request_finished(seq, seq.blocks_by_group(), finish.status)
        except Exception:
            logger.exception("connector: request_finished raised for %s", seq.request_id)
            nothing = FinishDecision(delay_free=False, kv_transfer_params=None)
            decision = self._ask(self._connector.fail_finish, seq.request_id, default=nothing)
        params = decision.kv_transfer_params
        if params is not None and params.get("do_remote_prefill"):
            params = params | {REMOTE_CACHED: seq.num_cached_tokens}
        if params is not None and (payload := params.get(resume_payload.KEY)) is not None:
            payload = with_progress(payload, seq.num_sent_tokens, seq.output_logprobs)
            params = params | {resume_payload.KEY: payload}
        seq.kv_transfer_answer = params
        return decision.delay_free

    def _free_held(self, blocks: list[int] | None, request_id: str) -> None:
        if blocks is None:
            logger.warning("connector reported %s, whose blocks it does not hold", request_id)
        else:
            self._blocks.free(blocks)

    def _ask(self, hook: Callable[..., T], *arguments: Any, default: T) -> T:
        """Call a hook whose failure is no reason to end a request."""
        try:
            return hook(*arguments)
        except Exception:
            names = [getattr(argument, "request_id", argument) for argument in arguments]
            logger.exception("connector: %s%s raised", hook.__name__, tuple(names))
            return default

    def _end_for_hook(self, seq: Sequence) -> None:
        logger.exception("connector: a hook raised for %s", seq.request_id)
        self.finish(seq, failed("the KV connector refused this request"))
