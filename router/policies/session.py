"""A session stays with its engine, as long as that is not overloaded."""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.affinity import LoadBound
from router.policies.candidate import MOST_TRIED, Ask, Candidate, E, Policy, filled
from router.policies.chance import mix
from router.policies.power_of_two import PowerOfTwo
from router.policies.ring import Ring


class Session(Policy):
    """A request without a session goes by load."""

    def __init__(self, bound: LoadBound) -> None:
        self._bound = bound
        self._by_load = PowerOfTwo()
        self._ring = Ring()
        self._seated: tuple[Candidate, ...] = ()

    def order(self, candidates: Sequence[E], ask: Ask) -> Sequence[E]:
        if not ask.session or len(candidates) < 2:
            return self._by_load.order(candidates, ask)
        if candidates is not self._seated:
            self._seat(candidates)
        order = [candidates[place] for place in self._ring.nearest(ask.session)]
        if order[0].in_flight < self._bound.floor:
            return order[:MOST_TRIED]
        limit = self._bound.limit(candidates, mix(ask.turn))
        fit = [engine for engine in order if engine.in_flight <= limit]
        others = () if fit else self._by_load.order(candidates, ask)
        return filled(fit, others, order)

    def _seat(self, candidates: Sequence[Candidate]) -> None:
        """A tuple stays what it is, so its identity tells; a list is looked at each time."""
        self._seated = candidates if isinstance(candidates, tuple) else ()
        self._ring.seat([engine.name for engine in candidates])
