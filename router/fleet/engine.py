"""One engine, with three independent kinds of state: its health, its intent and its load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from router.fleet.capabilities import EngineCapabilities
from router.fleet.circuit_breaker import CircuitBreaker
from router.fleet.engine_spec import EngineRole, EngineSpec, Intent
from router.http_client.pool import CompleteAnswer, EnginePool


class Health(StrEnum):
    """The result of the last probes."""

    UNKNOWN = "unknown"
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"


@dataclass(slots=True, eq=False)
class Engine:
    """An engine. Only its Fleet changes it, apart from the load, which requests count."""

    spec: EngineSpec
    pool: EnginePool
    """Its connections."""
    breaker: CircuitBreaker
    health: Health = Health.UNKNOWN
    intent: Intent = Intent.SERVING
    is_available: bool = False
    """Healthy, serving, and neither cold, cooling down nor behind an open circuit."""
    is_cold: bool = False
    """New, while the router warms it up: see router.proxy.warmup."""
    is_cooling: bool = False
    """Overloaded, by its own answer (Retry-After)."""
    failed_recently: bool = False
    """Other engines are preferred for a second, since an engine that fails fast looks idle."""
    reason: str = "not probed yet"
    """Why the engine is not healthy."""
    failed_probes: int = 0
    """Consecutive failed probes."""
    in_flight: int = 0
    """Request legs that run on it."""
    tokens_in_flight: int = 0
    """Estimated prompt tokens of these legs."""
    kv_leases: int = 0
    """Requests whose KV it holds until a decode engine has read it."""
    admitted: int = 0
    """Requests that hold a slot here (router.proxy.admission), with or without a running leg."""
    admitted_tokens: int = 0
    """Estimated prompt tokens that it computes for them."""
    capabilities: EngineCapabilities = field(default_factory=EngineCapabilities)
    models: frozenset[str] | None = None
    """None if unknown: the engine then counts as serving every model."""
    context_lengths: Mapping[str, int] = field(default_factory=dict)
    """Tokens of prompt and answer together, by model, as far as the engine reports them."""
    lost_at: float = 0.0
    """Unix time when it last became unhealthy: KV that it held before may be lost."""
    group: str = ""
    """KV moves only within a group, which the source or else the engine itself names."""
    compatibility: str = ""
    """The last known EngineCapabilities.compatibility. It outlives a failure, so that a failed
    engine does not change the groups of the others."""
    credential: str = ""
    """The Authorization header for the router's own requests."""
    name: str = field(init=False)
    role: EngineRole = field(init=False)

    def __post_init__(self) -> None:
        self.name, self.role = self.spec.name, self.spec.role
        self.group = self.spec.group
        self.models = self.spec.models or None

    def update_spec(self, spec: EngineSpec) -> None:
        """Replace the description of the engine at this address."""
        if spec.models != self.spec.models:
            self.models = spec.models or None  # models that it reported itself may be outdated
        self.spec, self.role, self.group = spec, spec.role, spec.group

    async def get(
        self, path: str, deadline: float, limit: int, credential: str = ""
    ) -> CompleteAnswer:
        """Return the answer to a GET request, of at most `limit` bytes. `credential` is the
        client's, for a router without its own. Raises UpstreamError."""
        lines = [f"GET {path} HTTP/1.1", f"host: {self.name}"]
        if credential := self.credential or credential:
            lines.append(f"authorization: {credential}")
        message = "\r\n".join([*lines, "", ""]).encode("latin-1")
        return await self.pool.fetch(message, deadline, limit)

    @property
    def is_usable(self) -> bool:
        """Requests may go there if no available engine is left."""
        return self.health is not Health.UNHEALTHY and self.intent is Intent.SERVING

    @property
    def is_idle(self) -> bool:
        """No request waits for it, so it can be removed if it gets no new ones."""
        return self.in_flight == 0 and self.kv_leases == 0

    def update_availability(self) -> None:
        """Recompute `is_available`: to be called after each change of the state."""
        self.is_available = (
            self.health is Health.HEALTHY
            and self.intent is Intent.SERVING
            and not self.is_cooling
            and not self.is_cold
            and self.breaker.allows_requests
        )
