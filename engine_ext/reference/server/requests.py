"""What the bodies of the OpenAI endpoints may hold, field by field.

Unknown fields are ignored. Known ones that would change the answer and that this engine does not
have are refused, unless they ask for what happens anyway.
"""

from typing import Annotated, Any, TypeVar

import pydantic
from pydantic import BaseModel, BeforeValidator, Field

from engine_ext.reference.server.connection import json_object
from engine_ext.reference.server.errors import EngineBadRequestError
from engine_ext.scheduler.admission import parse_threshold

INT64 = 2**63
MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOPS = 64
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKENS = 1024
MAX_REPORTED_ERRORS = 3

_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "echo": (False,),
    "frequency_penalty": (0,),
    "guided_choice": (),
    "guided_json": (),
    "guided_regex": (),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "min_p": (0,),
    "presence_penalty": (0,),
    "prompt_embeds": ([],),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
"""Field: the values that ask for nothing."""


class _Body(BaseModel):
    model_config = pydantic.ConfigDict(extra="ignore", frozen=True)

    model: str | None = None


class StreamOptions(BaseModel):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class GenerationBody(_Body):
    """What completions and chat completions share."""

    n: int = Field(1, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = None
    min_tokens: int = Field(0, ge=0)
    temperature: float | None = Field(None, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    seed: int | None = Field(None, ge=-INT64, lt=INT64)
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]],
        BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
        Field(max_length=MAX_STOPS),
    ] = []
    stop_token_ids: list[int] = Field([], max_length=MAX_STOP_TOKENS)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    request_id: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    cache_hit_threshold: Annotated[float | None, BeforeValidator(parse_threshold)] = None


class CompletionBody(GenerationBody):
    prompt: Any = None
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_special_tokens: bool = True


class ChatTemplateRequest(_Body):
    """What the chat template needs."""

    messages: list[Any] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] = {}

    @property
    def adds_generation_prompt(self) -> bool:
        if self.add_generation_prompt is not None:
            return self.add_generation_prompt
        return not self.continue_final_message


class ChatBody(GenerationBody, ChatTemplateRequest):
    max_completion_tokens: int | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS)


class TokenizeTextBody(_Body):
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatBody(ChatTemplateRequest):
    return_token_strs: bool = False


class DetokenizeBody(_Body):
    tokens: list[int]


B = TypeVar("B", bound=BaseModel)


def parse(kind: type[B], fields: dict[str, Any]) -> B:
    """Raises EngineBadRequestError that names every wrong field, up to three."""
    try:
        return kind.model_validate(fields)
    except pydantic.ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
    messages = []
    for entry in found[:MAX_REPORTED_ERRORS]:
        path = "".join(f"[{at}]" if isinstance(at, int) else f".{at}" for at in entry["loc"])
        messages.append(f"{path.lstrip('.')}: {entry['msg']}")
    raise EngineBadRequestError("; ".join(messages), str(found[0]["loc"][0]))


def parse_generation(kind: type[B], body: bytes) -> B:
    """Raises EngineBadRequestError for what `kind` forbids or the engine does not have."""
    fields = json_object(body)
    for name in _UNSUPPORTED.keys() & fields.keys():
        if fields[name] not in _UNSUPPORTED[name]:
            raise EngineBadRequestError(
                f"{name} is not supported by this engine; leave it out", name
            )
    if fields.get("stream_options") and not fields.get("stream"):
        raise EngineBadRequestError(
            "stream_options can only be set when stream is true", "stream_options"
        )
    return parse(kind, fields)
