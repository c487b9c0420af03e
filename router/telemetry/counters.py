"""Metrics that are cheap to count, and made into samples only when they are read.

Counted by one thread, read by any.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

    def add(self, values: Labels, many: int = 1) -> None:
        """`values` are those of the labels, in their order."""
        self._counts[values] = self._counts.get(values, 0) + many

    def counts(self) -> Mapping[Labels, int]:
        """As they are now."""
        return dict(self._counts)

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for values, count in list(self._counts.items()):
            family.add_metric([str(value) for value in values], count)
        yield family


class Readings(Collector):
    """A gauge with labels for what comes and goes: read where it is known, so that nothing stays
    of what is there no more. `read` gives each one's labels, in their order, and its value. Of
    what only grows it is a counter."""

    def __init__(
        self,
        name: str,
        text: str,
        labels: Sequence[str],
        registry: CollectorRegistry,
        grows: bool = False,
    ) -> None:
        self._family = CounterMetricFamily if grows else GaugeMetricFamily
        self.read: Callable[[], Iterable[Reading]] = lambda: ()
        self._name = name
        self._text = text
        self._labels = labels
        registry.register(self)

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        family = self._family(self._name, self._text, labels=self._labels)
        for values, value in self.read():
            family.add_metric([str(one) for one in values], value)
        yield family


class Series:
    """What was observed, in buckets; `bounds` ascend.

    To `observe` is to append to a list. What came is sorted into buckets when there is much of it
    or when the series is read: for many at once that costs next to nothing.
    """

    __slots__ = ("_bounds", "_counts", "_folding", "_sum", "observe", "unsorted")

    def __init__(self, bounds: Sequence[float]) -> None:
        # A float is compared with an int at thrice the price.
        self._bounds = tuple(map(float, bounds))
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._folding = threading.Lock()
        self.unsorted: list[float] = []
        self.observe: Callable[[float], None] = self.unsorted.append

    def fold(self) -> None:
        """To be called by who observes, now and then: a reader may do so in the same moment."""
        with self._folding:
            count = len(self.unsorted)
            values = sorted(self.unsorted[:count])
            del self.unsorted[:count]
            below = 0
            for place, bound in enumerate(self._bounds):
                reach = bisect_right(values, bound)
                self._counts[place] += reach - below
                below = reach
            self._counts[-1] += count - below
            self._sum += sum(values)

    def read(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """Adds what is known to a family of samples."""
        self.fold()
        names = [*map(str, self._bounds), "+Inf"]
        buckets = list(zip(names, map(float, accumulate(self._counts)), strict=True))
        family.add_metric(labels, buckets, self._sum)


class Buckets(Series, Collector):
    """A histogram without labels: one series."""

    def __init__(
        self, name: str, text: str, bounds: Sequence[float], registry: CollectorRegistry
    ) -> None:
        super().__init__(bounds)
        self._name = name
        self._text = text
        registry.register(self)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._text)
        self.read(family, [])
        yield family


class LabelledBuckets(Collector):
    """A histogram with labels: a series for each of their values. Who asks for them sees to it
    that those are few."""

    def __init__(
        self,
        name: str,
        text: str,
        labels: Sequence[str],
        bounds: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._name = name
        self._text = text
        self._labels = labels
        self._bounds = bounds
        self._series: dict[Labels, Series] = {}
        registry.register(self)

    def of(self, values: Labels) -> Series:
        """`values` are those of the labels, in their order."""
        known = self._series.get(values)
        if known is None:
            known = self._series[values] = Series(self._bounds)
        return known

    def fold_beyond(self, most: int) -> None:
        """Sorts what has become long."""
        for series in self._series.values():
            if len(series.unsorted) >= most:
                series.fold()

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        for values, series in list(self._series.items()):
            series.read(family, [str(value) for value in values])
        yield family
