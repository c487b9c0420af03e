"""Types of metrics that cost little on a request's path.

Only the event loop's thread increments these counters and histograms, without a lock and without a
call of Python; any thread reads them. They become Prometheus samples only when they are read.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple, TypeVar

import prometheus_client
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

PREFIX = "disagg_router_"
LATENCY_BUCKETS_S = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1, 2.5, 5, 10, 30, 60, 120, 300, 600),
)
Labels = tuple[str | int, ...]
Reading = tuple[Labels, float]
T = TypeVar("T", bound=Collector)


def nearest_rank(ordered: Sequence[float], share: float) -> float:
    """Return a quantile of ascending values: one of the values, so never above the largest."""
    return ordered[max(0, -(-round(share * 1000) * len(ordered) // 1000) - 1)]


class CallbackMetric(Collector):
    """A gauge or counter whose samples `read` returns whenever the metric is collected.

    `read` yields the labels' values, in the order of the labels, and the sample's value. Use it for
    things that come and go, such as engines: a removed engine leaves no sample behind.
    """

    def __init__(
        self,
        family: type[GaugeMetricFamily | CounterMetricFamily],
        name: str,
        text: str,
        labels: Sequence[str],
    ) -> None:
        self._family, self._name, self._text, self._labels = family, name, text, labels
        self.read: Callable[[], Iterable[Reading]] = lambda: ()

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        family = self._family(self._name, self._text, labels=self._labels)
        for values, value in self.read():
            family.add_metric([str(one) for one in values], value)
        yield family


class LocalCounter(CallbackMetric):
    """A counter that one thread increments, through `add` or in `totals`, by the labels' values."""

    def __init__(self, name: str, text: str, labels: Sequence[str]) -> None:
        super().__init__(CounterMetricFamily, name, text, labels)
        self.totals: defaultdict[Labels, int] = defaultdict(int)
        self.read = lambda: self.counts().items()

    def add(self, values: Labels, count: int = 1) -> None:
        """Add `count` for the labels' `values`, in the order of the labels."""
        self.totals[values] += count

    def counts(self) -> Mapping[Labels, int]:
        return dict(self.totals)


class HistogramSeries:
    """One series of a histogram; `bounds` ascend.

    `observe` appends to a list, `extend` several values. The values are sorted into buckets when
    there are many or when the series is read, which costs much less than sorting each at once.
    """

    __slots__ = ("_bounds", "_counts", "_folding", "_sum", "extend", "observe", "unsorted")

    def __init__(self, bounds: Sequence[float]) -> None:
        # Comparing a float with an int takes three times as long.
        self._bounds = tuple(map(float, bounds))
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._folding = threading.Lock()
        self.unsorted: list[float] = []
        self.observe: Callable[[float], None] = self.unsorted.append
        self.extend: Callable[[Iterable[float]], None] = self.unsorted.extend

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


class LocalHistogram(Collector):
    """A histogram; its caller sees to it that the labels have few values.

    `series` has a series for each of the labels' values, and makes one when it is first read.
    """

    def __init__(
        self, name: str, text: str, labels: Sequence[str], bounds: Sequence[float]
    ) -> None:
        self._name, self._text, self._labels = name, text, labels
        made = partial(HistogramSeries, bounds)
        self.series: defaultdict[Labels, HistogramSeries] = defaultdict(made)

    def fold(self) -> None:
        for series in self.series.values():
            series.fold()

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        for values, series in list(self.series.items()):
            series.add_samples(family, [str(value) for value in values])
        yield family


class MetricDescription(NamedTuple):
    """The description of a metric in docs/metrics.md, which adds advice for operators.

    `name` is the scraped name, for a histogram without _bucket, _sum and _count.
    """

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str


class MetricRegistry:
    """Makes metrics and describes them, in their order, in `described`.

    A metric is declared as in Prometheus' notation: "retries{role,kind}".
    """

    def __init__(self) -> None:
        self.collectors = CollectorRegistry()
        self.described: list[MetricDescription] = []
        self.histograms: list[LocalHistogram] = []

    def counter(self, declaration: str, text: str) -> prometheus_client.Counter:
        described = self._describe(declaration, "counter", text)
        return prometheus_client.Counter(*described, registry=self.collectors)

    def gauge(self, declaration: str, text: str) -> Gauge:
        described = self._describe(declaration, "gauge", text)
        return Gauge(*described, registry=self.collectors)

    def local_counter(self, declaration: str, text: str) -> LocalCounter:
        return self._add(LocalCounter(*self._describe(declaration, "counter", text)))

    def callback_gauge(self, declaration: str, text: str) -> CallbackMetric:
        described = self._describe(declaration, "gauge", text)
        return self._add(CallbackMetric(GaugeMetricFamily, *described))

    def callback_counter(self, declaration: str, text: str) -> CallbackMetric:
        described = self._describe(declaration, "counter", text)
        return self._add(CallbackMetric(CounterMetricFamily, *described))

    def histogram(
        self, declaration: str, text: str, bounds: Sequence[float] = LATENCY_BUCKETS_S
    ) -> LocalHistogram:
        described = self._describe(declaration, "histogram", text)
        self.histograms.append(self._add(LocalHistogram(*described, bounds)))
        return self.histograms[-1]

    def _add(self, made: T) -> T:
        self.collectors.register(made)
        return made

    def _describe(self, declaration: str, kind: str, text: str) -> tuple[str, str, tuple[str, ...]]:
        """Return the metric's full name, its help text and its labels."""
        name, _, names = declaration.rstrip("}").partition("{")
        labels = tuple(filter(None, names.split(",")))
        ending = "_total" if kind == "counter" else ""
        self.described.append(MetricDescription(f"{PREFIX}{name}{ending}", kind, labels, text))
        return PREFIX + name, text, labels
