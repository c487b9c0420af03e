"""Which engines a key belongs to, when there may be a thousand of them.

A consistent ring with several probes: each name has POINTS places on a circle, a key PROBES, and
the name whose place follows one of the key's most closely has the key. As with rendezvous hashing,
a name that comes or goes moves only its own keys, and shares are as even (they differ by about
1/sqrt(POINTS x PROBES)), but it takes a few bisections instead of a hash for each name.

            probe      probe                the second is closer to B than the first to A:
    --A------|----A------|-B-----A--        the key is B's, then A's
             '---->      '->
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

POINTS = 64
PROBES = 5
CIRCLE = 2**64
# The low bits of a point are the number of its name, so that a point is all there is to look up.
NUMBER = 2**20 - 1

_points = struct.Struct("<8Q")
_probes = struct.Struct(f"<{PROBES}I")


class HashRing:
    """Names that are not asked stay and are walked past, so one that blinks costs nothing; when
    they are more than half, the ring is made anew."""

    _circle: array[int]

    def __init__(self) -> None:
        self._begin_anew()

    def __len__(self) -> int:
        """Names that it knows."""
        return len(self._numbers)

    def copy(self) -> HashRing:
        """Another one of the same names: they are cheaper to seat there than in an empty one."""
        ring = HashRing()
        ring._circle, ring._numbers = self._circle[:], self._numbers.copy()
        return ring

    def seat(self, names: Sequence[str]) -> None:
        """From now on these names are asked; `nearest` tells their places in this list."""
        unknown = set(names) - self._numbers.keys()
        if len(self._numbers) + len(unknown) > 2 * len(names):
            self._begin_anew()
            unknown = set(names)
        self._add(sorted(unknown))
        self._places: list[int | None] = [None] * len(self._numbers)
        for place, name in enumerate(names):
            self._places[self._numbers[name]] = place

    def nearest(self, key: str) -> list[int]:
        """The places of at most PROBES names, the key's own first. Some name must be asked."""
        circle, places = self._circle, self._places
        size = len(circle)
        found: list[int] = []
        for probe in _probes.unpack(_digest(key, 4 * PROBES)):
            at = probe << 32
            index = bisect_left(circle, at)
            point = circle[index] if index < size else circle[0]
            while places[point & NUMBER] is None:
                index += 1
                point = circle[index % size]
            found.append((point - at) % CIRCLE)
        found.sort()
        order = [places[distance & NUMBER] for distance in found]
        return [place for place in dict.fromkeys(order) if place is not None]

    def _add(self, names: Sequence[str]) -> None:
        for name in names:
            number = self._numbers[name] = len(self._numbers)
            if len(names) == 1:
                for point in _points_of(name, number):
                    insort(self._circle, point)
            else:
                self._circle.extend(_points_of(name, number))
        if len(names) > 1:
            self._circle = array("Q", sorted(self._circle))

    def _begin_anew(self) -> None:
        # No list: its ints would lie all over the memory, and looking one up costs that.
        self._circle = array("Q")
        self._numbers: dict[str, int] = {}


def _points_of(name: str, number: int) -> Iterable[int]:
    """Two names share a place in their upper 44 bits with a chance of 1 in 10,000 in a thousand."""
    for turn in range(POINTS // 8):
        for point in _points.unpack(_digest(f"{turn} {name}", 64)):
            yield point & ~NUMBER | number


def _digest(text: str, size: int) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size).digest()
