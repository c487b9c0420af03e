"""Writes docs/metrics.md: every metric of the router, as its definition says.

The advice for operators, a second paragraph where a metric needs it, is written by hand in the
document, and so is all that follows the router's metrics.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

from router.telemetry.metric_types import MetricDescription
from router.telemetry.metrics import Metrics
from router.telemetry.request_metrics import MAX_LABEL_PAIRS, OTHER

DOCUMENT = Path(__file__).parents[1] / "docs/metrics.md"
SECTION = "\n### `"
TAIL = "\n## Engine metrics\n"
HEAD = f"""\
# Metrics

The router serves Prometheus metrics at `GET /metrics`, on its port and on the liveness port, or on
`--metrics-port` alone. With `--workers` the figures are those of all workers together. Times are in
seconds.

`model` is a name that the fleet serves. It is `{OTHER}` for requests without a known model, and
beyond {MAX_LABEL_PAIRS} pairs of model and group in a process's life.

[Engine metrics](#engine-metrics) come last. The chart has
[alerts and a dashboard](kubernetes.md#monitoring).

## Router metrics

`scripts/write_metrics_docs.py` writes this part from the code.
"""


def main() -> None:
    DOCUMENT.write_text(document(), encoding="utf-8")


def document() -> str:
    before, tail, after = DOCUMENT.read_text(encoding="utf-8").partition(TAIL)
    parts = (part.split("\n\n") for part in before.split(SECTION)[1:])
    advice = {name.rstrip("`"): " ".join(paragraphs) for name, _, *paragraphs in parts}
    sections = [_section(one, advice.get(one.name, "TODO")) for one in Metrics().described]
    return "\n".join([HEAD, *sections]) + tail + after


def _section(one: MetricDescription, advice: str) -> str:
    labels = ", ".join(f"`{label}`" for label in one.labels)
    kind = f"*{one.kind}*, by {labels}" if labels else f"*{one.kind}*"
    paragraphs = (f"{kind}. {one.text}", " ".join(advice.split()))
    text = "\n\n".join(textwrap.fill(each, 100, break_on_hyphens=False) for each in paragraphs)
    return f"### `{one.name}`\n\n{text.rstrip()}\n"


if __name__ == "__main__":
    main()
