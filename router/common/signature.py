"""What is put where others can write, signed so that only our own is believed.

A MAC covers the place and the value, so nobody without a key makes an entry, alters one, or moves
it to another conversation. The first key signs, all verify: that is how keys are changed.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

MAC_BYTES = 32
PURPOSE = b"disagg-turn"


class Seal:
    """`keys`: at least one, each of any length."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        # A key is hashed first, for BLAKE2b takes no more than 64 bytes.
        self._begun = [
            hashlib.blake2b(
                key=hashlib.blake2b(key).digest(), digest_size=MAC_BYTES, person=PURPOSE
            )
            for key in keys
        ]

    def close(self, place: str, value: bytes) -> bytes:
        return _mac(self._begun[0], place, value) + value

    def open(self, place: str, sealed: bytes) -> bytes | None:
        """The value; None for what was not closed for this place with one of the keys."""
        mac, value = sealed[:MAC_BYTES], sealed[MAC_BYTES:]
        for begun in self._begun:
            if hmac.compare_digest(mac, _mac(begun, place, value)):
                return value
        return None


def _mac(begun: hashlib.blake2b, place: str, value: bytes) -> bytes:
    digest = begun.copy()
    raw = place.encode()
    digest.update(b"%d:%b" % (len(raw), raw))
    digest.update(value)
    return digest.digest()
