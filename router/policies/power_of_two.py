"""Two engines by chance, the less loaded one first: nearly as even as a look at all of them."""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.candidate import Ask, E, Policy, load
from router.policies.chance import mix


class PowerOfTwo(Policy):
    def order(self, candidates: Sequence[E], ask: Ask) -> Sequence[E]:
        size = len(candidates)
        if size < 2:
            return candidates
        chance = mix(ask.turn)
        first = chance % size
        second = (first + 1 + (chance >> 32) % (size - 1)) % size
        one, other = candidates[first], candidates[second]
        order = [other, one] if load(other) < load(one) else [one, other]
        if size > 2:
            order.append(candidates[_third(first, second, (chance >> 16) % (size - 2))])
        return order


def _third(first: int, second: int, nth: int) -> int:
    """The nth place that is neither of the two."""
    low, high = (first, second) if first < second else (second, first)
    nth += nth >= low
    return nth + (nth >= high)
