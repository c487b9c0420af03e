"""JSON whose numbers are written as they were read.

What a client or an engine sends is read, changed in a few fields and written again. A float gives
back most numbers as they were written, but not 1.50, 1e5, 1e400 or 0.1 with forty digits; and
orjson reads an integer beyond 64 bits as a float. So `loads` makes a `WrittenNumber`, which knows
its text, of each number that would come out otherwise, and `dumps` writes that text.

An ordinary body pays for this with one call of Python for each number with a fraction or an
exponent: msgspec reads as fast as orjson, and hands over such numbers as text.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

import msgspec
import orjson
from msgspec import Struct
from msgspec.structs import asdict

SMALLEST, LARGEST = -(2**63), 2**64 - 1
"""Of the integers that orjson can write."""
MOST_NESTED = 254
"""Objects and lists inside each other that orjson writes."""
# An integer with the sign that every reader drops. The literal comes first: it is found faster.
NEGATIVE_ZERO = re.compile(rb"-0(?<=[:,\[\s]-0)(?=[\s,\]}])")


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
    try:
        content = _decode(raw)
    except msgspec.ValidationError:  # an integer with more digits than Python converts
        return _loads_slowly(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return orjson.loads(raw)  # which says what is wrong, and where
    if raw.find(b"-") >= 0 and NEGATIVE_ZERO.search(raw) is not None:
        return _loads_slowly(raw)
    return content


def dumps(content: object, option: int | None = None) -> bytes:
    """Write JSON; a Struct becomes an object. `option` is orjson's.

    Raises orjson.JSONEncodeError for what can be read but not written: nesting beyond 250 levels.
    """
    try:
        return orjson.dumps(content, _replacement, option)
    except orjson.JSONEncodeError:
        return orjson.dumps(_with_large_integers(content, 0), _replacement, option)


def _number(text: str) -> float:
    """`text` has a fraction or an exponent. Without an exponent, orjson writes a float as Python
    does."""
    number = float(text)
    return number if repr(number) == text and "e" not in text else WrittenNumber(text)


_decode = msgspec.json.Decoder(float_hook=_number).decode


def _loads_slowly(raw: bytes) -> Any:
    """The same, by Python's own reader, which can hand over every number as text."""
    try:
        return json.loads(
            raw.decode(), parse_float=_number, parse_int=_integer, parse_constant=_refuse
        )
    except (ValueError, RecursionError) as error:
        raise orjson.JSONDecodeError(str(error), "", 0) from None


def _integer(text: str) -> float:
    try:
        number = int(text)
    except ValueError:  # Python converts some thousand digits
        return WrittenNumber(text)
    return number if number or text == "0" else WrittenNumber(text)


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _replacement(value: object) -> object:
    if type(value) is WrittenNumber:
        return orjson.Fragment(value.text)
    if isinstance(value, Struct):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} is no JSON")


def _with_large_integers(value: object, level: int) -> object:
    """A copy with each integer that orjson cannot write as text. Too deep, it stays as it is."""
    if type(value) is int:
        return value if SMALLEST <= value <= LARGEST else orjson.Fragment(str(value))
    if level > MOST_NESTED:
        return value
    if isinstance(value, dict):
        return {name: _with_large_integers(one, level + 1) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_with_large_integers(one, level + 1) for one in value]
    return value
