"""Two engines by chance, the less loaded one first: nearly as even as a look at all of them."""

from __future__ import annotations

from collections.abc import Sequence

from router.routing.candidate import E, Policy, RoutingQuery, load
from router.routing.repeatable_random import mix


class PowerOfTwo(Policy):
    def order(self, candidates: Sequence[E], ask: RoutingQuery) -> Sequence[E]:
        size = len(candidates)
        if size < 2:
            return candidates
        chance = mix(ask.turn)
        first = chance % size
        second = (first + 1 + (chance >> 32) % (size - 1)) % size
        one, other = candidates[first], candidates[second]
        return [other, one] if load(other) < load(one) else [one, other]
