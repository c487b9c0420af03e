"""Each engine in turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from router.routing.candidate import MAX_ORDERED, E, Policy, RoutingQuery

T = TypeVar("T")


class RoundRobin(Policy):
    def order(self, candidates: Sequence[E], ask: RoutingQuery) -> Sequence[E]:
        start = ask.turn % len(candidates) if candidates else 0
        order = candidates[start : start + MAX_ORDERED]
        missing = min(MAX_ORDERED, len(candidates)) - len(order)
        return [*order, *candidates[:missing]] if missing else order


def in_turn(candidates: Sequence[T], turn: int) -> Sequence[T]:
    """All candidates, starting with the one whose turn it is; the rest are its stand-ins."""
    start = turn % len(candidates) if candidates else 0
    return [*candidates[start:], *candidates[:start]] if start else candidates
