"""Which groups there are, and whether a request could be served by one: pure."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

from router.fleet.engine_spec import DECODE, PREFILL
from router.fleet.fleet import Fleet
from router.fleet.snapshot import Snapshot

logger = logging.getLogger("disagg_router.fleet")
# Seconds that a group may lack a role before it is said.
PATIENCE = 2.0


class GroupCounts(NamedTuple):
    """`prefillers` and `decoders` may be asked; an engine that plays both roles is one of each."""

    weight: float
    prefillers: int
    decoders: int

    @property
    def is_complete(self) -> bool:
        return bool(self.prefillers and self.decoders)

    @property
    def is_half(self) -> bool:
        return bool(self.prefillers) != bool(self.decoders)


def count_groups(fleet: Fleet) -> Mapping[str, GroupCounts]:
    """Of every group that has an engine, wanted or not, or a weight of its own. Any thread may ask:
    what is read is replaced as a whole."""
    weights = {pool.group: pool.weight for pool in fleet.snapshot.any_model}
    weights.update(fleet.group_weights)
    counts = {group: [0, 0] for group in fleet.group_weights}
    for engine in fleet.engines:
        able = counts.setdefault(engine.group, [0, 0])
        if engine.is_usable:
            able[0] += engine.role.plays(PREFILL)
            able[1] += engine.role.plays(DECODE)
    return {group: GroupCounts(weights.get(group, 0.0), *able) for group, able in counts.items()}


class IncompleteGroupLog:
    """Says it once when a group has had engines of one role only for a while, and when it is whole
    again. Engines of a group seldom come in the same moment."""

    def __init__(self, fleet: Fleet, clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._clock = clock
        self._seen: Snapshot | None = None
        self._since: dict[str, float] = {}
        self._said: set[str] = set()

    def look(self) -> None:
        """Cheap where nothing has changed."""
        if self._fleet.snapshot is not self._seen:
            self._seen = self._fleet.snapshot
            self._note(count_groups(self._fleet))
        late = self._clock() - PATIENCE
        for name in [n for n, at in self._since.items() if at <= late and n not in self._said]:
            group = count_groups(self._fleet)[name]
            missing = DECODE if group.prefillers else PREFILL
            logger.warning("group %s has no %s engine that may be asked", name, missing)
            self._said.add(name)

    def _note(self, groups: Mapping[str, GroupCounts]) -> None:
        moment = self._clock()
        halves = [name for name, group in groups.items() if group.is_half]
        self._since = {name: self._since.get(name, moment) for name in halves}
        for name in self._said - self._since.keys():
            if name in groups and groups[name].is_complete:
                logger.info("group %s is complete", name)
        self._said &= self._since.keys()
