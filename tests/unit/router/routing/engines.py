"""Engines that only count."""

from dataclasses import dataclass, field

from router.fleet.engine import PrefillRate
from router.routing.policy import LoadBound

BOUND = LoadBound(1.5, 8)


@dataclass(slots=True, eq=False)
class Engine:
    name: str
    total_legs: int = 0
    total_tokens: int = 0
    prefill_rate: PrefillRate = field(default_factory=PrefillRate)
    total_local_prefill: tuple[float, int] = (0.0, 0)
    cache_tokens: int = 0
    role: str = "prefill"

    @property
    def preferred_role(self) -> str:
        return self.role


def engines(count: int) -> tuple[Engine, ...]:
    return tuple(Engine(f"10.0.{n // 256}.{n % 256}:8000") for n in range(count))


def loaded(loads: list[tuple[int, int]]) -> tuple[Engine, ...]:
    """From pairs of tokens and legs."""
    made = engines(len(loads))
    for engine, (tokens, legs) in zip(made, loads, strict=True):
        engine.total_tokens, engine.total_legs = tokens, legs
    return made
