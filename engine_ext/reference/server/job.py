"""From the bytes of a request to a job. Blocking: templates and tokenizers take their time."""

import re
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from engine_ext.common import resume_payload as wire
from engine_ext.common.resume_payload import ResumePayload, ResumePayloadError, read_resume_payload
from engine_ext.reference.messages import GenerateRequest, SamplingParams
from engine_ext.reference.resume import Beginning, BeginningError, begin, hands_over
from engine_ext.reference.server.connection import json_object
from engine_ext.reference.server.errors import EngineBadRequestError
from engine_ext.reference.server.prompts import (
    TokenIds,
    TokenizedPrompt,
    answering_role,
    check_asked,
    check_token_ids,
    encode,
    read_prompts,
    render,
    room,
)
from engine_ext.reference.server.requests import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    StreamOptions,
    parse_generation,
)
from engine_ext.reference.server.served_model import ServedModel
from engine_ext.reference.server.structured_output import Forced, forced_by, grammar_of
from engine_ext.scheduler.admission import prefills

MAX_LENGTH = 128

_FOREIGN = re.compile(r"[^A-Za-z0-9._-]")


def base_id(header: str | None, field: str | None = None) -> str:
    """The client's id, header before body, made safe; a random one where it gave none."""
    chosen = (header or field or "").strip()
    return _FOREIGN.sub("-", chosen[:MAX_LENGTH]) or uuid.uuid4().hex


def engine_id(request_id: str) -> str:
    """Unique also when a client sends the same id twice."""
    return f"{request_id}-{uuid.uuid4().hex[:8]}"


PARAM = "kv_transfer_params"
BEGUN = f"{PARAM}.{wire.KEY}"
PROMPT = "prompt_token_ids"
OURS = frozenset((PROMPT, wire.KEY, wire.TELL_TOKEN_IDS))


@dataclass(frozen=True, slots=True)
class TransferFields:
    params: dict[str, Any] | None
    """For the connector."""
    begun: ResumePayload | None = None
    tell: str | None = None
    prompt_token_ids: TokenIds | None = None
    """vLLM's way to spare a decode engine the tokenization."""

    def at_least_one(self, max_tokens: int, model: ServedModel) -> int:
        """A prefill samples a token, however many `max_tokens` it was given: they are the router's,
        who asks for one."""
        if self.begun is None or not prefills(self.params):
            return max_tokens
        left = model.max_model_len - len(self.begun.prompt_token_ids)
        return min(left, max(max_tokens, len(self.begun.output_token_ids) + 1))

    def begin(self, sampling: SamplingParams, model: ServedModel) -> Beginning | None:
        """Raises EngineBadRequestError for tokens that the answer cannot have."""
        if self.begun is None:
            return None
        tokenizer = model.tokenizer.backend
        is_handed_on = hands_over(self.params)
        try:
            return begin(self.begun, sampling, tokenizer, model.rules, hands_over=is_handed_on)
        except BeginningError as error:
            raise EngineBadRequestError(f"{BEGUN}: {error}", PARAM) from None


def read_transfer(request: GenerationBody, model: ServedModel) -> TransferFields:
    """Raises EngineBadRequestError."""
    params = request.kv_transfer_params
    if params is None:
        return TransferFields(None)
    rest = {name: value for name, value in params.items() if name not in OURS}
    tell = params.get(wire.TELL_TOKEN_IDS)
    if tell not in (None, wire.OUTPUT, wire.ALL):
        problem = f"{PARAM}.{wire.TELL_TOKEN_IDS} must be {wire.OUTPUT} or {wire.ALL}"
        raise EngineBadRequestError(problem, PARAM)
    if not isinstance(params.get(wire.HAND_BACK, False), bool):
        raise EngineBadRequestError(f"{PARAM}.{wire.HAND_BACK} must be a boolean", PARAM)
    try:
        begun = read_resume_payload(params)
    except ResumePayloadError as error:
        raise EngineBadRequestError(f"{PARAM}: {error}", PARAM) from None
    if begun is not None:
        _check(begun, request, model)
        return TransferFields(rest, begun, tell)
    return TransferFields(rest, tell=tell, prompt_token_ids=_listed(params.get(PROMPT)))


def remote_params(body: bytes) -> dict[str, Any] | None:
    """Of a request that was refused, where another engine may keep blocks for it."""
    try:
        params = json_object(body).get(PARAM)
    except EngineBadRequestError:
        return None
    if not isinstance(params, dict):
        return None
    names_one = params.get("do_remote_prefill") or params.get("remote_block_ids")
    return params if names_one else None


def _check(begun: ResumePayload, request: GenerationBody, model: ServedModel) -> None:
    if request.n > 1:
        raise EngineBadRequestError(f"{BEGUN} is of one answer, and n is {request.n}", "n")
    check_token_ids(begun.prompt_token_ids, model, PARAM)
    check_token_ids(begun.output_token_ids, model, PARAM)
    count = len(begun.prompt_token_ids) + len(begun.output_token_ids)
    if count > model.max_model_len:
        raise EngineBadRequestError(
            f"{BEGUN} holds {count} tokens, and this model's maximum context length is "
            f"{model.max_model_len} tokens.",
            PARAM,
        )


def _listed(ids: Any) -> TokenIds | None:
    if ids is None:
        return None
    if not isinstance(ids, list) or not ids or any(type(token) is not int for token in ids):
        raise EngineBadRequestError(
            f"{PARAM}.{PROMPT} must be a non-empty list of token ids", PARAM
        )
    return tuple(ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """How the answer is to look."""

    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    logprobs: int | None = None
    tokens_as_ids: bool = False
    """Logprobs name tokens `token_id:<id>`."""
    role: str = "assistant"
    forced: Forced | None = None
    """The answer is calls of tools."""
    tell: str | None = None
    """A stream names the ids of the tokens that it says, in comments: of the output, or of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    id: str
    """As the client sees it."""
    created: int
    model: str
    prompts: tuple[TokenizedPrompt, ...]
    engine_ids: tuple[str, ...]
    """One for each prompt."""
    sampling: SamplingParams
    n: int = 1
    kv_transfer_params: dict[str, Any] | None = None
    cache_hit_threshold: float | None = None
    options: AnswerOptions = field(default_factory=AnswerOptions)
    begun: Beginning | None = None
    """Of a job with one choice: its answer goes on from there."""

    @property
    def num_spoken(self) -> int:
        """Tokens of the answer that the client has."""
        return self.begun.num_spoken if self.begun else 0

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

    def prompt_of(self, choice: int) -> TokenizedPrompt:
        return self.prompts[choice // self.n]

    def engine_requests(self) -> Iterator[GenerateRequest]:
        """One for each choice, in the order of their indices.

        Only the first prompt's have the KV parameters, which are of one prompt; and where blocks
        are to be kept for another engine, its first alone.
        """
        for choice in range(self.num_choices):
            prompt, child = divmod(choice, self.n)
            own_id = self.engine_ids[prompt]
            yield GenerateRequest(
                request_id=f"{child}_{own_id}" if self.n > 1 else own_id,
                prompt_token_ids=self.prompts[prompt].token_ids,
                sampling=self._sampling(child),
                kv_transfer_params=self.kv_transfer_params if self._is_meant(choice) else None,
                cache_hit_threshold=self.cache_hit_threshold,
                is_only=self.num_choices == 1,
            )

    def _is_meant(self, choice: int) -> bool:
        if choice == 0:
            return True
        params = self.kv_transfer_params or {}
        return choice < self.n and params.get("do_remote_prefill") is True

    def _sampling(self, child: int) -> SamplingParams:
        if self.sampling.seed is None or child == 0:
            return self.sampling
        return replace(self.sampling, seed=self.sampling.seed + child)


def engine_ids(job_id: str, prompts: int) -> tuple[str, ...]:
    return tuple(engine_id(f"{job_id}-{place}") for place in range(prompts))


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
    job_id = f"cmpl-{base_id(id_header, request.request_id)}"
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
    job_id = f"chatcmpl-{base_id(id_header, request.request_id)}"
    return Job(
        id=job_id,
        created=int(time.time()),
        model=model.name,
        prompts=(TokenizedPrompt(token_ids),),
        engine_ids=(engine_id(job_id),),
        sampling=sampling,
        n=request.n,
        kv_transfer_params=transfer.params,
        cache_hit_threshold=request.cache_hit_threshold,
        options=_options(request, transfer, logprobs, answering_role(request), forced),
        begun=transfer.begin(sampling, model),
    )


def _chat_prompt(request: ChatBody, transfer: TransferFields, model: ServedModel) -> TokenIds:
    if transfer.begun is not None:
        return transfer.begun.prompt_token_ids
    given = transfer.prompt_token_ids
    text = render(request, model.chat_template) if given is None else given
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
