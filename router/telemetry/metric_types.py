"""Types of metrics that cost little on the request path, and the registry that makes them.

`LocalCounter` and the histograms are incremented by the event loop's thread alone, without a lock,
and are read by any thread. They become Prometheus samples only when they are read.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector

PREFIX = "disagg_router_"
Labels = tuple[str | int, ...]
Reading = tuple[Labels, float]


class LabelledMetric(Collector):
    """A metric with a name, a help text and labels, in a registry."""

    def __init__(
        self, name: str, text: str, labels: Sequence[str], registry: CollectorRegistry
    ) -> None:
        self._name, self._text, self._labels = name, text, labels
        registry.register(self)


class LocalCounter(LabelledMetric):
    """A counter that one thread increments."""

    def __init__(
        self, name: str, text: str, labels: Sequence[str], registry: CollectorRegistry
    ) -> None:
        self._counts: dict[Labels, int] = {}
        super().__init__(name, text, labels, registry)

    def add(self, values: Labels, count: int = 1) -> None:
        """Add `count` for the labels' `values`, in the order of the labels."""
        self._counts[values] = self._counts.get(values, 0) + count

    def counts(self) -> Mapping[Labels, int]:
        return dict(self._counts)

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for values, count in list(self._counts.items()):
            family.add_metric([str(value) for value in values], count)
        yield family


class CallbackMetric(LabelledMetric):
    """A gauge or counter whose samples `read` returns whenever the metric is collected.

    `read` yields the labels' values, in the order of the labels, and the sample's value. Use it for
    things that come and go, such as engines: a removed engine leaves no sample behind.
    """

    def __init__(
        self,
        name: str,
        text: str,
        labels: Sequence[str],
        registry: CollectorRegistry,
        is_counter: bool = False,
    ) -> None:
        self._family = CounterMetricFamily if is_counter else GaugeMetricFamily
        self.read: Callable[[], Iterable[Reading]] = lambda: ()
        super().__init__(name, text, labels, registry)

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        family = self._family(self._name, self._text, labels=self._labels)
        for values, value in self.read():
            family.add_metric([str(one) for one in values], value)
        yield family


class HistogramSeries:
    """One series of a histogram; `bounds` ascend.

    `observe` appends to a list. The values are sorted into buckets when there are many or when the
    series is read, which costs much less than sorting each value at once.
    """

    __slots__ = ("_bounds", "_counts", "_folding", "_sum", "observe", "unsorted")

    def __init__(self, bounds: Sequence[float]) -> None:
        # Comparing a float with an int takes three times as long.
        self._bounds = tuple(map(float, bounds))
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._folding = threading.Lock()
        self.unsorted: list[float] = []
        self.observe: Callable[[float], None] = self.unsorted.append

    def fold(self) -> None:
        """Sort the observed values into buckets. The observing thread calls this now and then;
        a reading thread may do so at the same moment."""
        with self._folding:
            count = len(self.unsorted)
            values = sorted(self.unsorted[:count])
            del self.unsorted[:count]
            below = 0
            for index, bound in enumerate(self._bounds):
                reach = bisect_right(values, bound)
                self._counts[index] += reach - below
                below = reach
            self._counts[-1] += count - below
            self._sum += sum(values)

    def add_samples(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        self.fold()
        names = [*map(str, self._bounds), "+Inf"]
        buckets = list(zip(names, map(float, accumulate(self._counts)), strict=True))
        family.add_metric(labels, buckets, self._sum)


class LocalHistogram(LabelledMetric):
    """A histogram; its caller sees to it that the labels have few values."""

    def __init__(
        self,
        name: str,
        text: str,
        labels: Sequence[str],
        bounds: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._bounds = bounds
        self._series: dict[Labels, HistogramSeries] = {}
        super().__init__(name, text, labels, registry)

    def series(self, values: Labels = ()) -> HistogramSeries:
        """Return the series of the labels' `values`, in the order of the labels."""
        known = self._series.get(values)
        if known is None:
            known = self._series[values] = HistogramSeries(self._bounds)
        return known

    def fold_beyond(self, count: int) -> None:
        """Fold the series that have at least `count` unsorted values."""
        for series in self._series.values():
            if len(series.unsorted) >= count:
                series.fold()

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        for values, series in list(self._series.items()):
            series.add_samples(family, [str(value) for value in values])
        yield family


class MetricDescription(NamedTuple):
    """The description of a metric in docs/metrics.md.

    `name` is the scraped name, for a histogram without _bucket, _sum and _count. `action` advises
    an operator what to do when the metric moves.
    """

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str
    action: str


class MetricRegistry:
    """Makes metrics and describes them, in their order, in `described`.

    A metric is declared as in Prometheus' notation: "retries{role,kind}".
    """

    def __init__(self) -> None:
        self.collectors = CollectorRegistry()
        self.described: list[MetricDescription] = []

    def counter(self, declaration: str, text: str, action: str) -> Counter:
        name, labels = self._describe(declaration, "counter", text, action)
        return Counter(name, text, labels, registry=self.collectors)

    def local_counter(self, declaration: str, text: str, action: str) -> LocalCounter:
        name, labels = self._describe(declaration, "counter", text, action)
        return LocalCounter(name, text, labels, self.collectors)

    def gauge(self, declaration: str, text: str, action: str) -> Gauge:
        name, labels = self._describe(declaration, "gauge", text, action)
        return Gauge(name, text, labels, registry=self.collectors)

    def callback_gauge(self, declaration: str, text: str, action: str) -> CallbackMetric:
        name, labels = self._describe(declaration, "gauge", text, action)
        return CallbackMetric(name, text, labels, self.collectors)

    def callback_counter(self, declaration: str, text: str, action: str) -> CallbackMetric:
        name, labels = self._describe(declaration, "counter", text, action)
        return CallbackMetric(name, text, labels, self.collectors, is_counter=True)

    def histogram(
        self, declaration: str, bounds: Sequence[float], text: str, action: str
    ) -> LocalHistogram:
        name, labels = self._describe(declaration, "histogram", text, action)
        return LocalHistogram(name, text, labels, bounds, self.collectors)

    def _describe(
        self, declaration: str, kind: str, text: str, action: str
    ) -> tuple[str, tuple[str, ...]]:
        """Return the metric's full name and labels."""
        name, _, names = declaration.rstrip("}").partition("{")
        labels = tuple(filter(None, names.split(",")))
        ending = "_total" if kind == "counter" else ""
        self.described.append(
            MetricDescription(f"{PREFIX}{name}{ending}", kind, labels, text, action)
        )
        return PREFIX + name, labels
