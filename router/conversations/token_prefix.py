"""Chained digests of a sequence of token ids, by which two sequences are compared up to their first
difference without keeping the ids.

The first digest covers STEP ids, the next one twice as many, and so on; the last one covers all.
STEP divides the block sizes of engines, so whole blocks can be proven equal.
"""

from __future__ import annotations

import hashlib
from array import array
from base64 import b64encode
from collections.abc import Iterator, Sequence
from typing import Annotated

from msgspec import Meta, Struct

STEP = 16
ID_BYTES = array("I").itemsize
PREFIX_DIGEST_BYTES = 12
# In base64.
DIGEST_CHARS = 16
MAX_TOKENS = 2**22


class TokenPrefix(Struct, frozen=True):
    """The digests of `count` token ids, one after the other, in base64."""

    count: Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
    digests: Annotated[str, Meta(max_length=MAX_TOKENS // STEP * DIGEST_CHARS)]

    @classmethod
    def of(cls, ids: Sequence[int]) -> TokenPrefix | None:
        """Return None for what are no token ids, or too many."""
        packed = _packed(ids)
        if packed is None or len(ids) > MAX_TOKENS:
            return None
        return cls(len(ids), "".join(_digests(packed)))

    def common(self, ids: Sequence[int]) -> int:
        """Return with how many of the hashed tokens `ids` certainly begins: a multiple of STEP, or
        `count` if it begins with all of them."""
        packed = _packed(ids[: self.count])
        if packed is None:
            return 0
        equal = at = 0
        for digest in _digests(packed):
            if not self.digests.startswith(digest, at):
                return equal
            equal, at = min(equal + STEP, len(ids), self.count), at + DIGEST_CHARS
        return equal


def _packed(ids: Sequence[int]) -> bytes | None:
    try:
        return array("I", ids).tobytes()
    except (OverflowError, TypeError):
        return None


def _digests(packed: bytes) -> Iterator[str]:
    view, digest, step = memoryview(packed), b"", STEP * ID_BYTES
    for at in range(0, len(packed), step):
        piece = view[at : at + step]
        digest = hashlib.blake2b(digest + piece, digest_size=PREFIX_DIGEST_BYTES).digest()
        yield b64encode(digest).decode("ascii")
