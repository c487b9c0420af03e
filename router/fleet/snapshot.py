"""Which engines may be asked for which model, in one immutable picture.

Made anew when something changes, which is seldom; read once by every request. The pools of a model
are those of its groups: KV moves only between engines of one pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from router.fleet.engine import Engine, Health
from router.fleet.spec import Role


class Pool(NamedTuple):
    """Engines of one group that serve one model; either sequence may be empty, not both."""

    group: str
    weight: float
    prefillers: Sequence[Engine]
    decoders: Sequence[Engine]


class Snapshot(NamedTuple):
    by_model: Mapping[str, Sequence[Pool]]
    any_model: Sequence[Pool]
    """For a request that names no model."""
    unnamed: Sequence[Pool]
    """Of the engines whose models nobody knows: they may serve what no other does."""

    def pools(self, model: object) -> Sequence[Pool]:
        """Empty where nobody serves it, or nobody may be asked."""
        if not isinstance(model, str) or not model:
            return self.any_model
        return self.by_model.get(model, self.unnamed)


def picture(engines: Iterable[Engine]) -> Snapshot:
    wanted = [engine for engine in engines if engine.is_wanted]
    unnamed = [engine for engine in wanted if engine.models is None]
    serving: dict[str, list[Engine]] = {}
    for engine in wanted:
        for model in engine.models or ():
            serving.setdefault(model, []).append(engine)
    return Snapshot(
        {model: _pools([*named, *unnamed]) for model, named in serving.items()},
        _pools(wanted),
        _pools(unnamed),
    )


def _pools(engines: Sequence[Engine]) -> tuple[Pool, ...]:
    groups: dict[str, list[Engine]] = {}
    for engine in engines:
        groups.setdefault(engine.spec.group, []).append(engine)
    return tuple(_pool(group, members) for group, members in groups.items())


def _pool(group: str, members: Sequence[Engine]) -> Pool:
    prefillers, decoders = _best(members, Role.PREFILL), _best(members, Role.DECODE)
    weight = sum(engine.spec.weight for engine in decoders or prefillers)
    return Pool(group, weight, prefillers, decoders)


def _best(members: Sequence[Engine], role: Role) -> tuple[Engine, ...]:
    """Those against which nothing speaks; else the healthy ones all the same; else those that were
    not probed yet. A circuit or a word of "too much" never leaves a role with nobody to ask."""
    able = [engine for engine in members if engine.role.plays(role)]
    asked = tuple(engine for engine in able if engine.is_asked)
    healthy = asked or tuple(engine for engine in able if engine.health is Health.HEALTHY)
    return healthy or tuple(able)
