"""What the connector counts, as changes since the last step, under the reference engine's names.

Workers count, vLLM's API server shows: what travels with each step is the difference since the
last one. Differences add up, over ranks and over steps, for gauges as for counters and for the
buckets of a histogram.
"""

from typing import Any

from engine_ext.common.types import ConnectorStats
from engine_ext.http.counted import COUNTED, DISTRIBUTED, Distributed
from engine_ext.scheduler.scheduler import SchedulerConnector

OF_SCHEDULER = ("leases_active", "proofs_unreadable", "engine_id_clashes")
"""Counted by the scheduler half. It knows of a lease before the worker does: an engine that rests
while its blocks are read takes no step that could report it."""

BUCKETS = {
    each.field: tuple(
        (f"{each.field} {place} count", f"{each.field} {place} total")
        for place in range(len(each.bounds) + 1)
    )
    for each in DISTRIBUTED
}
"""Under which names a histogram's buckets travel: their counts and their sums."""


class MetricDeltas:
    """What has changed since the last call."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def take(self, values: dict[str, float]) -> dict[str, float]:
        changes = {name: value - self._last.get(name, 0) for name, value in values.items()}
        self._last = values
        return {name: change for name, change in changes.items() if change}


def worker_values(stats: ConnectorStats) -> dict[str, float]:
    values: dict[str, float] = {
        each.field: getattr(stats, each.field) for each in COUNTED if each.field not in OF_SCHEDULER
    }
    for each in DISTRIBUTED:
        buckets = getattr(stats, each.field).buckets()
        for (count, total), bucket in zip(BUCKETS[each.field], buckets, strict=True):
            if bucket.times:
                values[count], values[total] = bucket.times, bucket.total
    return values


def scheduler_counts(half: SchedulerConnector) -> tuple[int, ...]:
    """Return the counts of the scheduler half, in the order of OF_SCHEDULER."""
    return half.num_leased, half.proofs_unreadable, half.engine_id_clashes


def histogram_buckets(data: dict[str, Any], each: Distributed) -> list[tuple[int, float]]:
    return [(int(data.get(c, 0)), data.get(t, 0.0)) for c, t in BUCKETS[each.field]]
