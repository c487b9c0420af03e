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
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache

from router.routing.policy import (
    MAX_ORDERED,
    CandidateCache,
    E,
    LoadBound,
    Policy,
    PowerOfTwo,
    RoutingQuery,
    filled,
    mix,
)
from router.routing.prompt_chunks import MASK

MAX_KEYS = 1024
POINTS = 64
PROBES = 5
# The low bits of a point are the index of its name: a look-up needs nothing but the point.
INDEX_MASK = 2**20 - 1

_points = struct.Struct("<8Q")
_probes = struct.Struct(f"<{PROBES}I")


class HashRing:
    """Assigns keys to names; see the top of this file."""

    def __init__(self, names: Sequence[str]) -> None:
        places = (point | at for at, name in enumerate(names) for point in _points_of(name))
        # An array, since the ints of a list lie all over the memory, which slows bisection.
        self._circle = array("Q", sorted(places))
        self.nearest = lru_cache(MAX_KEYS + 16 * len(names))(self._find_nearest)
        """Returns the indexes of at most PROBES names for a key, nearest first. There must be
        one."""

    def _find_nearest(self, key: str) -> list[int]:
        circle, distances = self._circle, []
        for probe in _probes.unpack(_digest(key, 4 * PROBES)):
            at = probe << 32
            place = bisect_left(circle, at)
            point = circle[place] if place < len(circle) else circle[0]
            distances.append((point - at) & MASK)
        return list(dict.fromkeys([distance & INDEX_MASK for distance in sorted(distances)]))


@lru_cache(4096)
def _points_of(name: str) -> Sequence[int]:
    """In a thousand names two share a place in the upper 44 bits with a chance of 1 in 10,000."""
    digests = [_digest(f"{turn} {name}", 64) for turn in range(POINTS // 8)]
    return [point & ~INDEX_MASK for digest in digests for point in _points.unpack(digest)]


def _digest(text: str, size: int) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size).digest()


class SessionAffinity(Policy):
    """A request without a session goes by load."""

    chooses_ranks = True

    def __init__(self, bound: LoadBound) -> None:
        self._bound = bound
        self._by_load = PowerOfTwo()
        self._rings = CandidateCache(lambda engines: HashRing([engine.name for engine in engines]))

    def order(self, candidates: Sequence[E], query: RoutingQuery) -> Sequence[E]:
        if not query.session or len(candidates) < 2:
            return self._by_load.order(candidates, query)
        nearest = self._rings.get(candidates).nearest(query.session)
        order = [candidates[index] for index in nearest]
        if order[0].total_legs < self._bound.floor:
            return order[:MAX_ORDERED]
        limit = self._bound.limit(candidates, mix(query.turn))
        fit = [engine for engine in order if engine.total_legs <= limit]
        others = () if len(fit) == MAX_ORDERED else self._by_load.order(candidates, query)
        return filled(fit, [one for one in others if one.total_legs <= limit], others, order)

    def forget(self, name: str) -> None:
        """Drop the rings, since a ring's candidates would keep a removed engine alive."""
        self._rings.clear()
