"""Keeps the fleet equal to what its sources list.

Each source is watched by a task of its own. Pure functions combine their lists (`merge_listings`),
put the operators' wishes on top (`apply_overrides`) and compare the result with the fleet
(`find_changes`); `EngineRegistry` applies the difference as one change. An engine that is no longer
listed is drained: it gets no new legs at once, and is removed when its last leg has ended or after
a time limit.

A source that fails changes nothing: its engines stay, and probes find out which ones are dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from time import monotonic as now
from typing import Any, NamedTuple

from router.fleet.consistency import ConsistencyLog
from router.fleet.engine import Engine, EngineRole, EngineSpec, Intent
from router.fleet.fleet import Fleet
from router.fleet.sources.source import EngineSource, SourceReport
from router.settings import Address

logger = logging.getLogger("disagg_router.fleet")

# At least this long between two changes of the fleet: what arrives meanwhile is one change.
BATCH_S = 0.1
# Between two checks for drained engines.
CHECK_INTERVAL_S = 0.5
# Before a source whose task failed is watched again.
SOURCE_RESTART_DELAY_S = 5.0
# The most names in a log line, and the most texts of problems of one source that are logged.
MAX_LOGGED = 8
# The name of the source of engines that operators add.
OVERRIDES_SOURCE = "admin"


class MergedListing(NamedTuple):
    """`conflicts` has a line for each engine that two sources describe in contradictory ways."""

    engines: Mapping[Address, EngineSpec]
    conflicts: Sequence[str]


class FleetChanges(NamedTuple):
    """The changes to make. An engine is in at most one of the three."""

    join: Sequence[EngineSpec]
    leave: Sequence[Address]
    change: Sequence[EngineSpec]

    def __bool__(self) -> bool:
        return any(self)


@dataclass(frozen=True, slots=True)
class OperatorOverrides:
    """The changes of operators at run time: engines that they added, engines that they drain, and
    the weights of groups. No address is added twice."""

    added: tuple[EngineSpec, ...] = ()
    draining: frozenset[Address] = frozenset()
    weights: Mapping[str, float] = field(default_factory=dict)
    migrating: frozenset[Address] = frozenset()
    """The engines in `draining` whose streams move to other engines."""

    def adds(self, address: Address) -> bool:
        return any(spec.address == address for spec in self.added)

    def with_engine(self, spec: EngineSpec) -> OperatorOverrides:
        """Its address must not be added yet."""
        assert not self.adds(spec.address)
        return replace(self, added=(*self.added, spec))

    def without_engine(self, address: Address) -> OperatorOverrides:
        return replace(self, added=tuple(s for s in self.added if s.address != address))

    def with_drain(self, address: Address, migrates: bool = False) -> OperatorOverrides:
        """`migrates`: its streams move. A second drain of an engine may only add this."""
        moved = self.migrating | {address} if migrates else self.migrating
        return replace(self, draining=self.draining | {address}, migrating=moved)

    def without_drain(self, address: Address) -> OperatorOverrides:
        return self.pruned(self.draining - {address})

    def with_weight(self, group: str, weight: float) -> OperatorOverrides:
        return replace(self, weights={**self.weights, group: weight})

    def without_weight(self, group: str) -> OperatorOverrides:
        left = {name: weight for name, weight in self.weights.items() if name != group}
        return replace(self, weights=left)

    def pruned(self, listed: Set[Address]) -> OperatorOverrides:
        """Return the overrides without drains of engines that no source lists: another engine may
        appear at such an address."""
        left = self.draining & listed
        return replace(self, draining=left, migrating=self.migrating & left)


class WatchedSource:
    """A source and its last report. `listed_at` is the Unix time of its last list, 0.0 if it never
    sent one."""

    def __init__(self, source: EngineSource) -> None:
        self.source = source
        self.listed: Sequence[EngineSpec] = ()
        self.addresses: Set[Address] = frozenset()
        self.problem = "has not reported yet"
        self.has_reported = False
        self.has_ended = False
        self._listed_at = 0.0
        self._logged: set[str] = set()

    @property
    def listed_at(self) -> float:
        """The present time for a source that has ended, since its list never changes."""
        return time.time() if self.has_ended else self._listed_at

    def note(self, report: SourceReport) -> bool:
        """Take a report. Return True if its list is a new one."""
        if report.problem != self.problem:
            self._log(report.problem)
        self.problem, self.has_reported = report.problem, True
        if report.listed is None:
            return False
        self._listed_at = time.time()
        # Usually it is the same object, which is compared at once.
        is_new = report.listed is not self.listed and report.listed != self.listed
        self.listed = report.listed
        if is_new:
            self.addresses = frozenset([listed.address for listed in report.listed])
        return is_new

    def _log(self, problem: str) -> None:
        """Log each text once until the source works again."""
        if not problem:
            if self._logged:
                logger.info("source %s: works again", self.source.name)
            self._logged.clear()
        elif problem not in self._logged and len(self._logged) < MAX_LOGGED:
            logger.warning("source %s: %s", self.source.name, problem)
            self._logged.add(problem)


class EngineRegistry:
    """Watches the sources and reconciles the fleet with them.

    `bound` is the time limit in seconds for the last legs of an engine that leaves. Of two sources
    that contradict each other the first one takes precedence. `counts` counts the engines that
    joined, left and changed since the process started.
    """

    def __init__(
        self,
        fleet: Fleet,
        sources: Iterable[EngineSource],
        bound: float,
        clock: Callable[[], float] = now,
    ) -> None:
        self._fleet = fleet
        self._bound = bound
        self._clock = clock
        self.sources: Sequence[WatchedSource] = [WatchedSource(source) for source in sources]
        self.overrides = OperatorOverrides()
        self.counts = {"joined": 0, "left": 0, "changed": 0}
        self._added: Set[Address] = frozenset()
        self._present: dict[Address, EngineSpec] = {}
        self._leaving: dict[Engine, float] = {}
        """The time when an engine that leaves is removed at the latest."""
        self._conflicts: Sequence[str] = ()
        self._has_changed = asyncio.Event()
        self._all_reported = asyncio.Event()
        self._failure = ""
        self._consistency = ConsistencyLog(fleet, clock)
        for source in self.sources:
            if source.source.first != SourceReport():
                self._note(source, source.source.first)
        if not self.sources:
            self._all_reported.set()
        self._reconcile()

    async def run(self) -> None:
        """Watch all sources until cancelled."""
        async with asyncio.TaskGroup() as group:
            for source in self.sources:
                group.create_task(self._watch(source))
            group.create_task(self._reconcile_repeatedly())

    async def wait_for_sources(self, timeout_s: float) -> None:
        """Wait until each source has reported, be it a problem, or the timeout is over; then apply
        what they list."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._all_reported.wait()
        if self._has_changed.is_set():
            self.reconcile()

    def problems(self) -> Mapping[str, str]:
        """Map the names of sources with a problem to the problem; "registry" is the registry's
        own."""
        found = {one.source.name: one.problem for one in self.sources if one.problem}
        return found | {"registry": self._failure} if self._failure else found

    def set_overrides(self, overrides: OperatorOverrides) -> None:
        """Apply what operators want from now on."""
        if overrides != self.overrides:
            self.overrides = overrides
            self._added = frozenset([spec.address for spec in overrides.added])
            self._has_changed.set()
            self.reconcile()

    def sources_of(self, address: Address) -> Sequence[str]:
        """Return the names of the sources that list an engine; none if it is about to leave."""
        own = [OVERRIDES_SOURCE] if address in self._added else []
        return own + [one.source.name for one in self.sources if address in one.addresses]

    @property
    def has_all_listings(self) -> bool:
        """Each source has sent a list, so an engine that is not listed is really gone."""
        return all(source.listed_at for source in self.sources)

    def reconcile(self) -> None:
        """Make the fleet what the sources list now, as one change, and log the changes."""
        changes = self._reconcile()
        changed = [
            f"{one.address} ({one.role}, group {one.group}, {one.intent})" for one in changes.change
        ]
        joined = [str(listed.address) for listed in changes.join]
        for what, names in (
            ("join", joined),
            ("leave", list(map(str, changes.leave))),
            ("change", changed),
        ):
            if names:
                more = f" and {len(names) - MAX_LOGGED} more" if len(names) > MAX_LOGGED else ""
                logger.info("engines that %s: %s%s", what, ", ".join(names[:MAX_LOGGED]), more)

    def _reconcile(self) -> FleetChanges:
        listings = ((one.source.name, one.listed) for one in self.sources)
        wanted, conflicts = apply_overrides(listings, self.overrides)
        for line in [line for line in conflicts if line not in self._conflicts][:MAX_LOGGED]:
            logger.warning("engine %s", line)
        self._conflicts = conflicts
        if changes := find_changes(self._present, wanted):
            with self._fleet.batch_changes():
                for address in changes.leave:
                    if engine := self._fleet.find(str(address)):
                        self._fleet.set_intent(engine, Intent.DRAINING)
                        self._leaving[engine] = self._clock() + self._bound
                    del self._present[address]
                for listed in (*changes.change, *changes.join):
                    self._add_or_change(listed)
            self.counts["joined"] += len(changes.join)
            self.counts["left"] += len(changes.leave)
            self.counts["changed"] += len(changes.change)
        self._has_changed.clear()
        return changes

    def _add_or_change(self, spec: EngineSpec) -> None:
        """Add the engine, or change it if it is still there: one that was about to leave stays."""
        engine = self._fleet.find(spec.name)
        if engine is None:
            self._fleet.add(spec)
        else:
            self._leaving.pop(engine, None)
            self._fleet.change_spec(engine, spec)
        self._present[spec.address] = spec

    def remove_drained(self) -> None:
        """Remove the leaving engines that are idle or whose time is over."""
        moment = self._clock()
        if over := [e for e, end in self._leaving.items() if e.is_idle or moment >= end]:
            with self._fleet.batch_changes():
                for engine in over:
                    del self._leaving[engine]
                    self._fleet.remove(engine.name)

    async def _watch(self, source: WatchedSource) -> None:
        """Take a source's reports; watch it again after an unexpected error."""
        while not source.has_ended:
            try:
                async with contextlib.aclosing(source.source.watch()) as reports:
                    async for report in reports:
                        self._note(source, report)
                source.has_ended = True
            except Exception as error:
                logger.exception("source %s failed", source.source.name)
                problem = f"failed: {type(error).__name__}: {error}"
                self._note(source, SourceReport(None, problem))
                await asyncio.sleep(SOURCE_RESTART_DELAY_S)

    def _note(self, source: WatchedSource, report: SourceReport) -> None:
        if source.note(report):
            self._has_changed.set()
        if all(one.has_reported for one in self.sources):
            self._all_reported.set()

    async def _reconcile_repeatedly(self) -> None:
        while True:
            await asyncio.sleep(BATCH_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHECK_INTERVAL_S - BATCH_S):
                    await self._has_changed.wait()
            try:
                self.remove_drained()
                if self._has_changed.is_set():
                    self.reconcile()
                self._consistency.check_findings()
                if self._all_reported.is_set():
                    self._consistency.check_groups()
                self._consistency.check_ids()
                self._failure = ""
            except Exception as error:
                logger.exception("the fleet could not be changed")
                self._failure = f"cannot change the fleet: {type(error).__name__}: {error}"
                self._has_changed.set()
                await asyncio.sleep(SOURCE_RESTART_DELAY_S)


def find_changes(
    present: Mapping[Address, EngineSpec], wanted: Mapping[Address, EngineSpec]
) -> FleetChanges:
    return FleetChanges(
        [listed for address, listed in wanted.items() if address not in present],
        [address for address in present if address not in wanted],
        [
            listed
            for address, listed in wanted.items()
            if address in present and present[address] != listed
        ],
    )


def apply_overrides(
    listings: Iterable[tuple[str, Iterable[EngineSpec]]], overrides: OperatorOverrides
) -> MergedListing:
    """Merge the listings, before them the engines that operators added, and drain the engines that
    operators drain, whatever the sources list."""
    added = (OVERRIDES_SOURCE, overrides.added)
    engines, conflicts = merge_listings([added, *listings])
    drained = {
        address: replace(engines[address], intent=Intent.DRAINING)
        for address in overrides.draining
        if address in engines
    }
    return MergedListing({**engines, **drained}, conflicts)


def merge_listings(listings: Iterable[tuple[str, Iterable[EngineSpec]]]) -> MergedListing:
    """Merge the lists of sources, given with the sources' names in the order of precedence.

    An address is one engine, whichever sources list it. It plays all listed roles, and it drains if
    any source does. For each other property explicit values take precedence over defaults, and
    then earlier sources over later ones.
    """
    engines: dict[Address, EngineSpec] = {}
    several: dict[Address, list[tuple[str, EngineSpec]]] = {}
    first_source: dict[Address, str] = {}
    for source, listing in listings:
        for listed in listing:
            address = listed.address
            known = engines.setdefault(address, listed)
            if known is listed:
                first_source[address] = source
            elif known != listed or address in several:
                descriptions = several.setdefault(address, [(first_source[address], known)])
                descriptions.append((source, listed))
    conflicts: list[str] = []
    for address, descriptions in several.items():
        engines[address] = _merge_descriptions(address, descriptions, conflicts)
    return MergedListing(engines, sorted(conflicts))


def _merge_descriptions(
    address: Address, descriptions: Sequence[tuple[str, EngineSpec]], conflicts: list[str]
) -> EngineSpec:
    roles = {listed.role for _, listed in descriptions}
    drains = any(listed.intent is Intent.DRAINING for _, listed in descriptions)
    intent = Intent.DRAINING if drains else Intent.SERVING
    role = roles.pop() if len(roles) == 1 else EngineRole.BOTH
    spec = EngineSpec(role, address, intent=intent)
    explicit: dict[str, Any] = {}
    for name in ("models", "group", "weight", "tls"):
        given = [(source, getattr(listed, name)) for source, listed in descriptions]
        given = [one for one in given if one[1] != getattr(spec, name)]
        if given:
            source, explicit[name] = given[0]
            if other := next((other for other, value in given if value != explicit[name]), ""):
                conflicts.append(
                    f"{address}: {source} and {other} disagree on its {name}: {source} wins"
                )
    return replace(spec, **explicit)
