"""Checks of the whole fleet whose findings are counted and logged: groups that lack a role, and
engines that share an id."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from router.fleet.engine import DECODE, PREFILL, Engine
from router.fleet.fleet import Fleet, Snapshot

logger = logging.getLogger("disagg_router.fleet")
# A group may lack a role for this long before that is logged: its engines start one by one.
INCOMPLETE_GRACE_S = 2.0


class GroupCounts(NamedTuple):
    """The usable engines of a group; an engine with both roles counts as one of each."""

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
    """Count each group with an engine, usable or not, or with its own weight. Safe in any thread,
    since the fleet replaces what is read here as a whole."""
    weights = {pool.group: pool.weight for pool in fleet.snapshot.any_model}
    weights.update(fleet.group_weights)
    counts = {group: [0, 0] for group in fleet.group_weights}
    for engine in fleet.engines:
        count = counts.setdefault(engine.group, [0, 0])
        if engine.is_usable:
            count[0] += engine.role.plays(PREFILL)
            count[1] += engine.role.plays(DECODE)
    return {group: GroupCounts(weights.get(group, 0.0), *count) for group, count in counts.items()}


def find_duplicate_ids(engines: Iterable[Engine]) -> Mapping[str, tuple[str, str]]:
    """Map each engine that shares its engine_id to another engine with that id, and the id.

    Engines identify each other by that id: two engines with the same one transfer no KV to each
    other, and a stock engine confuses them. An engine that is listed under two addresses has one
    side channel and is no duplicate of itself.
    """
    by_id: dict[str, list[tuple[tuple[str, int], str]]] = {}
    for engine in engines:
        for at in engine.capabilities.rank_endpoints.values():
            endpoint = at.remote_host, at.remote_port
            by_id.setdefault(at.remote_engine_id, []).append((endpoint, engine.name))
    found: dict[str, tuple[str, str]] = {}
    for engine_id, holders in by_id.items():
        first, *_ = holders
        other = next((one for one in holders if one[0] != first[0] and one[1] != first[1]), None)
        if other is None:
            continue
        for endpoint, name in holders:
            found[name] = (other[1] if endpoint == first[0] else first[1]), engine_id
    return found


class ConsistencyLog:
    """Logs once that a group lacks a role, and once that it is complete again; and, once for as
    long as they do, that two engines share an engine_id."""

    def __init__(self, fleet: Fleet, clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._clock = clock
        self._seen: Snapshot | None = None
        self._incomplete_since: dict[str, float] = {}
        self._logged_groups: set[str] = set()
        self._logged_pairs: set[tuple[str, ...]] = set()

    def check_groups(self) -> None:
        """Cheap if nothing has changed."""
        moment = self._clock()
        if self._fleet.snapshot is not self._seen:
            self._seen = self._fleet.snapshot
            self._note_groups(count_groups(self._fleet), moment)
        for name, since in self._incomplete_since.items():
            if since <= moment - INCOMPLETE_GRACE_S and name not in self._logged_groups:
                missing = DECODE if count_groups(self._fleet)[name].prefillers else PREFILL
                logger.warning("group %s has no usable %s engine", name, missing)
                self._logged_groups.add(name)

    def _note_groups(self, groups: Mapping[str, GroupCounts], moment: float) -> None:
        halves = [name for name, group in groups.items() if group.is_half]
        self._incomplete_since = {name: self._incomplete_since.get(name, moment) for name in halves}
        for name in self._logged_groups.difference(halves):
            if name in groups and groups[name].is_complete:
                logger.info("group %s is complete", name)
        self._logged_groups.intersection_update(halves)

    def check_ids(self) -> None:
        found: set[tuple[str, ...]] = set()
        for name, (other, engine_id) in find_duplicate_ids(self._fleet.engines).items():
            pair = tuple(sorted((name, other)))
            if pair not in found | self._logged_pairs:
                logger.warning(
                    "engines %s and %s have the same engine_id, %s: no KV moves between them, and "
                    "a stock engine confuses them. Give each engine an engine_id of its own.",
                    *pair,
                    engine_id,
                )
            found.add(pair)
        self._logged_pairs = found
