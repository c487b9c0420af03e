"""The lines that the router reads of an engine's /metrics.

A page may have megabytes: engines of many adapters or ranks have as many histograms. A regular
expression over all of it would hold the event loop for seconds, so the few lines are cut out first.
"""

from __future__ import annotations

from collections.abc import Iterable

METRICS_PATH = "/metrics"
MAX_METRICS_BYTES = 16 * 1024 * 1024
# Of what is cut out.
MAX_METRIC_LINES, MAX_METRIC_LINE_BYTES = 4096, 16 * 1024


def find_lines(page: bytes, names: Iterable[bytes]) -> bytes:
    """Return the lines of the metrics with these names, without very long lines."""
    found: list[bytes] = []
    for name in names:
        start = 0 if page.startswith(name) else _next_line(page, name, 0)
        while start >= 0 and len(found) < MAX_METRIC_LINES:
            end = page.find(b"\n", start)
            end = len(page) if end < 0 else end
            is_longer_name = page[start + len(name) : start + len(name) + 1] not in (b"{", b" ")
            if not is_longer_name and end - start <= MAX_METRIC_LINE_BYTES:
                found.append(page[start:end])
            start = _next_line(page, name, end)
    return b"\n".join([*found, b""])


def _next_line(page: bytes, name: bytes, at: int) -> int:
    """Return where the next line with the name begins, -1 if there is none."""
    found = page.find(b"\n" + name, at)
    return found if found < 0 else found + 1
