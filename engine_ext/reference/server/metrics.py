"""`/metrics`: what the engine and its connector count, read at the moment of the scrape."""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine_ext.base.types import ConnectorStats
from engine_ext.pages.counted import COUNTED
from engine_ext.reference.messages import EngineStats
from engine_ext.reference.server.engine_like import EngineLike

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


class EngineCollector(Collector):
    def __init__(self, engine: EngineLike) -> None:
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        yield from _engine_metrics(self._engine.stats())
        yield from _connector_metrics(self._engine.connector_stats())


def registry_of(engine: EngineLike) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine))
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
