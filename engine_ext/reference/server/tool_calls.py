"""`tool_choice` "required", or one tool by name: the answer is kept to calls, and told as calls.

Whether an answer is a call is not guessed at: with "auto" what the model says is text.
"""

import json
import uuid
from collections.abc import Iterator
from typing import Any, NamedTuple

from engine_ext.reference.server.errors import EngineBadRequestError
from engine_ext.reference.server.requests import ChatBody

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
            return [self._call(one["name"], _written(one["parameters"])) for one in self._ended()]
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


def _written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _wrong(message: str) -> EngineBadRequestError:
    return EngineBadRequestError(message, "tool_choice")
