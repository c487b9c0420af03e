"""Snapshots of a router: what each process sees, all of them merged, and what has changed.

The sections of a merged snapshot that KEYED names are sent item by item, the others whole.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from router.fleet.registry import EngineRegistry
from router.fleet.views import (
    EngineView,
    FleetView,
    build_fleet_view,
    merge_engine_views,
    merge_group_views,
)
from router.http_client.deadlines import now
from router.proxy.gateway import Gateway
from router.ui.engine_polling import EngineGauge
from router.ui.live_requests import (
    EngineLink,
    LiveRequests,
    Origin,
    RequestFeed,
    RequestSummary,
    count_moving,
    summarize_request,
)

KEYED = ("engines", "groups", "ways", "running")
MAX_LISTED = 64
MAX_ENGINES = 512
Json = dict[str, Any]


class LinkTraffic(BaseModel):
    """KV from one engine to another: requests that move it now, and requests per second."""

    from_: str
    to: str
    kind: str
    moving: int
    rate: float


class RequestTotals(BaseModel):
    """Requests since the process started; `by` counts them by outcome."""

    requests: int
    in_flight: int
    by: dict[str, int]


class TurnTotals(BaseModel):
    """Turns of conversations by outcome and by what they left; entries of a store in memory."""

    outcomes: dict[str, int]
    kept: dict[str, int]
    entries: int | None


class ProcessSnapshot(BaseModel):
    """The view of one process.

    `ended` holds the requests that ended since the last snapshot for the same reader, and `missed`
    counts those that it has no room for.
    """

    view: FleetView
    links: list[LinkTraffic]
    running: list[RequestSummary]
    ended: list[RequestSummary]
    missed: int
    totals: RequestTotals
    turns: TurnTotals


class SnapshotSource:
    """Makes snapshots of this process, and watches its requests while there is a reader."""

    def __init__(self, gateway: Gateway, registry: EngineRegistry) -> None:
        self._gateway = gateway
        self._registry = registry
        self._live = LiveRequests()

    @contextlib.contextmanager
    def reading(self) -> Iterator[Callable[[], ProcessSnapshot]]:
        """Yield a function that takes a snapshot for one reader."""
        feed, live = RequestFeed(), self._live
        live.feeds.append(feed)
        self._gateway.watch = live
        try:
            yield lambda: self._take(live, feed)
        finally:
            live.feeds.remove(feed)
            if not live.feeds:
                self._gateway.watch, self._live = None, LiveRequests()

    def _take(self, live: LiveRequests, feed: RequestFeed) -> ProcessSnapshot:
        origin = Origin(str(os.getpid()), time.time() - now())
        running = live.running
        ended, missed = feed.take(now())
        metrics, settings = self._gateway.metrics, self._gateway.settings
        outcomes: Counter[str] = Counter()
        for labels, count in metrics.requests.by_outcome.counts().items():
            outcomes[str(labels[-1])] += count
        entries = None
        if settings.conversation_store == "memory":
            families = metrics.conversation_entries.collect()
            entries = int(sum(sample.value for one in families for sample in one.samples))
        return ProcessSnapshot(
            view=build_fleet_view(self._gateway.fleet, self._registry),
            links=_busiest(count_moving(running), feed.rates.now()),
            running=[summarize_request(record, origin) for record in running[-MAX_LISTED:]],
            ended=[summarize_request(record, origin) for record in ended],
            missed=missed,
            totals=RequestTotals(
                requests=outcomes.total(), in_flight=len(self._gateway.tasks.running), by=outcomes
            ),
            turns=TurnTotals(
                outcomes=_by_name(metrics.conversation_turns.counts()),
                kept=_by_name(metrics.conversation_kept.counts()),
                entries=entries,
            ),
        )


def _busiest(
    moving: Mapping[EngineLink, int], rates: Mapping[EngineLink, float]
) -> list[LinkTraffic]:
    def order(link: EngineLink) -> tuple[float, float, EngineLink]:
        return -moving.get(link, 0), -rates.get(link, 0.0), link

    links = sorted({*moving, *rates}, key=order)
    return [
        LinkTraffic(
            from_=link[0],
            to=link[1],
            kind=link[2],
            moving=moving.get(link, 0),
            rate=round(rates.get(link, 0.0), 2),
        )
        for link in links[:MAX_LISTED]
    ]


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
    entries = [one.turns.entries for one in seen if one.turns.entries is not None]
    return {
        "engines": {one.name: _with_gauge(one, gauges) for one in engines[:MAX_ENGINES]},
        "engines_unlisted": max(0, len(engines) - MAX_ENGINES),
        "groups": {one.name: one.model_dump(mode="json") for one in merge_group_views(views)},
        "ways": _merge_links(seen, byte_rates or {}),
        "running": {one.key: one.model_dump(mode="json") for one in running[-MAX_LISTED:]},
        "totals": {
            "requests": sum(one.totals.requests for one in seen),
            "in_flight": sum(one.totals.in_flight for one in seen),
            "by": _added(one.totals.by for one in seen),
        },
        "turns": {
            "outcomes": _added(one.turns.outcomes for one in seen),
            "kept": _added(one.turns.kept for one in seen),
            "entries": sum(entries) if entries else None,
        },
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


def _with_gauge(view: EngineView, gauges: Mapping[str, EngineGauge]) -> Json:
    gauge = gauges.get(view.name, EngineGauge())
    return view.model_dump(mode="json") | {"gauge": gauge.model_dump(mode="json")}


def _merge_links(
    snapshots: Sequence[ProcessSnapshot], byte_rates: Mapping[EngineLink, float]
) -> Json:
    """Merge the links. Engines report bytes of other routers' requests, too."""
    found: Json = {}

    def of(link: EngineLink) -> Json:
        empty = {"from": link[0], "to": link[1], "kind": link[2], "moving": 0, "rate": 0.0}
        known: Json = found.setdefault(" ".join(link), empty | {"bytes_per_second": None})
        return known

    for one in [link for snapshot in snapshots for link in snapshot.links]:
        known = of((one.from_, one.to, one.kind))
        known["moving"] += one.moving
        known["rate"] = round(known["rate"] + one.rate, 2)
    fastest = sorted(byte_rates.items(), key=lambda item: (-item[1], item[0]))
    for link, rate in fastest[:MAX_LISTED]:
        of(link)["bytes_per_second"] = rate
    return found
