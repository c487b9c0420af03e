"""From the bytes of a request to a job: checked and complete, nothing in it can fail any more.

Blocking: templates and tokenizers take their time.
"""

import re
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from engine_ext.common import resume_payload as wire
from engine_ext.common.resume_payload import ResumePayload, ResumePayloadError, read_resume_payload
from engine_ext.reference.answer import ResumedAnswer, ResumeError, hands_over, resume_answer
from engine_ext.reference.messages import GenerateRequest, SamplingParams
from engine_ext.reference.server.prompts import (
    ServedModel,
    TokenIds,
    check_token_ids,
    encode,
    read_prompts,
    render,
)
from engine_ext.reference.server.requests import (
    ChatBody,
    CompletionBody,
    EngineBadRequestError,
    GenerationBody,
    json_object,
    parse_generation,
)
from engine_ext.reference.server.structured_output import Forced, forced_by, grammar_of
from engine_ext.scheduler.admission import prefills

PARAM = "kv_transfer_params"
RESUME = f"{PARAM}.{wire.KEY}"
MAX_SEQUENCES = 1024
MAX_ID_LENGTH = 128

_FOREIGN = re.compile(r"[^A-Za-z0-9._-]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    id: str
    """As the client sees it."""
    created: int
    model: str
    requests: tuple[GenerateRequest, ...]
    """One for each choice, in the order of their indices."""
    body: GenerationBody
    """For the form of the answer."""
    resumed: ResumedAnswer | None
    """The only choice of this job continues an answer that another engine began."""
    forced: Forced | None
    """The answer consists of tool calls."""
    tell_token_ids: str | None
    """A stream reports its token ids in comments: those of the output, or all."""

    @property
    def num_sent(self) -> int:
        """Tokens of the answer that the client has."""
        return self.resumed.num_sent if self.resumed else 0


def prepare(
    kind: type[CompletionBody | ChatBody], model: ServedModel, body: bytes, id_header: str | None
) -> Job:
    """Raises ApiError."""
    request = parse_generation(kind, body)
    model.check_name(request.model)
    if isinstance(request, ChatBody) and request.top_logprobs and not request.logprobs:
        raise EngineBadRequestError("top_logprobs needs logprobs to be true", "top_logprobs")
    transfer = _read_transfer(request, model)
    prompts = _prompts(request, transfer, model)
    # Ids travel in notifications between engines, where `:` and `,` separate fields.
    given = (id_header or request.request_id or "").strip()[:MAX_ID_LENGTH]
    job_id = f"{request.id_prefix}-{_FOREIGN.sub('-', given) or uuid.uuid4().hex}"
    forced = forced_by(request) if isinstance(request, ChatBody) else None
    rooms = [transfer.max_tokens(_room(request, prompt, model), model) for prompt in prompts]
    sampling = _sampling(request, model, rooms, forced)
    return Job(
        id=job_id,
        created=int(time.time()),
        model=model.name,
        requests=tuple(_engine_requests(job_id, request, prompts, sampling, transfer.params)),
        body=request,
        resumed=transfer.resume(sampling, model),
        forced=forced,
        tell_token_ids=transfer.tell_token_ids,
    )


def _engine_requests(
    job_id: str,
    request: GenerationBody,
    prompts: list[TokenIds],
    sampling: SamplingParams,
    params: dict[str, Any] | None,
) -> Iterator[GenerateRequest]:
    """The KV parameters are of the first prompt. All its choices may load KV, but only the first
    choice retains blocks for another engine."""
    loads = (params or {}).get("do_remote_prefill") is True
    for place, prompt in enumerate(prompts):
        name = job_id if isinstance(request, ChatBody) else f"{job_id}-{place}"
        # Unique even if a client sends the same id twice.
        name = f"{name}-{uuid.uuid4().hex[:8]}"
        for child in range(request.n):
            seed = None if sampling.seed is None else sampling.seed + child
            yield GenerateRequest(
                request_id=f"{child}_{name}" if request.n > 1 else name,
                prompt_token_ids=prompt,
                sampling=replace(sampling, seed=seed),
                kv_transfer_params=params if place == 0 and (child == 0 or loads) else None,
                cache_hit_threshold=request.cache_hit_threshold,
                is_only=len(prompts) * request.n == 1,
            )


def _prompts(
    request: CompletionBody | ChatBody, transfer: "TransferFields", model: ServedModel
) -> list[TokenIds]:
    prompts: list[str | TokenIds]
    if transfer.payload is not None:
        return [transfer.payload.prompt_token_ids]
    if isinstance(request, CompletionBody):
        prompts = read_prompts(request.prompt)
        if len(prompts) * request.n > MAX_SEQUENCES:
            raise EngineBadRequestError(f"prompts times n must be at most {MAX_SEQUENCES}", "n")
    else:
        prompts = [render(request, model)]
    special = request.add_special_tokens
    return [encode(prompt, model, add_special_tokens=special) for prompt in prompts]


def _room(request: CompletionBody | ChatBody, prompt: TokenIds, model: ServedModel) -> int:
    """Tokens that the answer may have. vLLM's rule: more than the context has left are cut to what
    is left, more than the whole context are refused."""
    asked, param = request.max_tokens, "max_tokens"
    if isinstance(request, ChatBody) and request.max_completion_tokens is not None:
        asked, param = request.max_completion_tokens, "max_completion_tokens"
    limit = model.max_model_len
    if asked is not None and asked > limit:
        raise EngineBadRequestError(
            f"{param}={asked} cannot be greater than max_model_len={limit}. "
            "Please request fewer output tokens.",
            param,
        )
    left = limit - len(prompt)
    room = left if asked is None else min(asked, left)
    if room < 1:
        raise EngineBadRequestError(f"max_tokens must be at least 1, got {room}.", "max_tokens")
    return room


def _sampling(
    request: CompletionBody | ChatBody, model: ServedModel, rooms: list[int], forced: Forced | None
) -> SamplingParams:
    """`rooms`: for each prompt, the tokens that its answer may have. The engine ends each answer at
    the end of the context, too."""
    if request.min_tokens > min(rooms):
        raise EngineBadRequestError(
            f"min_tokens must be less than or equal to max_tokens={min(rooms)}, "
            f"got {request.min_tokens}.",
            "min_tokens",
        )
    check_token_ids(request.stop_token_ids, model, "stop_token_ids")
    return SamplingParams(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=max(request.top_k, 0),
        seed=None if request.seed == -1 else request.seed,
        max_tokens=max(rooms),
        min_tokens=request.min_tokens,
        stop=tuple(request.stop),
        stop_token_ids=tuple(request.stop_token_ids),
        include_stop_str_in_output=request.include_stop_str_in_output,
        ignore_eos=request.ignore_eos,
        logprobs=request.num_logprobs,
        skip_special_tokens=request.skip_special_tokens,
        grammar=grammar_of(request, model, forced),
    )


@dataclass(frozen=True, slots=True)
class TransferFields:
    """What `kv_transfer_params` mean for the server; `params` are those for the connector."""

    params: dict[str, Any] | None = None
    payload: ResumePayload | None = None
    tell_token_ids: str | None = None

    def max_tokens(self, asked: int, model: ServedModel) -> int:
        """A prefill that resumes an answer samples one token more, whatever the router asks for."""
        if self.payload is None or not prefills(self.params):
            return asked
        left = model.max_model_len - len(self.payload.prompt_token_ids)
        return min(left, max(asked, len(self.payload.output_token_ids) + 1))

    def resume(self, sampling: SamplingParams, model: ServedModel) -> ResumedAnswer | None:
        """Raises EngineBadRequestError for tokens that the answer cannot have."""
        if self.payload is None:
            return None
        tokenizer, is_handed_over = model.tokenizer.backend, hands_over(self.params)
        try:
            return resume_answer(
                self.payload, sampling, tokenizer, model.rules, hands_over=is_handed_over
            )
        except ResumeError as error:
            raise EngineBadRequestError(f"{RESUME}: {error}", PARAM) from None


def _read_transfer(request: GenerationBody, model: ServedModel) -> TransferFields:
    params = request.kv_transfer_params
    if params is None:
        return TransferFields()
    ours = (wire.KEY, wire.TELL_TOKEN_IDS)
    rest = {name: value for name, value in params.items() if name not in ours}
    tell = params.get(wire.TELL_TOKEN_IDS)
    if tell not in (None, wire.OUTPUT, wire.ALL):
        problem = f"{PARAM}.{wire.TELL_TOKEN_IDS} must be {wire.OUTPUT} or {wire.ALL}"
        raise EngineBadRequestError(problem, PARAM)
    if not isinstance(params.get(wire.HAND_BACK, False), bool):
        raise EngineBadRequestError(f"{PARAM}.{wire.HAND_BACK} must be a boolean", PARAM)
    try:
        payload = read_resume_payload(params)
    except ResumePayloadError as error:
        raise EngineBadRequestError(f"{PARAM}: {error}", PARAM) from None
    if payload is not None:
        _check_payload(payload, request, model)
    return TransferFields(rest, payload, tell)


def _check_payload(payload: ResumePayload, request: GenerationBody, model: ServedModel) -> None:
    if request.n > 1:
        raise EngineBadRequestError(f"{RESUME} is of one answer, and n is {request.n}", "n")
    check_token_ids(payload.prompt_token_ids, model, PARAM)
    check_token_ids(payload.output_token_ids, model, PARAM)
    count = len(payload.prompt_token_ids) + len(payload.output_token_ids)
    if count > model.max_model_len:
        raise EngineBadRequestError(
            f"{RESUME} holds {count} tokens, and this model's maximum context length is "
            f"{model.max_model_len} tokens.",
            PARAM,
        )


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
