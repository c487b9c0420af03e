"""A request that begins in mid-answer is rendered and tokenized nowhere: its prompt is the one that
it was given, and what cannot begin here is refused before anything of it reaches the engine.

vLLM 0.32 takes a chat's prompt as ids from `kv_transfer_params["prompt_token_ids"]`, and a
completion's from `prompt`; both go through its own checks from there.
"""

import functools
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.exceptions import VLLMValidationError
from vllm.renderers.chat_utils import has_non_text_content

from engine_ext.common.resume_payload import (
    KEY,
    ResumePayload,
    ResumePayloadError,
    read_resume_payload,
)
from engine_ext.scheduler.admission import FIELD as THRESHOLD
from engine_ext.scheduler.admission import prefills
from engine_ext.vllm import describe
from engine_ext.vllm.fit import RequestDemands, refusal, unfit

MARK = "_disagg_begun"
CHARACTERS = 4
"""Of a token."""
NOT_OFFERED = (
    f"this engine does not offer {KEY}: it wants our --scheduler-cls, and the plugin disagg"
)


def install() -> None:
    """Idempotent."""
    for serving, name in (
        (OpenAIServingChat, "render_chat_request"),
        (OpenAIServingCompletion, "render_completion_request"),
    ):
        original = vars(serving)[name]
        if not hasattr(original, MARK):
            setattr(serving, name, _beginning(original))


def _beginning(original: Any) -> Any:
    @functools.wraps(original)
    async def render(self: Any, request: Any) -> Any:
        if (request.kv_transfer_params or {}).get(KEY) is not None:
            _begin(self, request)
        return await original(self, request)

    setattr(render, MARK, True)
    return render


def _begin(serving: Any, request: Any) -> None:
    """Decoded once: what is decoded takes the place of what came. Raises VLLMValidationError, which
    vLLM answers 400 to."""
    try:
        begun = _read(serving, request)
    except ResumePayloadError as error:
        raise VLLMValidationError(str(error), parameter=f"kv_transfer_params.{KEY}") from None
    prompt = list(begun.prompt_token_ids)
    request.kv_transfer_params = {**request.kv_transfer_params, KEY: begun}
    if isinstance(request, ChatCompletionRequest):
        request.kv_transfer_params["prompt_token_ids"] = prompt
    else:
        request.prompt = prompt
    if prefills(request.kv_transfer_params):
        _ask_for_one(request, len(begun.output_token_ids) + 1)


def _ask_for_one(request: Any, num_tokens: int) -> None:
    """A prefill samples a token, however many `max_tokens` it was given: they are the router's, who
    asks for one."""
    for name in ("max_tokens", "max_completion_tokens"):
        asked = getattr(request, name, None)
        if asked is not None:
            setattr(request, name, max(asked, num_tokens))


def _read(serving: Any, request: Any) -> ResumePayload:
    """Raises ResumePayloadError."""
    if not describe.begins(serving.engine_client.vllm_config):
        raise ResumePayloadError(NOT_OFFERED)
    asked = _asked(serving, request)
    _refuse_long(request.kv_transfer_params[KEY], asked.max_model_len)
    begun = read_resume_payload(request.kv_transfer_params)
    assert begun is not None
    problem = refusal(begun, asked)
    if problem is not None:
        raise ResumePayloadError(problem)
    return begun


def _refuse_long(raw: Any, max_model_len: int) -> None:
    """Before anything is decoded: of a string's four characters comes an object of many bytes.
    Raises ResumePayloadError."""
    texts = raw.values() if isinstance(raw, dict) else ()
    longest = max((len(text) for text in texts if isinstance(text, str)), default=0)
    if longest > CHARACTERS * max_model_len:
        raise ResumePayloadError(
            f"{KEY} has more tokens than this model's context, {max_model_len}"
        )


def _asked(serving: Any, request: Any) -> RequestDemands:
    config = serving.model_config
    return RequestDemands(
        vocab_size=config.get_vocab_size(),
        max_model_len=config.max_model_len,
        says_only_the_rest=bool(request.stream) or prefills(request.kv_transfer_params),
        num_logprobs=_num_logprobs(request),
        unfit=_unfit(request),
    )


def _num_logprobs(request: Any) -> int | None:
    if isinstance(request, ChatCompletionRequest):
        return (request.top_logprobs or 0) if request.logprobs else None
    asked: int | None = request.logprobs
    return asked


def _unfit(request: Any) -> list[str]:
    found = unfit(request)
    if has_non_text_content(getattr(request, "messages", None)):
        found.append("images or sounds")
    if (request.model_extra or {}).get(THRESHOLD):
        # It would be refused when its beginning has been said.
        found.append(THRESHOLD)
    return found
