"""Where metrics are made: each says what it means and what to do when it moves, of which
docs/metrics.md is written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge

from router.telemetry.counters import Buckets, LabelledBuckets, Readings, Tally

PREFIX = "disagg_router_"


class Described(NamedTuple):
    """`name` is what is scraped, of a histogram without _bucket, _sum and _count. `act`: what to do
    when it moves."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str
    act: str


class Registry:
    """Makes metrics, and keeps what they mean in `described`, in their order."""

    def __init__(self) -> None:
        self.collectors = CollectorRegistry()
        self.described: list[Described] = []

    def counter(self, name: str, text: str, *labels: str, act: str) -> Counter:
        self._describe(f"{name}_total", "counter", labels, text, act)
        return Counter(PREFIX + name, text, labels, registry=self.collectors)

    def tally(self, name: str, text: str, *labels: str, act: str) -> Tally:
        """A counter for what every request counts."""
        self._describe(f"{name}_total", "counter", labels, text, act)
        return Tally(PREFIX + name, text, labels, self.collectors)

    def gauge(self, name: str, text: str, *labels: str, act: str) -> Gauge:
        self._describe(name, "gauge", labels, text, act)
        return Gauge(PREFIX + name, text, labels, registry=self.collectors)

    def readings(
        self, name: str, text: str, *labels: str, act: str, grows: bool = False
    ) -> Readings:
        kind, ending = ("counter", "_total") if grows else ("gauge", "")
        self._describe(name + ending, kind, labels, text, act)
        return Readings(PREFIX + name, text, labels, self.collectors, grows)

    def histogram(self, name: str, text: str, bounds: Sequence[float], *, act: str) -> Buckets:
        self._describe(name, "histogram", (), text, act)
        return Buckets(PREFIX + name, text, bounds, self.collectors)

    def histograms(
        self, name: str, text: str, bounds: Sequence[float], *labels: str, act: str
    ) -> LabelledBuckets:
        self._describe(name, "histogram", labels, text, act)
        return LabelledBuckets(PREFIX + name, text, labels, bounds, self.collectors)

    def _describe(self, name: str, kind: str, labels: tuple[str, ...], text: str, act: str) -> None:
        self.described.append(Described(PREFIX + name, kind, labels, text, act))
