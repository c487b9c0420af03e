"""A session stays with its engine as long as that engine is not overloaded.

Sessions are mapped to engines by a consistent ring with several probes: each name has POINTS places
on a circle and each key PROBES places. The key belongs to the name whose place follows one of the
key's places most closely. As with rendezvous hashing, adding or removing a name moves only its own
keys, and shares are as even (they differ by about 1/sqrt(POINTS x PROBES)), but a look-up takes a
few bisections instead of one hash per name.

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
from typing import NamedTuple

from router.routing.policy import (
    MAX_ORDERED,
    Candidate,
    CandidateCache,
    E,
    LoadBound,
    Policy,
    PowerOfTwo,
    RoutingQuery,
    filled,
    mix,
)

MAX_SESSIONS = 1024
POINTS = 64
PROBES = 5
CIRCLE = 2**64
# The low bits of a point are the number of its name: a look-up needs nothing but the point.
NUMBER_MASK = 2**20 - 1

_points = struct.Struct("<8Q")
_probes = struct.Struct(f"<{PROBES}I")


class HashRing:
    """Names that are not active stay on the ring and are skipped, so that an engine that fails for
    a moment causes no work. When they are more than half, the ring is rebuilt."""

    _circle: array[int]

    def __init__(self) -> None:
        self._clear()

    def __len__(self) -> int:
        """Return the number of names on the ring, active or not."""
        return len(self._numbers)

    def copy(self) -> HashRing:
        """Return a ring with the same names: cheaper to change than an empty one."""
        ring = HashRing()
        ring._circle, ring._numbers = self._circle[:], self._numbers.copy()
        return ring

    def activate(self, names: Sequence[str]) -> None:
        """Make exactly these names active. `nearest` returns indexes into `names`."""
        unknown = set(names) - self._numbers.keys()
        if len(self._numbers) + len(unknown) > 2 * len(names):
            self._clear()
            unknown = set(names)
        self._add(sorted(unknown))
        self._indexes: list[int | None] = [None] * len(self._numbers)
        for index, name in enumerate(names):
            self._indexes[self._numbers[name]] = index

    def nearest(self, key: str) -> list[int]:
        """Return the indexes of at most PROBES active names, nearest first. There must be one."""
        circle, indexes = self._circle, self._indexes
        size = len(circle)
        found: list[int] = []
        for probe in _probes.unpack(_digest(key, 4 * PROBES)):
            at = probe << 32
            place = bisect_left(circle, at)
            point = circle[place] if place < size else circle[0]
            while indexes[point & NUMBER_MASK] is None:
                place += 1
                point = circle[place % size]
            found.append((point - at) % CIRCLE)
        found.sort()
        order = [indexes[distance & NUMBER_MASK] for distance in found]
        return [index for index in dict.fromkeys(order) if index is not None]

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

    def _clear(self) -> None:
        # An array, since the ints of a list lie all over the memory, which slows bisection.
        self._circle = array("Q")
        self._numbers: dict[str, int] = {}


def _points_of(name: str, number: int) -> Iterable[int]:
    """In a thousand names two share a place in the upper 44 bits with a chance of 1 in 10,000."""
    for turn in range(POINTS // 8):
        for point in _points.unpack(_digest(f"{turn} {name}", 64)):
            yield point & ~NUMBER_MASK | number


def _digest(text: str, size: int) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size).digest()


class _SessionMap(NamedTuple):
    """The ring of some candidates, and the indexes of each session's nearest candidates."""

    size: int
    ring: HashRing
    nearest: dict[str, list[int]]


class SessionAffinity(Policy):
    """A request without a session goes by load."""

    def __init__(self, bound: LoadBound) -> None:
        self._bound = bound
        self._by_load = PowerOfTwo()
        self._ring = HashRing()
        self._maps = CandidateCache(self._make_map)

    def order(self, candidates: Sequence[E], query: RoutingQuery) -> Sequence[E]:
        if not query.session or len(candidates) < 2:
            return self._by_load.order(candidates, query)
        sessions = self._maps.get(candidates)
        nearest = sessions.nearest.get(query.session)
        if nearest is None:
            if len(sessions.nearest) >= MAX_SESSIONS + 16 * sessions.size:
                sessions.nearest.clear()
            nearest = sessions.nearest[query.session] = sessions.ring.nearest(query.session)
        order = [candidates[index] for index in nearest]
        if order[0].in_flight < self._bound.floor:
            return order[:MAX_ORDERED]
        limit = self._bound.limit(candidates, mix(query.turn))
        fit = [engine for engine in order if engine.in_flight <= limit]
        others = () if len(fit) == MAX_ORDERED else self._by_load.order(candidates, query)
        return filled(fit, [one for one in others if one.in_flight <= limit], others, order)

    def forget(self, name: str) -> None:
        """Drop the cached maps, which keep a removed engine alive. The ring keeps the name, so
        sessions return to an engine that returns."""
        self._maps.clear()

    def _make_map(self, candidates: Sequence[Candidate]) -> _SessionMap:
        self._ring = self._ring.copy()
        self._ring.activate([engine.name for engine in candidates])
        return _SessionMap(len(candidates), self._ring, {})
