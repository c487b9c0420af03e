"""`/metrics`: what the engine and its connector count, read at the moment of the scrape."""

from collections.abc import Iterable
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from engine_ext.common.types import ConnectorStats
from engine_ext.http.counted import COUNTED, DISTRIBUTED, STOCK, Distributed
from engine_ext.reference.engine import ReferenceEngine

_PREFIX = "disagg_engine_"
_GAUGES = (
    ("requests_running", "num_running", "Requests in the running batch"),
    ("requests_waiting", "num_waiting", "Requests that wait for blocks or a place in the batch"),
    ("requests_waiting_for_remote_kv", "num_waiting_for_remote_kv", "Requests being fetched"),
    ("blocks", "num_blocks_total", "Usable KV blocks"),
    ("blocks_free", "num_blocks_free", "KV blocks without a holder, cached contents included"),
    (
        "blocks_delayed",
        "num_blocks_delayed",
        "KV blocks of finished requests, held for a remote reader",
    ),
)
_COUNTERS = {
    "prompt_tokens": "Prompt tokens of all requests",
    "prompt_tokens_computed": "Prompt tokens run through the model, recomputation included",
    "prompt_tokens_cached": "Prompt tokens found in the prefix cache",
    "prompt_tokens_fetched": "Prompt tokens whose KV came from another engine",
    "generation_tokens": "Tokens generated",
    "preemptions": "Requests put back because blocks ran out",
}
STOCK_LABELS = ("model_name", "engine")
"""vLLM's: its dashboards choose by them."""


class EngineCollector(Collector):
    def __init__(self, engine: ReferenceEngine, model_name: str) -> None:
        self._engine = engine
        self._stock_labels = (model_name, "0")

    def collect(self) -> Iterable[Metric]:
        engine, connector = self._engine.stats(), self._engine.connector_stats()
        for name, field, text in _GAUGES:
            yield GaugeMetricFamily(_PREFIX + name, text, value=getattr(engine, field))
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(_PREFIX + name, text, value=getattr(engine, name))
        finished = CounterMetricFamily(
            f"{_PREFIX}requests_finished", "Requests that ended, by reason", labels=["reason"]
        )
        for reason, count in sorted(engine.requests_finished.items()):
            finished.add_metric([reason], count)
        yield finished
        for each in COUNTED:
            family = GaugeMetricFamily if each.is_gauge else CounterMetricFamily
            yield family(each.name, each.text, value=getattr(connector, each.field))
        for summed in STOCK:
            stock = CounterMetricFamily(summed.name, summed.text, labels=STOCK_LABELS)
            total = sum(getattr(connector, field) for field in summed.fields)
            stock.add_metric(self._stock_labels, total)
            yield stock
        for one in DISTRIBUTED:
            yield self._histogram(one, connector)

    def _histogram(self, one: Distributed, stats: ConnectorStats) -> Metric:
        is_stock = one.name.startswith("vllm:")
        values = getattr(stats, one.field)
        buckets = values.buckets()
        counts = accumulate(bucket.times for bucket in buckets)
        bounds = map(floatToGoString, (*values.bounds, float("inf")))
        family = HistogramMetricFamily(one.name, one.text, labels=STOCK_LABELS if is_stock else ())
        family.add_metric(
            self._stock_labels if is_stock else (),
            list(zip(bounds, counts, strict=True)),
            sum(bucket.total for bucket in buckets),
        )
        return family
