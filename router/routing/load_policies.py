"""Policies that go by load, and the bound of load within which affinity applies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from router.routing.policy import (
    MAX_ORDERED,
    Candidate,
    E,
    Policy,
    RoutingQuery,
    legs,
    load,
    prompt_tokens,
)

T = TypeVar("T")

MASK = 2**64 - 1
SAMPLE_SIZE = 64
# Up to this many engines, one sort by all criteria is cheapest.
FEW = 8


def mix(number: int) -> int:
    """Return 64 pseudo-random bits that depend on every bit of the number (splitmix64)."""
    mixed = (number + 1) * 0x9E3779B97F4A7C15 & MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & MASK
    return mixed ^ mixed >> 31


def sample(items: Sequence[T], chance: int) -> Sequence[T]:
    """Return SAMPLE_SIZE items, evenly spaced from a random place on; all if there are fewer.

    Two slices, the second one where the first runs over the end: a thousand items cost no more than
    a hundred. Any two items may meet in a sample, so load spreads over all of them.
    """
    size = len(items)
    if size <= SAMPLE_SIZE:
        return items
    start = chance % size
    step = 1 + (chance >> 32) % (size // SAMPLE_SIZE)
    end = start + SAMPLE_SIZE * step
    picked = items[start:end:step]
    missing = SAMPLE_SIZE - len(picked)
    return [*picked, *items[end - missing * step - size : end - size : step]] if missing else picked


def in_turn(candidates: Sequence[T], turn: int) -> Sequence[T]:
    """Return all candidates, rotated so that each one comes first in turn."""
    start = turn % len(candidates) if candidates else 0
    return [*candidates[start:], *candidates[:start]] if start else candidates


@dataclass(frozen=True, slots=True)
class LoadBound:
    """The load up to which an engine keeps requests that prefer it. It is overloaded with at least
    `floor` legs and more than `factor` times the mean of the candidates."""

    factor: float = 1.5
    floor: int = 8

    def limit(self, candidates: Sequence[Candidate], chance: int = 0) -> int:
        """Return the largest number of legs of an engine that is not overloaded. Of many candidates
        a sample, which `chance` chooses, gives the mean."""
        sampled = sample(candidates, chance)
        mean = sum(map(legs, sampled)) / max(1, len(sampled))
        return max(self.floor - 1, int(self.factor * mean))

    def is_overloaded(
        self, engine: Candidate, candidates: Sequence[Candidate], chance: int = 0
    ) -> bool:
        if engine.in_flight < self.floor:
            return False
        return engine.in_flight > self.limit(candidates, chance)


class RoundRobin(Policy):
    """Each engine in turn."""

    def order(self, candidates: Sequence[E], query: RoutingQuery) -> Sequence[E]:
        start = query.turn % len(candidates) if candidates else 0
        order = candidates[start : start + MAX_ORDERED]
        missing = min(MAX_ORDERED, len(candidates)) - len(order)
        return [*order, *candidates[:missing]] if missing else order


class LeastLoaded(Policy):
    """The engine with the fewest prompt tokens in flight.

    Of many engines it considers a sample: the best of 64 is nearly the best of all, and routers
    that do not know each other's requests do not all choose the same engine.
    """

    def order(self, candidates: Sequence[E], query: RoutingQuery) -> Sequence[E]:
        if len(candidates) <= FEW:
            return sorted(in_turn(candidates, query.turn), key=load)[:MAX_ORDERED]
        if len(candidates) > SAMPLE_SIZE:
            considered = sample(candidates, mix(query.turn))
        else:
            considered = in_turn(candidates, query.turn)
        order = sorted(considered, key=prompt_tokens)
        if _has_ties(order):  # sorting by pairs takes twice as long as by numbers
            order = sorted(considered, key=load)
        return order[:MAX_ORDERED]


def _has_ties(order: Sequence[Candidate]) -> bool:
    tokens = [engine.tokens_in_flight for engine in order[: MAX_ORDERED + 1]]
    return len(set(tokens)) < len(tokens)


class PowerOfTwo(Policy):
    """The less loaded one of two random engines: nearly as even as comparing all of them."""

    def order(self, candidates: Sequence[E], query: RoutingQuery) -> Sequence[E]:
        size = len(candidates)
        if size < 2:
            return candidates
        chance = mix(query.turn)
        first = chance % size
        second = (first + 1 + (chance >> 32) % (size - 1)) % size
        one, other = candidates[first], candidates[second]
        return [other, one] if load(other) < load(one) else [one, other]
