"""From the bytes of a request to a job. Blocking: templates and tokenizers take their time."""

import time
from typing import Any

from engine_ext.reference.messages import SamplingParams
from engine_ext.reference.server import conversation, request_id
from engine_ext.reference.server.errors import BadRequestError
from engine_ext.reference.server.job import AnswerOptions, Job, engine_ids
from engine_ext.reference.server.lengths import check_asked, room
from engine_ext.reference.server.prompts import (
    Prompt,
    TokenIds,
    check_token_ids,
    encode,
    read_prompts,
)
from engine_ext.reference.server.requests import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    StreamOptions,
    parse_generation,
)
from engine_ext.reference.server.served_model import ServedModel
from engine_ext.reference.server.structure import grammar_of
from engine_ext.reference.server.tool_calls import Forced, forced_by

COMPLETION_TOKENS = 16
"""`max_tokens` of a completion that says nothing; a chat goes on to the end of the context."""

MAX_SEQUENCES = 1024
MAX_TEMPERATURE = 2


def prepare_completion(model: ServedModel, body: bytes, id_header: str | None) -> Job:
    """Raises BadRequestError or NotFoundError."""
    request = parse_generation(CompletionBody, body)
    model.check_name(request.model)
    asked = COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    check_asked(asked, model, "max_tokens")
    if request.echo and request.logprobs is not None:
        raise BadRequestError(
            "logprobs of the prompt are not supported: echo without logprobs", "echo"
        )
    texts = read_prompts(request.prompt)
    if len(texts) * request.n > MAX_SEQUENCES:
        raise BadRequestError(f"prompts times n must be at most {MAX_SEQUENCES}", "n")
    prompts = tuple(_completion_prompt(text, request, model) for text in texts)
    rooms = [room(len(prompt.token_ids), asked, model) for prompt in prompts]
    job_id = f"cmpl-{request_id.base_id(id_header, request.request_id)}"
    return Job(
        id=job_id,
        created=int(time.time()),
        model=model.name,
        prompts=prompts,
        engine_ids=engine_ids(job_id, len(prompts)),
        # The engine ends each of them at the end of the context, too.
        sampling=_sampling(request, model, max(rooms), min(rooms), request.logprobs),
        n=request.n,
        kv_transfer_params=request.kv_transfer_params,
        cache_hit_threshold=request.cache_hit_threshold,
        options=_options(request, request.logprobs),
    )


def _completion_prompt(text: str | TokenIds, request: CompletionBody, model: ServedModel) -> Prompt:
    token_ids = encode(text, model, add_special_tokens=request.add_special_tokens)
    if not request.echo:
        return Prompt(token_ids)
    return Prompt(token_ids, text if isinstance(text, str) else model.tokenizer.decode(list(text)))


def prepare_chat(model: ServedModel, body: bytes, id_header: str | None) -> Job:
    """Raises BadRequestError or NotFoundError."""
    request = parse_generation(ChatBody, body)
    model.check_name(request.model)
    if request.top_logprobs and not request.logprobs:
        raise BadRequestError("top_logprobs needs logprobs to be true", "top_logprobs")
    logprobs = request.top_logprobs if request.logprobs else None
    asked = _asked_of_chat(request, model)
    kv_transfer_params, given = _given_token_ids(request.kv_transfer_params)
    text = conversation.render(request, model.chat_template) if given is None else given
    token_ids = encode(text, model, add_special_tokens=request.add_special_tokens)
    max_tokens = room(len(token_ids), asked, model)
    forced = forced_by(request)
    job_id = f"chatcmpl-{request_id.base_id(id_header, request.request_id)}"
    return Job(
        id=job_id,
        created=int(time.time()),
        model=model.name,
        prompts=(Prompt(token_ids),),
        engine_ids=(request_id.engine_id(job_id),),
        sampling=_sampling(request, model, max_tokens, max_tokens, logprobs, forced),
        n=request.n,
        kv_transfer_params=kv_transfer_params,
        cache_hit_threshold=request.cache_hit_threshold,
        options=_options(request, logprobs, conversation.answering_role(request), forced),
    )


def _asked_of_chat(request: ChatBody, model: ServedModel) -> int | None:
    if request.max_completion_tokens is None:
        check_asked(request.max_tokens, model, "max_tokens")
        return request.max_tokens
    check_asked(request.max_completion_tokens, model, "max_completion_tokens")
    return request.max_completion_tokens


def _given_token_ids(
    params: dict[str, Any] | None,
) -> tuple[dict[str, Any] | None, TokenIds | None]:
    """vLLM lets a router hand over the ids the prefill engine made: no second tokenization."""
    if params is None or params.get("prompt_token_ids") is None:
        return params, None
    rest = dict(params)
    ids = rest.pop("prompt_token_ids")
    if not isinstance(ids, list) or not ids or any(type(token) is not int for token in ids):
        raise BadRequestError(
            "kv_transfer_params.prompt_token_ids must be a non-empty list of token ids",
            "kv_transfer_params",
        )
    return rest, tuple(ids)


def _options(
    request: GenerationBody,
    logprobs: int | None,
    role: str = "assistant",
    forced: Forced | None = None,
) -> AnswerOptions:
    streaming = request.stream_options or StreamOptions()
    return AnswerOptions(
        stream=request.stream,
        include_usage=bool(streaming.include_usage),
        continuous_usage=bool(streaming.include_usage and streaming.continuous_usage_stats),
        return_token_ids=request.return_token_ids,
        tokens_as_ids=request.return_tokens_as_token_ids,
        logprobs=logprobs,
        role=role,
        forced=forced,
    )


def _sampling(
    request: GenerationBody,
    model: ServedModel,
    max_tokens: int,
    least_room: int,
    logprobs: int | None,
    forced: Forced | None = None,
) -> SamplingParams:
    """`least_room`: of the prompts, what the longest one leaves for an answer."""
    if request.min_tokens > least_room:
        raise BadRequestError(
            f"min_tokens must be less than or equal to max_tokens={least_room}, "
            f"got {request.min_tokens}.",
            "min_tokens",
        )
    _check_temperature(request.temperature)
    check_token_ids(request.stop_token_ids, model, "stop_token_ids")
    chosen = model.defaults
    top_k = chosen.top_k if request.top_k is None else request.top_k
    return SamplingParams(
        temperature=chosen.temperature if request.temperature is None else request.temperature,
        top_p=chosen.top_p if request.top_p is None else request.top_p,
        top_k=max(top_k, 0),
        seed=None if request.seed == -1 else request.seed,
        max_tokens=max_tokens,
        min_tokens=request.min_tokens,
        stop=tuple(request.stop),
        stop_token_ids=tuple(request.stop_token_ids),
        include_stop_str_in_output=request.include_stop_str_in_output,
        ignore_eos=request.ignore_eos,
        logprobs=logprobs,
        skip_special_tokens=request.skip_special_tokens,
        grammar=grammar_of(request, model, forced),
    )


def _check_temperature(temperature: float | None) -> None:
    """With vLLM's words."""
    if temperature is None or 0 <= temperature <= MAX_TEMPERATURE:
        return
    bound = "non-negative" if temperature < 0 else f"in [0, {MAX_TEMPERATURE}]"
    raise BadRequestError(f"temperature must be {bound}, got {temperature}.", "temperature")
