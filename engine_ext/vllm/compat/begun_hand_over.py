"""What a prefill engine of vLLM's says where another is to go on: with the ids that its connector
tells, their log-probabilities, which only the HTTP server knows; and of its text what a stream of
these tokens would have said by then. The rest, which a stop string may still take back, is said by
whoever goes on."""

import functools
from dataclasses import dataclass
from typing import Any

from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import FinishReason
from vllm.v1.engine.output_processor import RequestState

from engine_ext.common.resume_payload import KEY, logprob_entry

MARK = "_disagg_begun"
SPOKEN = "_disagg_spoken"
"""Where begun_answer.py leaves on a request what of it was spoken when it came."""


@dataclass(frozen=True, slots=True)
class SentCounts:
    num_tokens: int = 0
    num_characters: int = 0


NOTHING = SentCounts()


def install() -> None:
    """Idempotent."""
    if not hasattr(RequestState.make_request_output, MARK):
        RequestState.make_request_output = _handing_over(RequestState.make_request_output)


def _handing_over(original: Any) -> Any:
    @functools.wraps(original)
    def make_request_output(
        self: Any,
        new_token_ids: Any,
        pooling_output: Any,
        finish_reason: Any,
        stop_reason: Any,
        kv_transfer_params: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        told = kv_transfer_params.get(KEY) if kv_transfer_params else None
        if told is None:
            said = (finish_reason, stop_reason, kv_transfer_params)
            return original(self, new_token_ids, pooling_output, *said, *args, **kwargs)
        spoken = getattr(self, SPOKEN, NOTHING)
        params = {**kwargs, "kv_transfer_params": _completed(self, kv_transfer_params, spoken)}
        result = original(self, new_token_ids, pooling_output, finish_reason, stop_reason, **params)
        if result is not None and self.output_kind is not RequestOutputKind.DELTA:
            _hold_back(self, result.outputs[0], finish_reason, spoken)
        return result

    setattr(make_request_output, MARK, True)
    return make_request_output


def _completed(state: Any, params: dict[str, Any], spoken: SentCounts) -> dict[str, Any]:
    begun = dict(params[KEY])
    if spoken.num_tokens:
        begun["spoken"] = spoken.num_tokens
    known = state.logprobs_processor.logprobs
    if known:
        positions = [known[at] for at in range(spoken.num_tokens, len(known))]
        begun["logprobs"] = [
            [logprob_entry(token, each.logprob) for token, each in position.items()]
            for position in positions
        ]
    return {**params, KEY: begun}


def _hold_back(state: Any, completion: Any, finish_reason: Any, spoken: SentCounts) -> None:
    is_whole = finish_reason is not FinishReason.LENGTH
    text = state.detokenizer.get_next_output_text(is_whole, False)
    completion.text = text[spoken.num_characters :]
    completion.token_ids = list(completion.token_ids)[spoken.num_tokens :]
    if completion.logprobs:
        completion.logprobs = completion.logprobs[spoken.num_tokens :]
