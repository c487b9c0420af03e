"""What a request says of its body: of which type it is, and that nothing has packed it. Pure.

A foreign page may have a browser POST text/plain, a form, or a body of no type at all, without
asking us first. Taken for JSON it would be done, unseen by that page, at its victim's cost. So a
body is what it says, and one that says nothing is taken for JSON only where no page sends it.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from router.openai.errors import UnsupportedTypeError
from router.proxy.exchange import Header

JSON, MULTIPART = b"application/json", b"multipart/form-data"
USUAL = (b"content-type", JSON)
NAME = itemgetter(0)
IDENTITY = (b"", b"identity")


def check_json(headers: Sequence[Header]) -> None:
    """Raises UnsupportedTypeError."""
    if USUAL in headers and b"content-encoding" not in map(NAME, headers):
        return
    given = dict(headers)
    kind = given.get(b"content-type")
    if kind != JSON and not (_is_json(kind) if kind else b"origin" not in given):
        said = "names no Content-Type" if not kind else f"is {_shown(kind)}"
        raise UnsupportedTypeError(f"the body {said}: only application/json is taken here")
    if b"content-encoding" in given:
        _check_encoding(given[b"content-encoding"])


def check_form(headers: Sequence[Header]) -> None:
    """A form with files, of a client that is no foreign page. Raises UnsupportedTypeError."""
    given = dict(headers)
    kind = given.get(b"content-type", b"")
    if kind.partition(b";")[0].strip().lower() != MULTIPART:
        text = f"the body is {_shown(kind)}: only multipart/form-data is taken here"
        raise UnsupportedTypeError(text)
    if b"content-encoding" in given:
        _check_encoding(given[b"content-encoding"])


def _check_encoding(value: bytes) -> None:
    if value.strip().lower() not in IDENTITY:
        text = f"Content-Encoding {_shown(value)} is not taken: send the body as it is"
        raise UnsupportedTypeError(text)


def _is_json(kind: bytes) -> bool:
    kind = kind.partition(b";")[0].strip().lower()
    return kind == JSON or (kind.startswith(b"application/") and kind.endswith(b"+json"))


def _shown(value: bytes) -> str:
    return value[:100].decode("ascii", "replace") or "of no type"
