"""What the connector counts (see metric_deltas.py) on its way to vLLM's `/metrics`."""

from collections.abc import Callable
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from engine_ext.http.counted import COUNTED, DISTRIBUTED, STOCK, Distributed
from engine_ext.vllm.metric_deltas import histogram_buckets


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
            count, total = map(sum, zip(*histogram_buckets(self.data, each), strict=True))
            if count:
                values[f"mean {each.field.replace('_', ' ')}"] = round(total / count, 6)
        return values

    def is_empty(self) -> bool:
        return not any(self.data.values())


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
            for place, (count, total) in enumerate(histogram_buckets(transfer_stats_data, each)):
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
