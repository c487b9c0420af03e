"""Snapshots of a router: what each process sees, all of them merged, and what has changed.

The sections of a merged snapshot that KEYED names are sent item by item, the others whole.
Each worker listens at a Unix socket of its own, in the router's private directory. A worker with
viewers connects to all the others (`OtherWorkers`), and each sends it a snapshot four times a
second, as one line of JSON. Without viewers there is no connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
import os
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic as now
from typing import Any

from pydantic import BaseModel, ValidationError

from router.common.tls import TlsContext
from router.common.watched_file import WatchedFiles
from router.fleet.pair_rates import UNKNOWN, Pair
from router.fleet.probes import Prober
from router.fleet.registry import EngineRegistry
from router.fleet.views import (
    FleetView,
    build_fleet_view,
    merge_engine_views,
    merge_group_views,
)
from router.proxy.gateway import Gateway
from router.ui.engine_reports import EngineGauge
from router.ui.live_requests import (
    EngineLink,
    LiveRequests,
    RecentRequests,
    Refusals,
    RequestFeed,
    RequestSummary,
    most_frequent,
    summarize_request,
)
from router.ui.standing_checks import CheckResult, merge_results, run_checks

logger = logging.getLogger("disagg_router.ui")
KEYED = ("engines", "groups", "ways", "running")
MAX_ROWS = 64
MAX_ENGINES = 512
SNAPSHOT_INTERVAL_S = 0.25
# For a line to arrive, and for the reader to take one.
LINE_TIMEOUT_S = 2.0
SNAPSHOT_RECONNECT_S = 1.0
MAX_SNAPSHOT_BYTES = 16 * 1024 * 1024
MAX_SNAPSHOT_CONNECTIONS = 256
MAX_OTHERS_ENDED = 1024
Json = dict[str, Any]
Reading = Callable[[], contextlib.AbstractContextManager[Callable[[], "ProcessSnapshot"]]]


class ProcessSnapshot(BaseModel):
    """The view of one process.

    `links` has requests per second by link, and `slow` the slow pairs of engines, each with a
    sentence. `ended` holds the requests that ended since the last
    snapshot for the same reader, and `missed` counts those that it has no room for. `outcomes`
    counts requests since the start of the process, `turns` turns of conversations by outcome and
    `kept` by what they left. `entries` are those of a conversation store in memory. `queue` counts
    requests that wait for a slot at an engine, and how many may; None if engines have no limits.
    `ready` has the reasons why requests are not answered ("blocking"), or answered with more work
    than necessary ("degrading"). `needed` has the engines that the requests need, by group and
    role, as far as known.
    """

    view: FleetView
    links: list[tuple[EngineLink, float]]
    running: list[RequestSummary]
    ended: list[RequestSummary]
    missed: int
    in_flight: int
    queue: tuple[int, int] | None = None
    ready: dict[str, dict[str, str]]
    refusals: list[Refusals]
    checks: list[CheckResult]
    outcomes: dict[str, int]
    turns: dict[str, int]
    kept: dict[str, int]
    entries: int | None
    needed: dict[str, dict[str, float]] = {}
    slow: list[tuple[Pair, str]] = []


@dataclass(slots=True)
class SnapshotSource:
    """Makes snapshots of this process, and watches its requests while there is a reader.

    `files` and `certificates` are by their name in the metrics.
    """

    gateway: Gateway
    registry: EngineRegistry
    prober: Prober
    files: Mapping[str, WatchedFiles]
    certificates: Mapping[str, TlsContext]
    _live: LiveRequests = field(default_factory=LiveRequests)
    _recent: RecentRequests = field(default_factory=RecentRequests)

    def __post_init__(self) -> None:
        self.gateway.records.add_reader(self._recent.add_records)

    @contextlib.contextmanager
    def reading(self) -> Iterator[Callable[[], ProcessSnapshot]]:
        """Yield a function that takes a snapshot for one reader."""
        self.gateway.records.flush()  # or a request would be both in `latest` and yet to come
        feed, live = RequestFeed(self._recent.latest()), self._live
        live.feeds.append(feed)
        self.gateway.watch = live
        try:
            yield lambda: self._take(live, feed)
        finally:
            live.feeds.remove(feed)
            if not live.feeds:
                self.gateway.watch, self._live = None, LiveRequests()

    def find(self, request_id: str) -> RequestSummary | None:
        """Return the recently ended request with this id."""
        self.gateway.records.flush()
        record = self._recent.find(request_id)
        if record is None:
            return None
        return summarize_request(record, str(os.getpid()), time.time() - now())

    def _take(self, live: LiveRequests, feed: RequestFeed) -> ProcessSnapshot:
        worker, unix = str(os.getpid()), time.time() - now()
        running = live.running
        ended, missed = feed.take(now())
        gateway, registry = self.gateway, self.registry
        slow = gateway.fleet.pair_rates.slow
        metrics, settings = gateway.metrics, gateway.settings
        outcomes: Counter[str] = Counter()
        for labels, count in metrics.requests.by_outcome.counts().items():
            outcomes[str(labels[-1])] += count
        entries = None
        if settings.conversation_store == "memory":
            families = metrics.conversation_entries.collect()
            entries = int(sum(sample.value for one in families for sample in one.samples))
        readiness = gateway.assess_readiness(self.prober.problem())
        needed: defaultdict[str, dict[str, float]] = defaultdict(dict)
        for (group, role), number in metrics.engines_needed.read():
            needed[str(group)][str(role)] = number
        queue = None
        if (admission := gateway.admission) is not None:
            queue = admission.depth, settings.queue_size
        return ProcessSnapshot(
            view=build_fleet_view(gateway.fleet, registry),
            links=heapq.nlargest(MAX_ROWS, feed.rates().items(), key=lambda one: one[1]),
            running=[summarize_request(record, worker, unix) for record in running[-MAX_ROWS:]],
            ended=[summarize_request(record, worker, unix) for record in ended],
            missed=missed,
            in_flight=len(gateway.tasks.running),
            queue=queue,
            ready={"blocking": readiness.blocking, "degrading": readiness.degrading},
            refusals=list(feed.refusals(now())),
            checks=run_checks(gateway.fleet, registry, self.files, self.certificates),
            outcomes=outcomes,
            turns=_by_name(metrics.requests.conversation_turns.counts()),
            kept=_by_name(metrics.requests.conversation_kept.counts()),
            entries=entries,
            needed=needed,
            slow=[(pair, one.describe(pair)) for pair, one in slow.items() if UNKNOWN not in pair],
        )


def _by_name(counts: Mapping[tuple[str | int, ...], int]) -> dict[str, int]:
    return {" ".join(str(one) for one in labels if one != ""): n for labels, n in counts.items()}


def merge_snapshots(
    snapshots: Sequence[ProcessSnapshot | None],
    gauges: Mapping[str, EngineGauge],
    byte_rates: Mapping[EngineLink, float] | None = None,
) -> Json:
    """Merge the snapshots of all processes, with None for one that does not answer.

    `gauges` are by engine name, and `byte_rates` in bytes per second by link.
    """
    seen = [one for one in snapshots if one is not None]
    views = [None if one is None else one.view for one in snapshots]
    engines = merge_engine_views(views)
    running = sorted((each for one in seen for each in one.running), key=lambda each: each.at)
    entries = [one.entries for one in seen if one.entries is not None]
    outcomes = _added(one.outcomes for one in seen)
    queues = [one.queue for one in seen if one.queue is not None]
    depths, sizes = zip(*queues, strict=True) if queues else ((), ())
    return {
        "engines": {
            one.name: one.model_dump(mode="json")
            | {"gauge": gauges.get(one.name, EngineGauge()).model_dump(mode="json")}
            for one in engines[:MAX_ENGINES]
        },
        "engines_unlisted": max(0, len(engines) - MAX_ENGINES),
        "groups": {
            one.name: one.model_dump(mode="json") | {"needed": _add_needs(seen, one.name)}
            for one in merge_group_views(views)
        },
        "ways": _merge_links(seen, byte_rates or {}),
        "running": {one.key: one.model_dump(mode="json") for one in running[-MAX_ROWS:]},
        "totals": {
            "requests": sum(outcomes.values()),
            "in_flight": sum(one.in_flight for one in seen),
            "queue": {"depth": sum(depths), "size": sum(sizes)} if queues else None,
            "by": outcomes,
        },
        "turns": {
            "outcomes": _added(one.turns for one in seen),
            "kept": _added(one.kept for one in seen),
            "entries": sum(entries) if entries else None,
        },
        "ready": {  # a request may reach any process, so the reasons of each one count
            kind: {name: why for one in reversed(seen) for name, why in one.ready[kind].items()}
            for kind in ("blocking", "degrading")
        },
        "refusals": _merge_refusals(seen),
        "checks": [
            one.model_dump(mode="json") for one in merge_results(each.checks for each in seen)
        ],
        "workers": {"answered": len(seen), "known": len(snapshots)},
    }


def changes(before: Json, after: Json) -> Json:
    """Return what differs. In a keyed section, null stands for an item that is gone."""
    found: Json = {}
    for name, new in after.items():
        old = before.get(name)
        if new == old:
            continue
        if name not in KEYED or old is None:
            found[name] = new
            continue
        found[name] = {key: item for key, item in new.items() if old.get(key) != item}
        found[name].update((key, None) for key in old if key not in new)
    return found


def _added(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for one in counts:
        sums.update(one)
    return dict(sums)


def _add_needs(snapshots: Sequence[ProcessSnapshot], group: str) -> dict[str, float]:
    """Return the engines that the requests of all processes need, by role."""
    sums: Counter[str] = Counter()
    for one in snapshots:
        sums.update(one.needed.get(group, {}))
    return {role: round(number, 3) for role, number in sums.items()}


def _merge_refusals(snapshots: Sequence[ProcessSnapshot]) -> list[Json]:
    counts: Counter[tuple[int, str]] = Counter()
    for one in [each for snapshot in snapshots for each in snapshot.refusals]:
        counts[one.status, one.text] += one.count
    return [one.model_dump() for one in most_frequent(counts)]


def _merge_links(
    snapshots: Sequence[ProcessSnapshot], byte_rates: Mapping[EngineLink, float]
) -> Json:
    """Merge the links, and mark those between slow pairs of engines. Engines report bytes of other
    routers' requests, too."""
    found: Json = {}
    slow = dict([each for snapshot in snapshots for each in snapshot.slow][:MAX_ROWS])

    def of(link: EngineLink) -> Json:
        empty = {"from": link[0], "to": link[1], "kind": link[2], "rate": 0.0}
        empty |= {"bytes_per_second": None, "slow": slow.get(link[:2], "")}
        known: Json = found.setdefault(" ".join(link), empty)
        return known

    for link, rate in [each for snapshot in snapshots for each in snapshot.links]:
        of(link)["rate"] = round(of(link)["rate"] + rate, 2)
    fastest = sorted(byte_rates.items(), key=lambda item: (-item[1], item[0]))
    for link, rate in fastest[:MAX_ROWS]:
        of(link)["bytes_per_second"] = rate
    for pair in slow.keys() - {(link["from"], link["to"]) for link in found.values()}:
        of((*pair, "prompt"))  # hardly anything moves there, because the router avoids it
    return found


def snapshot_socket(directory: Path, number: int) -> Path:
    """Return the path of a worker's socket."""
    return directory / f"{number}.page"


class OtherWorkers:
    """The snapshots of all workers but `number`, of `count` workers that there should be."""

    def __init__(self, directory: Path, number: int, count: int) -> None:
        self._paths = [snapshot_socket(directory, n) for n in range(count) if n != number]
        self._snapshots: dict[Path, ProcessSnapshot] = {}
        self._ended: deque[RequestSummary] = deque(maxlen=MAX_OTHERS_ENDED)
        self._missed = 0

    async def run(self) -> None:
        """Receive snapshots until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                for path in self._paths:
                    group.create_task(self._follow(path))
        finally:
            self._snapshots.clear()
            self._ended.clear()

    def snapshots(self) -> list[ProcessSnapshot | None]:
        """Return each worker's last snapshot, None for one that does not answer."""
        return [self._snapshots.get(path) for path in self._paths]

    def take_ended(self) -> tuple[Sequence[RequestSummary], int]:
        """Return the requests that ended since the last call, and how many more there were."""
        ended, missed = list(self._ended), self._missed
        self._ended.clear()
        self._missed = 0
        return ended, missed

    async def _follow(self, path: Path) -> None:
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(path, limit=MAX_SNAPSHOT_BYTES)
                with contextlib.closing(writer):
                    while True:
                        async with asyncio.timeout(LINE_TIMEOUT_S):
                            line = await reader.readuntil(b"\n")
                        self._snapshots[path] = snapshot = ProcessSnapshot.model_validate_json(line)
                        self._missed += snapshot.missed
                        self._ended.extend(snapshot.ended)
            except (OSError, TimeoutError, asyncio.IncompleteReadError):
                pass  # the worker is gone, or has not started
            except (ValidationError, asyncio.LimitOverrunError):
                logger.exception("another worker's snapshot cannot be read")
            finally:
                self._snapshots.pop(path, None)
            await asyncio.sleep(SNAPSHOT_RECONNECT_S)


@contextlib.asynccontextmanager
async def serve_snapshots(path: Path, reading: Reading) -> AsyncIterator[None]:
    """Send this worker's snapshots to the workers that connect, until the block ends.

    `reading` is `SnapshotSource.reading`.
    """
    connections: set[asyncio.Task[None]] = set()

    async def send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        try:
            if len(connections) <= MAX_SNAPSHOT_CONNECTIONS:
                with reading() as take_snapshot:
                    while not reader.at_eof():
                        writer.write(take_snapshot().model_dump_json().encode() + b"\n")
                        async with asyncio.timeout(LINE_TIMEOUT_S):
                            await writer.drain()
                        await asyncio.sleep(SNAPSHOT_INTERVAL_S)
        except (OSError, TimeoutError):
            pass  # the reader's last viewer has left
        except Exception:
            logger.exception("a snapshot cannot be sent to another worker")
        finally:
            connections.discard(task)
            writer.transport.abort()

    server = await asyncio.start_unix_server(send, path)
    try:
        yield
    finally:
        server.close()
        for task in list(connections):
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
