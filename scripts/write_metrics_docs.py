"""Writes docs/metrics.md: every metric of the router, as its definition says.

The advice for operators ("When it moves") is written by hand in the document, and stays there.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from router.telemetry.metrics import Metrics
from router.telemetry.request_metrics import MAX_LABEL_PAIRS, OTHER, MetricDescription

DOCUMENT = Path(__file__).parents[1] / "docs/metrics.md"
ADVICE = re.compile(
    r"^## `(\w+)`\n.*?\*\*When it moves:\*\* (.*?)\n(?:\n|\Z)", re.DOTALL | re.MULTILINE
)
HEAD = f"""\
# The router's metrics

Written by `scripts/write_metrics_docs.py` from the code, except the advice ("When it moves"). A
test keeps it true.

`GET /metrics` on the router's port, and on the liveness port, which answers while the router is
busy. With `--workers` both tell the figures of all workers as one. Times are in seconds. A
histogram `X` is scraped as `X_bucket`, `X_sum` and `X_count`.

Labels are bounded: engines, groups and sources are those there are. `model` is a name that the
fleet serves, at most {MAX_LABEL_PAIRS} pairs of a model and a group in a process's life; everything
else, made-up names included, is `{OTHER}`. What is counted by model appears a tenth of a second
after a request's end. Tokens are those that engines tell.

Alerts (`charts/disagg-router/files/alerts.yaml`) and a
Grafana dashboard (`charts/disagg-router/files/dashboard.json`) use them. The engines' own metrics
are in [engine-configuration.md](engine-configuration.md#metrics).
"""


def main() -> None:
    DOCUMENT.write_text(document(), encoding="utf-8")


def document() -> str:
    described = Metrics().described
    parts = [HEAD, "| metric | type | labels |", "|---|---|---|"]
    parts += [_row(one) for one in described]
    advice = dict(ADVICE.findall(DOCUMENT.read_text(encoding="utf-8")))
    parts += [_section(one, advice.get(one.name, "TODO")) for one in described]
    return "\n".join(parts) + "\n"


def _row(one: MetricDescription) -> str:
    labels = ", ".join(f"`{label}`" for label in one.labels)
    return f"| [`{one.name}`](#{one.name}) | {one.kind} | {labels} |"


def _section(one: MetricDescription, advice: str) -> str:
    text = textwrap.fill(one.text, 100)
    advice = textwrap.fill(f"**When it moves:** {' '.join(advice.split())}", 100)
    return f"\n## `{one.name}`\n\n{text}\n\n{advice}"


if __name__ == "__main__":
    main()
