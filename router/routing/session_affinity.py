"""A session stays with its engine, as long as that is not overloaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from router.routing.affinity import LoadBound
from router.routing.candidate import MAX_ORDERED, Candidate, E, Policy, RoutingQuery, filled
from router.routing.candidate_cache import CandidateCache
from router.routing.hash_ring import HashRing
from router.routing.power_of_two import PowerOfTwo
from router.routing.repeatable_random import mix

MOST_SESSIONS = 1024


class _Seat(NamedTuple):
    """`places`: of the engines near to a session."""

    size: int
    ring: HashRing
    places: dict[str, list[int]]


class SessionAffinity(Policy):
    """A request without a session goes by load."""

    def __init__(self, bound: LoadBound) -> None:
        self._bound = bound
        self._by_load = PowerOfTwo()
        self._ring = HashRing()
        self._seats = CandidateCache(self._seat)

    def order(self, candidates: Sequence[E], ask: RoutingQuery) -> Sequence[E]:
        if not ask.session or len(candidates) < 2:
            return self._by_load.order(candidates, ask)
        seat = self._seats.get(candidates)
        places = seat.places.get(ask.session) or _places(seat, ask.session)
        order = [candidates[place] for place in places]
        if order[0].in_flight < self._bound.floor:
            return order[:MAX_ORDERED]
        limit = self._bound.limit(candidates, mix(ask.turn))
        fit = [engine for engine in order if engine.in_flight <= limit]
        others = () if len(fit) == MAX_ORDERED else self._by_load.order(candidates, ask)
        return filled(fit, [one for one in others if one.in_flight <= limit], others, order)

    def forget(self, name: str) -> None:
        """Nothing keeps an engine that is gone. Sessions come back to one that comes back."""
        self._seats.clear()

    def _seat(self, candidates: Sequence[Candidate]) -> _Seat:
        self._ring = self._ring.copy()
        self._ring.seat([engine.name for engine in candidates])
        return _Seat(len(candidates), self._ring, {})


def _places(seat: _Seat, session: str) -> list[int]:
    if len(seat.places) >= MOST_SESSIONS + 16 * seat.size:
        seat.places.clear()
    places = seat.places[session] = seat.ring.nearest(session)
    return places
