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

Wire format, the field `prefix_proof` of `kv_transfer_params`: `{"v": 4, "step": tokens per hash,
"n": tokens covered, "b": base64 of the 16 bytes of `hash_of_params`, "h": base64 of 16 bytes per
step, the last one for the rest of n}`. Each hash is the first 16 bytes of SHA-256 over the content
from position 0 to its step's end: the tokens as little-endian unsigned 32-bit numbers, and the 32
bytes of SHA-256 over the JSON of each key that begins in these tokens. It is the same on every
host. One running hash makes all of them, and the last one alone shows that two contents are equal.

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
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

HASH_BYTES = 16
VERSION = 4
"""It changes with each EXTENSION_VERSION (wire/errors.py), even if hashes are made as before. An
older engine takes an engine of another version for stock, and must not read its KV as verified."""
MAX_TOKENS = 1 << 24
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
        made = _hashes(_encode(token_ids, num_tokens), keys, _ends(num_tokens, step))
        return cls(step, num_tokens, b"".join([each[:HASH_BYTES] for each in made]))

    def count_verified_tokens(self, token_ids: Sequence[int], keys: Keys = ()) -> int:
        """Return how many leading tokens of this content are those of the hashes. Raises as `of`.

        Whole steps count. The last, shorter step counts only if all of it is there: a hash does not
        show where in a step two contents differ.
        """
        shared = min(self.num_tokens, len(token_ids))
        if shared < self.num_tokens:
            shared -= shared % self.step
        ends, words = _ends(shared, self.step), _encode(token_ids, shared)
        # Mostly all of it is equal, which one hash shows in half the time of one per step.
        if self._match(words, keys, ends[-1:], len(ends) - 1):
            return shared
        return self._match(words, keys, ends[:-1]) * self.step

    def _match(
        self, words: "memoryview[int]", keys: Keys, ends: Sequence[int], first: int = 0
    ) -> int:
        """Return how many hashes, from the one at `first` on, are those of the content before
        `ends`."""
        for index, ours in enumerate(_hashes(words, keys, ends)):
            if not self.hashes.startswith(ours[:HASH_BYTES], (first + index) * HASH_BYTES):
                return index
        return len(ends)

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
    """Return the SHA-256 of what `PrefixHashes.of` would cover, or b"" for no tokens. Raises as
    `of`."""
    num_tokens = _bounded(num_tokens, token_ids)
    if not num_tokens:
        return b""
    return next(_hashes(_encode(token_ids, num_tokens), keys, [num_tokens]))


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


def _ends(num_tokens: int, step: int) -> list[int]:
    """Return the ends of the steps."""
    return [*range(step, num_tokens, step), *([num_tokens] if num_tokens else ())]


def _hashes(words: "memoryview[int]", keys: Keys, ends: Iterable[int]) -> Iterator[bytes]:
    """Yield the SHA-256 of the content before each of `ends`, which ascend."""
    tokens, named = hashlib.sha256(), hashlib.sha256()
    left = deque(sorted(keys, key=lambda key: key.start))
    key_hash, first = named.digest(), 0
    for end in ends:
        tokens.update(words[first:end])
        first = end
        while left and left[0].start < end:
            named.update(json.dumps(left.popleft()).encode())
            key_hash = named.digest()
        both = tokens.copy()
        both.update(key_hash)
        yield both.digest()


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
