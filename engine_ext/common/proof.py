"""Prefix proof: which content a remote's blocks hold, told by hashes, checked before any is read.

Matching by position alone loads KV of the wrong tokens whenever a history was shortened, edited or
tokenized differently, and the answer is wrong with HTTP 200. A hash at every `step` tokens says how
far two contents are equal: hash k covers all that its tokens' KV depends on, from position 0, so
the first difference ends the match.

What KV depends on: the token ids, and what a `ContentKey` names (images and sounds by their
content's hash and their place, the LoRA adapter, weights that were changed, the cache salt). What
has no name has no proof.

Hashes say what the blocks hold, not which blocks they are. So a proof is bound to the rest of what
was told with it, and proves nothing where that has come otherwise than it was sent: a list that was
sorted, cut or taken from another answer.

On the wire, in `kv_transfer_params`: `{"v": 3, "step": tokens per hash, "n": tokens covered, "b":
base64 of the 16 bytes of `bound_to`, "h": base64 of 16 bytes per step, the last one for what
remains of n}`. The bytes of "h" are the beginning of SHA-256 over the hash before (zeros at first),
the length (four bytes, little-endian) of the JSON of the keys that begin in these tokens, that JSON
(nothing for no keys), and the tokens as little-endian unsigned 32 bits: the same on every host.

128 bits: to make a request take a given content's KV for its own takes 2^128 tries. Two contents of
one's own with one hash take 2^64, and buy nothing: a request reads only what its own prefill leg or
its own conversation has left. Of half the length, one machine finds such a pair in an hour.
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
"""Another one for each EXTENSION_VERSION (wire/errors.py), even where a proof is made as before: an
older engine takes another version's engine for stock, and must not read its KV as proven."""
MAX_TOKENS = 1 << 24
WORD_BYTES = 4
NO_KEYS = bytes(WORD_BYTES)
LEAST_STEP = 16
MOST_HASHES = 256
"""Bounds what a proof costs to make, to send and to check. A difference costs at most the step that
it is in: a 128th of the content, where that is more than `LEAST_STEP`."""

BOUND = (
    "remote_engine_id",
    "remote_request_id",
    "tp_size",
    "remote_num_tokens",
    "remote_block_size",
    "remote_block_ids",
)
"""Of `kv_transfer_params`: what says where the proven tokens lie."""


class NoProof(enum.Enum):
    ABSENT = "absent"
    """Nothing was said: right for an engine that is known to be stock, and for no other."""
    UNREADABLE = "unreadable"
    """Malformed, cut, or of a version that we do not know: it proves nothing."""


class ContentKey(NamedTuple):
    """What KV depends on besides token ids: that of token `start` and of all behind it."""

    kind: str
    identity: tuple[str, ...]
    start: int = 0
    end: int = 0
    """The placeholder's end, exclusive, for what stands in the place of tokens."""


Keys = Sequence[ContentKey]
"""In the order of `start`."""


@dataclass(frozen=True, slots=True)
class PrefixProof:
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
    ) -> "PrefixProof":
        """Of all of the content, or that of its first `num_tokens` tokens. Raises OverflowError for
        an id that is negative or has more than 32 bits."""
        num_tokens = _bounded(num_tokens, token_ids)
        step = step or _step(num_tokens)
        return cls(step, num_tokens, b"".join(_chain(token_ids, num_tokens, keys, step)))

    def proven_tokens(self, token_ids: Sequence[int], keys: Keys = ()) -> int:
        """How many leading tokens of this content are the proof's. Raises as `of` does.

        Whole steps count, and the rest when all of it is there: of a step of which only a part is
        asked for nobody knows where it differs.
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
        """As it stands in `params`, which say where the tokens lie. Raises as `bound_to` does."""
        hashes, binding = (
            base64.b64encode(one).decode() for one in (self.hashes, bound_to(params))
        )
        return {"v": VERSION, "step": self.step, "n": self.num_tokens, "b": binding, "h": hashes}

    @classmethod
    def from_wire(cls, raw: Any, params: Mapping[str, Any]) -> "PrefixProof | NoProof":
        """Of what came as a proof with `params`, which are otherwise known to be what they should
        be. Total: whatever is there and proves nothing of them is unreadable; only None is
        absent."""
        if raw is None:
            return NoProof.ABSENT
        if not isinstance(raw, dict) or raw.get("v") != VERSION:
            return NoProof.UNREADABLE
        step, num_tokens = raw.get("step"), raw.get("n")
        if type(step) is not int or type(num_tokens) is not int:
            return NoProof.UNREADABLE
        if not LEAST_STEP <= step <= MAX_TOKENS or not 0 <= num_tokens <= step * MOST_HASHES:
            return NoProof.UNREADABLE
        hashes = _decoded(raw.get("h"))
        if hashes is None or len(hashes) != HASH_BYTES * -(-num_tokens // step):
            return NoProof.UNREADABLE
        if _decoded(raw.get("b")) != bound_to(params):
            return NoProof.UNREADABLE
        return cls(step, num_tokens, hashes)


def bound_to(params: Mapping[str, Any]) -> bytes:
    """SHA-256's beginning over the MessagePack of what `BOUND` names. Raises TypeError,
    OverflowError or ValueError for what no engine of ours tells."""
    told = [params.get(key) for key in BOUND]
    return hashlib.sha256(msgspec.msgpack.encode(told)).digest()[:HASH_BYTES]


def digest(token_ids: Sequence[int], keys: Keys = (), num_tokens: int | None = None) -> bytes:
    """One whole hash of what `PrefixProof.of` would cover; empty for no tokens. Raises as that."""
    num_tokens = _bounded(num_tokens, token_ids)
    if not num_tokens:
        return b""
    head = _heads(keys, num_tokens, num_tokens).get(0, NO_KEYS)
    return hashlib.sha256(head + _encode(token_ids, num_tokens)).digest()


def _decoded(raw: Any) -> bytes | None:
    try:
        return base64.b64decode(raw, validate=True) if type(raw) is str else None
    except (binascii.Error, ValueError):
        return None


def _bounded(num_tokens: int | None, token_ids: Sequence[int]) -> int:
    return len(token_ids) if num_tokens is None else min(num_tokens, len(token_ids))


def _step(num_tokens: int) -> int:
    """A power of two, so that of two proofs' steps one divides the other."""
    step = LEAST_STEP
    while step * MOST_HASHES < num_tokens:
        step *= 2
    return step


def _chain(token_ids: Sequence[int], num_tokens: int, keys: Keys, step: int) -> Iterator[bytes]:
    """Hashes of the content of the first `num_tokens` tokens."""
    words, heads = _encode(token_ids, num_tokens), _heads(keys, num_tokens, step)
    previous = bytes(HASH_BYTES)
    for start in range(0, len(words), WORD_BYTES * step):
        head = heads.get(start // WORD_BYTES, NO_KEYS) if heads else NO_KEYS
        tokens = words[start : start + WORD_BYTES * step]
        previous = hashlib.sha256(previous + head + tokens).digest()[:HASH_BYTES]
        yield previous


def _heads(keys: Keys, num_tokens: int, step: int) -> dict[int, bytes]:
    """The keys that begin in a step, encoded, by the step's first token."""
    begun: dict[int, list[ContentKey]] = {}
    for key in keys:
        if key.start < num_tokens:
            first = max(0, key.start)
            begun.setdefault(first - first % step, []).append(key)
    named = {start: json.dumps(keys).encode() for start, keys in begun.items()}
    return {start: len(text).to_bytes(WORD_BYTES, "little") + text for start, text in named.items()}


def _encode(token_ids: Sequence[int], num_tokens: int) -> bytes:
    """What is asked for whole is not copied first: that would cost a third of all this."""
    whole = len(token_ids) == num_tokens
    words = array("I", token_ids if whole else token_ids[:num_tokens])
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()
