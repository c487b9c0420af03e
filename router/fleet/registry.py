"""Keeps the fleet as its sources list it.

Each source is watched by a task of its own. What they list together is compared with what is there,
and the difference applied as one change. Who is not listed any more leaves gently: it gets nothing
new at once, and is removed when its last leg has ended, or after a bound.

A source that cannot tell changes nothing: its engines stay, for probes find out who is dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set

from router.fleet.duplicate_ids import DuplicateIdDetector
from router.fleet.engine import Engine
from router.fleet.engine_spec import Intent, ListedEngine
from router.fleet.fleet import Fleet
from router.fleet.group_state import IncompleteGroupLog
from router.fleet.overrides import OVERRIDES_SOURCE, OperatorOverrides, apply_overrides
from router.fleet.reconcile import FleetChanges, reconcile
from router.fleet.sources.source import EngineSource, SourceReport
from router.http_client.deadlines import now
from router.settings import Address

logger = logging.getLogger("disagg_router.fleet")

# Seconds between two changes of the fleet: what comes meanwhile is one.
PAUSE = 0.1
# Between two looks at who leaves, and before a source that died is watched again.
LOOK = 0.5
REVIVAL = 5.0
# The most names, or wordings of one trouble, that are logged.
MOST_NAMED = 8


class WatchedSource:
    """What one source has said. `told_at` is the Unix time when it last told what it lists, 0.0 if
    it never did."""

    def __init__(self, source: EngineSource) -> None:
        self.source = source
        self.listed: Sequence[ListedEngine] = ()
        self.addresses: Set[Address] = frozenset()
        self.problem = "has told nothing yet"
        self.has_reported = False
        self.has_ended = False
        self._told_at = 0.0
        self._said: set[str] = set()

    @property
    def listed_at(self) -> float:
        """What will never say anything else is as good as told now."""
        return time.time() if self.has_ended else self._told_at

    def note(self, report: SourceReport) -> bool:
        """Whether it lists something else than before."""
        before, self.problem, self.has_reported = self.problem, report.problem, True
        if report.problem != before:
            self._say(report.problem)
        if report.listed is None:
            return False
        self._told_at = time.time()
        # Most often it is the very same set, which costs nothing to compare.
        is_new = report.listed is not self.listed and report.listed != self.listed
        self.listed = report.listed
        if is_new:
            self.addresses = frozenset([listed.address for listed in report.listed])
        return is_new

    def _say(self, trouble: str) -> None:
        """Each wording once, until it is well again."""
        if not trouble:
            if self._said:
                logger.info("source %s: is well again", self.source.name)
            self._said.clear()
        elif trouble not in self._said and len(self._said) < MOST_NAMED:
            logger.warning("source %s: %s", self.source.name, trouble)
            self._said.add(trouble)


class EngineRegistry:
    """`bound`: seconds that the legs of an engine which leaves may still take. Of two sources that
    contradict each other, the one that comes first is believed."""

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
        self._there: dict[Address, ListedEngine] = {}
        self._leaving: dict[Address, float] = {}
        self._conflicts: Sequence[str] = ()
        self._news = asyncio.Event()
        self._all_spoken = asyncio.Event()
        self._fault = ""
        self._halves = IncompleteGroupLog(fleet, clock)
        self._namesakes = DuplicateIdDetector(fleet)
        self.overrides = OperatorOverrides()
        self.counts = {"joined": 0, "left": 0, "changed": 0}
        """Engines, since this process began, by what became of them."""
        self._added: Set[Address] = frozenset()
        for standing in self.sources:
            if standing.source.first != SourceReport():
                self._note(standing, standing.source.first)
        if not self.sources:
            self._all_spoken.set()
        self._apply()

    async def run(self) -> None:
        """Watches every source; ends only when it is cancelled."""
        async with asyncio.TaskGroup() as group:
            for standing in self.sources:
                group.create_task(self._watch(standing))
            group.create_task(self._keep())

    async def wait_for_sources(self, patience: float) -> None:
        """Returns when every source has said something, be it that it is in trouble, or after so
        many seconds; and what they list is there."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await self._all_spoken.wait()
        if self._news.is_set():
            self.reconcile()

    def problems(self) -> Mapping[str, str]:
        """Of the sources that have any, by their names."""
        found = {s.source.name: s.problem for s in self.sources if s.problem}
        return found | {"registry": self._fault} if self._fault else found

    def set_overrides(self, overrides: OperatorOverrides) -> None:
        """What operators want from now on."""
        if overrides != self.overrides:
            self.overrides = overrides
            self._added = frozenset([spec.address for spec in overrides.added])
            self._news.set()
            self.reconcile()

    def sources_of(self, address: Address) -> Sequence[str]:
        """The names of those that list it now; none where it is on its way out."""
        own = [OVERRIDES_SOURCE] if address in self._added else []
        return own + [s.source.name for s in self.sources if address in s.addresses]

    @property
    def is_informed(self) -> bool:
        """Every source has told what it lists, so who is not listed is really not there."""
        return all(standing.listed_at for standing in self.sources)

    def reconcile(self) -> None:
        """Makes the fleet what the sources list by now, as one change."""
        _say_changes(self._apply())

    def _apply(self) -> FleetChanges:
        listings = ((s.source.name, s.listed) for s in self.sources)
        wanted, conflicts = apply_overrides(listings, self.overrides)
        self._say_conflicts(conflicts)
        if changes := reconcile(self._there, wanted):
            with self._fleet.batch_changes():
                self._do(changes)
            self._count(changes)
        self._news.clear()
        return changes

    def _count(self, changes: FleetChanges) -> None:
        self.counts["joined"] += len(changes.join)
        self.counts["left"] += len(changes.leave)
        self.counts["changed"] += len(changes.change)

    def remove_drained(self) -> None:
        """Removes who was to leave and is idle, or has had its time."""
        moment = self._clock()
        over = [a for a, end in self._leaving.items() if self._is_idle(a) or moment >= end]
        if over:
            with self._fleet.batch_changes():
                for address in over:
                    del self._leaving[address]
                    self._fleet.remove(str(address))

    # Tasks.

    async def _watch(self, standing: WatchedSource) -> None:
        """A source that fails by a fault of its own is watched anew."""
        while True:
            try:
                async with contextlib.aclosing(standing.source.watch()) as reports:
                    async for report in reports:
                        self._note(standing, report)
                standing.has_ended = True
                return
            except Exception as error:
                logger.exception("source %s died", standing.source.name)
                self._note(standing, SourceReport(None, f"died: {type(error).__name__}: {error}"))
                await asyncio.sleep(REVIVAL)

    async def _keep(self) -> None:
        while True:
            await self._wait()
            try:
                self.remove_drained()
                if self._news.is_set():
                    self.reconcile()
                if self._all_spoken.is_set():
                    self._halves.look()
                self._namesakes.look()
                self._fault = ""
            except Exception as error:
                logger.exception("the fleet could not be changed")
                self._fault = f"cannot change the fleet: {type(error).__name__}: {error}"
                self._news.set()
                await asyncio.sleep(REVIVAL)

    async def _wait(self) -> None:
        """Until something is new, or it is time to look at who leaves."""
        await asyncio.sleep(PAUSE)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK - PAUSE):
                await self._news.wait()

    def _note(self, standing: WatchedSource, report: SourceReport) -> None:
        if standing.note(report):
            self._news.set()
        if all(standing.has_reported for standing in self.sources):
            self._all_spoken.set()

    # One change.

    def _do(self, changes: FleetChanges) -> None:
        for address in changes.leave:
            self._leave(address)
        for listed in (*changes.change, *changes.join):
            self._let_in(listed)

    def _leave(self, address: Address) -> None:
        del self._there[address]
        engine = self._fleet.find(str(address))
        if engine is not None:
            self._fleet.drain(engine)
            self._leaving[address] = self._clock() + self._bound

    def _let_in(self, listed: ListedEngine) -> None:
        """One that is on its way out may be here still, and simply stays."""
        address = listed.address
        self._leaving.pop(address, None)
        engine = self._fleet.find(str(address))
        if engine is None:
            self._fleet.add(listed.spec, listed.intent)
        else:
            self._fleet.change_spec(engine, listed.spec)
            self._set_intent(engine, listed.intent)
        self._there[address] = listed

    def _set_intent(self, engine: Engine, intent: Intent) -> None:
        if engine.intent is not intent:
            act = self._fleet.resume if intent is Intent.SERVING else self._fleet.drain
            act(engine)

    def _is_idle(self, address: Address) -> bool:
        engine = self._fleet.find(str(address))
        return engine is None or engine.is_idle

    def _say_conflicts(self, conflicts: Sequence[str]) -> None:
        for line in [line for line in conflicts if line not in self._conflicts][:MOST_NAMED]:
            logger.warning("engine %s", line)
        self._conflicts = conflicts


def _say_changes(changes: FleetChanges) -> None:
    for what, names in (
        ("join", [str(listed.address) for listed in changes.join]),
        ("leave", list(map(str, changes.leave))),
        ("change", [f"{listed.address} ({_told(listed)})" for listed in changes.change]),
    ):
        if names:
            more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
            logger.info("engines that %s: %s%s", what, ", ".join(names[:MOST_NAMED]), more)


def _told(listed: ListedEngine) -> str:
    return f"{listed.spec.role}, group {listed.spec.group}, {listed.intent}"
