"""Metrics of ended requests, and types of metrics that cost little on a request's path.

`LocalCounter` and the histograms are incremented by the event loop's thread alone, without a lock,
and are read by any thread. They become Prometheus samples only when they are read.

Metrics by model and group are counted in batches after requests have ended. A model's name comes
from the client, so only names that the fleet serves become labels, and only a bounded number of
pairs of a model and a group; everything else is counted as "other".
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeVar

import prometheus_client
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector

from router.telemetry.record import Record

PREFIX = "disagg_router_"
MAX_LABEL_PAIRS = 64
MAX_UNSORTED = 1024
OTHER = "other"
LATENCY_BUCKETS_S = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1, 2.5, 5, 10, 30, 60, 120, 300, 600),
)
ITL_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03),
    *(0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1),
)
Labels = tuple[str | int, ...]
Reading = tuple[Labels, float]
T = TypeVar("T", bound=Collector)


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
    """A counter that one thread increments."""

    def __init__(self, name: str, text: str, labels: Sequence[str]) -> None:
        super().__init__(CounterMetricFamily, name, text, labels)
        self._counts: dict[Labels, int] = {}
        self.read = lambda: self.counts().items()

    def add(self, values: Labels, count: int = 1) -> None:
        """Add `count` for the labels' `values`, in the order of the labels."""
        self._counts[values] = self._counts.get(values, 0) + count

    def counts(self) -> Mapping[Labels, int]:
        return dict(self._counts)


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


class LocalHistogram(Collector):
    """A histogram; its caller sees to it that the labels have few values."""

    def __init__(
        self, name: str, text: str, labels: Sequence[str], bounds: Sequence[float]
    ) -> None:
        self._name, self._text, self._labels, self._bounds = name, text, labels, bounds
        self._series: dict[Labels, HistogramSeries] = {}

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


class RequestMetrics:
    """What ended requests count. `known_models` returns the models that the fleet serves."""

    def __init__(self, registry: MetricRegistry) -> None:
        self.known_models: Callable[[], Container[str]] = tuple
        self._histograms = registry.histograms
        self._pairs: dict[tuple[str, str], tuple[str, str]] = {}
        self.by_outcome = registry.local_counter(
            "requests{endpoint,flow,status,outcome}",
            "Finished requests, by the status and outcome that the client got.",
        )
        self.prefill_seconds = registry.histogram(
            "prefill_seconds", "Time from sending a prefill leg to its complete answer."
        ).series()
        self.ttft_seconds = registry.histogram(
            "time_to_first_byte_seconds",
            "Time from the arrival of a request to the first byte of the decode engine's body.",
        ).series()
        self.decode_first_byte_seconds = registry.histogram(
            "decode_first_byte_seconds",
            "Time from sending a decode leg to the first byte of its body.",
        ).series()
        self.request_seconds = registry.histogram(
            "request_seconds",
            "End-to-end latency: time from the arrival of a request to the end of its answer.",
        ).series()
        self.queue_seconds = registry.histogram(
            "queue_seconds",
            "Time that queued requests waited for a slot, whether they got one or not.",
        ).series()
        self.conversation_turns = registry.local_counter(
            "conversation_turns{outcome,reason}",
            "Turns of conversations, by whether the last turn's KV was reused, and why not.",
        )
        self.conversation_tokens = registry.local_counter(
            "conversation_tokens_offered",
            "Tokens of last turns that prefill engines could pull from decode engines.",
        )
        self.conversation_tokens.add((), 0)  # the sample exists from the start
        self.conversation_kept = registry.local_counter(
            "conversation_kept{outcome}",
            "Finished turns, by whether they left KV for the next turn.",
        )
        self._model_requests = registry.local_counter(
            "model_requests{model,group,outcome}", "Finished requests, by outcome."
        )
        self._model_first_byte = registry.histogram(
            "model_time_to_first_byte_seconds{model,group}",
            "Time from the arrival of a request to the first byte of the decode engine's body.",
        )
        self._model_whole = registry.histogram(
            "model_request_seconds{model,group}", "End-to-end latency of successful requests."
        )
        self._model_between = registry.histogram(
            "model_inter_token_seconds{model,group}",
            "Mean inter-token latency (ITL) of a streamed answer with usage.",
            ITL_BUCKETS_S,
        )
        self._model_queue = registry.histogram(
            "model_queue_seconds{model,group}",
            "Time that queued requests waited for a slot at an engine.",
        )
        self._model_prompt = registry.local_counter(
            "model_prompt_tokens{model,group}", "Prompt tokens, as reported by engines."
        )
        self._model_completion = registry.local_counter(
            "model_completion_tokens{model,group}",
            "Completion tokens, as reported by engines. A stream reports them only if its client "
            "sets stream_options.include_usage.",
        )
        self._model_cached = registry.local_counter(
            "model_cached_tokens{model,group}",
            "Prompt tokens that were served from a cache, as reported by engines.",
        )

    def count(self, record: Record) -> None:
        """Count a request that has ended, at once. `add_records` counts it by model later."""
        self.by_outcome.add((record.endpoint, record.flow, record.status, record.outcome))
        if record.ended is not None:
            self.request_seconds.observe(record.ended - record.started)
        if record.first_byte is not None:
            self.ttft_seconds.observe(record.first_byte - record.started)
            if record.decode_started is not None:
                self.decode_first_byte_seconds.observe(record.first_byte - record.decode_started)
        if record.conversation:
            self.conversation_turns.add((record.conversation, record.conversation_reason))
            self.conversation_tokens.add((), record.offered_tokens)
        if record.kept:
            self.conversation_kept.add((record.kept,))

    def add_records(self, ended: Sequence[Record]) -> None:
        """Count requests that have ended by model and group."""
        by_pair: defaultdict[tuple[str, str], list[Record]] = defaultdict(list)
        for record in ended:
            by_pair[record.model, record.group].append(record)
        for (model, group), records in by_pair.items():
            labels = self._labels(model, group)
            for outcome, count in Counter([record.outcome for record in records]).items():
                self._model_requests.add((*labels, outcome), count)
            self._count_tokens(labels, records)
            self._observe_times(labels, records)
        for histogram in self._histograms:
            histogram.fold_beyond(MAX_UNSORTED)

    def _count_tokens(self, labels: tuple[str, str], records: Sequence[Record]) -> None:
        prompts, completions, cached = zip(*[record.tokens for record in records], strict=True)
        for counter, reported in (
            (self._model_prompt, prompts),
            (self._model_completion, completions),
            (self._model_cached, cached),
        ):
            if count := sum(filter(None, reported)):
                counter.add(labels, count)

    def _observe_times(self, labels: tuple[str, str], records: Sequence[Record]) -> None:
        begun: list[float] = []
        whole: list[float] = []
        between: list[float] = []
        queued: list[float] = []
        for record in records:
            began, ended = record.first_byte, record.ended
            if record.admitted is not None and record.queued is not None:
                queued.append(record.admitted - record.queued)
            if began is None:
                continue
            begun.append(began - record.started)
            if record.outcome == "ok" and ended is not None:
                whole.append(ended - record.started)
                if record.streamed:
                    between += _between(record, ended - began)
        for histogram, seconds in (
            (self._model_first_byte, begun),
            (self._model_whole, whole),
            (self._model_between, between),
            (self._model_queue, queued),
        ):
            if seconds:
                histogram.series(labels).unsorted.extend(seconds)

    def _labels(self, model: str, group: str) -> tuple[str, str]:
        known = self._pairs.get((model, group))
        if known is not None:
            return known
        pair = (model if model in self.known_models() else OTHER, group)
        if pair not in self._pairs:
            if len(self._pairs) >= MAX_LABEL_PAIRS:
                return OTHER, OTHER
            self._pairs[pair] = pair
        return pair


def _between(record: Record, seconds: float) -> tuple[float, ...]:
    """Return the mean time between two tokens of a stream, or nothing if it is unknown."""
    tokens = record.tokens.completion
    return () if tokens is None or tokens < 2 else (seconds / (tokens - 1),)
