"""Who holds which chunks of prompts, as far as we know: bounded, whatever is asked.

Two generations, each a dict of chunk -> bits of the engines that hold it. Notes go to the young
one; when it is full it becomes the old one, and what was old and not noted again is forgotten.
This is about what an engine's own LRU cache does, for a dict lookup a chunk.

Hashes are chained, so who holds a chunk holds all before it: bisection finds the longest match.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# What one engine's cache is taken to hold (half a million tokens), and the bound for all of them.
PER_ENGINE = 2048
IN_ALL = 2**19
# Bits are not given twice; when so many are nobody's, all is forgotten and they begin anew.
MOST_UNUSED = 2**12


class ChunkMatch(NamedTuple):
    """The `depth` first chunks of a prompt are held by `engines` (bits)."""

    depth: int
    engines: int


class ChunkIndex:
    def __init__(self, per_engine: int = PER_ENGINE, in_all: int = IN_ALL) -> None:
        self._per_engine = per_engine
        self._half = max(1, in_all // 2)
        self._bits: dict[str, int] = {}
        self._next_bit = 1
        self.era = 0
        """Bits of an earlier one mean nothing any more."""
        self._old: dict[int, int] = {}
        self._young: dict[int, int] = {}
        self._added = 0

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def seat(self, names: Sequence[str]) -> list[int]:
        """The engines' bits. Only engines that were seated are noted."""
        if self._next_bit.bit_length() > MOST_UNUSED + 2 * len(names):
            self._begin_anew()
        return [self._bits.get(name) or self._new_bit(name) for name in names]

    def bit(self, name: str) -> int:
        """0 if it was not seated, or was forgotten."""
        return self._bits.get(name, 0)

    def add(self, name: str, chunks: Sequence[int]) -> None:
        bit, young, added = self.bit(name), self._young, 0
        for chunk in reversed(chunks if bit else ()):
            known = young.get(chunk, 0)
            if known & bit:
                break
            young[chunk] = known | bit if known else bit  # one int for all that nobody else holds
            added += 1
        self._added += added
        if len(young) >= self._half or 2 * self._added >= self._per_engine * len(self._bits):
            self._turn_over()

    def longest(self, chunks: Sequence[int], among: int, most: int | None = None) -> ChunkMatch:
        """The longest beginning (of `most` chunks) that any of these engines (bits) holds."""
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
        """Its bit is nobody's from now on, so nothing needs to be looked through."""
        self._bits.pop(name, None)

    def _new_bit(self, name: str) -> int:
        bit = self._bits[name] = self._next_bit
        self._next_bit <<= 1
        return bit

    def _turn_over(self) -> None:
        self._old, self._young, self._added = self._young, {}, 0

    def _begin_anew(self) -> None:
        self._bits, self._next_bit, self.era = {}, 1, self.era + 1
        self._old, self._young, self._added = {}, {}, 0
