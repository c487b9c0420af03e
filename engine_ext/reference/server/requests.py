"""The fields of the OpenAI endpoints' bodies, and the errors for invalid ones.

Unknown fields are ignored. Known ones that would change the answer and that this engine does not
have are refused, unless they ask for what happens anyway.

A request may want its answer in a form: `response_format`, or the arguments of a tool, if
`tool_choice` names one, or is "required" and there is only one. A grammar then admits nothing else.
With "auto" the model's text is text: only a model's own parser could recognize a call in it.
"""

import contextlib
from http import HTTPStatus
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

import orjson
import pydantic
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field

from engine_ext.common.load_failure import KEY
from engine_ext.scheduler.admission import parse_threshold

INT64 = 2**63
MAX_LOGPROBS = 20
MAX_SALT_CHARS = 128
FORBIDDEN_IN_SALT = frozenset("@/\\\0")

_UNSUPPORTED: dict[str, Any] = {
    **dict.fromkeys(("continue_final_message", "echo", "include_stop_str_in_output"), False),
    "use_beam_search": False,
    **dict.fromkeys(("frequency_penalty", "min_p", "presence_penalty"), 0),
    **dict.fromkeys(("best_of", "n", "repetition_penalty"), 1),
    **{
        name: []
        for name in ("allowed_token_ids", "bad_words", "logits_processors", "stop_token_ids")
    },
    **dict.fromkeys(("chat_template", "prompt_embeds", "prompt_logprobs", "structured_outputs")),
    "truncate_prompt_tokens": None,
    "add_generation_prompt": True,
    "logit_bias": {},
    "suffix": "",
}
"""Field: the value that asks for nothing; with None, every value asks for something."""


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
    continuous_usage_stats: bool | None = False


class NamedSchema(BaseModel):
    body: dict[str, Any] = Field(alias="schema")


class ResponseFormat(BaseModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    def schema_of_answer(self) -> dict[str, Any] | None:
        """None if the answer is free. Raises EngineBadRequestError."""
        if self.type != "json_schema":
            return {"type": "object"} if self.type == "json_object" else None
        if self.json_schema is None:
            problem = "response_format of type json_schema needs the field json_schema"
            raise EngineBadRequestError(problem, "response_format")
        return self.json_schema.body


def _check_salt(salt: str) -> str:
    """Raises ValueError for a salt that vLLM refuses."""
    if not 0 < len(salt) <= MAX_SALT_CHARS or not FORBIDDEN_IN_SALT.isdisjoint(salt):
        raise ValueError(
            f"must have 1 to {MAX_SALT_CHARS} characters, and none of '@', '/', '\\\\' and NUL"
        )
    return salt


class GenerationBody(_Body):
    """What completions and chat completions share."""

    id_prefix: ClassVar[str]

    max_tokens: int | None = None
    min_tokens: int = Field(0, ge=0)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: Annotated[int, Field(ge=-1), AfterValidator(lambda value: max(value, 0))] = 0
    seed: int | None = Field(None, ge=-INT64, lt=INT64)
    stop: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=1024)], ...],
        BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
        Field(max_length=64),
    ] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    request_id: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    cache_salt: Annotated[str, AfterValidator(_check_salt)] | None = None
    cache_hit_threshold: Annotated[float | None, BeforeValidator(parse_threshold)] = None


class CompletionBody(GenerationBody):
    id_prefix = "cmpl"

    prompt: str | list[pydantic.StrictInt] = ""
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


class ToolChoice(BaseModel):
    function: dict[Literal["name"], str]


class ForcedTool(NamedTuple):
    """The tool whose arguments the answer is."""

    name: str
    parameters: dict[str, Any]
    finish_reason: str
    """The finish reason of a complete answer: "stop" if the request names the tool, as in OpenAI's
    API."""


class ChatBody(GenerationBody, ChatTemplateRequest):
    id_prefix = "chatcmpl"

    max_completion_tokens: int | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS)

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    def forced_tool(self) -> ForcedTool | None:
        """None if the model may answer freely. Raises EngineBadRequestError."""
        choice = self.tool_choice
        if choice in (None, "auto", "none"):
            return None
        named = choice.function["name"] if isinstance(choice, ToolChoice) else None
        functions = [tool.get("function") for tool in self.tools or []]
        known = [one for one in functions if isinstance(one, dict) and "name" in one]
        wanted = [one for one in known if named in (None, one["name"])]
        if len(wanted) != 1:
            problem = f"tool_choice must mean one of the tools, not {len(wanted)}: give its name"
            raise EngineBadRequestError(problem, "tool_choice")
        parameters = wanted[0].get("parameters") or {"type": "object", "properties": {}}
        return ForcedTool(wanted[0]["name"], parameters, "stop" if named else "tool_calls")


class TokenizeTextBody(_Body):
    prompt: str
    add_special_tokens: bool = True


B = TypeVar("B", bound=BaseModel)


def json_object(body: bytes) -> dict[str, Any]:
    """The object without its null members: in this API null means the same as absent. orjson
    refuses what would hurt later: NaN and infinities, lone surrogates, deep nesting."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise EngineBadRequestError(f"the request body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise EngineBadRequestError("the request body must be a JSON object")
    return {name: member for name, member in value.items() if member is not None}


def parse(kind: type[B], fields: dict[str, Any]) -> B:
    """Raises EngineBadRequestError that names the first wrong field."""
    try:
        return kind.model_validate(fields)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = "".join(f"[{at}]" if isinstance(at, int) else f".{at}" for at in first["loc"])
    raise EngineBadRequestError(f"{path.lstrip('.')}: {first['msg']}", str(first["loc"][0]))


def parse_generation(kind: type[B], body: bytes) -> B:
    """Raises EngineBadRequestError for what `kind` forbids or the engine does not have."""
    fields = json_object(body)
    for name in _UNSUPPORTED.keys() & fields.keys():
        if fields[name] != _UNSUPPORTED[name]:
            raise EngineBadRequestError(f"{name} is not supported by this engine", name)
    return parse(kind, fields)
