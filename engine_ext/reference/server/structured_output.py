"""What a request wants its answer's form to be: OpenAI's `response_format`, vLLM's
`structured_outputs`."""

import json
import uuid
from collections.abc import Iterator
from typing import Any, NamedTuple

import orjson

from engine_ext.reference.grammar import Grammar
from engine_ext.reference.server.errors import EngineBadRequestError
from engine_ext.reference.server.requests import ChatBody, GenerationBody
from engine_ext.reference.server.served_model import ServedModel

ANY_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}}
USAGE = 'Correct usage: `{"type": "function", "function": {"name": "my_function"}}`'


class Forced(NamedTuple):
    """`schema` is what an answer is: arguments of the tool `name`, or a list of calls."""

    schema: dict[str, Any]
    name: str | None = None


def forced_by(request: ChatBody) -> Forced | None:
    """None where the model may speak freely.

    Raises EngineBadRequestError, mostly in vLLM's words.
    """
    choice = request.tool_choice
    if choice in (None, "auto", "none"):
        return None
    if choice != "required" and not isinstance(choice, dict):
        raise _wrong(
            f"Invalid value for `tool_choice`: {choice!s:.200}! "
            'Only named tools, "none", "auto" or "required" are supported.'
        )
    if request.tools is None:
        raise _wrong("When using `tool_choice`, `tools` must be set.")
    functions = dict(_functions(request.tools))
    if isinstance(choice, dict):
        return _of_one(choice, functions)
    if not functions:
        raise _wrong("tool_choice requires a function call, but tools contains no function")
    return Forced(_of_any(functions, is_single=request.parallel_tool_calls is False))


class Calls:
    """One answer while it is written: what of it is told as calls."""

    def __init__(self, forced: Forced) -> None:
        self._name = forced.name
        self._rest = ""
        self._told = 0

    def take(self, text: str) -> list[dict[str, Any]]:
        """Entries of a chunk's `tool_calls`. A named tool's arguments come as they are written, of
        several calls each in one piece."""
        if self._name is None:
            self._rest += text
            if "}" not in text:
                return []  # so nothing has ended
            return [
                self._call(one["name"], json.dumps(one["parameters"], ensure_ascii=False))
                for one in self._ended()
            ]
        if self._told:
            return [{"index": 0, "function": {"arguments": text}}] if text else []
        return [self._call(self._name, text)]

    def _call(self, name: str, arguments: str) -> dict[str, Any]:
        self._told += 1
        return {
            "index": self._told - 1,
            "id": f"chatcmpl-tool-{uuid.uuid4().hex}",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }

    def _ended(self) -> Iterator[dict[str, Any]]:
        """Elements of the list that are whole by now."""
        while "}" in self._rest:
            start = self._rest.find("{")
            try:
                one, end = json.JSONDecoder().raw_decode(self._rest, max(start, 0))
            except (ValueError, RecursionError):
                return
            self._rest = self._rest[end:]
            if isinstance(one, dict) and {"name", "parameters"} <= one.keys():
                yield one


def calls_in(text: str, forced: Forced) -> list[dict[str, Any]]:
    """Of a whole answer: a message's `tool_calls`."""
    told = Calls(forced).take(text)
    return [{name: value for name, value in one.items() if name != "index"} for one in told]


def _of_one(choice: dict[str, Any], functions: dict[str, dict[str, Any]]) -> Forced:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise _wrong(f"`tool_choice` names no function! {USAGE}")
    if name not in functions:
        raise _wrong(
            "The tool specified in `tool_choice` does not match any of the specified `tools`"
        )
    return Forced(functions[name], name)


def _of_any(functions: dict[str, dict[str, Any]], *, is_single: bool) -> dict[str, Any]:
    """What arguments refer to as `#/$defs/...` moves to the root with them."""
    shared: dict[str, Any] = {}
    calls = []
    for name, parameters in functions.items():
        own = dict(parameters)
        for key, one in _definitions(own.pop("$defs", {}), name).items():
            if shared.setdefault(key, one) != one:
                raise EngineBadRequestError(
                    f"Tool definition '{key}' has multiple schemas, which is not supported.",
                    "tools",
                )
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, "parameters": own},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    most = {"maxItems": 1} if is_single else {}
    items = {"anyOf": calls}
    return {"type": "array", "minItems": 1, **most, "items": items, "$defs": shared}


def _definitions(given: Any, name: str) -> dict[str, Any]:
    if isinstance(given, dict):
        return given
    raise EngineBadRequestError(
        f"`$defs` in the parameters of tool '{name}' must be an object", "tools"
    )


def _functions(tools: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for tool in tools:
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            continue
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, dict):
            raise EngineBadRequestError("tools[].function.parameters must be an object", "tools")
        yield function["name"], parameters or ANY_ARGUMENTS


def _wrong(message: str) -> EngineBadRequestError:
    return EngineBadRequestError(message, "tool_choice")


ANY_OBJECT = {"type": "object"}


class StructuredOutputFormat(NamedTuple):
    kind: str
    text: str
    param: str


def grammar_of(
    request: GenerationBody, model: ServedModel, forced: Forced | None = None
) -> Grammar | None:
    """None where the answer is free. Raises EngineBadRequestError for a form that makes no sense.
    `forced`: calls, whatever other form is wanted."""
    form = _of_response_format(request.response_format)
    if forced is not None:
        form = StructuredOutputFormat("json_schema", _written(forced.schema), "tool_choice")
    if form is None:
        form = _of_structured_outputs(request.structured_outputs)
    if form is None:
        return None
    if model.grammars is None:
        raise EngineBadRequestError(f"{form.param} is not supported by this model", form.param)
    try:
        return model.grammars.compile(form.kind, form.text)
    except ValueError as error:
        raise EngineBadRequestError(
            f"{form.param} cannot be followed: {error}", form.param
        ) from None


def _of_response_format(wanted: dict[str, Any] | None) -> StructuredOutputFormat | None:
    param = "response_format"
    kind = "text" if wanted is None else wanted.get("type")
    if wanted is None or kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputFormat("json_schema", _written(ANY_OBJECT), param)
    if kind != "json_schema":
        raise EngineBadRequestError(
            "response_format.type must be text, json_object or json_schema", param
        )
    described = wanted.get("json_schema")
    if described is None:
        raise EngineBadRequestError(
            "When response_format type is 'json_schema', the 'json_schema' field must be provided.",
            param,
        )
    schema = described.get("schema") if isinstance(described, dict) else None
    if not isinstance(schema, dict):
        raise EngineBadRequestError("response_format.json_schema.schema must be an object", param)
    return StructuredOutputFormat("json_schema", _written(schema), param)


def _of_structured_outputs(wanted: dict[str, Any] | None) -> StructuredOutputFormat | None:
    param = "structured_outputs"
    given = {name: value for name, value in (wanted or {}).items() if _asks(name, value)}
    if wanted is None:
        return None
    if len(given) != 1:
        raise EngineBadRequestError(
            f"structured_outputs must have exactly one of {', '.join(_READERS)}", param
        )
    ((name, value),) = given.items()
    form = _READERS[name](value)
    if form is None:
        raise EngineBadRequestError(f"structured_outputs.{name} has the wrong type", param)
    return StructuredOutputFormat(*form, param)


def _written(value: Any) -> str:
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError as error:  # It is nested too deeply.
        raise EngineBadRequestError(f"the form of the answer cannot be followed: {error}") from None


def _asks(name: str, value: Any) -> bool:
    return name in _READERS and value is not None and value is not False


def _schema(value: Any) -> tuple[str, str] | None:
    if isinstance(value, dict):
        value = _written(value)
    return ("json_schema", value) if isinstance(value, str) else None


def _object(value: Any) -> tuple[str, str] | None:
    return ("json_schema", _written(ANY_OBJECT)) if value is True else None


def _regex(value: Any) -> tuple[str, str] | None:
    return ("regex", value) if isinstance(value, str) else None


def _choice(value: Any) -> tuple[str, str] | None:
    is_list = isinstance(value, list) and value
    return ("choice", _written(value)) if is_list and all(map(_is_text, value)) else None


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _grammar(value: Any) -> tuple[str, str] | None:
    return ("grammar", value) if isinstance(value, str) else None


_READERS = {
    "json": _schema,
    "json_object": _object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
