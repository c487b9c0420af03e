"""A session stays with its engine, as long as that is not overloaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from router.policies.affinity import LoadBound
from router.policies.candidate import MOST_TRIED, Ask, E, Policy, filled
from router.policies.chance import mix
from router.policies.power_of_two import PowerOfTwo
from router.policies.ring import Ring

MOST_SEATS = 16
MOST_SESSIONS = 1024


class _Seat(NamedTuple):
    """What was worked out for one tuple of candidates, which is kept so that its id stays its own.
    `places`: of the engines near to a session."""

    candidates: Sequence[object]
    ring: Ring
    places: dict[str, list[int]]


class Session(Policy):
    """A request without a session goes by load."""

    def __init__(self, bound: LoadBound) -> None:
        self._bound = bound
        self._by_load = PowerOfTwo()
        self._ring = Ring()
        self._seats: dict[int, _Seat] = {}

    def order(self, candidates: Sequence[E], ask: Ask) -> Sequence[E]:
        if not ask.session or len(candidates) < 2:
            return self._by_load.order(candidates, ask)
        seat = self._seats.get(id(candidates)) or self._seat(candidates)
        places = seat.places.get(ask.session) or _places(seat, ask.session)
        order = [candidates[place] for place in places]
        if order[0].in_flight < self._bound.floor:
            return order[:MOST_TRIED]
        limit = self._bound.limit(candidates, mix(ask.turn))
        fit = [engine for engine in order if engine.in_flight <= limit]
        others = () if fit else self._by_load.order(candidates, ask)
        return filled(fit, others, order)

    def forget(self, name: str) -> None:
        """Nothing keeps an engine that is gone. Sessions come back to one that comes back."""
        self._seats.clear()

    def _seat(self, candidates: Sequence[E]) -> _Seat:
        """A tuple stays what it is, so its identity tells; a list is looked at each time."""
        self._ring = self._ring.copy()
        self._ring.seat([engine.name for engine in candidates])
        seat = _Seat(candidates, self._ring, {})
        if isinstance(candidates, tuple):
            if len(self._seats) >= MOST_SEATS:
                del self._seats[next(iter(self._seats))]
            self._seats[id(candidates)] = seat
        return seat


def _places(seat: _Seat, session: str) -> list[int]:
    if len(seat.places) >= MOST_SESSIONS + 16 * len(seat.candidates):
        seat.places.clear()
    places = seat.places[session] = seat.ring.nearest(session)
    return places
