"""The tokens of a resume payload are replayed in the HTTP server before the engine's first step.

vLLM's `OutputProcessor.add_request` registers a request with its detokenizer, log-probabilities and
queue; `process_outputs` feeds the engine's outputs to them. When it has registered a request with a
payload, we feed the payload's tokens to `process_outputs` one by one, as steps of the engine would
bring them. So vLLM's own detokenizer, parsers and streams see them; patch_streams keeps back what
comes of tokens that the client has. If the tokens already end the answer, it ends here, and the
engine hears of the request only to release the KV of its prefill engine.

If an output of the engine needs more than the fields that `_output` fills in, or a request's state
is fed in another way, resumed answers lack text or fail. `_end` repeats the stop rules of vLLM's
scheduler by its own `check_stop`; if these move, an answer may run past its end by some tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request, RequestStatus

from engine_ext.common.resume_payload import Logprob
from engine_ext.vllm.compat.patching import wrap
from engine_ext.vllm.optional.answers.patch_outputs import SENT, SentCounts
from engine_ext.vllm.optional.answers.resumed_request import Replay, replay_in
from engine_ext.vllm.optional.streams.patch_streams import ReplayedOutput


@dataclass(frozen=True)
class End:
    """Where replayed tokens end the answer, by the engine's own rules; stop strings are found by
    the detokenizer."""

    num_tokens: int
    finish_reason: Any = None
    stop_reason: int | str | None = None


NO_END = End(0)


def install() -> None:
    """Idempotent."""
    wrap(OutputProcessor, "add_request", _wrap_add_request)


def _wrap_add_request(original: Any) -> Any:
    def add_request(
        self: Any,
        request: Any,
        prompt: str | None,
        parent_req: Any = None,
        request_index: int = 0,
        queue: Any = None,
    ) -> None:
        original(self, request, prompt, parent_req, request_index, queue)
        replay = replay_in(request.sampling_params)
        if replay is None or parent_req is not None or queue is None:
            return
        try:
            _replay(self, request, replay, queue)
        except BaseException:
            self.abort_requests([request.request_id], internal=True)
            raise
        # An answer that has ended is not known any more.
        request.abort_immediately = not self.has_request(request.request_id)

    return add_request


def _replay(processor: Any, request: Any, replay: Replay, queue: Any) -> None:
    state = processor.request_states[request.request_id]
    end, interval = _end(request, replay.token_ids), state.stream_interval
    state.queue, state.stream_interval = None, 1
    parts: list[RequestOutput] = []
    num_sent = num_replayed = 0
    for number, token in enumerate(replay.token_ids[: end.num_tokens]):
        if not processor.has_request(request.request_id):
            break  # A stop string.
        is_last = number + 1 == end.num_tokens
        output = _output(state, token, replay.logprobs_of(number), end if is_last else NO_END)
        num_replayed = number + 1
        parts += processor.process_outputs([output]).request_outputs
        if number < replay.num_sent:
            num_sent = len(parts)
            text = state.detokenizer.get_next_output_text(False, False)
            setattr(state, SENT, SentCounts(number + 1, len(text)))
    state.queue, state.stream_interval = queue, interval
    state.sent_tokens_offset = num_replayed if interval > 1 else 0
    # The prompt's statistics come with the engine's first token.
    state.is_prefilling = True
    if parts:
        is_streamed = state.output_kind is RequestOutputKind.DELTA
        queue.put(ReplayedOutput.of(parts, num_sent) if is_streamed else parts[-1])


def _output(state: Any, token: int, logprobs: Sequence[Logprob], end: End) -> EngineCoreOutput:
    return EngineCoreOutput(
        state.request_id,
        [token],
        new_logprobs=logprobs_lists(state, logprobs),
        finish_reason=end.finish_reason,
        stop_reason=end.stop_reason,
    )


def _end(request: Any, token_ids: Sequence[int]) -> End:
    """Tokens behind an end are not part of the answer."""
    params = request.sampling_params
    trial = Request.from_engine_core_request(request, None)
    for number, token in enumerate(token_ids, 1):
        trial.append_output_token_ids(token)
        # The context's end is where `max_tokens` is, at the latest.
        if not check_stop(trial, len(request.prompt_token_ids) + params.max_tokens):
            continue
        reason = trial.get_finished_reason()
        if reason is not FinishReason.STOP or number > params.min_tokens:
            return End(number, reason, trial.stop_reason)
        # The engine itself does not sample what ends an answer too early.
        trial.status, trial.stop_reason = RequestStatus.WAITING, None
        if number >= params.max_tokens:
            return End(number, FinishReason.LENGTH)
    return End(len(token_ids))


def logprobs_lists(state: Any, logprobs: Sequence[Logprob]) -> LogprobsLists | None:
    """Those of one token, as a step of the engine brings them: its own first."""
    if state.logprobs_processor.num_logprobs is None:
        return None
    # The token's own may be named again among the likeliest, and vLLM takes as many as are asked.
    row = dict(logprobs)
    values = [*row.values()]
    rank = 1 + sum(value > values[0] for value in values)
    return LogprobsLists(np.array([[*row]]), np.array([values]), np.array([rank]))
