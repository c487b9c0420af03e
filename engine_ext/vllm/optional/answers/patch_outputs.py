"""Results of the engine on their way to the HTTP server's answers.

vLLM turns each output of the engine into a result in `RequestState.make_request_output`: it writes
`str(finish_reason)`, takes over the stop reason and `kv_transfer_params`, and adds text and
log-probabilities. We wrap it, for two kinds of outputs:

* An early end (see early_ends) has the finish reason ABORT and a marked stop reason. The result
  gets the finish reason `cache_threshold` and the stop reason behind the mark.
* A resume payload (in `kv_transfer_params`) comes from the engine with ids alone. It is completed
  with log-probabilities, which only the HTTP server knows, and with the number of tokens that the
  client has. The text of a result that is not streamed is what a stream would have sent by then:
  the rest, which a stop string may still take back, is sent by the engine that resumes the answer.

If vLLM calls another function, clients see `abort` and a stop reason with a NUL, and a resumed
answer lacks its first log-probabilities. If it reads more of the finish reason than `str` and
whether it is None, a result of an early end may fail. vLLM's counter of finished requests counts an
early end as `abort`.
"""

from dataclasses import dataclass
from typing import Any

from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import FinishReason
from vllm.v1.engine.output_processor import RequestState

from engine_ext.common.resume_payload import KEY, logprob_entry
from engine_ext.scheduler.admission import FINISH_REASON
from engine_ext.vllm.compat.patching import wrap
from engine_ext.vllm.optional.answers.early_ends import MARK

SENT = "_disagg_sent"
"""Attribute of a RequestState: what of a resumed answer the client had when the request came."""


@dataclass(frozen=True, slots=True)
class SentCounts:
    num_tokens: int = 0
    num_characters: int = 0


NOTHING = SentCounts()


def install() -> None:
    """Idempotent."""
    wrap(RequestState, "make_request_output", _wrap_make_request_output)


def translated(finish_reason: Any, stop_reason: Any) -> tuple[Any, Any]:
    """Return finish reason and stop reason as an answer has them."""
    is_ours = finish_reason is FinishReason.ABORT and isinstance(stop_reason, str)
    if is_ours and stop_reason.startswith(MARK):
        return FINISH_REASON, stop_reason.removeprefix(MARK)
    return finish_reason, stop_reason


def _wrap_make_request_output(original: Any) -> Any:
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
        finish, stop = translated(finish_reason, stop_reason)
        has_payload = bool(kv_transfer_params) and kv_transfer_params.get(KEY) is not None
        sent = getattr(self, SENT, NOTHING)
        if has_payload:
            kv_transfer_params = _complete_payload(self, kv_transfer_params, sent)
        result = original(
            self, new_token_ids, pooling_output, finish, stop, kv_transfer_params, *args, **kwargs
        )
        if has_payload and result is not None and self.output_kind is not RequestOutputKind.DELTA:
            _hold_back(self, result.outputs[0], finish, sent)
        return result

    return make_request_output


def _complete_payload(state: Any, params: dict[str, Any], sent: SentCounts) -> dict[str, Any]:
    payload = dict(params[KEY])
    if sent.num_tokens:
        payload["spoken"] = sent.num_tokens
    known = state.logprobs_processor.logprobs
    if known:
        positions = [known[at] for at in range(sent.num_tokens, len(known))]
        payload["logprobs"] = [
            [logprob_entry(token, each.logprob) for token, each in position.items()]
            for position in positions
        ]
    return {**params, KEY: payload}


def _hold_back(state: Any, completion: Any, finish_reason: Any, sent: SentCounts) -> None:
    is_whole = finish_reason is not FinishReason.LENGTH
    text = state.detokenizer.get_next_output_text(is_whole, False)
    completion.text = text[sent.num_characters :]
    completion.token_ids = list(completion.token_ids)[sent.num_tokens :]
    if completion.logprobs:
        completion.logprobs = completion.logprobs[sent.num_tokens :]
