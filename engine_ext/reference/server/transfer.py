"""What a request's `kv_transfer_params` say to the server, and not to the connector: token ids that
another engine has made of the prompt, and what it has answered to it."""

from dataclasses import dataclass
from typing import Any

from engine_ext.common import resume_payload as wire
from engine_ext.common.resume_payload import ResumePayload, ResumePayloadError, read_resume_payload
from engine_ext.reference.beginning import Beginning, BeginningError, begin, hands_over
from engine_ext.reference.messages import SamplingParams
from engine_ext.reference.server.body import json_object
from engine_ext.reference.server.errors import EngineBadRequestError
from engine_ext.reference.server.prompts import TokenIds, check_token_ids
from engine_ext.reference.server.requests import GenerationBody
from engine_ext.reference.server.served_model import ServedModel
from engine_ext.scheduler.admission import prefills

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
