"""One engine: what it is, and three things that are not the same: health, intent and load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from router.fleet.capabilities import EngineCapabilities
from router.fleet.circuit_breaker import CircuitBreaker
from router.fleet.engine_spec import EngineRole, EngineSpec, Intent
from router.http_client.pool import CompleteAnswer, EnginePool


class Health(StrEnum):
    """What it does when it is asked."""

    UNKNOWN = "unknown"
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"


@dataclass(slots=True, eq=False)
class Engine:
    """Mutated by its Fleet alone; flows count their legs with `in_flight`, and the estimated tokens
    of these legs' prompts with `tokens_in_flight`. `admitted` are the requests that hold
    a seat here (router.proxy.admission), whether their leg runs yet or not."""

    spec: EngineSpec
    pool: EnginePool
    breaker: CircuitBreaker
    health: Health = Health.UNKNOWN
    intent: Intent = Intent.SERVING
    is_available: bool = False
    """Nothing speaks against it."""
    is_cold: bool = False
    """It is new, and is being made known to others: see router.proxy.warmup."""
    is_cooling: bool = False
    """It said that it has too much to do, and until when."""
    failed_recently: bool = False
    """Other engines are preferred for a second: an engine that fails fast looks idle."""
    reason: str = "not probed yet"
    failed_probes: int = 0
    in_flight: int = 0
    tokens_in_flight: int = 0
    kv_leases: int = 0
    """Requests whose KV waits here until a decoder has read it."""
    admitted: int = 0
    admitted_tokens: int = 0
    capabilities: EngineCapabilities = field(default_factory=EngineCapabilities)
    models: frozenset[str] | None = None
    """None: not known, so it is taken to serve every one."""
    context_lengths: Mapping[str, int] = field(default_factory=dict)
    """Tokens of prompt and answer together, of those models of which it has told."""
    lost_at: float = 0.0
    """Unix time when it was last found unhealthy: what it held before may be gone."""
    group: str = ""
    """Its KV moves only within: as its source says, or else as it says itself."""
    compatibility: str = ""
    """What it said last (see Learned), whether it lives or not: the dead move no other's group."""
    credential: str = ""
    """An Authorization header's value for what the router itself asks."""
    name: str = field(init=False)
    role: EngineRole = field(init=False)

    def __post_init__(self) -> None:
        self.name, self.role = self.spec.name, self.spec.role
        self.group = self.spec.group
        self.models = self.spec.models or None

    def update_spec(self, spec: EngineSpec) -> None:
        """Another description of what listens at the same address."""
        if spec.models != self.spec.models:
            self.models = spec.models or None  # what it said itself may be old by now
        self.spec, self.role, self.group = spec, spec.role, spec.group

    async def get(
        self, path: str, deadline: float, limit: int, credential: str = ""
    ) -> CompleteAnswer:
        """What it answers to GET, of at most `limit` bytes. `credential`: its caller's, where the
        router has none of its own. Raises UpstreamError."""
        lines = [f"GET {path} HTTP/1.1", f"host: {self.name}"]
        if credential := self.credential or credential:
            lines.append(f"authorization: {credential}")
        message = "\r\n".join([*lines, "", ""]).encode("latin-1")
        return await self.pool.fetch(message, deadline, limit)

    @property
    def is_usable(self) -> bool:
        """Requests may go there at all, if there is none better."""
        return self.health is not Health.UNHEALTHY and self.intent is Intent.SERVING

    @property
    def is_idle(self) -> bool:
        """Nobody waits for anything of it: it may go, once it gets nothing new."""
        return self.in_flight == 0 and self.kv_leases == 0

    def update_availability(self) -> None:
        """Notes anew whether anything speaks against it: to be called after each change."""
        self.is_available = (
            self.health is Health.HEALTHY
            and self.intent is Intent.SERVING
            and not self.is_cooling
            and not self.is_cold
            and self.breaker.allows_requests
        )
