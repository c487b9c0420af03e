"""What requests took and had, by model and group: noted when they have ended, many together.

A model's name comes from the client, so only names that the fleet serves are labels, and only so
many pairs of a model and a group as this process may remember; everything else is "other".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence

from router.telemetry.metric_registry import Registry
from router.telemetry.record import Record
from router.telemetry.token_usage import tokens_of

MOST_PAIRS = 64
MOST_UNSORTED = 1024
OTHER = "other"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
BETWEEN = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.015,
    0.02,
    0.03,
    0.04,
    0.05,
    0.075,
    0.1,
    0.15,
    0.25,
    0.5,
    1,
)
LABELS = ("model", "group")


class ByModel:
    """`known`: the models that the fleet serves now."""

    def __init__(self, registry: Registry) -> None:
        self.known: Callable[[], Container[str]] = tuple
        self._pairs: dict[tuple[str, str], tuple[str, str]] = {}
        self._requests = registry.tally(
            "model_requests",
            "Requests that ended, by what came of them.",
            *LABELS,
            "outcome",
            act="A share of failed, engine_error or broken_stream that grows for one model or "
            "group alone points at its engines: look at upstream_errors and their logs.",
        )
        self._first_byte = registry.histograms(
            "model_time_to_first_byte_seconds",
            "From a request's arrival to the first byte of the decoder's body.",
            SECONDS,
            *LABELS,
            act="Compare with prefill_seconds and model_queue_seconds: prefillers are slow or few, "
            "or requests wait for room. More prefillers, or shorter prompts by reuse.",
        )
        self._whole = registry.histograms(
            "model_request_seconds",
            "From a request's arrival to the end of its answer, of those that were answered.",
            SECONDS,
            *LABELS,
            act="Look whether answers became longer (completion tokens) or decoders slower "
            "(model_inter_token_seconds).",
        )
        self._between = registry.histograms(
            "model_inter_token_seconds",
            "The mean time between two tokens of a streamed answer that told its usage.",
            BETWEEN,
            *LABELS,
            act="Decoders have too large batches, or prefill for themselves (see decode_only): "
            "add decoders, or lower max_engine_requests.",
        )
        self._queue = registry.histograms(
            "model_queue_seconds",
            "How long requests waited for room at engines, of those that had to.",
            SECONDS,
            *LABELS,
            act="The engines of this model and group are full: add some, or raise the limits of "
            "docs/admission.md if engines have room.",
        )
        self._prompt = registry.tally(
            "model_prompt_tokens",
            "Tokens of prompts, as engines told.",
            *LABELS,
            act="What is asked of prefillers; it says how many of them are needed.",
        )
        self._completion = registry.tally(
            "model_completion_tokens",
            "Tokens of answers, as engines told; a stream tells only where its client asks "
            "(stream_options.include_usage).",
            *LABELS,
            act="What is asked of decoders; it says how many of them are needed.",
        )
        self._cached = registry.tally(
            "model_cached_tokens",
            "Tokens of prompts that nobody computed for the request, as engines told.",
            *LABELS,
            act="Its share of prompt tokens is what caches and reused turns save. If it falls: "
            "look at conversation_turns and the prefill policy.",
        )

    def take(self, ended: Sequence[Record]) -> None:
        for (model, group), records in _by_pair(ended).items():
            labels = self._labels(model, group)
            self._count(labels, records)
            self._time(labels, records)
        for histogram in (self._first_byte, self._whole, self._between, self._queue):
            histogram.fold_beyond(MOST_UNSORTED)

    def _count(self, labels: tuple[str, str], records: Sequence[Record]) -> None:
        for outcome, count in Counter([record.outcome for record in records]).items():
            self._requests.add((*labels, outcome), count)
        prompts, completions, cached = zip(*map(tokens_of, records), strict=True)
        for tally, told in (
            (self._prompt, prompts),
            (self._completion, completions),
            (self._cached, cached),
        ):
            if many := sum(filter(None, told)):
                tally.add(labels, many)

    def _time(self, labels: tuple[str, str], records: Sequence[Record]) -> None:
        begun: list[float] = []
        whole: list[float] = []
        between: list[float] = []
        queued: list[float] = []
        for record in records:
            began, ended = record.first_byte, record.ended
            if record.seated is not None and record.queued is not None:
                queued.append(record.seated - record.queued)
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
                histogram.of(labels).unsorted.extend(seconds)

    def _labels(self, model: str, group: str) -> tuple[str, str]:
        known = self._pairs.get((model, group))
        if known is not None:
            return known
        pair = (model if model in self.known() else OTHER, group)
        if pair not in self._pairs:
            if len(self._pairs) >= MOST_PAIRS:
                return OTHER, OTHER
            self._pairs[pair] = pair
        return pair


def _by_pair(ended: Sequence[Record]) -> Mapping[tuple[str, str], Sequence[Record]]:
    """What ended together is mostly of one model and group: what is done once for all of those
    costs next to nothing."""
    found: dict[tuple[str, str], list[Record]] = {}
    for record in ended:
        pair = record.model, record.group
        if pair in found:
            found[pair].append(record)
        else:
            found[pair] = [record]
    return found


def _between(record: Record, seconds: float) -> tuple[float, ...]:
    """The mean time between two tokens of a stream; nothing where it is not known."""
    tokens = tokens_of(record).completion
    return () if tokens is None or tokens < 2 else (seconds / (tokens - 1),)
