"""What the HTTP server reads of a request for our scheduler class.

vLLM's chat and completion servers call `BaseServing._check_model(request)` first, then render and
tokenize the prompt, then make SamplingParams, whose `extra_args` (the request's `vllm_xargs`)
travel to the engine and its workers. After a successful check we look at the request:

* A resume payload in `kv_transfer_params` is decoded once. The prompt is the payload's: vLLM takes
  a chat's prompt as ids from `kv_transfer_params["prompt_token_ids"]`, a completion's from
  `prompt`. A payload that cannot be resumed here is rejected with 400 before the engine hears of
  it. Its output tokens travel in `extra_args` (see resumed_request).
* `cache_hit_threshold`, at the top of the body, which vLLM keeps as an unknown field, travels too.
* So does a note that another engine cannot resume the answer.

If vLLM stops calling `_check_model`, or calls it after the prompt is rendered, a payload is ignored
and the prompt is computed and answered from its beginning: tests/vllm/test_resumed_answers.py
fails.
"""

from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import (
    BatchChatCompletionRequest,
    ChatCompletionRequest,
)
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.engine.serving import BaseServing
from vllm.exceptions import VLLMValidationError

from engine_ext.common.resume_payload import (
    KEY,
    ResumePayload,
    ResumePayloadError,
    read_resume_payload,
)
from engine_ext.scheduler.admission import FIELD as THRESHOLD
from engine_ext.scheduler.admission import parse_threshold, prefills
from engine_ext.vllm import describe
from engine_ext.vllm.compat.patching import wrap
from engine_ext.vllm.optional.answers import resumed_request
from engine_ext.vllm.optional.answers.resumed_request import (
    ResumeLimits,
    fields_not_resumed,
    refusal,
)

CHARACTERS = 4
"""Base64 characters of one token id."""
NOT_OFFERED = (
    f"this engine does not support {KEY}: vLLM needs our --scheduler-cls and the plugin disagg"
)
RESERVED_KEYS = (resumed_request.FIELD, resumed_request.CANNOT_RESUME)
"""Keys of `extra_args` that come from here alone, whatever `vllm_xargs` a client sends."""


RESUMABLE = (ChatCompletionRequest, CompletionRequest)
READ = (*RESUMABLE, BatchChatCompletionRequest)


def install() -> None:
    """Idempotent."""
    wrap(BaseServing, "_check_model", _wrap_check_model)


def _wrap_check_model(original: Any) -> Any:
    async def _check_model(self: Any, request: Any) -> Any:
        error = await original(self, request)
        if error is None and isinstance(request, READ):
            prepare(request, getattr(self, "engine_client", None), self.model_config)
        return error

    return _check_model


def prepare(request: Any, engine: Any, model_config: Any) -> None:
    """Raises ValueError (VLLMValidationError for a payload), which vLLM answers 400 to. `engine`
    None: the server only renders prompts."""
    extra = {
        key: value for key, value in (request.vllm_xargs or {}).items() if key not in RESERVED_KEYS
    }
    threshold = parse_threshold((request.model_extra or {}).get(THRESHOLD))
    if threshold is not None:
        extra[THRESHOLD] = threshold
    if fields_not_resumed(request):
        extra[resumed_request.CANNOT_RESUME] = True
    has_payload = isinstance(request, RESUMABLE) and KEY in (request.kv_transfer_params or {})
    if has_payload and engine is not None:
        if not describe.resumes(engine.vllm_config):
            raise _invalid(NOT_OFFERED)
        payload = _take_payload(request, _limits(request, model_config))
        if payload.output_token_ids:
            extra[resumed_request.FIELD] = resumed_request.carried(payload)
    request.vllm_xargs = extra or None


def _take_payload(request: Any, limits: ResumeLimits) -> ResumePayload:
    """Put the payload's prompt in place of the request's. Raises VLLMValidationError."""
    _refuse_long(request.kv_transfer_params[KEY], limits.max_model_len)
    try:
        payload = read_resume_payload(request.kv_transfer_params)
    except ResumePayloadError as error:
        raise _invalid(str(error)) from None
    assert payload is not None
    problem = refusal(payload, limits)
    if problem is not None:
        raise _invalid(problem)
    params = {key: each for key, each in request.kv_transfer_params.items() if key != KEY}
    prompt = list(payload.prompt_token_ids)
    if isinstance(request, ChatCompletionRequest):
        params["prompt_token_ids"] = prompt
    else:
        request.prompt = prompt
    request.kv_transfer_params = params or None
    if prefills(params):
        _ask_for_one(request, len(payload.output_token_ids) + 1)
    return payload


def _invalid(message: str) -> VLLMValidationError:
    return VLLMValidationError(message, parameter=f"kv_transfer_params.{KEY}")


def _ask_for_one(request: Any, num_tokens: int) -> None:
    """A prefill samples one token, whatever its `max_tokens`, which the router sets to one."""
    for name in ("max_tokens", "max_completion_tokens"):
        asked = getattr(request, name, None)
        if asked is not None:
            setattr(request, name, max(asked, num_tokens))


def _refuse_long(raw: Any, max_model_len: int) -> None:
    """Before anything is decoded: of a string's four characters comes an object of many bytes.
    Raises VLLMValidationError."""
    texts = raw.values() if isinstance(raw, dict) else ()
    longest = max((len(text) for text in texts if isinstance(text, str)), default=0)
    if longest > CHARACTERS * max_model_len:
        raise _invalid(f"{KEY} has more tokens than this model's context, {max_model_len}")


def _limits(request: Any, config: Any) -> ResumeLimits:
    from vllm.renderers.chat_utils import has_non_text_content  # 0.31 lacks it

    conflicts = fields_not_resumed(request)
    if has_non_text_content(getattr(request, "messages", None)):
        conflicts.append("images or sounds")
    if (request.model_extra or {}).get(THRESHOLD):
        # The request would be rejected when its beginning has been sent.
        conflicts.append(THRESHOLD)
    num_logprobs = request.logprobs
    if isinstance(request, ChatCompletionRequest):
        num_logprobs = (request.top_logprobs or 0) if request.logprobs else None
    return ResumeLimits(
        vocab_size=config.get_vocab_size(),
        max_model_len=config.max_model_len,
        sends_only_the_rest=bool(request.stream) or prefills(request.kv_transfer_params),
        num_logprobs=num_logprobs,
        conflicts=conflicts,
    )
