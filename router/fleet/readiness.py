"""Decides if the router is ready, and describes what a fleet lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from router.fleet.engine import DECODE, PREFILL, Engine, EngineRole, Health
from router.fleet.fleet import Fleet, GroupPool

# Engines with a reason that are listed, and the longest text about a role.
MAX_LISTED = 8
MAX_REASON = 500
# Engines in an error message.
MAX_NAMED = 3
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Readiness:
    """`blocking` are the reasons why requests are not answered, and `degrading` those why they are
    answered with more work than necessary; by role or engine."""

    blocking: dict[str, str] = field(default_factory=dict)
    degrading: dict[str, str] = field(default_factory=dict)


def assess_readiness(fleet: Fleet, decodes_alone: bool, longest_alone: int) -> Readiness:
    """Judge the fleet as a request finds it. `decodes_alone`: a decode engine may answer a prompt
    of up to `longest_alone` tokens without a prefill engine."""
    lacking = fleet.unavailable_roles()
    reasons = {str(role): why[:MAX_REASON] for role, why in lacking.items()}
    # At the start, a request would miss the prefill engines that are about to be found healthy.
    is_starting = PREFILL not in fleet.probed_roles and any(
        engine.health is Health.UNKNOWN and engine.role.plays(PREFILL) for engine in fleet.engines
    )
    needs_prefillers = is_starting or not decodes_alone
    if DECODE in lacking or (PREFILL in lacking and needs_prefillers):
        return Readiness(blocking=reasons)
    found = fleet.compare().reasons
    shown = dict(list(found.items())[:MAX_LISTED])
    if more := len(found) - len(shown):
        shown["others"] = f"{more} more engines that exchange no KV"
    if ambiguous := fleet.snapshot.ambiguous_adapters:
        names = _listed(sorted(ambiguous), lambda name: name[: MAX_REASON // MAX_NAMED], ", ")
        shown["adapters"] = f"of several base models, of which one is served: {names}"
    if not any(_is_served(pool, decodes_alone) for pool in _pools_of_models(fleet)):
        why = "no decode engine has a prefill engine for its model, and none may answer alone"
        return Readiness(blocking={"pairs": why, **shown})
    if str(PREFILL) in reasons:
        limit = f"decode engines answer alone, prompts of up to {longest_alone} tokens"
        reasons[str(PREFILL)] += f"; {limit}"
    return Readiness(degrading=reasons | shown)


def _pools_of_models(fleet: Fleet) -> Iterator[GroupPool]:
    for pools in fleet.snapshot.by_model.values():
        yield from pools
    yield from fleet.snapshot.unknown_models


def _is_served(pool: GroupPool, decodes_alone: bool) -> bool:
    return _has_healthy(pool.decoders) and (decodes_alone or _has_healthy(pool.prefillers))


def _has_healthy(engines: Sequence[Engine]) -> bool:
    return any(engine.health is Health.HEALTHY for engine in engines)


def describe_lack(fleet: Fleet, model: object, role: EngineRole, names_models: bool) -> str:
    """Say, for a client, that a model has no engine of a role, and what there is instead.

    `names_models`: the client may know of all models.
    """
    is_named = isinstance(model, str) and bool(model)
    for_model = f" for the model `{str(model)[:128]}`" if is_named else ""
    engines = [engine for engine in fleet.engines if engine.role.plays(role)]
    healthy = [
        one for one in engines if one.health is Health.HEALTHY and (one.is_usable or one.is_unread)
    ]
    if not engines:
        return f"no {role} engine is known{for_model}"
    if not healthy:
        return f"no {role} engine is healthy{for_model}: {_listed(engines, _state_of)}"
    serving = [one for one in healthy if _may_serve(one, model if is_named else None)]
    if not serving:
        there = f": {_listed(healthy, _models_of)}" if names_models else ""
        return f"no {role} engine serves the model `{str(model)[:128]}`{there}"
    reasons = fleet.compare().reasons
    known = [one for one in serving if one.name in reasons]
    shown = _listed(known, lambda one: f"{one.name}: {reasons[one.name]}")
    there = f": {shown}" if known and names_models else ""
    return f"no {role} engine can exchange KV{for_model}{there}"


def _may_serve(engine: Engine, model: object) -> bool:
    if engine.models is None or model is None:
        return not engine.is_unread
    return model in engine.models


def _state_of(engine: Engine) -> str:
    """Say the state without the reason of a failed probe, which is not for clients."""
    state = str(engine.health)
    if engine.health is Health.HEALTHY:
        state = str(engine.intent)
    elif engine.health is Health.UNKNOWN:
        state = "not probed yet"
    return f"{engine.name} is {state}"


def _models_of(engine: Engine) -> str:
    if engine.is_unread:
        return f"the models of {engine.name} are unknown"
    return f"{engine.name} serves {_listed(sorted(engine.models or ()), str, ', ')}"


def _listed(items: Sequence[T], name: Callable[[T], str], separator: str = "; ") -> str:
    more = f" and {len(items) - MAX_NAMED} more" if len(items) > MAX_NAMED else ""
    return separator.join(map(name, items[:MAX_NAMED])) + more
