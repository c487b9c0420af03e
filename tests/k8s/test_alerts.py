"""Alerts and dashboard as Prometheus itself reads them; and what sets alerts off."""

import json
import subprocess
from pathlib import Path

import yaml

from scripts.write_dashboard import expressions
from tests.k8s.binaries import CACHE
from tests.k8s.chart import CHART, only, render

ALERTS = CHART / "files/alerts.yaml"
TESTS = Path(__file__).with_name("alerts_test.yaml")


def promtool(*arguments: str | Path) -> str:
    program = CACHE / "promtool"
    assert program.exists(), f"{program} is missing: run scripts/install_promtool"
    done = subprocess.run(
        [program, *map(str, arguments)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_prometheus_takes_the_alerts() -> None:
    assert "SUCCESS" in promtool("check", "rules", ALERTS)


def test_alerts_are_set_off_by_what_they_are_for_and_by_nothing_else(tmp_path: Path) -> None:
    tests = tmp_path / "tests.yaml"
    tests.write_text(TESTS.read_text().replace("ALERTS", json.dumps(str(ALERTS)), 1))
    promtool("test", "rules", tests)


def test_prometheus_can_read_what_the_dashboard_asks(tmp_path: Path) -> None:
    rules = [{"record": f"panel:{n}", "expr": text} for n, text in enumerate(expressions())]
    asked = tmp_path / "rules.yaml"
    asked.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool("check", "rules", asked)


def test_the_charts_rule_has_the_same_alerts_and_is_made_only_when_wanted() -> None:
    assert not [one for one in render("default") if one["kind"] == "PrometheusRule"]
    rule = only(render("default", "--set", "monitoring.alerts=true"), "PrometheusRule")
    assert rule["spec"] == yaml.safe_load(ALERTS.read_text())
