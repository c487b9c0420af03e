"""The form that a request wants its answer to have: OpenAI's `response_format` and forced
`tool_choice`.

With `tool_choice` "required", or one tool by name, the grammar admits only calls, and the answer is
written as calls. With "auto" the model's text is text: only a model's own parser could recognize a
call in it.
"""

import json
import uuid
from typing import Any, NamedTuple

import orjson

from engine_ext.reference.grammar import Grammar
from engine_ext.reference.server.prompts import ServedModel
from engine_ext.reference.server.requests import (
    ChatBody,
    EngineBadRequestError,
    GenerationBody,
    ResponseFormat,
    ToolChoice,
)

ANY_OBJECT = {"type": "object"}
ANY_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}}


class Forced(NamedTuple):
    """`schema` is what an answer is: arguments of the tool `name`, or a list of calls."""

    schema: dict[str, Any]
    name: str | None = None


def grammar_of(
    request: GenerationBody, model: ServedModel, forced: Forced | None
) -> Grammar | None:
    """None if the answer is free. Raises EngineBadRequestError for a form that makes no sense.
    `forced` calls replace any other form."""
    param = "tool_choice" if forced else "response_format"
    schema = forced.schema if forced else _response_schema(request.response_format)
    if schema is None:
        return None
    try:
        return model.grammars.compile(orjson.dumps(schema).decode())
    except (ValueError, orjson.JSONEncodeError) as error:  # orjson's: It is nested too deeply.
        raise EngineBadRequestError(f"{param} cannot be followed: {error}", param) from None


def _response_schema(wanted: ResponseFormat | None) -> dict[str, Any] | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return ANY_OBJECT
    if wanted.json_schema is None:
        raise EngineBadRequestError(
            "When response_format type is 'json_schema', the 'json_schema' field must be provided.",
            "response_format",
        )
    return wanted.json_schema.body


def forced_by(request: ChatBody) -> Forced | None:
    """None if the model may answer freely. Raises EngineBadRequestError."""
    choice = request.tool_choice
    if choice in (None, "auto", "none"):
        return None
    functions = _functions(request.tools or [])
    if isinstance(choice, ToolChoice):
        name = choice.function.name
        if name not in functions:
            raise EngineBadRequestError(
                "The tool specified in `tool_choice` does not match any of the specified `tools`",
                "tool_choice",
            )
        return Forced(functions[name], name)
    if not functions:
        raise EngineBadRequestError(
            "tool_choice requires a function call, but tools contains no function", "tool_choice"
        )
    return Forced(_list_of_calls(functions, is_single=request.parallel_tool_calls is False))


def _functions(tools: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The schema of each function's arguments, by name."""
    functions = {}
    for tool in tools:
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            continue
        parameters = function.get("parameters") or ANY_ARGUMENTS
        if not isinstance(parameters, dict) or not isinstance(parameters.get("$defs", {}), dict):
            raise EngineBadRequestError(
                "tools[].function.parameters and its $defs must be objects", "tools"
            )
        functions[function["name"]] = parameters
    return functions


def _list_of_calls(functions: dict[str, dict[str, Any]], *, is_single: bool) -> dict[str, Any]:
    """A schema. Definitions that arguments refer to as `#/$defs/...` move to its root."""
    shared: dict[str, Any] = {}
    calls = []
    for name, parameters in functions.items():
        own = dict(parameters)
        for key, one in own.pop("$defs", {}).items():
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


class Calls:
    """The calls in one answer while it is generated."""

    def __init__(self, forced: Forced) -> None:
        self._name = forced.name
        self._rest = ""
        self._num_calls = 0

    def take(self, text: str) -> list[dict[str, Any]]:
        """Entries of a chunk's `tool_calls`. A named tool's arguments come as they are generated;
        of several calls each comes in one piece."""
        if self._name is not None:
            if not self._num_calls:
                return [self._call(self._name, text)]
            return [{"index": 0, "function": {"arguments": text}}] if text else []
        self._rest += text
        entries = []
        while "}" in text and "}" in self._rest:
            start = self._rest.find("{")
            try:
                one, end = json.JSONDecoder().raw_decode(self._rest, max(start, 0))
            except (ValueError, RecursionError):
                break  # The call is not complete yet.
            self._rest = self._rest[end:]
            if isinstance(one, dict) and {"name", "parameters"} <= one.keys():
                arguments = json.dumps(one["parameters"], ensure_ascii=False)
                entries.append(self._call(one["name"], arguments))
        return entries

    def _call(self, name: str, arguments: str) -> dict[str, Any]:
        self._num_calls += 1
        return {
            "index": self._num_calls - 1,
            "id": f"chatcmpl-tool-{uuid.uuid4().hex}",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }


def calls_in(text: str, forced: Forced) -> list[dict[str, Any]]:
    """The `tool_calls` of a whole message."""
    entries = Calls(forced).take(text)
    return [{name: value for name, value in one.items() if name != "index"} for one in entries]
