"""Reading and writing large bodies in steps, between which the event loop serves other clients.

Nothing interrupts a JSON parser, and another thread would not help, because parsers keep the GIL.
So large bodies are parsed and written one after another (`Pacer`), and a long list of token ids,
which takes longest by far, is read piece by piece.
"""

from __future__ import annotations

import asyncio
import re
from random import getrandbits
from typing import Any

import msgspec
import orjson
from msgspec import Struct
from orjson import Fragment

from router.common.exact_json import SLOW_LIMIT, loads

LARGE_BYTES = 256 * 1024
"""A smaller body takes less than two milliseconds."""
PIECE_BYTES = 256 * 1024
MAX_OFFSET = 64 * 1024
"""Bytes of a body in which a long list of ids has to begin."""
IDS = re.compile(rb'"(prompt|token_ids)"\s*:\s*\[(?=\d)')
_read_piece = msgspec.json.Decoder(list[Any], float_hook=Fragment).decode


class Pacer:
    """Lets one long step begin in a pass of the event loop."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def turn(self) -> None:
        """Wait until it is the caller's turn for a step."""
        async with self._lock:
            await asyncio.sleep(0)


class LongIds(Struct, frozen=True):
    """A body with a long list of token ids, and this list as the client has written it."""

    body: dict[str, Any]
    field: str
    written: bytes

    def writable(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return a body with these ids so that they are written as they are."""
        is_unchanged = body.get(self.field) is self.body[self.field]
        return {**body, self.field: Fragment(self.written)} if is_unchanged else body


async def read_long_ids(raw: bytes, pacer: Pacer) -> LongIds | None:
    """Read a JSON object with a long list of token ids piece by piece. Return None if it is another
    body, which `parse_body` reads or refuses."""
    found = IDS.search(raw, 0, MAX_OFFSET) if len(raw) > SLOW_LIMIT else None
    if found is None:
        return None
    start, end = found.end(), raw.find(b"]", found.end())
    if end - start < PIECE_BYTES:
        return None
    # In place of the ids the rest has a number that no client can guess: if it is there where the
    # field is, these ids are the value of the field.
    mark = getrandbits(62)
    ids: list[Any] = []
    try:
        body = loads(b"%b%d%b" % (raw[:start], mark, raw[end:]))
        field = found[1].decode()
        if not isinstance(body, dict) or body.get(field) != [mark]:
            return None
        while start <= end:
            await pacer.turn()
            comma = raw.find(b",", start + PIECE_BYTES, end)
            comma = end if comma < 0 else comma
            piece = _read_piece(b"[%b]" % raw[start:comma])
            if not piece:  # a comma without a number behind it
                return None
            ids += piece
            start = comma + 1
    except (orjson.JSONDecodeError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    body[field] = ids
    return LongIds(body, field, raw[found.end() - 1 : end + 1])
