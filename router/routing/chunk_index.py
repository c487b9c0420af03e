"""An estimate of which engine holds which chunks of prompts, within a bound of memory.

`ChunkIndex` has two generations, each a dict from a chunk to the bits of the engines that hold it.
New chunks go to the young generation. When that has half of what all caches together hold, it
becomes the old one, and the index forgets chunks of the old one that were not added again. This is
about what an engine's LRU cache does, for one dict look-up per chunk. Chunk hashes are chained, so
an engine that holds a chunk holds all before it, and bisection finds the longest match.

If all caches together hold more chunks than the bound admits, the index keeps only every second,
fourth ... chunk of a prompt. Matches are then found in larger steps, but none is forgotten sooner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from router.routing.prompt_chunks import MAX_CHUNKS, TOKENS_PER_CHUNK

# The assumed cache of an engine that does not report its size, in tokens.
DEFAULT_CACHE_TOKENS = 2**19
# Bytes of an entry of a dict: its share of the table, the hash, and an int of an engine's bit.
BYTES_PER_CHUNK = 128
DEFAULT_MEMORY = 64 * 2**20
# Bits are not reused; when this many belong to no engine, the index is cleared.
MAX_UNUSED_BITS = 2**12


class ChunkMatch(NamedTuple):
    """The first `depth` chunks of a prompt are held by `engines` (bits)."""

    depth: int
    engines: int


NO_MATCH = ChunkMatch(0, 0)


class ChunkIndex:
    """An estimate of the chunks that each engine holds; see the top of this file. After a change of
    `era` earlier bits are meaningless. `memory` is the bound in bytes. Each engine keeps
    `host_tokens` more tokens than it reports."""

    def __init__(self, memory: int = DEFAULT_MEMORY, host_tokens: int = 0) -> None:
        self._host_tokens = host_tokens
        self.on_sent: Callable[[str, Sequence[int]], None] = lambda name, chunks: None
        """Called for each prompt that this router has sent to an engine."""
        self._max_young = max(1, memory // BYTES_PER_CHUNK // 2)
        self.era = 0
        self._clear()

    def _clear(self) -> None:
        self._bits: dict[str, int] = {}
        self._cache_tokens: dict[str, int] = {}
        self._next_bit = 1
        self._old: dict[int, int] = {}
        self._young: dict[int, int] = {}
        self._added = 0
        self._fit_caches()

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    @property
    def stride(self) -> int:
        """Only chunks whose number in their prompt is a multiple of it are kept."""
        return self._stride

    def register(self, names: Sequence[str], cache_tokens: Sequence[int] = ()) -> list[int]:
        """Return the bits of the engines, whose caches hold `cache_tokens` (0: unknown). Chunks are
        added for registered engines only."""
        if self._next_bit.bit_length() > MAX_UNUSED_BITS + 2 * len(names):
            self.era += 1
            self._clear()
        for name in names:
            if name not in self._bits:
                self._bits[name] = self._next_bit
                self._next_bit <<= 1
        known = cache_tokens or [0] * len(names)
        for name, tokens in zip(names, known, strict=True):
            self._cache_tokens[name] = (tokens or DEFAULT_CACHE_TOKENS) + self._host_tokens
        self._fit_caches()
        return [self._bits[name] for name in names]

    def _fit_caches(self) -> None:
        """Set how many chunks a generation has, and which are kept."""
        chunks = sum(self._cache_tokens.values()) // TOKENS_PER_CHUNK // 2
        self._stride = 1
        while chunks > self._stride * self._max_young and self._stride < MAX_CHUNKS:
            self._stride *= 2
        self._max_added = max(1, chunks // self._stride)

    def bit(self, name: str) -> int:
        """Return the engine's bit; 0 if the engine is not registered."""
        return self._bits.get(name, 0)

    def add(self, name: str, chunks: Sequence[int]) -> None:
        """The engine holds these chunks, the successive chunks of one prompt."""
        bit, young, stride, added = self.bit(name), self._young, self._stride, 0
        if not bit:
            return
        last = len(chunks) // stride * stride
        for at in range(last - 1, -1, -stride):
            chunk = chunks[at]
            known = young.get(chunk, 0)
            if known & bit:
                break
            young[chunk] = known | bit if known else bit  # one int for many chunks
            added += 1
        self._added += added
        if len(young) >= self._max_young or self._added >= self._max_added:
            self._old, self._young, self._added = self._young, {}, 0

    def longest(self, chunks: Sequence[int], among: int, most: int | None = None) -> ChunkMatch:
        """Return the longest beginning, of at most `most` chunks, that one of the engines `among`
        (bits) holds."""
        young, old, stride = self._young, self._old, self._stride
        low, high, engines = 0, (len(chunks) if most is None else most) // stride, 0
        while low < high:
            middle = (low + high + 1) // 2
            chunk = chunks[middle * stride - 1]
            found = (young.get(chunk, 0) | old.get(chunk, 0)) & among
            if found:
                low, engines = middle, found
            else:
                high = middle - 1
        return ChunkMatch(low * stride, engines)

    def forget(self, name: str) -> None:
        """Give up the engine's bit, so that no chunk needs to be changed."""
        self._bits.pop(name, None)
        self._cache_tokens.pop(name, None)
        self._fit_caches()
