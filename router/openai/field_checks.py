"""Check the fields of a request's body; a wrong one is a BadRequestError that names the field."""

from __future__ import annotations

from router.openai.answers import Json
from router.openai.errors import BadRequestError


def field_error(where: str, why: str) -> BadRequestError:
    return BadRequestError(f"{where}: {why}", where)


def unsupported_type(where: str, what: str, kind: object) -> BadRequestError:
    shown = repr(kind)[:80] if isinstance(kind, str) else "none"
    return field_error(where, f"{what} of type {shown} are not supported")


def require_text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise field_error(where, "must be a string")
    return value


def require_objects(value: object, where: str) -> list[Json]:
    """Return the value if it is a list of objects."""
    if not isinstance(value, list):
        raise field_error(where, "must be a list")
    for number, item in enumerate(value):
        if not isinstance(item, dict):
            raise field_error(f"{where}[{number}]", "must be an object")
    return value


def require_object(value: object, where: str) -> Json:
    if not isinstance(value, dict):
        raise field_error(where, "must be an object")
    return value


def join_text_parts(parts: list[Json]) -> str | list[Json]:
    """Return one text if all parts are text: some chat templates accept no list of parts."""
    if all(part.get("type") == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts
