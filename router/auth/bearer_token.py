"""Whether a caller shows the token that is wanted: in constant time."""

from __future__ import annotations

import hmac
from collections.abc import Iterable

Headers = Iterable[tuple[bytes, bytes]]


def shows(headers: Headers, token: str) -> bool:
    """Authorization: Bearer, once."""
    shown = [value for name, value in headers if name == b"authorization"]
    scheme, _, rest = (shown[0] if len(shown) == 1 else b"").partition(b" ")
    is_right = hmac.compare_digest(rest.strip(), token.encode())
    return is_right and scheme.lower() == b"bearer"
