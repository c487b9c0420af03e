"""What speaks of metrics speaks of those there are: the document, the alerts, the dashboard."""

import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from router.telemetry.metrics import Metrics
from scripts.write_dashboard import DASHBOARD, dashboard, expressions
from scripts.write_metrics_docs import DOCUMENT, document

ALERTS = Path(__file__).parents[3] / "charts/disagg-router/files/alerts.yaml"
# What Prometheus adds when it scrapes, and what a histogram's buckets have.
ADDED = {"job", "namespace", "instance", "pod", "le"}
ENDINGS = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("",), "gauge": ("",)}
LABELS_OF = {
    one.name + ending: set(one.labels)
    for one in Metrics().described
    for ending in ENDINGS[one.kind]
}


def alerts() -> list[str]:
    groups = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    return [rule["expr"] for group in groups for rule in group["rules"]]


def test_the_document_is_that_of_the_code() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text == document(), "run scripts/write_metrics_docs.py"
    assert "TODO" not in text, "a metric has no advice for operators"


def test_advice_is_kept_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    advice = "Most should be granted or cached"
    changed = text.replace(advice, "See [routing](routing.md#shared) and issue #7 first.")
    monkeypatch.setattr("scripts.write_metrics_docs.DOCUMENT", tmp_path / "metrics.md")
    (tmp_path / "metrics.md").write_text(changed, encoding="utf-8")
    assert advice in text
    assert document().split() == changed.split()


def test_the_dashboard_is_that_of_its_script() -> None:
    text = DASHBOARD.read_text(encoding="utf-8")
    assert json.loads(text) == dashboard(), "run scripts/write_dashboard.py"


def test_every_metric_that_is_told_is_described_with_its_type_and_no_other() -> None:
    metrics = Metrics()
    families = text_string_to_metric_families(metrics.exposition().decode())
    told = {
        family.name + ("_total" if family.type == "counter" else ""): family.type
        for family in families
        if not family.name.endswith("_created")
    }
    described = {one.name: one.kind for one in metrics.described}
    assert told == described
    assert len(described) == len(metrics.described)


@pytest.mark.parametrize("expression", [*alerts(), *expressions()])
def test_an_expression_names_metrics_and_labels_that_exist(expression: str) -> None:
    names = re.findall(r"disagg_router_\w+", expression)
    assert names
    assert set(names) <= LABELS_OF.keys()
    matched = re.findall(r"[{,]\s*(\w+)\s*(?:=~|!~|!=|=)", expression)
    grouped = re.findall(r"by \(([^)]*)\)", expression)
    labels = {*matched, *(one.strip() for group in grouped for one in group.split(","))}
    known = ADDED.union(*(LABELS_OF[name] for name in names))
    assert labels <= known


def test_alerts_say_what_is_wrong_of_labels_that_they_have() -> None:
    groups = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    for rule in (rule for group in groups for rule in group["rules"]):
        kept = set(re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", rule["expr"]))))
        used = set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"])))
        assert used <= kept, rule["alert"]
        assert rule["annotations"].keys() == {"summary", "description"}
        assert rule["labels"]["severity"] in ("warning", "critical")


def test_labels_of_models_are_model_and_group() -> None:
    of_models = [one for one in Metrics().described if "_model_" in one.name]
    assert of_models
    assert all(one.labels[:2] == ("model", "group") for one in of_models)
