"""An estimate of which engine holds which chunks of prompts, within a bound of memory.

`ChunkIndex` has two generations for each role, each a dict from a chunk to the bits of the engines
that hold it. New chunks go to the young generation. When that has as much as the role's caches
together hold, it becomes the old one, and the index forgets chunks of the old one that were not
added again. So it remembers about all that LRU caches hold, and what they evicted last, for one
dict look-up per chunk. Generations of half this size lose up to 0.03 of goodput at prefill engines.
Decode engines have these: they are given prompts to compute whose prefix the index expects there,
so a prefix that was evicted costs more. Roles are apart because a few decode engines fill their
caches sooner than many prefill engines. An engine of both roles has the role that it prefers. Chunk
hashes are chained, so an engine that holds a chunk holds all before it, and bisection finds the
longest match.

If all caches together hold more chunks than the bound admits, the index keeps only every second,
fourth ... chunk of a prompt. Matches are then found in larger steps, but none is forgotten sooner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

from router.fleet.engine import DECODE
from router.routing.prompt_chunks import MAX_CHUNKS, TOKENS_PER_CHUNK, Body, describe_part

# The assumed cache of an engine that does not report its size, in tokens.
DEFAULT_CACHE_TOKENS = 2**19
# Bytes of an entry of a dict: its share of the table, the hash, and an int of an engine's bit.
BYTES_PER_CHUNK = 128
# Bits are not reused; when this many belong to no engine, the index is cleared.
MAX_UNUSED_BITS = 2**12


class ChunkMatch(NamedTuple):
    """The first `depth` chunks of a prompt are held by `engines` (bits)."""

    depth: int
    engines: int


NO_MATCH = ChunkMatch(0, 0)


@dataclass(slots=True, eq=False)
class _Generations:
    """The chunks of the engines of one role."""

    engines: int = 0
    """The bits of the engines whose chunks here count: those of the role, and those that had it and
    compute prompts now."""
    cache_tokens: int = 0
    """The tokens that the caches of the engines of the role hold together."""
    young: dict[int, int] = field(default_factory=dict)
    old: dict[int, int] = field(default_factory=dict)
    added: int = 0
    most: int = 1
    """Chunks of one generation."""

    def add(self, bit: int, chunks: Sequence[int], stride: int) -> bool:
        """Return True if that began a new generation."""
        young = self.young
        last = len(chunks) // stride * stride
        for at in range(last - 1, -1, -stride):
            chunk = chunks[at]
            known = young.get(chunk, 0)
            if known & bit:
                break
            young[chunk] = known | bit if known else bit  # one int for many chunks
            self.added += 1
        if self.added < self.most:
            return False
        self.begin()
        return True

    def begin(self) -> None:
        """Begin a new generation."""
        self.old, self.young, self.added = self.young, {}, 0

    def fullness(self) -> float:
        """Return how many generations it would fill; 0 only without chunks."""
        return (len(self.young) + len(self.old)) / self.most

    def holders(self, chunk: int) -> int:
        return self.young.get(chunk, 0) | self.old.get(chunk, 0)


NOBODY = _Generations()


class ChunkIndex:
    """An estimate of the chunks that each engine holds; see the top of this file. After a change of
    `era` earlier bits are meaningless. `memory` is the bound in bytes. Each engine keeps
    `host_tokens` more tokens than it reports."""

    def __init__(self, memory: int = 2**26, host_tokens: int = 0) -> None:
        self._host_tokens = host_tokens
        self.on_sent: Callable[[str, Sequence[int]], None] = lambda name, chunks: None
        """Called for each prompt that this router has sent to an engine."""
        self._max_chunks = max(2, memory // BYTES_PER_CHUNK)
        self.era = 0
        self._clear()

    def _clear(self) -> None:
        self._bits: dict[str, int] = {}
        self._caches: dict[str, tuple[int, _Generations]] = {}
        """The cache size of each engine in tokens, and the generations of its role."""
        self._roles: dict[str, _Generations] = {}
        self._next_bit = 1
        self._stride = 1

    def __len__(self) -> int:
        return sum(len(role.young) + len(role.old) for role in self._roles.values())

    @property
    def stride(self) -> int:
        """Only chunks whose number in their prompt is a multiple of it are kept."""
        return self._stride

    def register(
        self, names: Sequence[str], cache_tokens: Sequence[int] = (), roles: Sequence[str] = ()
    ) -> list[int]:
        """Return the bits of the engines, whose caches hold `cache_tokens` (0: unknown), and which
        prefer these roles now. Chunks are added for registered engines only."""
        if self._next_bit.bit_length() > MAX_UNUSED_BITS + 2 * len(names):
            self.era += 1
            self._clear()
        known = zip_longest(names, cache_tokens, roles, fillvalue=None)
        for name, tokens, role in known:
            assert name is not None
            bit = self._bits.get(name, self._next_bit)
            if bit == self._next_bit:
                self._bits[name] = bit
                self._next_bit <<= 1
            if role == DECODE:  # it loads the prompts of all prefill engines, which evict the rest
                for other in self._roles.values():
                    other.engines &= ~bit
            generations = self._roles.setdefault(role or "", _Generations())
            generations.engines |= bit
            held = (tokens or DEFAULT_CACHE_TOKENS) + self._host_tokens
            self._caches[name] = held, generations
        self._fit_caches()
        return [self._bits[name] for name in names]

    def _fit_caches(self) -> None:
        """Set how many chunks a generation has, and which are kept."""
        for role in self._roles.values():
            role.cache_tokens = 0
        for tokens, role in self._caches.values():
            role.cache_tokens += tokens
        total = sum(role.cache_tokens for role in self._roles.values()) // TOKENS_PER_CHUNK // 2
        self._stride = 1
        max_young = self._max_chunks // 2
        while total > self._stride * max_young and self._stride < MAX_CHUNKS:
            self._stride *= 2
        kept = min(2 * total // self._stride, max_young)
        for name, role in self._roles.items():
            most = kept * role.cache_tokens // max(1, 2 * total * TOKENS_PER_CHUNK)
            role.most = max(1, most // 2 if name == DECODE else most)
            if not role.engines:
                role.young, role.old, role.added = {}, {}, 0

    def bit(self, name: str) -> int:
        """Return the engine's bit; 0 if the engine is not registered."""
        return self._bits.get(name, 0)

    def add(self, name: str, chunks: Sequence[int]) -> None:
        """The engine holds these chunks, the successive chunks of one prompt."""
        bit = self.bit(name)
        if bit and self._caches[name][1].add(bit, chunks, self._stride):
            for role in self._roles.values():
                if not role.cache_tokens:  # no engine has it now, so none replaces these chunks
                    role.begin()
        while len(self) > self._max_chunks:  # some had larger shares before engines changed roles
            max(self._roles.values(), key=_Generations.fullness).begin()

    def longest(self, chunks: Sequence[int], among: int, most: int | None = None) -> ChunkMatch:
        """Return the longest beginning, of at most `most` chunks, that one of the engines `among`
        (bits) holds."""
        stride = self._stride
        first, *others = [one for one in self._roles.values() if one.engines & among] or [NOBODY]
        young, old, own = first.young, first.old, first.engines & among
        low, high, engines = 0, (len(chunks) if most is None else most) // stride, 0
        while low < high:
            middle = (low + high + 1) // 2
            chunk = chunks[middle * stride - 1]
            found = (young.get(chunk, 0) | old.get(chunk, 0)) & own
            for other in others:
                found |= other.holders(chunk) & other.engines & among
            if found:
                low, engines = middle, found
            else:
                high = middle - 1
        return ChunkMatch(low * stride, engines)

    def describe_divergence(self, body: Body, chunks: Sequence[int], marks: int) -> str:
        """Describe where the prompt first differs from the remembered prompt with which it shares
        the longest prefix. Return an empty string if no remembered prompt shares a prefix, or if
        one contains the whole prompt. `marks`: see `RoutingQuery`."""
        depth = self.longest(chunks, -1).depth
        if not marks < depth <= len(chunks) - self._stride:
            return ""
        return describe_part(body, depth - marks, depth - marks + self._stride)

    def drop(self, name: str, chunks: Sequence[int], kept: int) -> None:
        """The engine holds none of these chunks but the first `kept`."""
        if bit := self.bit(name):
            for role in self._roles.values():
                for generation in role.young, role.old:
                    for chunk in chunks[kept:]:
                        if generation.get(chunk, 0) & bit:
                            generation[chunk] ^= bit

    def forget(self, name: str) -> None:
        """Give up the engine's bit, so that no chunk needs to be changed."""
        bit = self._bits.pop(name, 0)
        if bit:
            self._caches.pop(name)
            for role in self._roles.values():
                role.engines &= ~bit
            self._fit_caches()
