"""From the bytes of a request to a job. Blocking: templates and tokenizers take their time."""

import time

from engine_ext.common.resume_payload import ResumePayload
from engine_ext.reference.messages import SamplingParams
from engine_ext.reference.server import conversation, request_id
from engine_ext.reference.server.errors import EngineBadRequestError
from engine_ext.reference.server.job import AnswerOptions, Job, engine_ids
from engine_ext.reference.server.lengths import check_asked, room
from engine_ext.reference.server.prompts import (
    TokenIds,
    TokenizedPrompt,
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
from engine_ext.reference.server.transfer import BEGUN, TransferFields, read_transfer

COMPLETION_TOKENS = 16
"""`max_tokens` of a completion that says nothing; a chat goes on to the end of the context."""

MAX_SEQUENCES = 1024
MAX_TEMPERATURE = 2


def prepare_completion(model: ServedModel, body: bytes, id_header: str | None) -> Job:
    """Raises EngineBadRequestError or EngineNotFoundError."""
    request = parse_generation(CompletionBody, body)
    model.check_name(request.model)
    asked = COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    check_asked(asked, model, "max_tokens")
    if request.echo and request.logprobs is not None:
        raise EngineBadRequestError(
            "logprobs of the prompt are not supported: echo without logprobs", "echo"
        )
    transfer = read_transfer(request, model)
    prompts = _completion_prompts(request, transfer, model)
    rooms = [room(len(prompt.token_ids), asked, model) for prompt in prompts]
    rooms = [transfer.at_least_one(found, model) for found in rooms]
    # The engine ends each of them at the end of the context, too.
    sampling = _sampling(request, model, max(rooms), min(rooms), request.logprobs)
    job_id = f"cmpl-{request_id.base_id(id_header, request.request_id)}"
    return Job(
        id=job_id,
        created=int(time.time()),
        model=model.name,
        prompts=prompts,
        engine_ids=engine_ids(job_id, len(prompts)),
        sampling=sampling,
        n=request.n,
        kv_transfer_params=transfer.params,
        cache_hit_threshold=request.cache_hit_threshold,
        options=_options(request, transfer, request.logprobs),
        begun=transfer.begin(sampling, model),
    )


def _completion_prompts(
    request: CompletionBody, transfer: TransferFields, model: ServedModel
) -> tuple[TokenizedPrompt, ...]:
    if transfer.begun is not None:
        return (_begun_completion(request, transfer.begun, model),)
    texts = read_prompts(request.prompt)
    if len(texts) * request.n > MAX_SEQUENCES:
        raise EngineBadRequestError(f"prompts times n must be at most {MAX_SEQUENCES}", "n")
    return tuple(_completion_prompt(text, request, model) for text in texts)


def _begun_completion(
    request: CompletionBody, begun: ResumePayload, model: ServedModel
) -> TokenizedPrompt:
    """What was asked for is read only to be repeated: it is the given ids that are gone on from."""
    asked = request.prompt
    if isinstance(asked, list) and len(asked) > 1 and not isinstance(asked[0], int):
        raise EngineBadRequestError(
            f"{BEGUN} is of one prompt, and here are {len(asked)}", "prompt"
        )
    if not request.echo or begun.num_sent:
        return TokenizedPrompt(begun.prompt_token_ids)
    text = model.tokenizer.decode(list(begun.prompt_token_ids))
    return TokenizedPrompt(begun.prompt_token_ids, asked if isinstance(asked, str) else text)


def _completion_prompt(
    text: str | TokenIds, request: CompletionBody, model: ServedModel
) -> TokenizedPrompt:
    token_ids = encode(text, model, add_special_tokens=request.add_special_tokens)
    if not request.echo:
        return TokenizedPrompt(token_ids)
    return TokenizedPrompt(
        token_ids, text if isinstance(text, str) else model.tokenizer.decode(list(text))
    )


def prepare_chat(model: ServedModel, body: bytes, id_header: str | None) -> Job:
    """Raises EngineBadRequestError or EngineNotFoundError."""
    request = parse_generation(ChatBody, body)
    model.check_name(request.model)
    if request.top_logprobs and not request.logprobs:
        raise EngineBadRequestError("top_logprobs needs logprobs to be true", "top_logprobs")
    logprobs = request.top_logprobs if request.logprobs else None
    asked = _asked_of_chat(request, model)
    transfer = read_transfer(request, model)
    token_ids = _chat_prompt(request, transfer, model)
    max_tokens = transfer.at_least_one(room(len(token_ids), asked, model), model)
    forced = forced_by(request)
    sampling = _sampling(request, model, max_tokens, max_tokens, logprobs, forced)
    job_id = f"chatcmpl-{request_id.base_id(id_header, request.request_id)}"
    return Job(
        id=job_id,
        created=int(time.time()),
        model=model.name,
        prompts=(TokenizedPrompt(token_ids),),
        engine_ids=(request_id.engine_id(job_id),),
        sampling=sampling,
        n=request.n,
        kv_transfer_params=transfer.params,
        cache_hit_threshold=request.cache_hit_threshold,
        options=_options(request, transfer, logprobs, conversation.answering_role(request), forced),
        begun=transfer.begin(sampling, model),
    )


def _chat_prompt(request: ChatBody, transfer: TransferFields, model: ServedModel) -> TokenIds:
    if transfer.begun is not None:
        return transfer.begun.prompt_token_ids
    given = transfer.prompt_token_ids
    text = conversation.render(request, model.chat_template) if given is None else given
    return encode(text, model, add_special_tokens=request.add_special_tokens)


def _asked_of_chat(request: ChatBody, model: ServedModel) -> int | None:
    if request.max_completion_tokens is None:
        check_asked(request.max_tokens, model, "max_tokens")
        return request.max_tokens
    check_asked(request.max_completion_tokens, model, "max_completion_tokens")
    return request.max_completion_tokens


def _options(
    request: GenerationBody,
    transfer: TransferFields,
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
        tell=transfer.tell,
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
        raise EngineBadRequestError(
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
    raise EngineBadRequestError(f"temperature must be {bound}, got {temperature}.", "temperature")
