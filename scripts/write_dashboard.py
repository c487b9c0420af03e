"""Writes the Grafana dashboard, charts/disagg-router/files/dashboard.json: one panel a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

DASHBOARD = Path(__file__).parents[1] / "charts/disagg-router/files/dashboard.json"
# What is chosen at the top.
SOURCE = {"name": "datasource", "type": "datasource", "query": "prometheus"}
CHOSEN = {"type": "prometheus", "uid": "${datasource}"}
WHERE = 'job=~"$job"'
MODEL = f'{WHERE}, model=~"$model", group=~"$group"'
WIDE, HIGH, COLUMNS = 8, 7, 3


class Panel(NamedTuple):
    """`lines`: what each line is called, and what it shows."""

    title: str
    unit: str
    lines: dict[str, str]


def rate(metric: str, by: str, where: str = WHERE) -> str:
    return f"sum by ({by}) (rate(disagg_router_{metric}_total{{{where}}}[$__rate_interval]))"


def shares(metric: str, where: str = MODEL) -> dict[str, str]:
    """Return the quantiles of a histogram."""
    counts = f"sum by (le) (rate(disagg_router_{metric}_bucket{{{where}}}[$__rate_interval]))"
    return {f"p{int(q * 100)}": f"histogram_quantile({q}, {counts})" for q in (0.5, 0.9, 0.99)}


def engines(metric: str, how: str = "max") -> dict[str, str]:
    text = f"{how} by (role, engine) (disagg_router_{metric}{{{WHERE}}})"
    return {"{{role}} {{engine}}": text}


def total(metric: str) -> str:
    return f"sum(disagg_router_{metric}{{{WHERE}}})"


ROWS: dict[str, list[Panel]] = {
    "Requests": [
        Panel("Requests by outcome", "reqps", {"{{outcome}}": rate("requests", "outcome")}),
        Panel("TTFT", "s", shares("model_time_to_first_byte_seconds")),
        Panel("ITL", "s", shares("model_inter_token_seconds")),
        Panel("End-to-end latency", "s", shares("model_request_seconds")),
        Panel("Requests in flight and queued", "short", {
            "in flight": total("requests_in_flight"), "queued": total("queue_depth")}),
        Panel("Rejected requests by reason", "reqps", {"{{reason}}": rate("refusals", "reason")}),
    ],
    "Latency by stage": [
        Panel("Queue time", "s", shares("model_queue_seconds")),
        Panel("Prefill leg", "s", shares("prefill_seconds", WHERE)),
        Panel("Decode leg to first byte", "s", shares("decode_first_byte_seconds", WHERE)),
    ],
    "Tokens": [
        Panel("Tokens per second", "short", {
            "prompt": rate("model_prompt_tokens", "job", MODEL),
            "completion": rate("model_completion_tokens", "job", MODEL),
            "cached": rate("model_cached_tokens", "job", MODEL)}),
        Panel("Requests by model", "reqps", {
            "{{model}} {{group}}": rate("model_requests", "model, group", MODEL)}),
        Panel("Conversation turns by outcome", "short", {
            "{{outcome}}": rate("conversation_turns", "outcome")}),
    ],
    "Engines": [
        Panel("Request legs in flight", "short", engines("engine_requests_in_flight", "sum")),
        Panel("Prompts whose KV is leased", "short", engines("engine_holding", "sum")),
        Panel("Health (1: healthy)", "short", engines("engine_healthy", "min")),
        Panel("Circuit breaker (2: open)", "short", engines("engine_circuit")),
        Panel("Failed legs", "short", {
            "{{role}} {{kind}}": rate("upstream_errors", "role, kind")}),
        Panel("Retried legs", "short", {"{{role}} {{kind}}": rate("retries", "role, kind")}),
        Panel("Stream resumes by outcome", "short", {
            "{{kind}} {{outcome}}": rate("resumes", "kind, outcome")}),
        Panel("First tokens handed over", "short", {
            "{{outcome}}": rate("handed_over", "outcome")}),
        Panel("Hedged legs by outcome", "short", {
            "{{outcome}}": rate("scattered", "outcome")}),
        Panel("Usable engines by group", "short", {
            "{{group}} {{role}}": "max by (group, role) "
            f"(disagg_router_group_engines{{{WHERE}}})"}),
        Panel("Fleet changes", "short", {"{{change}}": rate("fleet_changes", "change")}),
        Panel("Failing discovery sources", "short", {
            "{{source}}": f"max by (source) (disagg_router_source_trouble{{{WHERE}}})"}),
    ],
}  # fmt: skip


def main() -> None:
    DASHBOARD.parent.mkdir(exist_ok=True)
    DASHBOARD.write_text(json.dumps(dashboard(), indent=1) + "\n", encoding="utf-8")


def dashboard() -> dict[str, Any]:
    return {
        "title": "disagg-router",
        "uid": "disagg-router",
        "schemaVersion": 39,
        "tags": ["disagg-router"],
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [SOURCE, *_chosen()]},
        "panels": _panels(),
    }


def expressions() -> list[str]:
    """What panels ask, with a range that Prometheus itself can read."""
    asked = [text for row in ROWS.values() for panel in row for text in panel.lines.values()]
    return [text.replace("$__rate_interval", "5m") for text in asked]


def _panels() -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    top = 0
    for row, panels in ROWS.items():
        at = {"x": 0, "y": top, "w": WIDE * COLUMNS, "h": 1}
        made.append({"id": len(made) + 1, "type": "row", "title": row, "gridPos": at})
        top += 1
        for place, panel in enumerate(panels):
            down, across = divmod(place, COLUMNS)
            at = {"x": across * WIDE, "y": top + down * HIGH, "w": WIDE, "h": HIGH}
            made.append(_panel(len(made) + 1, panel, at))
        top += HIGH * -(-len(panels) // COLUMNS)
    return made


def _panel(number: int, panel: Panel, at: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "gridPos": at,
        "datasource": CHOSEN,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(65 + place), "datasource": CHOSEN, "expr": text, "legendFormat": name}
            for place, (name, text) in enumerate(panel.lines.items())
        ],
    }


def _chosen() -> list[dict[str, Any]]:
    chosen = {
        "job": "disagg_router_requests_in_flight",
        "model": "disagg_router_model_requests_total",
        "group": "disagg_router_model_requests_total",
    }
    return [
        {
            "name": name,
            "type": "query",
            "datasource": CHOSEN,
            "query": f"label_values({metric}, {name})",
            "refresh": 2,
            "includeAll": True,
            "allValue": ".*",
            "multi": True,
            "current": {"text": "All", "value": "$__all"},
        }
        for name, metric in chosen.items()
    ]


if __name__ == "__main__":
    main()
