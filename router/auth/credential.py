"""The key that a request shows: Authorization: Bearer, or Anthropic's x-api-key."""

from __future__ import annotations

from collections.abc import Sequence

Header = tuple[bytes, bytes]
AUTHORIZATION, X_API_KEY = b"authorization", b"x-api-key"
CREDENTIALS = frozenset((AUTHORIZATION, X_API_KEY))
# Longer ones are nobody's, and need not be hashed.
LONGEST = 512


def shown(headers: Sequence[Header]) -> bytes | None:
    """None where none is; empty for one that cannot be right, as two of the same kind are: which
    of them a gateway has looked at nobody knows."""
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
    return key if len(key) <= LONGEST else b""


def without(headers: Sequence[Header]) -> list[Header]:
    """What may be told to others."""
    return [header for header in headers if header[0] not in CREDENTIALS]
