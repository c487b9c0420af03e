"""Signatures of values in a store that others can write to.

A MAC covers the key in the store and the value, so that an attacker without the secret cannot make
an entry, alter it, or move it to another conversation. The first secret signs and all verify, so
that secrets can be rotated.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

MAC_BYTES = 32
PURPOSE = b"disagg-turn"


class ValueSigner:
    """Signs and verifies values with `secrets`: at least one, each of any length."""

    def __init__(self, secrets: Sequence[bytes]) -> None:
        # A secret is hashed first, because BLAKE2b keys have at most 64 bytes.
        self._keyed = [
            hashlib.blake2b(
                key=hashlib.blake2b(secret).digest(), digest_size=MAC_BYTES, person=PURPOSE
            )
            for secret in secrets
        ]

    def sign(self, key: str, value: bytes) -> bytes:
        """Return the signature and the value."""
        return _mac(self._keyed[0], key, value) + value

    def verify(self, key: str, signed: bytes) -> bytes | None:
        """Return the value, or None if it was not signed for `key` with one of the secrets."""
        mac, value = signed[:MAC_BYTES], signed[MAC_BYTES:]
        for keyed in self._keyed:
            if hmac.compare_digest(mac, _mac(keyed, key, value)):
                return value
        return None


def _mac(keyed: hashlib.blake2b, key: str, value: bytes) -> bytes:
    digest = keyed.copy()
    raw = key.encode()
    digest.update(b"%d:%b" % (len(raw), raw))
    digest.update(value)
    return digest.digest()
