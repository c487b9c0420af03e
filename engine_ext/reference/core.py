"""The engine without its thread: requests in, one step at a time, outputs out.

A step runs as vLLM's does: schedule, `build_connector_meta`, `start_load_kv`, the forward pass,
`wait_for_save`, `get_transfer_results`, then the new tokens (`request_finished` for those that end)
and last `update_connector_output`.
"""

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from tokenizers import Tokenizer

from engine_ext.common.orders import EMPTY_STEP, StepMetadata
from engine_ext.common.step_costs import StepFit
from engine_ext.common.types import CacheGeometry, TransferResults
from engine_ext.connector import Connector
from engine_ext.reference.answer import GeneratedAnswer, ResumedAnswer, StopRules
from engine_ext.reference.block_manager import BlockManager
from engine_ext.reference.config import EngineConfig
from engine_ext.reference.kv_cache import KVCache, max_model_len, num_blocks
from engine_ext.reference.kv_connector import NoConnector
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
from engine_ext.reference.model import BatchBuilder, ChunkInput, Decoder
from engine_ext.reference.model_config import ModelConfig
from engine_ext.reference.sampler import SampledToken, Sampler, skip_draws
from engine_ext.reference.scheduler import Scheduler, SchedulerStep, work_of
from engine_ext.reference.sequence import Sequence

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepResult:
    outputs: list[RequestOutput]
    progressed: bool
    """Something changed: another step may find more to do at once."""
    must_ask_again: bool
    """A waiting request has to be tried again soon, though nothing changed."""


ConnectorFactory = Callable[[ModelConfig, CacheGeometry], Connector]


class EngineCore:
    """`connect` makes the connector once the cache's geometry is known; None: no transfers."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        model: Decoder,
        tokenizer: Tokenizer,
        connect: ConnectorFactory | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.config = config
        device, size = torch.device(config.device), config.block_size
        count = num_blocks(config, model_config)
        self.cache = KVCache(model_config, num_blocks=count, block_size=size, device=device)
        geometry = replace(self.cache.geometry(), lends=config.enable_prefix_caching)
        self.connector: Connector | NoConnector = (
            connect(model_config, geometry) if connect else NoConnector()
        )
        self._blocks = BlockManager(
            num_blocks=count,
            block_size=size,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        self._counters = Counters()
        self.step_fit = StepFit(config.tokens_per_step)
        self.scheduler = Scheduler(
            config, self._blocks, self.connector.scheduler, self._counters, self.step_fit, clock
        )
        self._clock = clock
        self.connector.scheduler.lend_from(self.scheduler)
        self.connector.scheduler.borrow_with(self.scheduler)
        self._sampler = Sampler(seed=config.seed, eos_token_ids=model_config.eos_token_ids)
        self._model = model
        self._builder = BatchBuilder(model_config, block_size=size, device=device)
        self._tokenizer = tokenizer
        self._rules = StopRules(model_config.eos_token_ids, max_model_len(config, model_config))
        self._answers: dict[str, GeneratedAnswer] = {}
        self._unsent: dict[str, tuple[Sequence, ResumedAnswer]] = {}
        """Resumed answers whose first output waits for their admission, which may be refused: it
        has the tokens that the client lacks."""

    def add(
        self, request: GenerateRequest, resumed: ResumedAnswer | None = None
    ) -> RequestOutput | None:
        """Put the request into the queue; the server has checked that the model can run it. Returns
        an output if that ended the request at once."""
        seq = Sequence(request, resumed)
        self._answers[seq.request_id] = (resumed and resumed.answer) or GeneratedAnswer(
            seq.prompt_token_ids,
            seq.sampling,
            self._tokenizer,
            self._rules,
            hands_over=seq.hands_over,
        )
        self._counters.prompt_tokens += seq.num_prompt_tokens
        if resumed is not None and resumed.finish is not None:
            self._end_unscheduled(seq, resumed.finish)
            return self._first_output(seq, resumed)
        self.scheduler.add(seq)
        if seq.finish is not None:
            return self._output(seq)
        if resumed is not None:
            skip_draws(seq, len(resumed.token_ids))
            if resumed.unsent_token_ids:
                self._unsent[seq.request_id] = seq, resumed
        return None

    def decline(self, request_id: str, params: dict[str, Any]) -> None:
        """A request with these `kv_transfer_params` was refused before it came here: a remote may
        hold blocks for it."""
        refused = GenerateRequest(
            request_id=request_id,
            prompt_token_ids=(),
            sampling=SamplingParams(),
            kv_transfer_params=params,
        )
        self._end_unscheduled(Sequence(refused), failed("refused"))

    def abort(self, request_id: str) -> RequestOutput | None:
        """None if no such request lives."""
        seq = self.scheduler.abort(request_id)
        return self._output(seq) if seq else None

    def abort_all(self) -> list[RequestOutput]:
        outputs = [self.abort(seq.request_id) for seq in list(self.scheduler.live())]
        return [output for output in outputs if output is not None]

    @property
    def has_work(self) -> bool:
        """True if a step could do something, or must check whether a transfer has ended."""
        at = self.scheduler
        if at.running or at.loaded or at.waiting or at.parked or at.orphaned or at.delayed:
            return True
        try:
            half, worker = self.connector.scheduler, self.connector.worker
            return worker.has_results or bool(half.has_pending_work())
        except Exception:
            logger.exception("connector: has_pending_work raised")
            return True

    def step(self) -> StepResult:
        began_at = self._clock()
        step = self.scheduler.schedule()
        work = work_of(step.chunks)
        outputs = [self._output(seq) for seq in step.ended]
        # A sequence that has blocks can no longer be refused.
        for seq, resumed in [each for each in self._unsent.values() if each[0].block_ids]:
            del self._unsent[seq.request_id]
            outputs.append(self._first_output(seq, resumed))
        meta = self._build_meta(step, outputs)
        try:
            self.connector.worker.start_load_kv(meta)
        except Exception:
            logger.exception("connector: start_load_kv raised")
            self.connector.worker.fail_loads(meta)
        tokens = self._compute(step, meta, outputs) if step.chunks else {}
        try:
            results = self.connector.worker.get_transfer_results()
        except Exception:
            logger.exception("connector: get_transfer_results raised")
            results = TransferResults()
        outputs += [self._accept(seq, sampled) for seq, sampled in tokens.items()]
        outputs += [self._output(seq) for seq in self.scheduler.update_transfers(results)]
        if step.chunks:
            self.step_fit.add(work, (self._clock() - began_at) * 1e3)
        progressed = bool(step.chunks or step.num_preempted or outputs or meta or results)
        return StepResult(outputs, progressed, step.must_ask_again)

    def stats(self) -> EngineStats:
        queues = self.scheduler
        return EngineStats(
            num_running=len(queues.running),
            num_waiting=len(queues.waiting) + len(queues.loaded),
            num_waiting_for_remote_kv=len(queues.parked),
            num_blocks_total=self._blocks.num_total,
            num_blocks_free=self._blocks.num_free,
            num_blocks_delayed=len(set().union(*queues.delayed.values())),
            **asdict(self._counters),
        )

    def _end_unscheduled(self, seq: Sequence, finish: Finish) -> None:
        """End a request of which only the connector is to know."""
        self.scheduler.add(seq)
        if seq.finish is None:
            self.scheduler.finish(seq, finish)

    def _build_meta(self, step: SchedulerStep, outputs: list[RequestOutput]) -> StepMetadata:
        """The scheduler half's orders for the worker half. Those that cannot be built now go with a
        later step."""
        half, must_save = self.connector.scheduler, False
        try:
            must_save = half.wants_steps
            for chunk in step.chunks if must_save else ():
                seq = chunk.seq
                computed = seq.num_computed_tokens
                half.on_step(seq.request_id, seq.blocks_by_group(), computed, chunk.num_tokens)
            return half.build_connector_meta()
        except Exception:
            logger.exception("connector: the step's orders were not built")
        if must_save:  # Readers would be offered what this step computes, and no mirror has it.
            outputs += self._fail([chunk.seq for chunk in step.chunks], "the KV connector failed")
            step.chunks.clear()
        return EMPTY_STEP

    def _compute(
        self, step: SchedulerStep, meta: StepMetadata, outputs: list[RequestOutput]
    ) -> dict[Sequence, SampledToken | None]:
        try:
            tokens = self._forward(step)
            self.connector.worker.wait_for_save(meta)
        except Exception:
            logger.exception("the forward pass failed for %d requests", len(step.chunks))
            outputs += self._fail([c.seq for c in step.chunks], "the forward pass failed")
            return {}
        for chunk in step.chunks:
            prompt_left = chunk.seq.num_prompt_tokens - chunk.seq.num_computed_tokens
            self._counters.prompt_tokens_computed += min(max(0, prompt_left), chunk.num_tokens)
            self.scheduler.advance(chunk.seq, chunk.num_tokens)
        return tokens

    def _forward(self, step: SchedulerStep) -> dict[Sequence, SampledToken | None]:
        """The next token of each chunk that reaches its sequence's end; None for broken logits.

        When this returns, the KV of the step is in memory, for any reader.
        """
        self.cache.zero(step.fresh_blocks)
        chunks = sorted(step.chunks, key=lambda chunk: chunk.num_tokens > 1)
        inputs = []
        for chunk in chunks:
            seq, start = chunk.seq, chunk.seq.num_computed_tokens
            blocks = seq.block_ids[: -(-chunk.end // self.cache.block_size)]
            inputs.append(ChunkInput(seq.token_ids[start : chunk.end], start, blocks))
        logits = self._model.forward(self._builder.build(inputs), self.cache.layers)
        rows = [i for i, chunk in enumerate(chunks) if chunk.reaches_end]
        sequences = [chunks[i].seq for i in rows]
        sampled = self._sampler.sample(logits[rows], sequences) if rows else []
        if logits.is_cuda:
            torch.cuda.current_stream(logits.device).synchronize()
        return dict(zip(sequences, sampled, strict=True))

    def _accept(self, seq: Sequence, sampled: SampledToken | None) -> RequestOutput:
        if sampled is None:
            self.scheduler.distrust(seq)
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
            self.scheduler.finish(seq, finish)
        logprobs = (sampled.logprob,) if sampled.logprob else ()
        return self._output(seq, text, (sampled.token_id,), logprobs)

    def _fail(self, sequences: Seq[Sequence], error: str) -> list[RequestOutput]:
        for seq in sequences:
            self.scheduler.finish(seq, failed(error))
        return [self._output(seq) for seq in sequences]

    def _first_output(self, seq: Sequence, resumed: ResumedAnswer) -> RequestOutput:
        return self._output(seq, resumed.text, resumed.unsent_token_ids, resumed.logprobs)

    def _output(
        self,
        seq: Sequence,
        text: str = "",
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
    ) -> RequestOutput:
        finish = seq.finish
        if finish is not None:
            del self._answers[seq.request_id]
            self._unsent.pop(seq.request_id, None)
            counts = self._counters.requests_finished
            counts[finish.reason] = counts.get(finish.reason, 0) + 1
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
