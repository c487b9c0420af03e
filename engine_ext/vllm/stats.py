"""What the connector counts on its way to vLLM's `/metrics`, under the reference engine's names.

Workers count, vLLM's API server tells: what travels with each step is the difference since the
last one. Differences add up, over ranks and over steps, for gauges as for counters and for the
buckets of a histogram.
"""

from collections.abc import Callable
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.utils import create_metric_per_engine

from engine_ext.base.types import ConnectorStats
from engine_ext.core.scheduler import SchedulerConnector
from engine_ext.pages.counted import COUNTED, DISTRIBUTED, STOCK, Distributed

OF_SCHEDULER = ("leases_active", "proofs_unreadable")
"""Counted by the scheduler half. It knows of a lease before the worker does: an engine that rests
while its blocks are read takes no step that could tell."""

BUCKETS = {
    each.field: tuple(
        (f"{each.field} {place} count", f"{each.field} {place} total")
        for place in range(len(each.bounds) + 1)
    )
    for each in DISTRIBUTED
}
"""Under which names a histogram's buckets travel: their counts and their sums."""


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
        said: dict[str, int | float] = {f.replace("_", " "): self.data[f] for f in counted}
        for each in DISTRIBUTED:
            count, total = map(sum, zip(*_told(self.data, each), strict=True))
            if count:
                said[f"mean {each.field.replace('_', ' ')}"] = round(total / count, 6)
        return said

    def is_empty(self) -> bool:
        return not any(self.data.values())


class Differences:
    """What has changed since the last call."""

    def __init__(self) -> None:
        self._told: dict[str, float] = {}

    def take(self, values: dict[str, float]) -> DisaggStats | None:
        changes = {name: value - self._told.get(name, 0) for name, value in values.items()}
        self._told = values
        changed = {name: change for name, change in changes.items() if change}
        return DisaggStats(changed) if changed else None


def of_worker(stats: ConnectorStats) -> dict[str, float]:
    values: dict[str, float] = {
        each.field: getattr(stats, each.field) for each in COUNTED if each.field not in OF_SCHEDULER
    }
    for each in DISTRIBUTED:
        buckets = getattr(stats, each.field).buckets()
        for (count, total), bucket in zip(BUCKETS[each.field], buckets, strict=True):
            if bucket.times:
                values[count], values[total] = bucket.times, bucket.total
    return values


def of_scheduler(half: SchedulerConnector) -> dict[str, float]:
    return dict(zip(OF_SCHEDULER, (half.num_leased, half.proofs_unreadable), strict=True))


def _told(data: dict[str, Any], each: Distributed) -> list[tuple[int, float]]:
    return [(int(data.get(c, 0)), data.get(t, 0.0)) for c, t in BUCKETS[each.field]]


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
            by_engine: dict[int, Any] = create_metric_per_engine(metric, per_engine_labelvalues)
            return by_engine

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
            for place, (count, total) in enumerate(_told(transfer_stats_data, each)):
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
