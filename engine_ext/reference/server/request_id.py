"""Ids: `X-Request-Id: abc` is `chatcmpl-abc` to the client and `chatcmpl-abc-<8 hex>` inside.

The inner ids travel in notifications between engines, where `:` and `,` separate fields.
"""

import re
import uuid

MAX_LENGTH = 128

_FOREIGN = re.compile(r"[^A-Za-z0-9._-]")


def base_id(header: str | None, field: str | None = None) -> str:
    """The client's id, header before body, made safe; a random one where it gave none."""
    chosen = (header or field or "").strip()
    return _FOREIGN.sub("-", chosen[:MAX_LENGTH]) or uuid.uuid4().hex


def engine_id(request_id: str) -> str:
    """Unique also when a client sends the same id twice."""
    return f"{request_id}-{uuid.uuid4().hex[:8]}"
