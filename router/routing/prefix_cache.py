"""The engine that holds most of the prompt, as long as it is not overloaded.

`ChunkIndex` estimates which engine holds which chunks of prompts, within a bound of memory. It has
two generations, each a dict from a chunk to the bits of the engines that hold it. New chunks go to
the young generation. When that is full it becomes the old one, and chunks of the old one that were
not added again are forgotten. This is about what an engine's LRU cache does, for one dict look-up
per chunk. Chunk hashes are chained, so an engine that holds a chunk holds all before it, and
bisection finds the longest match.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from router.routing.policy import (
    MAX_ORDERED,
    Candidate,
    CandidateCache,
    E,
    LeastLoaded,
    LoadBound,
    Policy,
    RoutingQuery,
    filled,
    load,
    mix,
)
from router.routing.prompt_chunks import TOKENS_PER_CHUNK

# The assumed cache of one engine (half a million tokens), and the bound for all engines together.
CHUNKS_PER_ENGINE = 2048
MAX_CHUNKS = 2**19
# Bits are not reused; when this many belong to no engine, the index is cleared.
MAX_UNUSED_BITS = 2**12
# Of the engines with an equal match, at most this many are compared by load.
MAX_COMPARED = 8
# After this many consecutive answers that contradict the index, it forgets the engine.
MAX_STRIKES = 3
# The unanswered prompts of one engine that are remembered.
MAX_UNANSWERED = 32


class ChunkMatch(NamedTuple):
    """The first `depth` chunks of a prompt are held by `engines` (bits)."""

    depth: int
    engines: int


class ChunkIndex:
    """An estimate of the chunks that each engine holds; see the top of this file. After a change of
    `era` earlier bits are meaningless."""

    def __init__(
        self, chunks_per_engine: int = CHUNKS_PER_ENGINE, max_chunks: int = MAX_CHUNKS
    ) -> None:
        self._chunks_per_engine = chunks_per_engine
        self._max_young = max(1, max_chunks // 2)
        self.era = 0
        self._clear()

    def _clear(self) -> None:
        self._bits: dict[str, int] = {}
        self._next_bit = 1
        self._old: dict[int, int] = {}
        self._young: dict[int, int] = {}
        self._added = 0

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def register(self, names: Sequence[str]) -> list[int]:
        """Return the bits of the engines. Chunks are added for registered engines only."""
        if self._next_bit.bit_length() > MAX_UNUSED_BITS + 2 * len(names):
            self.era += 1
            self._clear()
        for name in names:
            if name not in self._bits:
                self._bits[name] = self._next_bit
                self._next_bit <<= 1
        return [self._bits[name] for name in names]

    def bit(self, name: str) -> int:
        """Return the engine's bit; 0 if the engine is not registered."""
        return self._bits.get(name, 0)

    def add(self, name: str, chunks: Sequence[int]) -> None:
        """The engine holds these chunks, the successive chunks of one prompt."""
        bit, young, added = self.bit(name), self._young, 0
        for chunk in reversed(chunks if bit else ()):
            known = young.get(chunk, 0)
            if known & bit:
                break
            young[chunk] = known | bit if known else bit  # one int for many chunks
            added += 1
        self._added += added
        is_full = 2 * self._added >= self._chunks_per_engine * len(self._bits)
        if len(young) >= self._max_young or is_full:
            self._old, self._young, self._added = self._young, {}, 0

    def longest(self, chunks: Sequence[int], among: int, most: int | None = None) -> ChunkMatch:
        """Return the longest beginning, of at most `most` chunks, that one of the engines `among`
        (bits) holds."""
        young, old = self._young, self._old
        low, high, engines = 0, len(chunks) if most is None else most, 0
        while low < high:
            middle = (low + high + 1) // 2
            chunk = chunks[middle - 1]
            found = (young.get(chunk, 0) | old.get(chunk, 0)) & among
            if found:
                low, engines = middle, found
            else:
                high = middle - 1
        return ChunkMatch(low, engines)

    def forget(self, name: str) -> None:
        """Give up the engine's bit, so that no chunk needs to be changed."""
        self._bits.pop(name, None)


class _UnansweredPrompt(NamedTuple):
    """A prompt that was sent when its first `depth` chunks were expected to be cached. `is_certain`
    is False if only another unanswered prompt would bring these chunks."""

    depth: int
    is_certain: bool
    chunks: tuple[int, ...]

    def brings(self, chunk: int, depth: int) -> bool:
        return self.depth < depth <= len(self.chunks) and self.chunks[depth - 1] == chunk


class _CandidateBits(NamedTuple):
    """The bits of some candidates with their indexes, and all bits together."""

    indexes: dict[int, int]
    all: int


class PrefixAffinity(Policy):
    uses_feedback = True

    def __init__(self, bound: LoadBound, index: ChunkIndex | None = None) -> None:
        self._bound = bound
        self._by_load = LeastLoaded()
        self._index = ChunkIndex() if index is None else index
        self._candidate_bits = CandidateCache(self._register)
        self._unanswered: dict[str, dict[int, _UnansweredPrompt]] = {}
        """For each engine, by turn."""
        self._strikes: dict[str, int] = {}
        # The best match of the last query: its feedback follows soon.
        self._last_chunks: tuple[int, ...] = ()
        self._last_match = ChunkMatch(0, 0)

    def order(self, candidates: Sequence[E], query: RoutingQuery) -> Sequence[E]:
        """Prefer the engine with the longest match. If it is overloaded, look for shorter matches
        of the other engines."""
        chunks = query.chunks
        if not chunks:
            return self._by_load.order(candidates, query)
        bits = self._candidate_bits.get(candidates)
        depth, engines = self._last_match = self._index.longest(chunks, bits.all)
        self._last_chunks = chunks
        among = bits.all
        overloaded: list[E] = []
        while depth and len(overloaded) < MAX_ORDERED:
            first = self._least_loaded(engines, candidates, bits, query)
            if first.in_flight < self._bound.floor or not self._bound.is_overloaded(
                first, candidates, mix(query.turn)
            ):
                return _with_stand_in(first, candidates, query.turn)
            overloaded.append(first)
            among &= ~engines
            depth, engines = self._index.longest(chunks, among, depth - 1)
        return filled([], self._by_load.order(candidates, query), overloaded)

    def _least_loaded(
        self, engines: int, candidates: Sequence[E], bits: _CandidateBits, query: RoutingQuery
    ) -> E:
        if engines in bits.indexes:
            return candidates[bits.indexes[engines]]
        found = [candidates[bits.indexes[bit]] for bit in _some_bits(engines, mix(query.turn))]
        return min(found, key=load)

    def note_sent(self, name: str, query: RoutingQuery) -> None:
        if not query.chunks or not self._index.bit(name):
            return
        unanswered = self._unanswered.setdefault(name, {})
        depth, is_certain = self._depth(name, query), True
        if depth and unanswered:
            chunk = query.chunks[depth - 1]
            is_certain = not any(other.brings(chunk, depth) for other in unanswered.values())
        if len(unanswered) >= MAX_UNANSWERED:
            del unanswered[next(iter(unanswered))]
        unanswered[query.turn] = _UnansweredPrompt(depth, is_certain, query.chunks)
        self._index.add(name, query.chunks)

    def note_cached(self, name: str, query: RoutingQuery, cached_tokens: int | None) -> None:
        """Compare the expectation with the answer. Half of it suffices: tokens are estimated."""
        sent = self._unanswered.get(name, {}).pop(query.turn, None)
        if sent is None or cached_tokens is None or not sent.depth:
            return
        if 2 * cached_tokens >= sent.depth * TOKENS_PER_CHUNK:
            self._strikes.pop(name, None)
        elif sent.is_certain:
            strikes = self._strikes[name] = self._strikes.get(name, 0) + 1
            if strikes >= MAX_STRIKES:
                self.forget(name)

    def forget(self, name: str) -> None:
        self._strikes.pop(name, None)
        self._unanswered.pop(name, None)
        self._index.forget(name)
        self._candidate_bits.clear()

    def expected_tokens(self, name: str, query: RoutingQuery) -> int:
        """Return the tokens without those that only unanswered prompts will bring."""
        depth = self._depth(name, query)
        if depth:
            for other in self._unanswered.get(name, {}).values():
                if depth and other.brings(query.chunks[depth - 1], depth):
                    depth = other.depth
        return depth * TOKENS_PER_CHUNK

    def _depth(self, name: str, query: RoutingQuery) -> int:
        bit = self._index.bit(name)
        if query.chunks is self._last_chunks and self._last_match.engines & bit:
            return self._last_match.depth
        return self._index.longest(query.chunks, bit).depth

    def _register(self, candidates: Sequence[Candidate]) -> _CandidateBits:
        era = self._index.era
        bits = self._index.register([engine.name for engine in candidates])
        if self._index.era != era:
            self._candidate_bits.clear()
        for name in [name for name in self._unanswered if not self._index.bit(name)]:
            del self._unanswered[name]
        return _CandidateBits({bit: index for index, bit in enumerate(bits)}, sum(bits))


def _with_stand_in(first: E, candidates: Sequence[E], turn: int) -> list[E]:
    """Return `first` and another engine, which is used only if the first one fails."""
    other = candidates[turn % len(candidates)]
    if other is first:
        other = candidates[(turn + 1) % len(candidates)]
    return [first, other] if other is not first else [first]


def _some_bits(engines: int, chance: int) -> list[int]:
    """Return the bits of at most MAX_COMPARED of these engines, from a random one on."""
    found: list[int] = []
    shift = chance % engines.bit_length()
    above = engines >> shift << shift
    for bits in (above, engines ^ above):
        while bits and len(found) < MAX_COMPARED:
            bit = bits & -bits
            found.append(bit)
            bits ^= bit
    return found
