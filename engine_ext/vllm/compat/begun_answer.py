"""What a begun request was given is said before any step of the engine: by vLLM's own detokenizer,
log-probabilities, parsers and streams, as if the engine had made it.

What the client has already is fed to them too, but comes first and alone, as `Spoken`: streams.py
lets it pass through the parsers and says nothing of it. Where what was given already ends the
answer, it ends here; the engine hears of the request, for the sake of whoever holds its KV, and
does nothing for it.
"""

import copy
import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.outputs import RequestOutput
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request

from engine_ext.base.begun import Logprob
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


class Spoken(RequestOutput):
    """What the client has, and behind it what has come since: vLLM adds results to one that nobody
    has fetched yet."""

    rest: RequestOutput | None = None

    @classmethod
    def of(cls, output: RequestOutput) -> "Spoken":
        """An answer that ends in what was spoken: that it ends is still to be said."""
        spoken = cls(**vars(output))
        (completion,) = output.outputs
        if completion.finish_reason is not None:
            last = copy.copy(completion)
            last.text, last.token_ids = "", []
            last.logprobs = None if completion.logprobs is None else completion.logprobs[:0]
            spoken.rest = copy.copy(output)
            spoken.rest.outputs = [last]
            completion.finish_reason = completion.stop_reason = None
        return spoken

    def add(self, next_output: RequestOutput, aggregate: bool) -> None:
        if self.rest is None:
            self.rest = next_output
        else:
            self.rest.add(next_output, aggregate)
        self.finished |= next_output.finished


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
    state = processor.request_states[request.request_id]
    end = _end(request, given.token_ids)
    spoken = given.token_ids[: min(given.spoken, end.num_tokens)]
    if spoken:
        _feed_spoken(processor, state, spoken, end, queue)
    unspoken = given.token_ids[len(spoken) : end.num_tokens]
    if unspoken and processor.has_request(request.request_id):
        scores = _scores(state, given.logprobs[: len(unspoken)])
        processor.process_outputs([_output(request.request_id, unspoken, scores, end)])
    # The prompt's statistics come with the engine's first token.
    state.is_prefilling = True


def _feed_spoken(processor: Any, state: Any, spoken: list[int], end: End, queue: Any) -> None:
    """Streamed, so there is a result."""
    last = end if len(spoken) == end.num_tokens else End(end.num_tokens)
    unknown = [[(token, 0.0)] for token in spoken]
    state.queue = None
    try:
        output = _output(state.request_id, spoken, _scores(state, unknown), last)
        (said,) = processor.process_outputs([output]).request_outputs
    finally:
        state.queue = queue
    queue.put(Spoken.of(said))


def _output(
    request_id: str, token_ids: Sequence[int], scores: LogprobsLists | None, end: End
) -> EngineCoreOutput:
    return EngineCoreOutput(
        request_id,
        list(token_ids),
        new_logprobs=scores,
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
        if check_stop(trial, len(request.prompt_token_ids) + params.max_tokens):
            return End(number, trial.get_finished_reason(), trial.stop_reason)
    return End(len(token_ids))


def _scores(state: Any, logprobs: Sequence[Sequence[Logprob]]) -> LogprobsLists | None:
    """As a step of the engine brings them: a row a token, its own entry first, of what is asked
    for. Rows need not be of one length: they are read one by one."""
    if state.logprobs_processor.num_logprobs is None:
        return None
    # The token's own may be named again among the likeliest, and vLLM takes as many as are asked.
    rows = [dict(row) for row in logprobs]
    return LogprobsLists(
        [np.array([*row]) for row in rows],
        [np.array([*row.values()]) for row in rows],
        [np.array(_rank([*row.values()])) for row in rows],
    )


def _rank(values: Sequence[float]) -> int:
    return 1 + sum(value > values[0] for value in values)
