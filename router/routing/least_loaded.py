"""The engine with the fewest prompt tokens in flight."""

from __future__ import annotations

from collections.abc import Sequence

from router.routing.candidate import (
    MAX_ORDERED,
    Candidate,
    E,
    Policy,
    RoutingQuery,
    load,
    prompt_tokens,
)
from router.routing.repeatable_random import SAMPLE, mix, sample
from router.routing.round_robin import in_turn

# So few are sorted by all at once.
FEW = 8


class LeastLoaded(Policy):
    """Of many engines it looks at a sample only: the best of 64 is nearly the best of all, and two
    routers that know nothing of each other don't run to the same one."""

    def order(self, candidates: Sequence[E], ask: RoutingQuery) -> Sequence[E]:
        if len(candidates) <= FEW:
            return sorted(in_turn(candidates, ask.turn), key=load)[:MAX_ORDERED]
        if len(candidates) > SAMPLE:
            looked_at = sample(candidates, mix(ask.turn))
        else:
            looked_at = in_turn(candidates, ask.turn)
        order = sorted(looked_at, key=prompt_tokens)
        if _has_ties(order):  # Pairs take twice as long to sort as numbers.
            order = sorted(looked_at, key=load)
        return order[:MAX_ORDERED]


def _has_ties(order: Sequence[Candidate]) -> bool:
    """Whether legs have a say in who comes first."""
    tokens = [engine.tokens_in_flight for engine in order[: MAX_ORDERED + 1]]
    return len(set(tokens)) < len(tokens)
