"""An engine that may hold something of ours, as long as it is not overloaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from router.routing.candidate import legs
from router.routing.repeatable_random import sample


class Loaded(Protocol):
    """An engine, as far as affinity goes: `in_flight` are the legs that run on it."""

    in_flight: int


L = TypeVar("L", bound=Loaded)


@dataclass(frozen=True, slots=True)
class LoadBound:
    """An engine is overloaded with more than `floor` legs and more than `factor` times the mean."""

    factor: float = 1.5
    floor: int = 8

    def limit(self, candidates: Sequence[Loaded], chance: int = 0) -> int:
        """The most legs of an engine that is not overloaded. Of many engines, the mean is that of
        a sample, which `chance` chooses."""
        looked_at = sample(candidates, chance)
        mean = sum(map(legs, looked_at)) / max(1, len(looked_at))
        return max(self.floor - 1, int(self.factor * mean))

    def is_far(self, engine: Loaded) -> bool:
        """The engine has so few legs that nobody else's matter."""
        return engine.in_flight < self.floor

    def is_overloaded(self, engine: Loaded, candidates: Sequence[Loaded], chance: int = 0) -> bool:
        return not self.is_far(engine) and engine.in_flight > self.limit(candidates, chance)


def first(candidates: Sequence[L], preferred: L) -> list[L]:
    """All candidates, `preferred` before the others."""
    return [preferred, *(engine for engine in candidates if engine is not preferred)]
