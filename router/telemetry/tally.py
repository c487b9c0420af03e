"""Metrics that are cheap to count, and made into samples only when they are read.

Counted by one thread, read by any.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector

Labels = tuple[str | int, ...]
Reading = tuple[Labels, float]


class Tally(Collector):
    """A counter with labels."""

    def __init__(
        self, name: str, text: str, labels: Sequence[str], registry: CollectorRegistry
    ) -> None:
        self._name = name
        self._text = text
        self._labels = labels
        self._counts: dict[Labels, int] = {}
        registry.register(self)

    def add(self, values: Labels) -> None:
        """`values` are those of the labels, in their order."""
        self._counts[values] = self._counts.get(values, 0) + 1

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for values, count in list(self._counts.items()):
            family.add_metric([str(value) for value in values], count)
        yield family


class Readings(Collector):
    """A gauge with labels for what comes and goes: read where it is known, so that nothing stays
    of what is there no more. `read` gives each one's labels, in their order, and its value."""

    def __init__(
        self, name: str, text: str, labels: Sequence[str], registry: CollectorRegistry
    ) -> None:
        self.read: Callable[[], Iterable[Reading]] = lambda: ()
        self._name = name
        self._text = text
        self._labels = labels
        registry.register(self)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(self._name, self._text, labels=self._labels)
        for values, value in self.read():
            family.add_metric([str(one) for one in values], value)
        yield family


class Buckets(Collector):
    """A histogram; `bounds` ascend."""

    def __init__(
        self, name: str, text: str, bounds: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._name = name
        self._text = text
        # A float is compared with an int at thrice the price.
        self._bounds = tuple(map(float, bounds))
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[HistogramMetricFamily]:
        names = [*map(str, self._bounds), "+Inf"]
        buckets = list(zip(names, map(float, accumulate(self._counts)), strict=True))
        family = HistogramMetricFamily(self._name, self._text)
        family.add_metric([], buckets, self._sum)
        yield family
