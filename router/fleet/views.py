"""What one process sees of engines and groups, and what several see together.

Counts add up; of all else the worst that any of them sees is what counts. These models are
the admin API's answers, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from pydantic import BaseModel, Field

from router.fleet.circuit_breaker import CircuitState
from router.fleet.engine import Engine, Health
from router.fleet.engine_spec import EngineRole, Intent
from router.fleet.fleet import Fleet
from router.fleet.group_state import count_groups
from router.fleet.registry import EngineRegistry

# Which word counts where processes differ: the last one.
HEALTHS = (Health.HEALTHY, Health.UNKNOWN, Health.UNHEALTHY)
CIRCUITS = (CircuitState.CLOSED, CircuitState.HALF_OPEN, CircuitState.OPEN)
Origin = Literal["admin", "settings", "engines"]


class EngineView(BaseModel):
    name: str
    url: str
    role: EngineRole
    group: str
    models: list[str] | None = Field(description="null: not known")
    weight: float
    health: Health
    reason: str = Field(description="Why it is not healthy")
    intent: Intent
    cold: bool
    cooling: bool = Field(False, description="It said that it has too much to do")
    in_flight: int = Field(description="Legs that run")
    tokens_in_flight: int = Field(description="Tokens of these legs' prompts, as estimated")
    holding: int = Field(description="Requests whose KV waits there until a decoder has read it")
    circuit: CircuitState
    sources: list[str] = Field(description="Who lists it; nobody: it is on its way out")
    drained: bool = Field(description="It gets nothing new, and nobody waits for anything of it")


class GroupView(BaseModel):
    name: str
    weight: float
    weighed_by: Origin
    prefillers: int = Field(description="Engines that may be asked, as far as we know")
    decoders: int
    complete: bool


class FleetView(BaseModel):
    """`is_informed`: each of its sources has told what it lists."""

    engines: list[EngineView]
    groups: list[GroupView]
    is_informed: bool


def build_fleet_view(fleet: Fleet, registry: EngineRegistry) -> FleetView:
    own = registry.overrides.weights
    return FleetView(
        engines=[_engine(engine, registry) for engine in fleet.engines],
        groups=[
            GroupView(
                name=name,
                weight=group.weight,
                weighed_by=_origin(name in own, name in fleet.group_weights),
                prefillers=group.prefillers,
                decoders=group.decoders,
                complete=group.is_complete,
            )
            for name, group in count_groups(fleet).items()
        ],
        is_informed=registry.is_informed,
    )


def merge_engine_views(views: Sequence[FleetView | None]) -> list[EngineView]:
    """As all processes see them. One that does not answer may have legs anywhere, so then nobody
    is drained."""
    told = [view for view in views if view is not None]
    found: dict[str, list[EngineView]] = {}
    for view in told:
        for engine in view.engines:
            found.setdefault(engine.name, []).append(engine)
    engines = [_one_engine(seen) for seen in found.values()]
    if len(told) == len(views):
        return engines
    return [engine.model_copy(update={"drained": False}) for engine in engines]


def merge_group_views(views: Sequence[FleetView | None]) -> list[GroupView]:
    found: dict[str, list[GroupView]] = {}
    for view in views:
        for group in () if view is None else view.groups:
            found.setdefault(group.name, []).append(group)
    return [_one_group(seen) for seen in found.values()]


def is_informed(views: Sequence[FleetView | None]) -> bool:
    """Every process answers, and knows all that there is to know."""
    return all(view is not None and view.is_informed for view in views)


def _engine(engine: Engine, registry: EngineRegistry) -> EngineView:
    spec = engine.spec
    return EngineView(
        name=engine.name,
        url=spec.url,
        role=engine.role,
        group=engine.group,
        models=None if engine.models is None else sorted(engine.models),
        weight=spec.weight,
        health=engine.health,
        reason=engine.reason,
        intent=engine.intent,
        cold=engine.is_cold,
        cooling=engine.is_cooling,
        in_flight=engine.in_flight,
        tokens_in_flight=engine.tokens_in_flight,
        holding=engine.kv_leases,
        circuit=engine.breaker.circuit,
        sources=list(registry.sources_of(spec.address)),
        drained=engine.intent is Intent.DRAINING and engine.is_idle,
    )


def _origin(is_own: bool, is_configured: bool) -> Origin:
    if is_own:
        return "admin"
    return "settings" if is_configured else "engines"


def _one_engine(seen: Sequence[EngineView]) -> EngineView:
    worst = max(seen, key=lambda one: HEALTHS.index(one.health))
    return worst.model_copy(
        update={
            "intent": Intent.DRAINING if _all(seen, Intent.DRAINING) else Intent.SERVING,
            "cold": any(one.cold for one in seen),
            "cooling": any(one.cooling for one in seen),
            "in_flight": sum(one.in_flight for one in seen),
            "tokens_in_flight": sum(one.tokens_in_flight for one in seen),
            "holding": sum(one.holding for one in seen),
            "circuit": max((one.circuit for one in seen), key=CIRCUITS.index),
            "sources": _union(one.sources for one in seen),
            "drained": all(one.drained for one in seen),
        }
    )


def _all(seen: Iterable[EngineView], intent: Intent) -> bool:
    return all(one.intent is intent for one in seen)


def _union(lists: Iterable[Iterable[str]]) -> list[str]:
    return list(dict.fromkeys(name for names in lists for name in names))


def _one_group(seen: Sequence[GroupView]) -> GroupView:
    return seen[0].model_copy(
        update={
            "weight": max(one.weight for one in seen),
            "prefillers": min(one.prefillers for one in seen),
            "decoders": min(one.decoders for one in seen),
            "complete": all(one.complete for one in seen),
        }
    )
