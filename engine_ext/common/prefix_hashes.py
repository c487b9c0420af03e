"""Prefix hashes: they show which content an engine's blocks hold, before any block is read.

Two engines that match blocks by position alone load KV of the wrong tokens whenever a history was
shortened, edited or tokenized differently, and the answer is wrong with HTTP 200. A hash at every
`step` tokens shows how far two contents are equal: hash k covers everything that the KV of its
tokens depends on, from position 0, so the first difference ends the match.

KV depends on the token ids and on what a `ContentKey` names: images and sounds (the hash of their
content and their place), the LoRA adapter, changed weights, the cache salt. Content that depends on
something else gets no hashes.

Hashes show what the blocks hold, and not which blocks they are. Therefore they are bound to the
other params that were sent with them (`hash_of_params`). A list of blocks that was sorted, cut or
taken from another answer verifies nothing.

Wire format, the field `prefix_proof` of `kv_transfer_params`: `{"v": 3, "step": tokens per hash,
"n": tokens covered, "b": base64 of the 16 bytes of `hash_of_params`, "h": base64 of 16 bytes per
step, the last one for the rest of n}`. Each hash is the first 16 bytes of SHA-256 over the previous
hash (zeros for the first), the length (four bytes, little-endian) of the JSON of the keys that
begin in these tokens, that JSON (nothing if there are no keys), and the tokens as little-endian
unsigned 32-bit numbers. It is the same on every host.

Why 128 bits: an attacker who wants a request to take the KV of a given content needs 2^128 tries.
Two contents of the attacker's own with one hash take 2^64 tries and gain nothing, because a request
reads only KV of its own prefill leg or its own conversation. With 64 bits, one machine finds such a
pair in an hour.
"""

import base64
import binascii
import enum
import hashlib
import json
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

HASH_BYTES = 16
VERSION = 3
"""It changes with each EXTENSION_VERSION (wire/errors.py), even if hashes are made as before. An
older engine takes an engine of another version for stock, and must not read its KV as verified."""
MAX_TOKENS = 1 << 24
WORD_BYTES = 4
NO_KEYS = bytes(WORD_BYTES)
LEAST_STEP = 16
MOST_HASHES = 256
"""Bounds the cost to make, send and check hashes. A difference loses at most the step it is in:
a 128th of the content, if that is more than `LEAST_STEP`."""

BOUND = (
    "remote_engine_id",
    "remote_request_id",
    "tp_size",
    "remote_num_tokens",
    "remote_block_size",
    "remote_block_ids",
)
"""The params that say where the tokens lie."""


class UnusableHashes(enum.Enum):
    ABSENT = "absent"
    """No hashes were sent. That is acceptable only from an engine that is known to be stock."""
    UNREADABLE = "unreadable"
    """Malformed, cut, or of an unknown version: it verifies nothing."""


class ContentKey(NamedTuple):
    """Something besides token ids that the KV of token `start` and of later tokens depends on."""

    kind: str
    identity: tuple[str, ...]
    start: int = 0
    end: int = 0
    """The exclusive end of the placeholder, for content that takes the place of tokens."""


Keys = Sequence[ContentKey]
"""Keys in the order of `start`."""


@dataclass(frozen=True, slots=True)
class PrefixHashes:
    """Hashes of the first `num_tokens` tokens' content, one per `step` and one for the rest."""

    step: int
    num_tokens: int
    hashes: bytes

    @classmethod
    def of(
        cls,
        token_ids: Sequence[int],
        keys: Keys = (),
        num_tokens: int | None = None,
        step: int | None = None,
    ) -> "PrefixHashes":
        """Return the hashes of the content, or of its first `num_tokens` tokens.

        Raises OverflowError for a token id that is negative or has more than 32 bits.
        """
        num_tokens = _bounded(num_tokens, token_ids)
        step = step or _step(num_tokens)
        return cls(step, num_tokens, b"".join(_chain(token_ids, num_tokens, keys, step)))

    def count_verified_tokens(self, token_ids: Sequence[int], keys: Keys = ()) -> int:
        """Return how many leading tokens of this content are those of the hashes. Raises as `of`.

        Whole steps count. The last, shorter step counts only if all of it is there: a hash does not
        show where in a step two contents differ.
        """
        shared = min(self.num_tokens, len(token_ids))
        if shared < self.num_tokens:
            shared -= shared % self.step
        proven = 0
        for ours in _chain(token_ids, shared, keys, self.step):
            if not self.hashes.startswith(ours, proven * HASH_BYTES):
                break
            proven += 1
        return min(proven * self.step, shared)

    def to_wire(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the field for `params`, which say where the tokens lie. Raises as
        `hash_of_params`."""
        hashes, binding = (
            base64.b64encode(one).decode() for one in (self.hashes, hash_of_params(params))
        )
        return {"v": VERSION, "step": self.step, "n": self.num_tokens, "b": binding, "h": hashes}

    @classmethod
    def from_wire(cls, raw: Any, params: Mapping[str, Any]) -> "PrefixHashes | UnusableHashes":
        """Read the field that came with `params`, whose other fields were checked. `raw` may be any
        JSON: None is ABSENT, and anything that verifies nothing is UNREADABLE."""
        if raw is None:
            return UnusableHashes.ABSENT
        if not isinstance(raw, dict) or raw.get("v") != VERSION:
            return UnusableHashes.UNREADABLE
        step, num_tokens = raw.get("step"), raw.get("n")
        if type(step) is not int or type(num_tokens) is not int:
            return UnusableHashes.UNREADABLE
        if not LEAST_STEP <= step <= MAX_TOKENS or not 0 <= num_tokens <= step * MOST_HASHES:
            return UnusableHashes.UNREADABLE
        hashes = _decoded(raw.get("h"))
        if hashes is None or len(hashes) != HASH_BYTES * -(-num_tokens // step):
            return UnusableHashes.UNREADABLE
        if _decoded(raw.get("b")) != hash_of_params(params):
            return UnusableHashes.UNREADABLE
        return cls(step, num_tokens, hashes)


def hash_of_params(params: Mapping[str, Any]) -> bytes:
    """Return the first 16 bytes of SHA-256 over the MessagePack of the params in `BOUND`.

    Raises TypeError, OverflowError or ValueError for values that no engine of ours sends.
    """
    values = [params.get(key) for key in BOUND]
    return hashlib.sha256(msgspec.msgpack.encode(values)).digest()[:HASH_BYTES]


def digest(token_ids: Sequence[int], keys: Keys = (), num_tokens: int | None = None) -> bytes:
    """Return one SHA-256 of what `PrefixHashes.of` would cover, or b"" for no tokens. Raises as
    `of`."""
    num_tokens = _bounded(num_tokens, token_ids)
    if not num_tokens:
        return b""
    hashed = hashlib.sha256(_heads(keys, num_tokens, num_tokens).get(0, NO_KEYS))
    hashed.update(_encode(token_ids, num_tokens))
    return hashed.digest()


def _decoded(raw: Any) -> bytes | None:
    try:
        return base64.b64decode(raw, validate=True) if type(raw) is str else None
    except (binascii.Error, ValueError):
        return None


def _bounded(num_tokens: int | None, token_ids: Sequence[int]) -> int:
    return len(token_ids) if num_tokens is None else min(num_tokens, len(token_ids))


def _step(num_tokens: int) -> int:
    """Return a power of two, so that of the steps of two contents one divides the other."""
    step = LEAST_STEP
    while step * MOST_HASHES < num_tokens:
        step *= 2
    return step


def _chain(token_ids: Sequence[int], num_tokens: int, keys: Keys, step: int) -> Iterator[bytes]:
    """Yield the hashes of the content of the first `num_tokens` tokens."""
    heads = _heads(keys, num_tokens, step)
    previous = bytes(HASH_BYTES)
    words = _encode(token_ids, num_tokens)
    for first in range(0, num_tokens, step):
        hashed = hashlib.sha256(previous + heads.get(first, NO_KEYS))
        hashed.update(words[first : first + step])
        previous = hashed.digest()[:HASH_BYTES]
        yield previous


def _heads(keys: Keys, num_tokens: int, step: int) -> dict[int, bytes]:
    """Return the keys that begin in a step, encoded, by the step's first token."""
    begun: dict[int, list[ContentKey]] = {}
    for key in keys:
        if key.start < num_tokens:
            first = max(0, key.start)
            begun.setdefault(first - first % step, []).append(key)
    named = {start: json.dumps(keys).encode() for start, keys in begun.items()}
    return {start: len(text).to_bytes(WORD_BYTES, "little") + text for start, text in named.items()}


def _encode(token_ids: Sequence[int], num_tokens: int) -> "memoryview[int]":
    """Return the first ids as little-endian 32-bit numbers. Raises OverflowError."""
    # A slice would copy the list, which takes a quarter as long as the conversion itself. That is
    # most of what the hashes of a long prompt cost, and for a list `fromlist` is the fastest.
    ids = token_ids if num_tokens == len(token_ids) else token_ids[:num_tokens]
    words = array("I", () if isinstance(ids, list) else ids)
    if isinstance(ids, list):
        words.fromlist(ids)
    if sys.byteorder == "big":
        words.byteswap()
    return memoryview(words)
