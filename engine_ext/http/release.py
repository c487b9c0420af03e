"""`POST /disagg/release`: free the blocks of a finished prefill that no engine will read.

The body is `{"kv_transfer_params": ...}` with the params of the prefill engine's own answer. The
answer is `{"released": true}` if the engine held the blocks. A second or late release changes
nothing. The request's id is the only credential: it has a random part that the engine sends in its
answer and nowhere else.
"""

from typing import Any, NamedTuple

from engine_ext.scheduler.params import MAX_ID_LENGTH

PATH = "/disagg/release"
FIELD = "kv_transfer_params"
MAX_BODY = 4 << 20
"""The limit in bytes. The params of a million tokens in blocks of 16 have half a million bytes."""


class Release(NamedTuple):
    engine_id: str
    request_id: str


def parse(body: Any) -> Release:
    """Read the body. Raises ValueError with a one-line message."""
    params = body.get(FIELD) if isinstance(body, dict) else None
    if not isinstance(params, dict):
        raise ValueError(f"the body must be an object whose {FIELD} is a prefill engine's answer")
    return Release(_text(params, "remote_engine_id"), _text(params, "remote_request_id"))


def _text(params: dict[str, Any], key: str) -> str:
    value = params.get(key)
    if not isinstance(value, str) or not value.isascii() or len(value) > MAX_ID_LENGTH:
        raise ValueError(
            f"{FIELD}.{key} must be a string of at most {MAX_ID_LENGTH} ASCII characters"
        )
    return value
