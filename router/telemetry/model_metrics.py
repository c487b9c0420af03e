"""Latencies, tokens and outcomes by model and group.

Requests are counted in batches after they have ended. A model's name comes from the client, so only
names that the fleet serves become labels, and only a bounded number of pairs of a model and a
group; everything else is counted as "other".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence

from router.telemetry.metric_types import MetricRegistry
from router.telemetry.record import Record
from router.telemetry.token_usage import tokens_of

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
LABELS = ("model", "group")


class ModelMetrics:
    """Metrics with the labels model and group; `known` returns the models that the fleet serves."""

    def __init__(self, registry: MetricRegistry) -> None:
        self.known: Callable[[], Container[str]] = tuple
        self._pairs: dict[tuple[str, str], tuple[str, str]] = {}
        self._requests = registry.local_counter(
            "model_requests{model,group,outcome}",
            "Finished requests, by outcome.",
            "A growing share of failed, engine_error or broken_stream for one model or group alone "
            "is caused by its engines: look at upstream_errors and their logs.",
        )
        self._first_byte = registry.histogram(
            "model_time_to_first_byte_seconds{model,group}",
            LATENCY_BUCKETS_S,
            "Time from the arrival of a request to the first byte of the decode engine's body.",
            "Compare with prefill_seconds and model_queue_seconds: prefill engines are slow or "
            "few, or requests wait for a slot. Add prefill engines, or shorten prompts by reuse.",
        )
        self._whole = registry.histogram(
            "model_request_seconds{model,group}",
            LATENCY_BUCKETS_S,
            "End-to-end latency of successful requests.",
            "Check whether answers became longer (completion tokens) or decode engines slower "
            "(model_inter_token_seconds).",
        )
        self._between = registry.histogram(
            "model_inter_token_seconds{model,group}",
            ITL_BUCKETS_S,
            "Mean inter-token latency (ITL) of a streamed answer with usage.",
            "Decode engines have too large batches, or compute prompts themselves (see "
            "decode_only): add decode engines, or lower max_engine_requests.",
        )
        self._queue = registry.histogram(
            "model_queue_seconds{model,group}",
            LATENCY_BUCKETS_S,
            "Time that queued requests waited for a slot at an engine.",
            "The engines of this model and group are full: add engines, or raise the limits of "
            "docs/admission.md if engines have room.",
        )
        self._prompt = registry.local_counter(
            "model_prompt_tokens{model,group}",
            "Prompt tokens, as reported by engines.",
            "The demand on prefill engines, which determines how many are needed.",
        )
        self._completion = registry.local_counter(
            "model_completion_tokens{model,group}",
            "Completion tokens, as reported by engines. A stream reports them only if its client "
            "sets stream_options.include_usage.",
            "The demand on decode engines, which determines how many are needed.",
        )
        self._cached = registry.local_counter(
            "model_cached_tokens{model,group}",
            "Prompt tokens that were served from a cache, as reported by engines.",
            "Their share of prompt tokens is what caches and reused turns save. If it falls, look "
            "at conversation_turns and the prefill policy.",
        )

    def add_records(self, ended: Sequence[Record]) -> None:
        """Count requests that have ended."""
        for (model, group), records in _by_pair(ended).items():
            labels = self._labels(model, group)
            self._count(labels, records)
            self._time(labels, records)
        for histogram in (self._first_byte, self._whole, self._between, self._queue):
            histogram.fold_beyond(MAX_UNSORTED)

    def _count(self, labels: tuple[str, str], records: Sequence[Record]) -> None:
        for outcome, count in Counter([record.outcome for record in records]).items():
            self._requests.add((*labels, outcome), count)
        prompts, completions, cached = zip(*map(tokens_of, records), strict=True)
        for counter, reported in (
            (self._prompt, prompts),
            (self._completion, completions),
            (self._cached, cached),
        ):
            if count := sum(filter(None, reported)):
                counter.add(labels, count)

    def _time(self, labels: tuple[str, str], records: Sequence[Record]) -> None:
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
            (self._first_byte, begun),
            (self._whole, whole),
            (self._between, between),
            (self._queue, queued),
        ):
            if seconds:
                histogram.series(labels).unsorted.extend(seconds)

    def _labels(self, model: str, group: str) -> tuple[str, str]:
        known = self._pairs.get((model, group))
        if known is not None:
            return known
        pair = (model if model in self.known() else OTHER, group)
        if pair not in self._pairs:
            if len(self._pairs) >= MAX_LABEL_PAIRS:
                return OTHER, OTHER
            self._pairs[pair] = pair
        return pair


def _by_pair(ended: Sequence[Record]) -> Mapping[tuple[str, str], Sequence[Record]]:
    """Requests that end together are mostly of one model and group, so grouping them is cheap."""
    found: dict[tuple[str, str], list[Record]] = {}
    for record in ended:
        pair = record.model, record.group
        if pair in found:
            found[pair].append(record)
        else:
            found[pair] = [record]
    return found


def _between(record: Record, seconds: float) -> tuple[float, ...]:
    """Return the mean time between two tokens of a stream, or nothing if it is unknown."""
    tokens = tokens_of(record).completion
    return () if tokens is None or tokens < 2 else (seconds / (tokens - 1),)
