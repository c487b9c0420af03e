"""One small picture of a router: what each process sees, what all see together, what has changed.

Sections of KEYED are told item by item, the others whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from router.telemetry.metrics import Metrics
from router.ui.engine_polling import EngineGauge
from router.ui.live_requests import EngineLink, LiveRequests, RequestFeed, moving
from router.ui.request_view import Origin, RequestSummary, summarize_request

KEYED = ("engines", "groups", "ways", "running")
MOST_LISTED = 64
MOST_ENGINES = 512
Json = dict[str, Any]


class LinkTraffic(BaseModel):
    """KV from one engine to another: requests under way, and those a second."""

    from_: str
    to: str
    kind: str
    moving: int
    rate: float


class RequestTotals(BaseModel):
    """Since the start of the processes. `by` counts what has become of requests."""

    requests: int
    in_flight: int
    by: dict[str, int]


class TurnTotals(BaseModel):
    """Of conversations: by outcome and reason, by what turns left; entries of a memory store."""

    outcomes: dict[str, int]
    kept: dict[str, int]
    entries: int | None


class ProcessSnapshot(BaseModel):
    """What one process sees; `ended` since it was last asked, `untold` how many more did."""

    view: FleetView
    ways: list[LinkTraffic]
    running: list[RequestSummary]
    ended: list[RequestSummary]
    untold: int
    totals: RequestTotals
    turns: TurnTotals


def take_snapshot(
    gateway: Gateway,
    registry: EngineRegistry,
    watch: LiveRequests,
    look: RequestFeed,
    origin: Origin,
) -> ProcessSnapshot:
    running = watch.running
    ended, missed = look.take(now())
    return ProcessSnapshot(
        view=build_fleet_view(gateway.fleet, registry),
        ways=_ways(moving(running), look.rates.now()),
        running=[summarize_request(record, origin) for record in running[-MOST_LISTED:]],
        ended=[summarize_request(record, origin) for record in ended],
        untold=missed,
        totals=_totals(gateway),
        turns=_turns(gateway),
    )


def merge_snapshots(
    pictures: Sequence[ProcessSnapshot | None],
    gauges: Mapping[str, EngineGauge],
    speeds: Mapping[EngineLink, float] | None = None,
) -> Json:
    """Of all processes, None for one that does not answer. `speeds`: in bytes a second."""
    told = [one for one in pictures if one is not None]
    views = [None if one is None else one.view for one in pictures]
    engines = merge_engine_views(views)
    running = sorted((view for one in told for view in one.running), key=lambda view: view.at)
    return {
        "engines": {one.name: _engine(one, gauges) for one in engines[:MOST_ENGINES]},
        "engines_unlisted": max(0, len(engines) - MOST_ENGINES),
        "groups": {one.name: one.model_dump(mode="json") for one in merge_group_views(views)},
        "ways": _added_ways(told, speeds or {}),
        "running": {one.key: one.model_dump(mode="json") for one in running[-MOST_LISTED:]},
        "totals": {
            "requests": sum(one.totals.requests for one in told),
            "in_flight": sum(one.totals.in_flight for one in told),
            "by": added([one.totals.by for one in told]),
        },
        "turns": {
            "outcomes": added([one.turns.outcomes for one in told]),
            "kept": added([one.turns.kept for one in told]),
            "entries": _entries(told),
        },
        "workers": {"answered": len(told), "known": len(pictures)},
    }


def changes(before: Json, after: Json) -> Json:
    """Only what differs; of a keyed section null for what is gone. Empty: nothing has changed."""
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


def added(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for each in counts:
        for name, count in each.items():
            sums[name] = sums.get(name, 0) + count
    return sums


def _engine(view: EngineView, gauges: Mapping[str, EngineGauge]) -> Json:
    gauge = gauges.get(view.name, EngineGauge())
    return view.model_dump(mode="json") | {"gauge": gauge.model_dump(mode="json")}


def _ways(
    under_way: Mapping[EngineLink, int], rates: Mapping[EngineLink, float]
) -> list[LinkTraffic]:
    def order(way: EngineLink) -> tuple[float, float, EngineLink]:
        return -under_way.get(way, 0), -rates.get(way, 0.0), way

    busiest = sorted({*under_way, *rates}, key=order)
    return [
        LinkTraffic(
            from_=way[0],
            to=way[1],
            kind=way[2],
            moving=under_way.get(way, 0),
            rate=round(rates.get(way, 0.0), 2),
        )
        for way in busiest[:MOST_LISTED]
    ]


def _added_ways(pictures: Sequence[ProcessSnapshot], speeds: Mapping[EngineLink, float]) -> Json:
    """Engines tell of other routers' requests, too."""
    found: Json = {}
    for one in [way for each in pictures for way in each.ways]:
        known = _way(found, (one.from_, one.to, one.kind))
        known["moving"] += one.moving
        known["rate"] = round(known["rate"] + one.rate, 2)
    fastest = sorted(speeds.items(), key=lambda item: (-item[1], item[0]))
    for way, speed in fastest[:MOST_LISTED]:
        _way(found, way)["bytes_per_second"] = speed
    return found


def _way(found: Json, way: EngineLink) -> Json:
    from_, to, kind = way
    nothing = {"from": from_, "to": to, "kind": kind, "moving": 0, "rate": 0.0}
    known: Json = found.setdefault(" ".join(way), nothing | {"bytes_per_second": None})
    return known


def _totals(gateway: Gateway) -> RequestTotals:
    by: dict[str, int] = {}
    for labels, count in gateway.metrics.requests.counts().items():
        outcome = str(labels[-1])
        by[outcome] = by.get(outcome, 0) + count
    return RequestTotals(requests=sum(by.values()), in_flight=len(gateway.running), by=by)


def _turns(gateway: Gateway) -> TurnTotals:
    metrics = gateway.metrics
    return TurnTotals(
        outcomes={_named(labels): n for labels, n in metrics.conversation_turns.counts().items()},
        kept={_named(labels): n for labels, n in metrics.conversation_kept.counts().items()},
        entries=_waiting(metrics) if gateway.settings.conversation_store == "memory" else None,
    )


def _waiting(metrics: Metrics) -> int:
    return int(sum(one.value for f in metrics.conversation_entries.collect() for one in f.samples))


def _entries(pictures: Sequence[ProcessSnapshot]) -> int | None:
    counts = [one.turns.entries for one in pictures if one.turns.entries is not None]
    return sum(counts) if counts else None


def _named(labels: Sequence[object]) -> str:
    return " ".join(str(label) for label in labels if label != "")
