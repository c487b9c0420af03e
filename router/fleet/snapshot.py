"""Which engines may be asked for which model, in one immutable picture.

Made anew when something changes, which is seldom; read once by every request. The pools of a model
are those of its groups: KV moves only between engines of one pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from router.fleet.engine import Engine, Health
from router.fleet.engine_spec import EngineRole

MOST_KNOWN = 64


@dataclass(frozen=True, slots=True)
class GroupPool:
    """Engines of one group that serve one model; either sequence may be empty, not both."""

    group: str
    weight: float
    prefillers: Sequence[Engine]
    decoders: Sequence[Engine]

    def by_role(self, role: EngineRole) -> Sequence[Engine]:
        return self.prefillers if role is EngineRole.PREFILL else self.decoders


@dataclass(frozen=True, slots=True)
class Snapshot:
    by_model: Mapping[str, Sequence[GroupPool]]
    any_model: Sequence[GroupPool]
    """For a request that names no model."""
    unknown_models: Sequence[GroupPool]
    """Of the engines whose models nobody knows: they may serve what no other does."""
    context_lengths: Mapping[str, int] = field(default_factory=dict)
    """Of a model: the longest context that one of its decoders has, if all have told."""

    def pools(self, model: object) -> Sequence[GroupPool]:
        """Empty where nobody serves it, or nobody may be asked."""
        if not isinstance(model, str) or not model:
            return self.any_model
        return self.by_model.get(model, self.unknown_models)


class EngineTuples:
    """The same engines are the same tuple, in every model's pools and whenever they come back, so
    that what a policy has worked out for a tuple is found by its identity."""

    def __init__(self) -> None:
        self._known: dict[tuple[Engine, ...], tuple[Engine, ...]] = {}

    def of(self, engines: Iterable[Engine]) -> tuple[Engine, ...]:
        made = tuple(engines)
        known = self._known.pop(made, made)
        self._known[known] = known  # the youngest is the last
        if len(self._known) > MOST_KNOWN:
            del self._known[next(iter(self._known))]
        return known

    def forget(self, engines: Set[Engine]) -> None:
        for known in [known for known in self._known if not engines.isdisjoint(known)]:
            del self._known[known]


def build_snapshot(
    engines: Iterable[Engine],
    members: EngineTuples | None = None,
    weights: Mapping[str, float] | None = None,
) -> Snapshot:
    """Without `members` nothing is compared with what was before. `weights` of groups count before
    those of their engines."""
    members, weights = members or EngineTuples(), weights or {}
    wanted = [engine for engine in engines if engine.is_usable]
    unnamed = [engine for engine in wanted if engine.models is None]
    serving: dict[str, list[Engine]] = {}
    for engine in wanted:
        for model in engine.models or ():
            serving.setdefault(model, []).append(engine)
    return Snapshot(
        {model: _pools([*named, *unnamed], members, weights) for model, named in serving.items()},
        _pools(wanted, members, weights),
        _pools(unnamed, members, weights),
        {} if unnamed else _contexts(serving),
    )


def _contexts(serving: Mapping[str, Sequence[Engine]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for model, engines in serving.items():
        told = [e.context_lengths.get(model) for e in engines if e.role.plays(EngineRole.DECODE)]
        known = [tokens for tokens in told if tokens is not None]
        if known and len(known) == len(told):
            found[model] = max(known)
    return found


def _pools(
    engines: Sequence[Engine], members: EngineTuples, weights: Mapping[str, float]
) -> tuple[GroupPool, ...]:
    groups: dict[str, list[Engine]] = {}
    for engine in engines:
        groups.setdefault(engine.group, []).append(engine)
    return tuple(
        _pool(group, found, members, weights.get(group)) for group, found in groups.items()
    )


def _pool(
    group: str, found: Sequence[Engine], members: EngineTuples, weight: float | None
) -> GroupPool:
    prefillers = members.of(_best(found, EngineRole.PREFILL))
    decoders = members.of(_best(found, EngineRole.DECODE))
    if weight is None:
        weight = sum([engine.spec.weight for engine in decoders or prefillers])
    return GroupPool(group, weight, prefillers, decoders)


def _best(found: Sequence[Engine], role: EngineRole) -> Sequence[Engine]:
    """Those against which nothing speaks; else the healthy ones all the same; else those that were
    not probed yet. A circuit or a word of "too much" never leaves a role with nobody to ask."""
    able = [engine for engine in found if engine.role.plays(role)]
    asked = [engine for engine in able if engine.is_available]
    return asked or [engine for engine in able if engine.health is Health.HEALTHY] or able
