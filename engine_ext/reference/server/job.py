"""From the bytes of a request to a job: checked and complete, nothing in it can fail any more.

Blocking: templates and tokenizers take their time.
"""

import re
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, fields
from http import HTTPStatus
from typing import Any

import orjson

from engine_ext.common import resume_payload as wire
from engine_ext.common.resume_payload import ResumePayload, ResumePayloadError, read_resume_payload
from engine_ext.reference.answer import (
    ResumedAnswer,
    ResumeError,
    StopRules,
    hands_over,
    resume_answer,
)
from engine_ext.reference.grammar import Grammar, GrammarCompiler
from engine_ext.reference.messages import GenerateRequest, SamplingParams
from engine_ext.reference.server.requests import (
    ApiError,
    ChatBody,
    ChatTemplateRequest,
    CompletionBody,
    EngineBadRequestError,
    ForcedTool,
    GenerationBody,
    TokenizeTextBody,
    json_object,
    parse,
    parse_generation,
)
from engine_ext.reference.tokenizer import ChatTemplate, Tokenizer
from engine_ext.scheduler.admission import prefills

PARAM = "kv_transfer_params"
RESUME = f"{PARAM}.{wire.KEY}"
MAX_ID_LENGTH = 128

_FOREIGN = re.compile(r"[^A-Za-z0-9._-]")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    names: tuple[str, ...]
    """The model names that clients may use. Answers contain the first one."""
    vocab_size: int
    """Token ids below this are the model's; the tokenizer may know fewer."""
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    rules: StopRules
    grammars: GrammarCompiler
    created: int = 0
    """Unix time for /v1/models."""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def max_model_len(self) -> int:
        return self.rules.max_model_len

    def check_name(self, name: str | None) -> None:
        """Raises ApiError. A request that names no model means this one."""
        if name and name not in self.names:
            known = ", ".join(self.names)
            message = f"The model `{name}` does not exist. Valid aliases: {known}."
            raise ApiError(HTTPStatus.NOT_FOUND, message, "model")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    id: str
    """As the client sees it."""
    created: int
    model: str
    request: GenerateRequest
    body: GenerationBody
    """For the form of the answer."""
    resumed: ResumedAnswer | None
    """The answer that another engine began, and that this one continues."""
    tool: ForcedTool | None
    """The answer is the arguments of this tool; None: it is text."""
    tell_token_ids: str | None
    """A stream reports its token ids in comments: those of the output, or all."""

    @property
    def sent_token_ids(self) -> tuple[int, ...]:
        """Tokens of the answer that the client had before this engine continued it."""
        return self.resumed.token_ids[: self.resumed.num_sent] if self.resumed else ()


def prepare(
    kind: type[CompletionBody | ChatBody], model: ServedModel, body: bytes, id_header: str | None
) -> Job:
    """Raises ApiError."""
    request = parse_generation(kind, body)
    model.check_name(request.model)
    if isinstance(request, ChatBody) and request.top_logprobs and not request.logprobs:
        raise EngineBadRequestError("top_logprobs needs logprobs to be true", "top_logprobs")
    params = request.kv_transfer_params
    ours = (wire.KEY, wire.TELL_TOKEN_IDS)
    tell_token_ids = params.get(wire.TELL_TOKEN_IDS) if params else None
    if tell_token_ids not in (None, wire.OUTPUT, wire.ALL):
        raise EngineBadRequestError(
            f"{PARAM}.{wire.TELL_TOKEN_IDS} is neither output nor all", PARAM
        )
    if params and not isinstance(params.get(wire.HAND_BACK, False), bool):
        raise EngineBadRequestError(f"{PARAM}.{wire.HAND_BACK} must be a boolean", PARAM)
    payload = _read_payload(params, model)
    if payload is not None:
        prompt = payload.prompt_token_ids
    else:
        given = render(request, model) if isinstance(request, ChatBody) else request.prompt
        prompt = encode(given, model, add_special_tokens=request.add_special_tokens)
    room = _room(request, len(prompt), model)
    if payload is not None and prefills(params):
        # It samples one token more than the payload has, whatever the router asks for.
        least = len(payload.output_token_ids) + 1
        room = min(model.max_model_len - len(prompt), max(room, least))
    tool = request.forced_tool() if isinstance(request, ChatBody) else None
    sampling = _sampling(request, model, room, tool)
    # Ids travel in notifications between engines, where `:` and `,` separate fields.
    name = _FOREIGN.sub("-", (id_header or request.request_id or "").strip()[:MAX_ID_LENGTH])
    job_id = f"{request.id_prefix}-{name or uuid.uuid4().hex}"
    return Job(
        id=job_id,
        created=int(time.time()),
        model=model.name,
        request=GenerateRequest(
            # Unique even if a client sends the same id twice.
            request_id=f"{job_id}-{uuid.uuid4().hex[:8]}",
            prompt_token_ids=prompt,
            sampling=sampling,
            kv_transfer_params=params and {k: v for k, v in params.items() if k not in ours},
            cache_hit_threshold=request.cache_hit_threshold,
            cache_salt=request.cache_salt,
        ),
        body=request,
        resumed=_resume(payload, request, sampling, model) if payload else None,
        tool=tool,
        tell_token_ids=tell_token_ids,
    )


def _read_payload(params: dict[str, Any] | None, model: ServedModel) -> ResumePayload | None:
    """Raises EngineBadRequestError."""
    try:
        payload = read_resume_payload(params)
    except ResumePayloadError as error:
        raise EngineBadRequestError(f"{PARAM}: {error}", PARAM) from None
    if payload is not None:
        tokens = payload.prompt_token_ids + payload.output_token_ids
        check_token_ids(tokens, model, PARAM)
        if len(tokens) > model.max_model_len:
            problem = f"has {len(tokens)} tokens, the model's context {model.max_model_len}"
            raise EngineBadRequestError(f"{RESUME} {problem}", PARAM)
    return payload


def _resume(
    payload: ResumePayload, request: GenerationBody, sampling: SamplingParams, model: ServedModel
) -> ResumedAnswer:
    """Raises EngineBadRequestError for tokens that the answer cannot have."""
    tokenizer, is_handed_over = model.tokenizer.backend, hands_over(request.kv_transfer_params)
    try:
        return resume_answer(payload, sampling, tokenizer, model.rules, hands_over=is_handed_over)
    except ResumeError as error:
        raise EngineBadRequestError(f"{RESUME}: {error}", PARAM) from None


def _room(request: CompletionBody | ChatBody, num_prompt: int, model: ServedModel) -> int:
    """Tokens that the answer may have. vLLM's rule: more than the context has left are cut to what
    is left, more than the whole context are refused."""
    asked, param = request.max_tokens, "max_tokens"
    if isinstance(request, ChatBody) and request.max_completion_tokens is not None:
        asked, param = request.max_completion_tokens, "max_completion_tokens"
    limit = model.max_model_len
    if asked is not None and asked > limit:
        problem = f"{param}={asked} cannot be greater than max_model_len={limit}."
        raise EngineBadRequestError(f"{problem} Please request fewer output tokens.", param)
    left = limit - num_prompt
    room = left if asked is None else min(asked, left)
    if room < 1:
        raise EngineBadRequestError(f"max_tokens must be at least 1, got {room}.", "max_tokens")
    return room


def _sampling(
    request: CompletionBody | ChatBody, model: ServedModel, room: int, tool: ForcedTool | None
) -> SamplingParams:
    """`room`: the tokens that the answer may have."""
    if request.min_tokens > room:
        problem = f"min_tokens must be at most max_tokens={room}, not {request.min_tokens}."
        raise EngineBadRequestError(problem, "min_tokens")
    shared = [one.name for one in fields(SamplingParams) if one.name in GenerationBody.model_fields]
    return SamplingParams(
        **{name: getattr(request, name) for name in shared}
        | {"seed": None if request.seed == -1 else request.seed, "max_tokens": room},
        logprobs=request.num_logprobs,
        grammar=_grammar(request, model, tool),
    )


def _grammar(
    request: GenerationBody, model: ServedModel, tool: ForcedTool | None
) -> Grammar | None:
    """The arguments of a tool replace any other form."""
    wanted, param = request.response_format, "response_format"
    schema = wanted.schema_of_answer() if wanted else None
    if tool is not None:
        schema, param = tool.parameters, "tool_choice"
    if schema is None:
        return None
    try:
        return model.grammars.compile(orjson.dumps(schema).decode())
    except (ValueError, orjson.JSONEncodeError) as error:  # orjson's: It is nested too deeply.
        raise EngineBadRequestError(f"{param} cannot be followed: {error}", param) from None


def remote_params(body: bytes) -> dict[str, Any] | None:
    """The `kv_transfer_params` of a refused request, if another engine may keep blocks for it."""
    try:
        params = json_object(body).get(PARAM)
    except EngineBadRequestError:
        return None
    if not isinstance(params, dict):
        return None
    names_one = params.get("do_remote_prefill") or params.get("remote_block_ids")
    return params if names_one else None


def encode(
    prompt: str | list[int], model: ServedModel, *, add_special_tokens: bool
) -> tuple[int, ...]:
    """Raises EngineBadRequestError for an empty or too long prompt, or an unknown token id."""
    limit = model.max_model_len
    if isinstance(prompt, str):
        if (least := model.tokenizer.least_tokens(prompt)) > limit:
            raise _too_long(limit, f"at least {least}")
        prompt = model.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
    else:
        check_token_ids(prompt, model, "prompt")
    if not prompt:
        raise EngineBadRequestError("the prompt must not be empty", "prompt")
    if len(prompt) > limit:
        raise _too_long(limit, f"{len(prompt)}")
    return tuple(prompt)


def _too_long(limit: int, count: str) -> EngineBadRequestError:
    return EngineBadRequestError(
        f"This model's maximum context length is {limit} tokens. However, your prompt contains "
        f"{count} input tokens, which exceeds this limit even without any output tokens. "
        "Please reduce the length of the input prompt.",
        "input_tokens",
    )


def check_token_ids(ids: Sequence[int], model: ServedModel, param: str) -> None:
    for token in (min(ids), max(ids)) if ids else ():
        if not 0 <= token < model.vocab_size:
            raise EngineBadRequestError(f"Token id {token} is out of vocabulary", param)


def render(conversation: ChatTemplateRequest, model: ServedModel) -> str:
    """The prompt's text. Raises EngineBadRequestError if the template says no."""
    if model.chat_template is None:
        problem = "this model has no chat template: use /v1/completions"
        raise EngineBadRequestError(problem, "messages")
    try:
        return model.chat_template.render(
            [message.for_template() for message in conversation.messages],
            tools=conversation.tools,
            arguments=conversation.chat_template_kwargs,
        )
    except ValueError as error:
        raise EngineBadRequestError(str(error), "messages") from error


def tokenize(model: ServedModel, body: bytes) -> dict[str, Any]:
    """vLLM's `/tokenize`: of a `prompt`, or of `messages` as a chat would send them."""
    fields = json_object(body)
    request: TokenizeTextBody | ChatTemplateRequest
    if "messages" in fields:
        request = parse(ChatTemplateRequest, fields)
        text = render(request, model)
    else:
        request = parse(TokenizeTextBody, fields)
        text = request.prompt
    model.check_name(request.model)
    ids = model.tokenizer.encode(text, add_special_tokens=request.add_special_tokens)
    return {"count": len(ids), "max_model_len": model.max_model_len, "tokens": ids}
