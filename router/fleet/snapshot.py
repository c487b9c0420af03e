"""Which engines can read each other's KV, and which may serve which model.

`assign_groups` names the group of each engine. A source may do so. The engines whose source does
not are grouped by the compatibility that they report (see EngineCapabilities): equal values are one
group, named after the value, so that all routers use the same name and a group keeps its name when
another one appears. Engines that report none, such as stock engines, belong to the only group there
is. With two or more groups it is unknown which of them they could read, so they form their own.

`build_snapshot` makes an immutable picture of the usable engines. It is made when something
changes, which is rare, and read once by each request.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from router.fleet.engine import Engine, Health
from router.fleet.engine_spec import DEFAULT_GROUP, EngineRole

# The characters of a compatibility value in a group's name, if that distinguishes the groups.
SHOWN_CHARS = 8
MAX_TUPLES = 64


def assign_groups(engines: Iterable[Engine]) -> None:
    unassigned: list[Engine] = []
    values: set[str] = set()
    for engine in engines:
        if engine.spec.group != DEFAULT_GROUP:
            continue
        engine.compatibility = engine.capabilities.compatibility or engine.compatibility
        if engine.compatibility:
            values.add(engine.compatibility)
        unassigned.append(engine)
    names = _group_names(values)
    other = next(iter(names.values())) if len(names) == 1 else DEFAULT_GROUP
    for engine in unassigned:
        engine.group = names.get(engine.compatibility, other)


def _group_names(values: Set[str]) -> Mapping[str, str]:
    """Return a name for each value; values with an equal beginning are distinguished by a hash."""
    shown = {value: value[:SHOWN_CHARS] for value in values}
    counts = Counter(shown.values())
    names: dict[str, str] = {}
    for value, start in shown.items():
        names[value] = f"{DEFAULT_GROUP}-{start}"
        if counts[start] > 1:
            text = value.encode("utf-8", "surrogatepass")
            names[value] += f"-{hashlib.blake2b(text, digest_size=8).hexdigest()}"
    return names


@dataclass(frozen=True, slots=True)
class GroupPool:
    """The engines of one group that serve one model. One of the roles may be empty."""

    group: str
    weight: float
    prefillers: Sequence[Engine]
    decoders: Sequence[Engine]

    def by_role(self, role: EngineRole) -> Sequence[Engine]:
        return self.prefillers if role is EngineRole.PREFILL else self.decoders


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The usable engines by model and group."""

    by_model: Mapping[str, Sequence[GroupPool]]
    any_model: Sequence[GroupPool]
    """For a request without a model."""
    unknown_models: Sequence[GroupPool]
    """Engines whose models are unknown: they may serve models that no other engine serves."""
    context_lengths: Mapping[str, int] = field(default_factory=dict)
    """By model, the longest context of its decode engines in tokens, if all have reported it."""

    def pools(self, model: object) -> Sequence[GroupPool]:
        """Return the pools for a request's model; empty if no usable engine serves it."""
        if not isinstance(model, str) or not model:
            return self.any_model
        return self.by_model.get(model, self.unknown_models)


class EngineTuples:
    """Returns the same tuple object for the same engines, in the pools of all models and later on,
    so that policies can recognize a set of engines by the identity of the tuple."""

    def __init__(self) -> None:
        self._known: dict[tuple[Engine, ...], tuple[Engine, ...]] = {}

    def get(self, engines: Iterable[Engine]) -> tuple[Engine, ...]:
        made = tuple(engines)
        known = self._known.pop(made, made)
        self._known[known] = known  # the last one is the most recently used
        if len(self._known) > MAX_TUPLES:
            del self._known[next(iter(self._known))]
        return known

    def forget(self, engines: Set[Engine]) -> None:
        for known in [known for known in self._known if not engines.isdisjoint(known)]:
            del self._known[known]


def build_snapshot(
    engines: Iterable[Engine],
    tuples: EngineTuples | None = None,
    weights: Mapping[str, float] | None = None,
) -> Snapshot:
    """Make a snapshot. `weights` of groups take precedence over the weights of their engines."""
    tuples, weights = tuples or EngineTuples(), weights or {}
    usable = [engine for engine in engines if engine.is_usable]
    unknown = [engine for engine in usable if engine.models is None]
    serving: dict[str, list[Engine]] = {}
    for engine in usable:
        for model in engine.models or ():
            serving.setdefault(model, []).append(engine)
    return Snapshot(
        {model: _pools([*named, *unknown], tuples, weights) for model, named in serving.items()},
        _pools(usable, tuples, weights),
        _pools(unknown, tuples, weights),
        {} if unknown else _context_lengths(serving),
    )


def _context_lengths(serving: Mapping[str, Sequence[Engine]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for model, engines in serving.items():
        decoders = [engine for engine in engines if engine.role.plays(EngineRole.DECODE)]
        lengths = [engine.context_lengths.get(model) for engine in decoders]
        known = [tokens for tokens in lengths if tokens is not None]
        if known and len(known) == len(lengths):
            found[model] = max(known)
    return found


def _pools(
    engines: Sequence[Engine], tuples: EngineTuples, weights: Mapping[str, float]
) -> tuple[GroupPool, ...]:
    groups: dict[str, list[Engine]] = {}
    for engine in engines:
        groups.setdefault(engine.group, []).append(engine)
    pools: list[GroupPool] = []
    for group, members in groups.items():
        prefillers = tuples.get(_best(members, EngineRole.PREFILL))
        decoders = tuples.get(_best(members, EngineRole.DECODE))
        weight = weights.get(group)
        if weight is None:
            weight = sum([engine.spec.weight for engine in decoders or prefillers])
        pools.append(GroupPool(group, weight, prefillers, decoders))
    return tuple(pools)


def _best(members: Sequence[Engine], role: EngineRole) -> Sequence[Engine]:
    """Return the available engines, or else the healthy ones, or else those not probed yet. So an
    open circuit or an overload never leaves a role without any engine."""
    able = [engine for engine in members if engine.role.plays(role)]
    available = [engine for engine in able if engine.is_available]
    return available or [engine for engine in able if engine.health is Health.HEALTHY] or able
