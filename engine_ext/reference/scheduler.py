"""Which sequences run next, and which blocks they get.

Continuous batching with chunked prefill: those who decode come first, in order of admission, a
token each. Then the loaded and the waiting are admitted, and all whose prompts are not computed yet
share the step's prefill tokens (`prefill_shares`). Where blocks run out, the sequence that came
last gives up its own and is computed again later, or handed back where that is asked for.

The connector is called where vLLM's v1 scheduler calls one, in the same order. An exception out of
a hook ends the request it was about and nothing else.
"""

import enum
import logging
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from engine_ext.common import resume_payload
from engine_ext.common.types import NO_RESULTS, FinishDecision, TransferResults
from engine_ext.reference.block_manager import BlockManager
from engine_ext.reference.config import EngineConfig
from engine_ext.reference.kv_connector import SchedulerHalf
from engine_ext.reference.messages import ABORTED, HANDED_BACK, Counters, Finish, failed, refused
from engine_ext.reference.queues import Queues
from engine_ext.reference.resume import handed_over
from engine_ext.reference.sequence import REMOTE_CACHED, Sequence
from engine_ext.scheduler.admission import FIELD, AdmissionVerdict, hands_back, judge, prefills


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
    budget: int
    """Tokens that may still be added."""
    seats: int = 0
    """Sequences that may still be admitted: each is to have a token in this step."""
    num_admitted: int = 0
    chunks: list[Chunk] = field(default_factory=list)
    fresh_blocks: list[int] = field(default_factory=list)
    """Newly handed out, to be computed into, with stale contents."""
    parked: list[Sequence] = field(default_factory=list)
    """Began to wait for remote KV in this step."""
    ended: list[Sequence] = field(default_factory=list)
    """Ended while being scheduled."""
    num_preempted: int = 0
    must_ask_again: bool = False
    """The connector wants to be asked about a waiting request once more."""

    def add(self, seq: Sequence, num_tokens: int) -> None:
        self.chunks.append(Chunk(seq, num_tokens))
        self.budget -= num_tokens

    def admit(self, fresh_blocks: list[int]) -> None:
        """A sequence runs from now on; `add` tells how far it comes in this step."""
        self.seats -= 1
        self.num_admitted += 1
        self.fresh_blocks += fresh_blocks


_OLDEST = 4
"""The oldest prompt has this part of the tokens to itself."""


def shares(remaining: Seq[int], budget: int, num_new: int) -> list[int]:
    """Tokens of each prompt in this step; `remaining` in order of admission.

    Those with the least to do go first: they end soonest, and hold up the others least. So that
    long ones come to their end too, whatever follows them, the oldest has its part before that.
    The last `num_new` have a token each at least: their blocks are made ready in this step.
    """
    granted = [0] * len(remaining)

    def give(index: int, most: int) -> int:
        given = min(most, remaining[index] - granted[index])
        granted[index] += given
        return given

    left = budget
    for index in range(len(remaining) - num_new, len(remaining)):
        left -= give(index, min(1, left))
    if remaining:
        left -= give(0, min(-(-budget // _OLDEST), left))
    for index in sorted(range(len(remaining)), key=remaining.__getitem__):
        left -= give(index, left)
    return granted


logger = logging.getLogger(__name__)

_LOAD_FAILED = "the KV cache of this request could not be loaded from the remote engine"


class _Admission(enum.Enum):
    TAKEN = enum.auto()
    NO_ROOM = enum.auto()
    LATER = enum.auto()
    """Not now, for a reason that need not hold up those behind it."""


class Scheduler:
    def __init__(
        self,
        config: EngineConfig,
        blocks: BlockManager,
        connector: SchedulerHalf,
        counters: Counters,
    ) -> None:
        self._config = config
        self._blocks = blocks
        self._connector = connector
        self._counters = counters
        self.queues = Queues()
        self._unheard = NO_RESULTS
        """What the connector was told while it raised; it is told once more."""

    def add(self, seq: Sequence) -> None:
        """A request whose hook raises ends here: `seq.finish` tells."""
        self.queues.waiting.append(seq)
        try:
            self._connector.on_new_request(seq)
        except Exception:
            self._end_for_hook(seq)
            return
        self._note_load_failure(seq)

    def schedule(self) -> SchedulerStep:
        step = SchedulerStep(budget=self._config.max_num_batched_tokens)
        self._schedule_decodes(step)
        prefill = min(self._config.prefill_tokens_per_step, step.budget)
        step.seats = prefill - bool(self._prefilling())
        if not step.num_preempted:
            self._schedule_loaded(step)
            self._schedule_waiting(step)
        self._schedule_prefills(step, prefill)
        return step

    def advance(self, seq: Sequence, num_tokens: int) -> None:
        """The KV of `num_tokens` more tokens stands in the blocks."""
        seq.num_computed_tokens += num_tokens
        self._blocks.commit(seq)

    def distrust(self, seq: Sequence) -> None:
        """Something in the KV of `seq` is broken: nobody else is to start from it."""
        self._blocks.forget(seq)

    def abort(self, request_id: str) -> Sequence | None:
        """None where none such lives. What one that has ended keeps for others is given up."""
        seq = self.queues.find(request_id)
        if seq is not None:
            self.finish(seq, ABORTED)
        elif request_id in self.queues.delayed:
            self._revoke(request_id)
        return seq

    def finish(self, seq: Sequence, finish: Finish) -> None:
        """Ends a live sequence. Its blocks stay as long as a remote may read or write them."""
        is_parked = seq.request_id in self.queues.parked
        self.queues.remove(seq)
        seq.finish = finish
        delay_free = self._request_finished(seq, finish)
        blocks = self._blocks.detach(seq)
        if delay_free:
            self.queues.delayed.hold(seq.request_id, blocks)
        elif is_parked:
            self.queues.orphaned[seq.request_id] = blocks
        else:
            self._blocks.free_blocks(blocks)

    def update_transfers(self, results: TransferResults) -> list[Sequence]:
        """Returns the sequences that a failed load ended."""
        unheard, self._unheard = self._unheard, NO_RESULTS
        try:
            results &= self._connector.update_connector_output(unheard | results)
        except Exception:
            logger.exception("connector: update_connector_output raised")
            self._unheard = results
        for request_id in results.finished_sending:
            self._free_held(self.queues.delayed.pop(request_id), request_id)
        ended = []
        parked = self.queues.parked
        arrived = [seq for seq in parked.values() if seq.request_id in results.finished_recving]
        for request_id in results.finished_recving - parked.keys():
            self._free_held(self.queues.orphaned.pop(request_id, None), request_id)
        for seq in arrived:
            self.queues.remove(seq)
            if seq.request_id not in results.failed_recving:
                self._accept_load(seq)
            elif not self._survives_failed_load(seq):
                ended.append(seq)
        return ended

    def drain(self) -> None:
        try:
            self._connector.drain()
        except Exception:
            logger.exception("connector: drain raised")

    def release(self, engine_id: str, request_id: str) -> bool:
        try:
            return self._connector.release(engine_id, request_id)
        except Exception:
            logger.exception("connector: release raised")
            return False

    def _revoke(self, request_id: str) -> None:
        try:
            self._connector.revoke(request_id)
        except Exception:
            logger.exception("connector: revoke raised")

    def check_integrity(self) -> None:
        self.queues.check_integrity(self._blocks)

    def _schedule_decodes(self, step: SchedulerStep) -> None:
        index = 0
        while index < len(self.queues.running) and step.budget > 0:
            seq = self.queues.running[index]
            if seq.num_uncomputed_tokens == 1:
                fresh = self._grow_at_any_cost(seq, step)
                if fresh is None:
                    return
                step.fresh_blocks += fresh
                step.add(seq, 1)
            index += 1

    def _prefilling(self) -> list[Sequence]:
        return [seq for seq in self.queues.running if seq.num_uncomputed_tokens > 1]

    def _schedule_prefills(self, step: SchedulerStep, budget: int) -> None:
        """All of their blocks were theirs when they were admitted."""
        running = self.queues.running
        old = running[: len(running) - step.num_admitted]
        new = running[len(old) :]
        sequences = [*(seq for seq in old if seq.num_uncomputed_tokens > 1), *new]
        remaining = [seq.num_uncomputed_tokens for seq in sequences]
        granted = shares(remaining, budget, num_new=len(new))
        for seq, num_tokens in zip(sequences, granted, strict=True):
            if num_tokens:
                step.add(seq, num_tokens)

    def _grow_at_any_cost(self, seq: Sequence, step: SchedulerStep) -> list[int] | None:
        """Room for all tokens of `seq`, taken from those who came last; None where that was `seq`
        itself."""
        while (fresh := self._blocks.grow(seq, seq.num_tokens)) is None:
            victim = self.queues.running[-1]
            self._preempt(victim, step)
            if victim is seq:
                return None
        return fresh

    def _schedule_loaded(self, step: SchedulerStep) -> None:
        while self.queues.loaded and self._has_room(step):
            seq = self.queues.loaded[0]
            num_loaded_blocks = -(-seq.num_computed_tokens // self._blocks.block_size)
            self._start(seq, seq.block_ids[num_loaded_blocks:], step)

    def _schedule_waiting(self, step: SchedulerStep) -> None:
        waiting = self.queues.waiting
        passed_over: deque[Sequence] = deque()
        while waiting and self._has_room(step):
            seq = waiting[0]
            verdict = self._try_admit(seq, step)
            if verdict is _Admission.NO_ROOM:
                break
            if verdict is _Admission.LATER:
                passed_over.append(waiting.popleft())
        waiting.extendleft(reversed(passed_over))

    def _try_admit(self, seq: Sequence, step: SchedulerStep) -> _Admission:
        try:
            return self._admit(seq, step)
        except Exception:
            self._end_for_hook(seq)
            step.ended.append(seq)
            return _Admission.TAKEN

    def _admit(self, seq: Sequence, step: SchedulerStep) -> _Admission:
        prefix = self._blocks.find_prefix(seq)
        local = len(prefix) * self._blocks.block_size
        matched = self._connector.get_num_new_matched_tokens(seq, local)
        if matched.num_tokens is None:
            step.must_ask_again = True
            return _Admission.LATER
        external = min(matched.num_tokens, seq.num_tokens - local)
        verdict = self._judge(seq, local, external)
        if verdict.is_refused:
            return self._refuse(seq, verdict, step)
        if external <= 0:
            return self._admit_local(seq, prefix, step)
        if not matched.is_async:
            raise NotImplementedError("this engine loads remote KV beside its steps only")
        if len(self.queues.parked) >= self._config.max_num_seqs:
            return _Admission.LATER
        return self._park(seq, prefix, external, step)

    def may_refuse(self, seq: Sequence) -> bool:
        """By its threshold, when it is to be admitted."""
        return self._threshold(seq) > 0 and not prefills(seq.kv_transfer_params)

    def _judge(self, seq: Sequence, local: int, external: int) -> AdmissionVerdict:
        is_prefill = prefills(seq.kv_transfer_params)
        return judge(self._threshold(seq), local, external, seq.num_tokens, prefills=is_prefill)

    def _threshold(self, seq: Sequence) -> float:
        own = seq.cache_hit_threshold
        return self._config.global_cache_hit_threshold if own is None else own

    def _refuse(self, seq: Sequence, verdict: AdmissionVerdict, step: SchedulerStep) -> _Admission:
        self.finish(seq, refused(verdict.stop_reason))
        seq.kv_transfer_answer = {"cache_hit_rate": verdict.rate, FIELD: verdict.threshold}
        step.ended.append(seq)
        return _Admission.TAKEN

    def _admit_local(self, seq: Sequence, prefix: list[int], step: SchedulerStep) -> _Admission:
        local = len(prefix) * self._blocks.block_size
        fresh = self._blocks.admit(seq, prefix)
        if fresh is None:
            return _Admission.NO_ROOM
        self._note_prefix_hit(seq, local)
        self._start(seq, fresh, step)
        return _Admission.TAKEN

    def _park(
        self, seq: Sequence, prefix: list[int], num_external: int, step: SchedulerStep
    ) -> _Admission:
        local = len(prefix) * self._blocks.block_size
        if self._blocks.admit(seq, prefix) is None:
            return _Admission.NO_ROOM
        self._note_prefix_hit(seq, local)
        seq.num_external_tokens = num_external
        self.queues.remove(seq)
        self.queues.parked[seq.request_id] = seq
        step.parked.append(seq)
        try:
            self._connector.update_state_after_alloc(seq, seq.blocks_by_group(), num_external)
        except Exception:
            # Its blocks stay: the load may have been ordered.
            logger.exception("connector: a hook raised for %s", seq.request_id)
            self._connector.fail_load(seq.request_id)
        return _Admission.TAKEN

    def _start(self, seq: Sequence, fresh: list[int], step: SchedulerStep) -> None:
        try:
            self._connector.update_state_after_alloc(seq, seq.blocks_by_group(), 0)
        except Exception:
            self._end_for_hook(seq)
            step.ended.append(seq)
            return
        self.queues.remove(seq)
        self.queues.running.append(seq)
        step.admit(fresh)

    def _has_room(self, step: SchedulerStep) -> bool:
        return step.seats > 0 and len(self.queues.running) < self._config.max_num_seqs

    def _note_prefix_hit(self, seq: Sequence, num_tokens: int) -> None:
        seq.num_computed_tokens = num_tokens
        if seq.num_prefix_hit_tokens is None:
            of_prompt = min(num_tokens, seq.num_prompt_tokens)
            seq.num_prefix_hit_tokens = seq.num_cached_tokens = of_prompt
            self._counters.prompt_tokens_cached += of_prompt

    def _preempt(self, seq: Sequence, step: SchedulerStep) -> None:
        if self._hands_back(seq):
            self.finish(seq, HANDED_BACK)
            step.ended.append(seq)
        else:
            self._send_back(seq)
        self._counters.preemptions += 1
        step.num_preempted += 1

    def _hands_back(self, seq: Sequence) -> bool:
        if not (seq.is_only and hands_back(seq.kv_transfer_params, self._config.hand_back)):
            return False
        return resume_payload.logprobs_fit(seq.num_output_tokens, seq.sampling.logprobs)

    def _send_back(self, seq: Sequence) -> None:
        try:
            self._connector.on_preempted(seq.request_id)
        except Exception:
            logger.exception("connector: on_preempted raised for %s", seq.request_id)
        self.queues.remove(seq)
        self._blocks.free(seq)
        seq.num_computed_tokens = 0
        self.queues.waiting.appendleft(seq)

    def _accept_load(self, seq: Sequence) -> None:
        loaded = seq.num_computed_tokens + seq.num_external_tokens
        # The last token always runs here: its logits did not travel.
        seq.num_computed_tokens = min(loaded, seq.num_tokens - 1)
        of_prompt = min(loaded, seq.num_prompt_tokens)
        before = loaded - seq.num_external_tokens
        seq.num_cached_tokens = of_prompt
        self._counters.prompt_tokens_fetched += max(0, of_prompt - before)
        self._blocks.commit(seq)
        self.queues.loaded.append(seq)

    def _survives_failed_load(self, seq: Sequence) -> bool:
        """Its blocks are freed only by way of `finish`, which asks whether something may still
        write into them; what is computed anew was not reported before nothing did."""
        self._note_load_failure(seq)
        try:
            recomputes = self._connector.load_failure_policy(seq) == "recompute"
        except Exception:
            logger.exception("connector: load_failure_policy raised for %s", seq.request_id)
            recomputes = False
        if recomputes:
            self._send_back(seq)
        else:
            self.finish(seq, failed(_LOAD_FAILED))
        return recomputes

    def _note_load_failure(self, seq: Sequence) -> None:
        try:
            seq.load_failure = self._connector.load_failures.take(seq.request_id)
        except Exception:
            logger.exception("connector: load_failures raised for %s", seq.request_id)

    def _request_finished(self, seq: Sequence, finish: Finish) -> bool:
        """Sets the answer for the caller; returns whether the blocks must stay."""
        try:
            decision = self._connector.request_finished(seq, seq.blocks_by_group(), finish.status)
        except Exception:
            logger.exception("connector: request_finished raised for %s", seq.request_id)
            decision = self._fail_finish(seq.request_id)
        params = decision.kv_transfer_params
        if params is not None and params.get("do_remote_prefill"):
            params = params | {REMOTE_CACHED: seq.num_cached_tokens}
        if params is not None and resume_payload.KEY in params:
            told = handed_over(
                params[resume_payload.KEY], seq.num_spoken_tokens, seq.output_logprobs
            )
            params = params | {resume_payload.KEY: told}
        seq.kv_transfer_answer = params
        return decision.delay_free

    def _fail_finish(self, request_id: str) -> FinishDecision:
        try:
            return self._connector.fail_finish(request_id)
        except Exception:
            logger.exception("connector: fail_finish raised for %s", request_id)
            return FinishDecision(delay_free=False, kv_transfer_params=None)

    def _free_held(self, blocks: list[int] | None, request_id: str) -> None:
        if blocks is None:
            logger.warning("connector reported %s, whose blocks it does not hold", request_id)
            return
        self._blocks.free_blocks(blocks)

    def _end_for_hook(self, seq: Sequence) -> None:
        logger.exception("connector: a hook raised for %s", seq.request_id)
        self.finish(seq, failed("the KV connector refused this request"))
