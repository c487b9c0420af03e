"""The connector's counts on their way to vLLM's `/metrics`, under the reference engine's names.

Workers count, vLLM's API server shows: what travels with each step is the change since the last
one. Changes add up, over ranks and over steps, for gauges as for counters and for the buckets of a
histogram.
"""

from collections.abc import Callable
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from engine_ext.common.types import ConnectorStats
from engine_ext.http.counted import COUNTED, DISTRIBUTED, STOCK, Distributed
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


def _worker_values(stats: ConnectorStats) -> dict[str, float]:
    values: dict[str, float] = {
        each.field: getattr(stats, each.field) for each in COUNTED if each.field not in OF_SCHEDULER
    }
    for each in DISTRIBUTED:
        buckets = getattr(stats, each.field).buckets()
        for (count, total), bucket in zip(BUCKETS[each.field], buckets, strict=True):
            if bucket.times:
                values[count], values[total] = bucket.times, bucket.total
    return values


def _histogram_buckets(data: dict[str, Any], each: Distributed) -> list[tuple[int, float]]:
    return [(int(data.get(c, 0)), data.get(t, 0.0)) for c, t in BUCKETS[each.field]]


class DisaggStats(KVConnectorStats):
    """`data`: name of a counter of ConnectorStats, or as in BUCKETS -> its change."""

    def reset(self) -> None:
        self.data: dict[str, float] = {}

    def aggregate(self, other: KVConnectorStats) -> "DisaggStats":
        for name, change in other.data.items():
            self.data[name] = self.data.get(name, 0) + change
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log: changes, and means of what is distributed."""
        counted = [each.field for each in COUNTED if self.data.get(each.field)]
        values: dict[str, int | float] = {f.replace("_", " "): self.data[f] for f in counted}
        for each in DISTRIBUTED:
            count, total = map(sum, zip(*_histogram_buckets(self.data, each), strict=True))
            if count:
                values[f"mean {each.field.replace('_', ' ')}"] = round(total / count, 6)
        return values

    def is_empty(self) -> bool:
        return not any(self.data.values())


class MetricDeltas:
    """Return the counts of one half since the last call; None if there are none."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._last_counts: tuple[int, ...] = ()

    def of_scheduler(self, half: SchedulerConnector) -> DisaggStats | None:
        counts = half.num_leased, half.proofs_unreadable, half.engine_id_clashes
        if counts == self._last_counts:
            return None  # as in most steps
        self._last_counts = counts
        return self._changes(dict(zip(OF_SCHEDULER, counts, strict=True)))

    def of_worker(self, stats: ConnectorStats) -> DisaggStats | None:
        return self._changes(_worker_values(stats))

    def _changes(self, values: dict[str, float]) -> DisaggStats | None:
        last, self._last = self._last, values
        changes = {name: value - last.get(name, 0) for name, value in values.items()}
        changed = {name: change for name, change in changes.items() if change}
        return DisaggStats(changed) if changed else None


class DisaggPromMetrics(KVConnectorPromMetrics):
    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)

        def make(kind: type[Any], name: str, text: str, **options: Any) -> dict[int, Any]:
            metric = metric_types[kind](
                name=name, documentation=text, labelnames=labelnames, **options
            )
            return {rank: metric.labels(*of) for rank, of in per_engine_labelvalues.items()}

        self._counters = _counters(make)
        self._histograms = [
            (each, make(Histogram, each.name, each.text, buckets=each.bounds))
            for each in DISTRIBUTED
        ]

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for field, metrics in self._counters.items():
            if change := transfer_stats_data.get(field, 0):
                for metric in metrics:
                    metric[engine_idx].inc(change)
        for each, histogram in self._histograms:
            for place, (count, total) in enumerate(_histogram_buckets(transfer_stats_data, each)):
                for _ in range(count):
                    histogram[engine_idx].observe(_mean(each, place, total / count))


def _counters(make: Callable[..., dict[int, Any]]) -> dict[str, list[dict[int, Any]]]:
    """Every metric that a counter of ConnectorStats moves."""
    # A gauge that is increased cannot be "mostrecent", vLLM's usual mode.
    counters = {
        each.field: [
            make(Gauge, each.name, each.text, multiprocess_mode="sum")
            if each.is_gauge
            else make(Counter, each.name, each.text)
        ]
        for each in COUNTED
    }
    for each in STOCK:
        metric = make(Counter, each.name, each.text)
        for field in each.fields:
            counters[field].append(metric)
    return counters


def _mean(each: Distributed, place: int, mean: float) -> float:
    """Rounding must not move it to the next bucket."""
    return min(mean, each.bounds[place]) if place < len(each.bounds) else mean
