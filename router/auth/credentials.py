"""Credentials in a request's headers: Authorization: Bearer, or Anthropic's x-api-key."""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Sequence

Header = tuple[bytes, bytes]
Headers = Iterable[Header]
AUTHORIZATION, X_API_KEY = b"authorization", b"x-api-key"
CREDENTIALS = frozenset((AUTHORIZATION, X_API_KEY))
# Longer keys are never valid and need not be hashed.
MAX_KEY_BYTES = 512


def read_key(headers: Sequence[Header]) -> bytes | None:
    """Return the API key, None if there is none, or b"" for a credential that is never valid.

    Two credentials of the same kind are invalid, because a gateway in front of the router may have
    checked either of them.
    """
    found = [header for header in headers if header[0] in CREDENTIALS]
    if not found:
        return None
    if len(found) == 2 and found[0][0] != found[1][0]:
        found = [header for header in found if header[0] == AUTHORIZATION]
    if len(found) > 1:
        return b""
    name, value = found[0]
    if name == AUTHORIZATION:
        scheme, _, value = value.partition(b" ")
        if scheme.lower() != b"bearer":
            return b""
    key = value.strip()
    return key if len(key) <= MAX_KEY_BYTES else b""


def without_credentials(headers: Sequence[Header]) -> list[Header]:
    return [header for header in headers if header[0] not in CREDENTIALS]


def has_bearer_token(headers: Headers, token: str) -> bool:
    """Return True for exactly one Authorization header with `token`. Compares in constant time."""
    values = [value for name, value in headers if name == AUTHORIZATION]
    scheme, _, rest = (values[0] if len(values) == 1 else b"").partition(b" ")
    is_right = hmac.compare_digest(rest.strip(), token.encode())
    return is_right and scheme.lower() == b"bearer"
