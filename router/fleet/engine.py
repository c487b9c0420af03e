"""One engine: where it is, what it does for us, whether it is alive."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from router.fleet.learned import Learned
from router.settings import Address
from router.upstream.pool import EnginePool


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


class State(StrEnum):
    UNKNOWN = "unknown"
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"


@dataclass(slots=True, eq=False)
class Engine:
    """Mutated by its Fleet alone; flows hold it and count their legs with `in_flight`."""

    role: Role
    address: Address
    pool: EnginePool
    state: State = State.UNKNOWN
    reason: str = "not probed yet"
    failures: int = 0
    in_flight: int = 0
    learned: Learned = field(default_factory=Learned)
    lost_at: float = 0.0
    """Unix time when it was last found unhealthy: what it held before may be gone."""
    name: str = field(init=False)
    url: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = str(self.address)
        self.url = f"http://{self.name}"
