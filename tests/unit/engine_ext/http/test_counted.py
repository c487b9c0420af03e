"""What is counted has one name, and the documents know each."""

import re
from dataclasses import fields
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from engine_ext.common.types import ConnectorStats
from engine_ext.http.counted import COUNTED, DISTRIBUTED, STOCK
from engine_ext.reference.server.metrics import EngineCollector
from tests.unit.reference.server.fake_engine import FakeEngine

DOCUMENT = Path(__file__).parents[4] / "docs" / "metrics.md"


def idle_engine() -> FakeEngine:
    return FakeEngine(lambda request: ())


def told(engine: FakeEngine) -> str:
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine, "tiny"))
    return generate_latest(registry).decode()


def test_every_field_is_told_once_and_every_sum_is_of_counters() -> None:
    names = [each.field for each in COUNTED] + [each.field for each in DISTRIBUTED]
    assert sorted(names) == sorted(field.name for field in fields(ConnectorStats))
    counters = {each.field for each in COUNTED if not each.is_gauge}
    assert all(counters.issuperset(each.fields) for each in STOCK)


def test_the_document_names_exactly_the_metrics_that_exist_with_their_types() -> None:
    section = DOCUMENT.read_text().partition("\n## Engine metrics\n")[2].partition("\n## ")[0]
    heads = re.findall(r"^\| (`.+?`) \| \S", section, re.MULTILINE)
    rows = [name for head in heads for name in re.findall(r"`([^`]+)`", head)]
    exist = dict(re.findall(r"^# TYPE (\S+) (\w+)$", told(idle_engine()), re.MULTILINE))
    transfers = [name for name in exist if name.startswith(("disagg_engine_kv_", "vllm:"))]
    assert sorted(rows) == sorted(transfers)
    kinds = {"_total": "counter", "_active": "gauge"}  # as the page says
    for name in transfers:
        suffix = name[name.rindex("_") :]
        assert exist[name] == kinds.get(suffix, "histogram"), name


def test_stocks_names_have_its_labels_and_sum_what_it_sums() -> None:
    engine = idle_engine()
    counted = engine.counted
    counted.pulls_failed, counted.handshakes_failed, counted.leases_expired = 1, 2, 4
    for seconds in (0.004, 0.3, 0.3, 70):
        counted.transfer_seconds.observe(seconds)
    families = {one.name: one for one in text_string_to_metric_families(told(engine))}
    (failed,) = families["vllm:nixl_num_failed_transfers"].samples
    assert (failed.labels, failed.value) == ({"model_name": "tiny", "engine": "0"}, 3)
    (expired,) = families["vllm:nixl_num_kv_expired_reqs"].samples
    assert expired.value == 4
    samples = families["vllm:nixl_xfer_time_seconds"].samples
    assert all(sample.labels["model_name"] == "tiny" for sample in samples)
    buckets = {s.labels["le"]: s.value for s in samples if s.name.endswith("_bucket")}
    assert (buckets["0.005"], buckets["0.2"], buckets["0.3"], buckets["5.0"]) == (1, 1, 3, 3)
    assert buckets["+Inf"] == 4
    (total,) = [s.value for s in samples if s.name.endswith("_sum")]
    assert round(total, 6) == 70.604
