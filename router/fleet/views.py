"""Views of engines and groups by one router process, and how several views are combined.

Counts add up; of any other property the worst value counts. The models are also the admin API's
answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isinf
from typing import Literal

from pydantic import BaseModel, Field

from router.fleet.consistency import count_groups
from router.fleet.engine import CLOSED, CircuitState, Engine, EngineRole, Health, Intent
from router.fleet.fleet import Fleet
from router.fleet.registry import EngineRegistry

# In the order of precedence where processes differ: the last one counts.
HEALTHS = (Health.HEALTHY, Health.UNKNOWN, Health.UNHEALTHY)
CIRCUITS = (CircuitState.CLOSED, CircuitState.HALF_OPEN, CircuitState.OPEN)
WeightOrigin = Literal["admin", "settings", "engines"]


class EngineView(BaseModel):
    name: str
    url: str
    role: EngineRole
    preferred_role: EngineRole | None = Field(
        None, description="Of an engine of both roles: the legs that it gets now; null: no choice"
    )
    role_reason: str = Field("", description="Why it gets these legs")
    step_limit_ms: float | None = Field(
        None, description="The longest step beside answers that it allows; null: unlimited"
    )
    mixing: float | None = Field(
        None, description="Weight reads that mixing prompts and answers costs; null: not measured"
    )
    group: str
    models: list[str] | None = Field(description="null: unknown")
    weight: float
    health: Health
    reason: str = Field(description="Why it is not healthy")
    since: float = Field(0.0, description="Unix time since when it has been healthy or not")
    degraded: str = Field("", description="Why it is healthy but exchanges no KV")
    intent: Intent
    cold: bool
    cooling: bool = Field(False, description="It reported an overload (Retry-After)")
    in_flight: int = Field(description="Running request legs")
    tokens_in_flight: int = Field(description="Estimated prompt tokens of these legs")
    holding: int = Field(
        description="KV leases: requests whose KV it holds until a decode engine has read it"
    )
    circuit: CircuitState
    circuit_reason: str = Field("", description="Why the router avoids it while it is healthy")
    sources: list[str] = Field(description="The sources that list it; empty: it is about to leave")
    drained: bool = Field(description="It gets no new legs, and no request needs it")


class GroupView(BaseModel):
    name: str
    weight: float
    weighed_by: WeightOrigin
    prefillers: int = Field(description="Usable engines")
    decoders: int
    complete: bool


class FleetView(BaseModel):
    """The view of one process. `has_all_listings`: each of its sources has sent a list."""

    engines: list[EngineView]
    groups: list[GroupView]
    has_all_listings: bool


def build_fleet_view(fleet: Fleet, registry: EngineRegistry) -> FleetView:
    def origin(group: str) -> WeightOrigin:
        if group in registry.overrides.weights:
            return "admin"
        return "settings" if group in fleet.group_weights else "engines"

    return FleetView(
        engines=[
            _view_engine(engine, registry, fleet.report.reasons.get(engine.name, ""))
            for engine in fleet.engines
        ],
        groups=[
            GroupView(
                name=name,
                weighed_by=origin(name),
                complete=group.is_complete,
                **group._asdict(),
            )
            for name, group in count_groups(fleet).items()
        ],
        has_all_listings=registry.has_all_listings,
    )


def merge_engine_views(views: Sequence[FleetView | None]) -> list[EngineView]:
    """Combine the engines of all processes. A process that does not answer (None) may have legs at
    any engine, so then no engine counts as drained."""
    answered = [view for view in views if view is not None]
    found: dict[str, list[EngineView]] = {}
    for view in answered:
        for engine in view.engines:
            found.setdefault(engine.name, []).append(engine)
    engines = [_merge_engine(seen) for seen in found.values()]
    if len(answered) == len(views):
        return engines
    return [engine.model_copy(update={"drained": False}) for engine in engines]


def merge_group_views(views: Sequence[FleetView | None]) -> list[GroupView]:
    found: dict[str, list[GroupView]] = {}
    for view in views:
        for group in () if view is None else view.groups:
            found.setdefault(group.name, []).append(group)
    return [_merge_group(seen) for seen in found.values()]


def has_all_listings(views: Sequence[FleetView | None]) -> bool:
    """Return True if every process has answered and has the lists of all sources."""
    return all(view is not None and view.has_all_listings for view in views)


def _view_engine(engine: Engine, registry: EngineRegistry, degraded: str) -> EngineView:
    spec, known = engine.spec, engine.capabilities
    model, limit = known.step_model, known.step_limit
    role_reason = engine.role_reason if engine.is_available else ""  # as in the metric
    return EngineView(
        name=engine.name,
        url=spec.url,
        role=engine.role,
        preferred_role=engine.preferred_role if role_reason else None,
        role_reason=role_reason,
        step_limit_ms=None if isinf(limit) else round(limit * 1000, 1),
        mixing=None if model is None or model.mixing is None else round(model.mixing, 2),
        group=engine.group,
        models=None if engine.models is None else sorted(engine.models),
        weight=spec.weight,
        health=engine.health,
        reason=engine.reason,
        since=round(engine.health_since, 3),
        degraded=degraded,
        intent=engine.intent,
        cold=engine.is_cold,
        cooling=engine.is_cooling,
        in_flight=engine.in_flight,
        tokens_in_flight=engine.tokens_in_flight,
        holding=engine.kv_leases,
        circuit=engine.breaker.circuit,
        circuit_reason="" if engine.breaker.circuit is CLOSED else engine.circuit_reason,
        sources=list(registry.sources_of(spec.address)),
        drained=engine.intent is Intent.DRAINING and engine.is_idle,
    )


def _merge_engine(seen: Sequence[EngineView]) -> EngineView:
    worst = max(seen, key=lambda one: HEALTHS.index(one.health))
    is_draining = all(one.intent is Intent.DRAINING for one in seen)
    # Each process has its own preference, and may be a step behind the others.
    roles = {one.preferred_role: one.role_reason for one in seen if one.preferred_role}
    role = next(iter(roles)) if len(roles) == 1 else EngineRole.BOTH if roles else None
    return worst.model_copy(
        update={
            "preferred_role": role,
            "role_reason": "; ".join(
                why if len(roles) == 1 else f"{one} in a worker process: {why}"
                for one, why in roles.items()
            ),
            "intent": Intent.DRAINING if is_draining else Intent.SERVING,
            "cold": any(one.cold for one in seen),
            "cooling": any(one.cooling for one in seen),
            "degraded": next((one.degraded for one in seen if one.degraded), ""),
            "in_flight": sum(one.in_flight for one in seen),
            "tokens_in_flight": sum(one.tokens_in_flight for one in seen),
            "holding": sum(one.holding for one in seen),
            "circuit": max((one.circuit for one in seen), key=CIRCUITS.index),
            "circuit_reason": next((one.circuit_reason for one in seen if one.circuit_reason), ""),
            "sources": list(dict.fromkeys(name for one in seen for name in one.sources)),
            "drained": all(one.drained for one in seen),
        }
    )


def _merge_group(seen: Sequence[GroupView]) -> GroupView:
    return seen[0].model_copy(
        update={
            "weight": max(one.weight for one in seen),
            "prefillers": min(one.prefillers for one in seen),
            "decoders": min(one.decoders for one in seen),
            "complete": all(one.complete for one in seen),
        }
    )
