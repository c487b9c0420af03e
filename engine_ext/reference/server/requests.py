"""The fields of the OpenAI endpoints' bodies, and the errors for invalid ones.

Unknown fields are ignored. Known ones that would change the answer and that this engine does not
have are refused, unless they ask for what happens anyway.
"""

import codecs
import contextlib
from http import HTTPStatus
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import orjson
import pydantic
from pydantic import BaseModel, BeforeValidator, Field

from engine_ext.common.load_failure import KEY
from engine_ext.scheduler.admission import parse_threshold

INT64 = 2**63
MAX_LOGPROBS = 20
MAX_REPORTED_ERRORS = 3

_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "min_p": (0,),
    "presence_penalty": (0,),
    "prompt_embeds": ([],),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "structured_outputs": (),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
"""Field: the values that ask for nothing."""


class ApiError(Exception):
    """An answer that is an error, with its HTTP status."""

    def __init__(
        self,
        status: HTTPStatus,
        message: str,
        param: str | None = None,
        load_failure: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = error_body(status, message, param)
        if load_failure is not None:
            self.body["error"][KEY] = load_failure


class EngineBadRequestError(ApiError):
    """The request is wrong, and the message says how."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(HTTPStatus.BAD_REQUEST, message, param)


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """OpenAI's error object, with vLLM's names for `type`: the status's phrase and `Error`."""
    kind = HTTPStatus(status).phrase.replace(" ", "").removesuffix("Error") + "Error"
    return {"error": {"message": message, "type": kind, "param": param, "code": int(status)}}


class _Body(BaseModel):
    model_config = pydantic.ConfigDict(extra="ignore", frozen=True)

    model: str | None = None


class StreamOptions(BaseModel):
    include_usage: bool | None = False


class NamedSchema(BaseModel):
    body: dict[str, Any] = Field(alias="schema")


class ResponseFormat(BaseModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class GenerationBody(_Body):
    """What completions and chat completions share."""

    id_prefix: ClassVar[str]

    n: int = Field(1, ge=1, le=128)
    max_tokens: int | None = None
    min_tokens: int = Field(0, ge=0)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    seed: int | None = Field(None, ge=-INT64, lt=INT64)
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=1024)]],
        BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
        Field(max_length=64),
    ] = []
    stop_token_ids: list[int] = Field([], max_length=1024)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    request_id: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    cache_hit_threshold: Annotated[float | None, BeforeValidator(parse_threshold)] = None


class CompletionBody(GenerationBody):
    id_prefix = "cmpl"

    prompt: Any = None
    max_tokens: int | None = 16  # A chat continues to the end of the context.
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_special_tokens: bool = True

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


def _read_arguments(value: Any) -> dict[str, Any]:
    """Templates want arguments as an object; clients send them as a string of JSON.

    Arguments that a model wrote badly once stay in the history: to refuse them would end the
    conversation. They become an empty object, as in vLLM.
    """
    if isinstance(value, str):
        with contextlib.suppress(orjson.JSONDecodeError):
            value = orjson.loads(value)
    return value if isinstance(value, dict) else {}


class CalledFunction(BaseModel, extra="allow"):
    arguments: Annotated[dict[str, Any], BeforeValidator(_read_arguments)] = {}


class ToolCall(BaseModel, extra="allow"):
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(BaseModel, extra="allow"):
    role: str
    content: str | list[str | TextPart] | None = None
    tool_calls: list[ToolCall] | None = None

    def for_template(self) -> dict[str, Any]:
        """Plain text, and tool calls only if there are any. Raises ValueError for deep nesting."""
        content = self.content or ""
        if isinstance(content, list):
            content = "\n".join(part if isinstance(part, str) else part.text for part in content)
        unused = set() if self.tool_calls else {"tool_calls"}
        # Agents send no content beside their tool calls, and templates add it to other strings.
        return {**self.model_dump(exclude=unused), "content": content}


class ChatTemplateRequest(_Body):
    """What the chat template needs."""

    messages: list[ChatMessage] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] = {}


class ToolName(BaseModel):
    name: str


class ToolChoice(BaseModel):
    function: ToolName


class ChatBody(GenerationBody, ChatTemplateRequest):
    id_prefix = "chatcmpl"

    max_completion_tokens: int | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS)

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None


class TokenizeTextBody(_Body):
    prompt: str
    add_special_tokens: bool = True


B = TypeVar("B", bound=BaseModel)


def json_object(body: bytes) -> dict[str, Any]:
    """The object without its null members: in this API null means the same as absent.

    A byte order mark before it is no harm. orjson refuses what would hurt later: NaN and
    infinities, lone surrogates, deep nesting.
    """
    try:
        value = orjson.loads(body.removeprefix(codecs.BOM_UTF8))
    except orjson.JSONDecodeError as error:
        raise EngineBadRequestError(f"the request body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise EngineBadRequestError("the request body must be a JSON object")
    return {name: member for name, member in value.items() if member is not None}


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
