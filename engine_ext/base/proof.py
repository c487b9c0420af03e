"""Prefix proof: which tokens a remote's blocks hold, told by hashes, checked before any is read.

Matching by position alone loads KV of the wrong tokens whenever a history was shortened, edited or
tokenized differently, and the answer is wrong with HTTP 200. A chained hash per block says exactly
how far two token sequences are equal: hash k covers every token before it, so the first difference
ends the match.

On the wire, in `kv_transfer_params`: `{"v": 1, "block": tokens per hash, "n": tokens covered,
"h": base64 of 8 bytes per full block, then 8 for the tail if `n` is inside a block}`. The bytes are
blake2b over the previous hash and the tokens as little-endian int32: the same on every host.
"""

import base64
import binascii
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

HASH_BYTES = 8
VERSION = 1
MAX_TOKENS = 1 << 24


@dataclass(frozen=True, slots=True)
class PrefixProof:
    """Hashes of the first `num_tokens` tokens: one per `block_size`, and one for the rest."""

    block_size: int
    num_tokens: int
    hashes: tuple[bytes, ...]

    @classmethod
    def of(cls, token_ids: Sequence[int], block_size: int) -> "PrefixProof":
        return cls(block_size, len(token_ids), tuple(_chain(token_ids, block_size)))

    def proven_tokens(self, token_ids: Sequence[int]) -> int:
        """How many leading tokens of `token_ids` are those of the proof.

        Whole blocks count, and the tail when all of it is there: a block of which only a part is
        asked for cannot be told from one that differs later.
        """
        shared = min(self.num_tokens, len(token_ids))
        if shared < self.num_tokens:
            shared -= shared % self.block_size
        ours = _chain(token_ids[:shared], self.block_size)
        proven = 0
        for one, other in zip(ours, self.hashes, strict=False):
            if one != other:
                break
            proven += 1
        return min(proven * self.block_size, shared)

    def to_wire(self) -> dict[str, Any]:
        return {
            "v": VERSION,
            "block": self.block_size,
            "n": self.num_tokens,
            "h": base64.b64encode(b"".join(self.hashes)).decode(),
        }

    @classmethod
    def from_wire(cls, raw: Any) -> "PrefixProof | None":
        """Total: None for whatever is not a proof of a version we know."""
        if not isinstance(raw, dict) or raw.get("v") != VERSION:
            return None
        block_size, num_tokens, encoded = raw.get("block"), raw.get("n"), raw.get("h")
        if type(block_size) is not int or type(num_tokens) is not int or type(encoded) is not str:
            return None
        if not 0 < block_size <= MAX_TOKENS or not 0 <= num_tokens <= MAX_TOKENS:
            return None
        try:
            joined = base64.b64decode(encoded, validate=True)
        except (binascii.Error, ValueError):
            return None
        if len(joined) != HASH_BYTES * -(-num_tokens // block_size):
            return None
        starts = range(0, len(joined), HASH_BYTES)
        return cls(block_size, num_tokens, tuple(joined[i : i + HASH_BYTES] for i in starts))


def digest(token_ids: Sequence[int]) -> bytes:
    """One hash over all tokens, whatever the block size; empty for no tokens."""
    *_, last = b"", *_chain(token_ids, max(1, len(token_ids)))
    return last


def _chain(token_ids: Sequence[int], block_size: int) -> Iterator[bytes]:
    tokens = np.asarray(token_ids, dtype="<i4").tobytes()
    previous = b"\0" * HASH_BYTES
    for start in range(0, len(tokens), 4 * block_size):
        block = tokens[start : start + 4 * block_size]
        previous = hashlib.blake2b(previous + block, digest_size=HASH_BYTES).digest()
        yield previous
