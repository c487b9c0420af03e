"""The engine without its thread: requests in, one step at a time, outputs out.

A step runs as vLLM's does: schedule, `build_connector_meta`, `start_load_kv`, the forward pass,
`wait_for_save`, `get_transfer_results`, then the new tokens (`request_finished` for those that end)
and last `update_connector_output`.
"""

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from engine_ext.common.types import EMPTY_STEP, StepMetadata, TransferResults
from engine_ext.reference.answer import GeneratedAnswer, StopRules
from engine_ext.reference.block_manager import BlockManager
from engine_ext.reference.kv_connector import KVConnector
from engine_ext.reference.messages import (
    Counters,
    EngineStats,
    Finish,
    GenerateRequest,
    RequestOutput,
    SamplingParams,
    TokenLogprob,
    failed,
)
from engine_ext.reference.resume import Beginning
from engine_ext.reference.runner import ModelRunner
from engine_ext.reference.sampler import SampledToken, pass_over
from engine_ext.reference.scheduler import Scheduler, SchedulerStep
from engine_ext.reference.sequence import Sequence

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepResult:
    outputs: list[RequestOutput]
    progressed: bool
    """Something changed: another step may find more to do at once."""
    must_ask_again: bool
    """A waiting request has to be asked about soon, though nothing changed."""


class EngineCore:
    def __init__(
        self,
        *,
        scheduler: Scheduler,
        blocks: BlockManager,
        runner: ModelRunner,
        connector: KVConnector,
        counters: Counters,
        tokenizer: Tokenizer,
        vocab_size: int,
        rules: StopRules,
    ) -> None:
        self._scheduler = scheduler
        self._queues = scheduler.queues
        self._blocks = blocks
        self._runner = runner
        self._connector = connector
        self._counters = counters
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._rules = rules
        self._answers: dict[str, GeneratedAnswer] = {}
        self._unsaid: dict[str, tuple[Sequence, Beginning]] = {}
        """Begun elsewhere, and not admitted yet, which may be refused."""

    def add(self, request: GenerateRequest, begun: Beginning | None = None) -> RequestOutput | None:
        """Admits the request to the queue; an output where that ended it at once, or where it has
        begun elsewhere with tokens that are not spoken yet."""
        if self._queues.knows(request.request_id):
            return self._refuse(request, f"request id {request.request_id} is in use")
        seq = Sequence(request, begun)
        error = self._refusal(seq, begun)
        if error is not None:
            # The connector hears of it: a remote may hold blocks for this request.
            self._end_unheard(seq, failed(error))
            return self._refuse(request, error)
        self._answers[seq.request_id] = begun.answer if begun else self._answer(seq)
        self._counters.prompt_tokens += seq.num_prompt_tokens
        if begun is not None and begun.finish is not None:
            self._end_unheard(seq, begun.finish)
            return self._opening(seq, begun)
        self._scheduler.add(seq)
        if seq.finish is not None:
            return self._last_output(seq)
        return None if begun is None else self._go_on(seq, begun)

    def decline(self, request_id: str, params: dict[str, Any]) -> None:
        """A request with these `kv_transfer_params` was refused before it came here: a remote may
        hold blocks for it."""
        refused = GenerateRequest(
            request_id=request_id,
            prompt_token_ids=(),
            sampling=SamplingParams(),
            kv_transfer_params=params,
        )
        self._end_unheard(Sequence(refused), failed("refused"))

    def abort(self, request_id: str) -> RequestOutput | None:
        """None where no such request lives."""
        seq = self._scheduler.abort(request_id)
        return self._last_output(seq) if seq else None

    def abort_all(self) -> list[RequestOutput]:
        outputs = [self.abort(seq.request_id) for seq in list(self._queues.live())]
        return [output for output in outputs if output is not None]

    def drain(self) -> None:
        """What is held for later is given up; what a remote reads now stays until it is read."""
        self._scheduler.drain()

    def release(self, engine_id: str, request_id: str) -> bool:
        """No remote will read this request's KV. True: it was held."""
        return self._scheduler.release(engine_id, request_id)

    @property
    def has_work(self) -> bool:
        """Whether a step could do anything without news from outside."""
        queues = self._queues
        return bool(queues.running or queues.loaded or queues.waiting or self._has_pending_work())

    @property
    def awaits_transfers(self) -> bool:
        return bool(self._queues.parked or self._queues.orphaned or self._queues.delayed)

    def step(self) -> StepResult:
        step = self._scheduler.schedule()
        outputs = [self._last_output(seq) for seq in step.ended]
        outputs += self._say_admitted()
        meta = self._load(step, outputs)
        tokens = self._compute(step, meta, outputs) if step.chunks else {}
        results = self._transfer_results()
        for seq, sampled in tokens.items():
            outputs.append(self._accept(seq, sampled))
        failed_loads = self._scheduler.update_transfers(results)
        outputs += [self._last_output(seq) for seq in failed_loads]
        progressed = bool(step.chunks or step.num_preempted or outputs or meta or results)
        return StepResult(outputs, progressed, step.must_ask_again)

    def stats(self) -> EngineStats:
        counters, queues = self._counters, self._queues
        return EngineStats(
            num_running=len(queues.running),
            num_waiting=len(queues.waiting) + len(queues.loaded),
            num_waiting_for_remote_kv=len(queues.parked),
            num_blocks_total=self._blocks.num_total,
            num_blocks_free=self._blocks.num_free,
            num_blocks_delayed=queues.delayed.num_blocks,
            prompt_tokens=counters.prompt_tokens,
            prompt_tokens_computed=counters.prompt_tokens_computed,
            prompt_tokens_cached=counters.prompt_tokens_cached,
            prompt_tokens_fetched=counters.prompt_tokens_fetched,
            generation_tokens=counters.generation_tokens,
            requests_finished=dict(counters.finished),
            preemptions=counters.preemptions,
        )

    def check_integrity(self) -> None:
        """Raises IntegrityError."""
        self._scheduler.check_integrity()

    def _answer(self, seq: Sequence) -> GeneratedAnswer:
        return GeneratedAnswer(
            seq.prompt_token_ids,
            seq.sampling,
            self._tokenizer,
            self._rules,
            hands_over=seq.hands_over,
        )

    def _end_unheard(self, seq: Sequence, finish: Finish) -> None:
        """Before it was anything to anybody but the connector."""
        self._scheduler.add(seq)
        if seq.finish is None:
            self._scheduler.finish(seq, finish)

    def _go_on(self, seq: Sequence, begun: Beginning) -> RequestOutput | None:
        pass_over(seq, len(begun.token_ids))
        if not begun.unspoken:
            return None
        if not self._scheduler.may_refuse(seq):
            return self._opening(seq, begun)
        self._unsaid[seq.request_id] = seq, begun
        return None

    def _say_admitted(self) -> list[RequestOutput]:
        """Whoever has blocks is refused no more."""
        admitted = [each for each in self._unsaid.values() if each[0].block_ids]
        for seq, _ in admitted:
            del self._unsaid[seq.request_id]
        return [self._opening(seq, begun) for seq, begun in admitted]

    def _opening(self, seq: Sequence, begun: Beginning) -> RequestOutput:
        return self._output(seq, begun.text, begun.unspoken, begun.logprobs)

    def _refusal(self, seq: Sequence, begun: Beginning | None) -> str | None:
        prompt, limit = seq.prompt_token_ids, self._rules.max_model_len
        if not prompt:
            return "the prompt is empty"
        if len(prompt) >= limit:
            return f"the prompt has {len(prompt)} tokens, this engine takes up to {limit - 1}"
        if not 0 <= min(seq.token_ids) <= max(seq.token_ids) < self._vocab_size:
            return f"the prompt holds a token id outside the vocabulary of {self._vocab_size}"
        if seq.num_tokens >= limit and not (begun and begun.finish):
            return f"prompt and answer have {seq.num_tokens} tokens, this engine takes {limit}"
        if seq.sampling.max_tokens < 1:
            return "max_tokens must be at least 1"
        return None

    def _refuse(self, request: GenerateRequest, error: str) -> RequestOutput:
        self._counters.finished["error"] += 1
        return RequestOutput(request_id=request.request_id, finish_reason="error", error=error)

    def _load(self, step: SchedulerStep, outputs: list[RequestOutput]) -> StepMetadata:
        """Hands the step's orders to the worker half. What is not built goes with a later step;
        loads that do not get through have failed."""
        meta = self._orders(step, outputs)
        try:
            self._connector.worker.start_load_kv(meta)
        except Exception:
            logger.exception("connector: start_load_kv raised")
            self._connector.worker.fail_loads(meta)
        return meta

    def _orders(self, step: SchedulerStep, outputs: list[RequestOutput]) -> StepMetadata:
        saves = False
        try:
            saves = self._connector.scheduler.wants_steps
            if saves:
                self._announce(step)
            return self._connector.scheduler.build_connector_meta()
        except Exception:
            logger.exception("connector: the step's orders were not built")
        if saves:  # What this step computes would be offered to readers, and is not in the mirror.
            outputs += self._fail([chunk.seq for chunk in step.chunks], "the KV connector failed")
            step.chunks.clear()
        return EMPTY_STEP

    def _announce(self, step: SchedulerStep) -> None:
        for chunk in step.chunks:
            self._connector.scheduler.on_step(
                chunk.seq.request_id,
                chunk.seq.blocks_by_group(),
                chunk.seq.num_computed_tokens,
                chunk.num_tokens,
            )

    def _compute(
        self, step: SchedulerStep, meta: StepMetadata, outputs: list[RequestOutput]
    ) -> dict[Sequence, SampledToken | None]:
        try:
            tokens = self._runner.run(step)
            self._connector.worker.wait_for_save(meta)
        except Exception:
            logger.exception("the forward pass failed for %d requests", len(step.chunks))
            outputs += self._fail([c.seq for c in step.chunks], "the forward pass failed")
            return {}
        for chunk in step.chunks:
            prompt_left = chunk.seq.num_prompt_tokens - chunk.seq.num_computed_tokens
            self._counters.prompt_tokens_computed += min(max(0, prompt_left), chunk.num_tokens)
            self._scheduler.advance(chunk.seq, chunk.num_tokens)
        return tokens

    def _transfer_results(self) -> TransferResults:
        try:
            return self._connector.worker.get_transfer_results()
        except Exception:
            logger.exception("connector: get_transfer_results raised")
            return TransferResults()

    def _accept(self, seq: Sequence, sampled: SampledToken | None) -> RequestOutput:
        if sampled is None:
            self._scheduler.distrust(seq)
            return self._fail([seq], "the model's output is not finite")[0]
        seq.token_ids.append(sampled.token_id)
        if seq.hands_over and sampled.logprob:
            seq.output_logprobs.append(sampled.logprob)
        self._counters.generation_tokens += 1
        error = seq.constraint.accept(sampled.token_id) if seq.constraint else None
        if error is not None:
            return self._fail([seq], f"the answer's form cannot be kept: {error}")[0]
        try:
            text, finish = self._answers[seq.request_id].accept(sampled.token_id)
        except Exception:
            logger.exception("detokenizing failed for %s", seq.request_id)
            return self._fail([seq], "detokenizing failed")[0]
        if finish is not None:
            self._scheduler.finish(seq, finish)
        logprobs = (sampled.logprob,) if sampled.logprob else ()
        return self._output(seq, text, (sampled.token_id,), logprobs)

    def _fail(self, sequences: Seq[Sequence], error: str) -> list[RequestOutput]:
        for seq in sequences:
            self._scheduler.finish(seq, failed(error))
        return [self._last_output(seq) for seq in sequences]

    def _last_output(self, seq: Sequence) -> RequestOutput:
        return self._output(seq, "", (), ())

    def _output(
        self,
        seq: Sequence,
        text: str,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprob, ...],
    ) -> RequestOutput:
        finish = seq.finish
        if finish is not None:
            self._forget(seq, finish)
        return RequestOutput(
            request_id=seq.request_id,
            text=text,
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=finish.reason if finish else None,
            stop_reason=finish.stop_reason if finish else None,
            kv_transfer_params=seq.kv_transfer_answer,
            num_cached_tokens=seq.num_saved_tokens,
            error=finish.error if finish else None,
            load_failure=seq.load_failure,
        )

    def _forget(self, seq: Sequence, finish: Finish) -> None:
        del self._answers[seq.request_id]
        self._unsaid.pop(seq.request_id, None)
        self._counters.finished[finish.reason] += 1

    def _has_pending_work(self) -> bool:
        try:
            return self._connector.scheduler.has_pending_work()
        except Exception:
            logger.exception("connector: has_pending_work raised")
            return True
