"""`POST /disagg/release`: the blocks of a finished prefill that nobody will read are free at once.

The body is `{"kv_transfer_params": ...}` with the prefill engine's own answer, sent back to it as
it came; the answer `{"released": true}` where they were held. Saying it twice, or too late, changes
nothing. Who knows the request's name may do it: it holds a random part, and only the answer has it.
"""

from typing import Any, NamedTuple

from engine_ext.scheduler.params import MAX_ID_LENGTH

PATH = "/disagg/release"
FIELD = "kv_transfer_params"
MAX_BODY = 4 << 20
"""Bytes; an answer of a prompt of a million tokens in blocks of 16 has half a million."""


class Release(NamedTuple):
    engine_id: str
    request_id: str


def parse(body: Any) -> Release:
    """Raises ValueError, one line."""
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
