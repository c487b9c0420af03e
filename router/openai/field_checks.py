"""Reading what clients sent, field by field: each is what it should be, or a 400 names it."""

from __future__ import annotations

from router.openai.answers import Json
from router.openai.errors import BadRequestError


def wrong(where: str, why: str) -> BadRequestError:
    return BadRequestError(f"{where}: {why}", where)


def unknown(where: str, what: str, kind: object) -> BadRequestError:
    shown = repr(kind)[:80] if isinstance(kind, str) else "none"
    return wrong(where, f"{what} of type {shown} are not supported")


def text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise wrong(where, "must be a string")
    return value


def items(value: object, where: str) -> list[Json]:
    """A list of objects."""
    if not isinstance(value, list):
        raise wrong(where, "must be a list")
    for number, item in enumerate(value):
        if not isinstance(item, dict):
            raise wrong(f"{where}[{number}]", "must be an object")
    return value


def mapping(value: object, where: str) -> Json:
    if not isinstance(value, dict):
        raise wrong(where, "must be an object")
    return value


def plain(parts: list[Json]) -> str | list[Json]:
    """One text instead of parts, where all of them are text: templates may know no parts."""
    if all(part.get("type") == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts
