"""Checks of the whole fleet whose findings are counted and logged: groups that lack a role, engines
that share an id, and engines that cannot exchange KV with any other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

from router.fleet.engine import DECODE, PREFILL, Health
from router.fleet.fleet import Fleet, Snapshot
from router.fleet.partners import FindingKind, FleetReport, find_duplicate_ids

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


class ConsistencyLog:
    """Logs once that a group lacks a role, and once that it is complete again; once for as long as
    they do, that two engines share an engine_id; and once each other finding of `Fleet.compare`."""

    def __init__(self, fleet: Fleet, clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._clock = clock
        self._seen: Snapshot | None = None
        self._compared: FleetReport | None = None
        self._incomplete_since: dict[str, float] = {}
        self._logged_groups: set[str] = set()
        self._logged_pairs: set[tuple[str, ...]] = set()
        # By kind and reason of a finding: since when it holds for each engine, and which of them
        # were logged.
        self._findings: dict[tuple[str, str], dict[str, float]] = {}
        self._logged_findings: dict[tuple[str, str], set[str]] = {}

    def check_groups(self) -> None:
        """Cheap if nothing has changed."""
        moment = self._clock()
        if self._fleet.snapshot is not self._seen:
            self._seen = self._fleet.snapshot
            self._note_groups(count_groups(self._fleet), moment)
        for name, since in self._incomplete_since.items():
            if since <= moment - INCOMPLETE_GRACE_S and name not in self._logged_groups:
                if self._is_explained(name):  # in more detail, by a finding
                    continue
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
        """Cheap if nothing has changed."""
        before, self._compared = self._compared, self._fleet.compare()
        if before is self._compared:
            return
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

    def check_findings(self) -> None:
        """Log what keeps engines from exchanging KV, once for each engine that it concerns, unless
        it is over at once: engines start one by one. Cheap if nothing has changed."""
        moment, report = self._clock(), self._fleet.compare()
        before, self._findings = self._findings, {}
        for finding in report.findings:
            if finding.kind is FindingKind.SHARED_ID:  # logged by `check_ids`
                continue
            key = finding.kind, finding.detail
            since = self._findings.setdefault(key, {})
            since |= {name: before.get(key, {}).get(name, moment) for name in finding.engines}
            logged = self._logged_findings.setdefault(key, set())
            old = {name for name in since if since[name] <= moment - INCOMPLETE_GRACE_S}
            if old - logged:
                logged |= old
                logger.warning("%s. To do: %s.", finding.text, finding.cure)
        self._forget_findings()

    def _forget_findings(self) -> None:
        """Forget the engines that are no longer concerned. While one of them is lost, nothing is
        known of the others, and it may return as it was."""
        if not self._logged_findings:
            return
        lost = {one.name for one in self._fleet.engines if one.health is not Health.HEALTHY}
        for key, names in list(self._logged_findings.items()):
            if lost.isdisjoint(names):
                names.intersection_update(self._findings.get(key, ()))
            if not names:
                del self._logged_findings[key]

    def _is_explained(self, group: str) -> bool:
        reasons = self._fleet.report.reasons
        return any(one.name in reasons for one in self._fleet.engines if one.group == group)
