"""JSON whose numbers are written as they were read.

What a client or an engine sends is read, changed in a few fields and written again. A float gives
back most numbers as they were written, but not 1.50, 1e5, 1e400 or 0.1 with forty digits; and
orjson reads an integer beyond 64 bits as a float. So `loads` reads with msgspec, which is as fast,
and which hands over each number with a fraction or an exponent as text. It becomes a float, or a
`WrittenNumber`, which knows its text, where a float would be written otherwise. An integer is an
int, however large.

Both cost a call of Python for each number. So in a text of more than SLOW_LIMIT bytes only the
values of the outermost object are treated in this way, since the router looks at some of them. The
other numbers stay text, as orjson's Fragment, which `dumps` copies and `number` reads. The integer
-0 loses its sign there, and an integer of more digits than Python converts is refused: Python's own
reader, which is ten times slower, reads texts with these.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

import msgspec
import orjson
from msgspec import Struct
from msgspec.structs import asdict
from orjson import Fragment

MIN_INTEGER, MAX_INTEGER = -(2**63), 2**64 - 1
"""Of the integers that orjson can write."""
MAX_NESTING = 254
"""Objects and lists inside each other that orjson writes."""
SLOW_LIMIT = 1024 * 1024
"""Bytes: all numbers of such a text take 0.4 s at worst."""
MAX_OUTER_FIELDS = 10_000
"""Values of the outermost object of a larger text. No request or answer has so many."""
# An integer with the sign that every reader drops. The literal comes first: it is found faster.
NEGATIVE_ZERO = re.compile(rb"-0(?<=[:,\[\s]-0)(?=[\s,\]}])")

# A backslash and what it escapes: a surrogate pair, half of one (the group), or a character.
SURROGATES = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)


class WrittenNumber(float):
    """A number as it was written, in `text`. It compares and computes as the nearest float."""

    __slots__ = ("text",)

    text: str

    def __new__(cls, text: str) -> WrittenNumber:
        number = super().__new__(cls, text)
        number.text = text
        return number

    def __repr__(self) -> str:
        return self.text


def loads(raw: bytes) -> Any:
    """Read a JSON text. Raises orjson.JSONDecodeError."""
    if len(raw) > SLOW_LIMIT:
        return _loads_large(raw)
    try:
        content = _decode(raw)
    except msgspec.ValidationError:  # an integer with more digits than Python converts
        return _loads_slowly(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return orjson.loads(raw)  # which says what is wrong, and where
    if raw.find(b"-0") >= 0 and NEGATIVE_ZERO.search(raw):  # `in` costs three times as much
        return _loads_slowly(raw)
    return content


def loads_leniently(raw: bytes) -> Any:
    """Read a text that `loads` refuses only for its values. NaN and infinite numbers become None;
    halves of surrogate pairs and bytes that are no UTF-8 become U+FFFD, and control characters in
    strings stay. Raises orjson.JSONDecodeError."""
    text = SURROGATES.sub(_replace_half, raw.decode("utf-8", "replace"))
    try:
        return json.loads(
            text,
            strict=False,
            parse_float=read_number,
            parse_int=_integer,
            parse_constant=lambda name: None,
        )
    except (ValueError, RecursionError) as error:
        raise orjson.JSONDecodeError(str(error), "", 0) from None


def dumps(content: object, option: int | None = None) -> bytes:
    """Write JSON; a Struct becomes an object. `option` is orjson's.

    Raises orjson.JSONEncodeError for what can be read but not written: nesting beyond 250 levels.
    """
    try:
        return orjson.dumps(content, _replacement, option)
    except orjson.JSONEncodeError:
        return orjson.dumps(_with_large_integers(content, 0), _replacement, option)


def number(value: object) -> Any:
    """Return a value inside an object or a list as a float, if it is a number that stayed text."""
    if type(value) is not Fragment:
        return value
    return read_number(orjson.dumps(value).decode())


def read_number(text: str) -> float:
    """Return a number that is written with a fraction or an exponent, or has too many digits."""
    as_float = float(text)
    # Python and orjson write a float alike, except for the form of an exponent.
    return as_float if repr(as_float) == text and "e" not in text else WrittenNumber(text)


_decode = msgspec.json.Decoder(float_hook=read_number).decode
_decode_large = msgspec.json.Decoder(float_hook=Fragment).decode


def _loads_large(raw: bytes) -> Any:
    try:
        content = _decode_large(raw)
    except msgspec.ValidationError:
        raise orjson.JSONDecodeError("an integer has too many digits", "", 0) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return orjson.loads(raw)
    if type(content) is dict and len(content) <= MAX_OUTER_FIELDS:
        for name, value in content.items():
            if type(value) is Fragment:
                content[name] = number(value)
    return content


def _loads_slowly(raw: bytes) -> Any:
    """Read by Python's own reader, which can hand over every number as text."""
    try:
        return json.loads(
            raw.decode(), parse_float=read_number, parse_int=_integer, parse_constant=_refuse
        )
    except (ValueError, RecursionError) as error:
        raise orjson.JSONDecodeError(str(error), "", 0) from None


def _integer(text: str) -> float:
    try:
        value = int(text)
    except ValueError:  # Python converts some thousand digits
        return WrittenNumber(text)
    return value if value or text == "0" else WrittenNumber(text)


def _replace_half(escape: re.Match[str]) -> str:
    return "\\ufffd" if escape[1] else escape[0]


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _replacement(value: object) -> object:
    if type(value) is WrittenNumber:
        return Fragment(value.text)
    if isinstance(value, Struct):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def _with_large_integers(value: object, level: int) -> object:
    """A copy with each integer that orjson cannot write as text. Too deep, it stays as it is."""
    if type(value) is int:
        return value if MIN_INTEGER <= value <= MAX_INTEGER else Fragment(str(value))
    if level > MAX_NESTING:
        return value
    if isinstance(value, dict):
        return {name: _with_large_integers(one, level + 1) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_with_large_integers(one, level + 1) for one in value]
    return value
