"""The connector's counters on their way to vLLM's `/metrics`, under the reference engine's names.

Workers count, vLLM's API server tells: what travels with each step is the difference since the
last one. Differences add up, over ranks and over steps, for gauges as for counters.
"""

from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.utils import create_metric_per_engine

from engine_ext.base.types import ConnectorStats
from engine_ext.core.scheduler import SchedulerConnector
from engine_ext.pages.counted import COUNTED

OF_SCHEDULER = ("leases_active", "proofs_unreadable")
"""Counted by the scheduler half. It knows of a lease before the worker does: an engine that rests
while its blocks are read takes no step that could tell."""


class DisaggStats(KVConnectorStats):
    """`data`: name of a field of ConnectorStats -> its change."""

    def reset(self) -> None:
        self.data: dict[str, int] = {}

    def aggregate(self, other: KVConnectorStats) -> "DisaggStats":
        for name, change in other.data.items():
            self.data[name] = self.data.get(name, 0) + change
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name.replace("_", " "): change for name, change in self.data.items() if change}

    def is_empty(self) -> bool:
        return not any(self.data.values())


class Differences:
    """What has changed since the last call."""

    def __init__(self) -> None:
        self._told: dict[str, int] = {}

    def take(self, values: dict[str, int]) -> DisaggStats | None:
        changes = {name: value - self._told.get(name, 0) for name, value in values.items()}
        self._told = values
        changed = {name: change for name, change in changes.items() if change}
        return DisaggStats(changed) if changed else None


def of_worker(stats: ConnectorStats) -> dict[str, int]:
    fields = (each.field for each in COUNTED if each.field not in OF_SCHEDULER)
    return {field: getattr(stats, field) for field in fields}


def of_scheduler(half: SchedulerConnector) -> dict[str, int]:
    return dict(zip(OF_SCHEDULER, (half.num_leased, half.proofs_unreadable), strict=True))


class DisaggPromMetrics(KVConnectorPromMetrics):
    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, dict[int, Any]] = {}
        for each in COUNTED:
            # A gauge that is increased cannot be "mostrecent", vLLM's usual mode.
            options = {"multiprocess_mode": "sum"} if each.is_gauge else {}
            kind = metric_types[Gauge if each.is_gauge else Counter]
            metric = kind(name=each.name, documentation=each.text, labelnames=labelnames, **options)
            self._metrics[each.field] = create_metric_per_engine(metric, per_engine_labelvalues)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for field, change in transfer_stats_data.items():
            self._metrics[field][engine_idx].inc(change)
