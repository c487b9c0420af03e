"""`GET /disagg/leases`: an engine's leases, its quarantined blocks, its peers and its latest
transfers.

A client that knows a request's id can release its blocks (release.py), and the random part of an
id is short. Therefore the page shows ids hashed with a key of the engine's process. A client that
knows an id can look it up with `?request_id=`. Ended transfers are listed by the client's part of
the id, which gives no rights. That part is hashed without a key, so that a router recognises its
own requests and cannot identify others.
"""

import re
import secrets
from collections.abc import Sequence
from dataclasses import fields
from hashlib import blake2b
from typing import Any

from engine_ext.common.inspection import Inspection, TransferSeen

PATH = "/disagg/leases"
ASKED = "request_id"
DURATIONS = ("seconds", "busy_seconds")
"""The durations of transfers are rounded to microseconds, all other times to milliseconds."""
ANSWER_SECONDS = 10.0
"""The time in which an engine must answer. It answers between two steps."""

_NAME = re.compile(
    # The choice, the kind, the client's part, our router's attempt, the prompt, the engine's part.
    r"(?:(?:\d+_)?(?:chat)?cmpl-)?(.+?)(?:\.[0-9a-f]{10}\d+)?(?:-\d+)?(?:-[0-9a-f]{8})?"
)
_FOREIGN = re.compile(r"[^A-Za-z0-9._-]")
"""Characters that engines may replace in a client's id."""


def new_key() -> bytes:
    return secrets.token_bytes(16)


def hashed(request_id: str, key: bytes) -> str:
    return blake2b(request_id.encode(), digest_size=8, key=key).hexdigest()


def found_by(request_id: str) -> str:
    """Return the hash of the client's `X-Request-Id`, which is part of the engine's request id."""
    name = _NAME.fullmatch(request_id)
    own = _FOREIGN.sub("-", name[1] if name else request_id)
    return blake2b(own.encode(), digest_size=8).hexdigest()


def page(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"ranks": list(ranks)}


def rank(seen: Inspection, key: bytes, dp_rank: int = 0) -> dict[str, Any]:
    """Return the part of one tensor rank as JSON."""
    shown: dict[str, Any] = {"dp_rank": dp_rank}
    for field in fields(seen):
        value = getattr(seen, field.name)
        is_list = isinstance(value, tuple)
        shown[field.name] = [_shown(one, key) for one in value] if is_list else value
    return shown


def _shown(one: Any, key: bytes) -> dict[str, Any]:
    """Return a record of `engine_ext.common.inspection` as JSON, without its request id."""
    shown: dict[str, Any] = {}
    for name, value in one._asdict().items():
        match value:
            case str() if name == "request_id" and isinstance(one, TransferSeen):
                shown["found_by"] = found_by(value)
            case str() if name == "request_id":
                shown["request"] = hashed(value, key)
            case float():
                shown[name] = round(value, 6 if name in DURATIONS else 3)
            case tuple():
                shown[name] = [_shown(part, key) for part in value]
            case _:
                shown[name] = value
    return shown
