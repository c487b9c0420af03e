"""What a request wants its answer's form to be: OpenAI's `response_format`, vLLM's
`structured_outputs`."""

from typing import Any, NamedTuple

import orjson

from engine_ext.reference.grammar import Grammar
from engine_ext.reference.server.errors import EngineBadRequestError
from engine_ext.reference.server.requests import GenerationBody
from engine_ext.reference.server.served_model import ServedModel
from engine_ext.reference.server.tool_calls import Forced

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
