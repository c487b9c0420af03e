"""What a begun request was given is said before any step of the engine: by vLLM's own detokenizer,
log-probabilities, parsers and streams, token by token, as if the engine had made it.

What the client has already is fed to them too, but said by nobody: streams.py lets it pass through
the parsers and keeps back what comes of it. Where what was given already ends the answer, it ends
here; the engine hears of the request, for the sake of who holds its KV, and does nothing for it.
"""

import functools
import logging
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
from engine_ext.vllm.compat.begun_hand_over import SPOKEN, SentCounts
from engine_ext.vllm.compat.told import GivenTokenResults
from engine_ext.vllm.given import Given, given_in

logger = logging.getLogger(__name__)

MARK = "_disagg_begun"


@dataclass(frozen=True)
class End:
    """Where given tokens end the answer, by the engine's own rules; stop strings are found by the
    detokenizer."""

    num_tokens: int
    finish_reason: Any = None
    stop_reason: int | str | None = None


NO_END = End(0)


def install() -> None:
    """Idempotent."""
    if not is_installed():
        OutputProcessor.add_request = _saying(OutputProcessor.add_request)


def is_installed() -> bool:
    return hasattr(OutputProcessor.add_request, MARK)


def _saying(original: Any) -> Any:
    @functools.wraps(original)
    def add_request(
        self: Any,
        request: Any,
        prompt: str | None,
        parent_req: Any = None,
        request_index: int = 0,
        queue: Any = None,
    ) -> None:
        original(self, request, prompt, parent_req, request_index, queue)
        given = given_in(request.sampling_params)
        if given is None or parent_req is not None or queue is None:
            return
        try:
            _say(self, request, given, queue)
        except BaseException:
            self.abort_requests([request.request_id], internal=True)
            raise
        # What has ended is not known any more.
        request.abort_immediately = not self.has_request(request.request_id)

    setattr(add_request, MARK, True)
    return add_request


def _say(processor: Any, request: Any, given: Given, queue: Any) -> None:
    """One by one, as steps of the engine would bring them."""
    state = processor.request_states[request.request_id]
    end, interval = _end(request, given.token_ids), state.stream_interval
    state.queue, state.stream_interval = None, 1
    parts: list[RequestOutput] = []
    num_silent = 0
    for number, token in enumerate(given.token_ids[: end.num_tokens]):
        if not processor.has_request(request.request_id):
            break  # A stop string.
        is_last = number + 1 == end.num_tokens
        output = _output(state, token, given.logprobs_of(number), end if is_last else NO_END)
        parts += processor.process_outputs([output]).request_outputs
        if number < given.spoken:
            num_silent = len(parts)
            told = state.detokenizer.get_next_output_text(False, False)
            setattr(state, SPOKEN, SentCounts(number + 1, len(told)))
    state.queue, state.stream_interval = queue, interval
    state.sent_tokens_offset = state.detokenizer.num_output_tokens() if interval > 1 else 0
    # The prompt's statistics come with the engine's first token.
    state.is_prefilling = True
    if parts:
        is_streamed = state.output_kind is RequestOutputKind.DELTA
        queue.put(GivenTokenResults.of(parts, num_silent) if is_streamed else parts[-1])


def _output(state: Any, token: int, logprobs: Sequence[Logprob], end: End) -> EngineCoreOutput:
    return EngineCoreOutput(
        state.request_id,
        [token],
        new_logprobs=_scores(state, logprobs),
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


def _scores(state: Any, logprobs: Sequence[Logprob]) -> LogprobsLists | None:
    """Of one token, as a step of the engine brings them: its own first."""
    if state.logprobs_processor.num_logprobs is None:
        return None
    # The token's own may be named again among the likeliest, and vLLM takes as many as are asked.
    row = dict(logprobs)
    values = [*row.values()]
    return LogprobsLists(np.array([[*row]]), np.array([values]), np.array([_rank(values)]))


def _rank(values: Sequence[float]) -> int:
    return 1 + sum(value > values[0] for value in values)
