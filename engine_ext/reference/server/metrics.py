"""`/metrics`: what the engine and its connector count, read at the moment of the scrape."""

from collections.abc import Iterable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from engine_ext.common.histogram import Histogram
from engine_ext.common.types import ConnectorStats
from engine_ext.http.counted import COUNTED, DISTRIBUTED, STOCK, Distributed
from engine_ext.reference.messages import EngineStats
from engine_ext.reference.server.generation import EngineLike

PREFIX = "disagg_engine"

_GAUGES = (
    ("requests_running", "num_running", "Requests in the running batch"),
    ("requests_waiting", "num_waiting", "Requests that wait for blocks or a place in the batch"),
    ("requests_waiting_for_remote_kv", "num_waiting_for_remote_kv", "Requests being fetched"),
    ("blocks", "num_blocks_total", "Usable KV blocks"),
    ("blocks_free", "num_blocks_free", "KV blocks nobody holds, cached contents included"),
    ("blocks_delayed", "num_blocks_delayed", "KV blocks held for a remote reader"),
)
_COUNTERS = (
    ("prompt_tokens", "prompt_tokens", "Prompt tokens of all requests"),
    ("prompt_tokens_computed", "prompt_tokens_computed", "Prompt tokens run through the model"),
    ("prompt_tokens_cached", "prompt_tokens_cached", "Prompt tokens found in the prefix cache"),
    ("prompt_tokens_fetched", "prompt_tokens_fetched", "Prompt tokens whose KV a remote gave"),
    ("generation_tokens", "generation_tokens", "Tokens generated"),
    ("preemptions", "preemptions", "Requests put back because blocks ran out"),
)


STOCK_LABELS = ("model_name", "engine")
"""vLLM's: its dashboards choose by them."""


class EngineCollector(Collector):
    def __init__(self, engine: EngineLike, model_name: str) -> None:
        self._engine = engine
        self._labels = (model_name, "0")

    def collect(self) -> Iterable[Metric]:
        stats = self._engine.connector_stats()
        yield from _engine_metrics(self._engine.stats())
        yield from _connector_metrics(stats)
        yield from _stock_metrics(stats, self._labels)


def registry_of(engine: EngineLike, model_name: str) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine, model_name))
    return registry


def exposition(registry: CollectorRegistry) -> bytes:
    return generate_latest(registry)


def _engine_metrics(stats: EngineStats) -> Iterator[Metric]:
    for name, field, text in _GAUGES:
        yield GaugeMetricFamily(f"{PREFIX}_{name}", text, value=getattr(stats, field))
    for name, field, text in _COUNTERS:
        yield CounterMetricFamily(f"{PREFIX}_{name}", text, value=getattr(stats, field))
    finished = CounterMetricFamily(
        f"{PREFIX}_requests_finished", "Requests that ended, by how", labels=["reason"]
    )
    for reason, count in sorted(stats.requests_finished.items()):
        finished.add_metric([reason], count)
    yield finished


def _connector_metrics(stats: ConnectorStats) -> Iterator[Metric]:
    for each in COUNTED:
        family = GaugeMetricFamily if each.is_gauge else CounterMetricFamily
        yield family(each.name, each.text, value=getattr(stats, each.field))
    for one in DISTRIBUTED:
        if not _is_stock(one):
            yield _histogram(one, getattr(stats, one.field), (), ())


def _stock_metrics(stats: ConnectorStats, labels: tuple[str, ...]) -> Iterator[Metric]:
    for each in STOCK:
        family = CounterMetricFamily(each.name, each.text, labels=STOCK_LABELS)
        family.add_metric(labels, sum(getattr(stats, field) for field in each.fields))
        yield family
    for one in DISTRIBUTED:
        if _is_stock(one):
            yield _histogram(one, getattr(stats, one.field), STOCK_LABELS, labels)


def _is_stock(one: Distributed) -> bool:
    return one.name.startswith("vllm:")


def _histogram(
    one: Distributed, values: Histogram, names: tuple[str, ...], labels: tuple[str, ...]
) -> Metric:
    buckets = values.buckets()
    counts = accumulate(bucket.times for bucket in buckets)
    bounds = map(floatToGoString, (*values.bounds, float("inf")))
    family = HistogramMetricFamily(one.name, one.text, labels=names)
    total = sum(bucket.total for bucket in buckets)
    family.add_metric(labels, list(zip(bounds, counts, strict=True)), total)
    return family
