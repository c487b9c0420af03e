"""Read token counts from the records of ended requests, and count the requests.

Token counts are those that engines report. The router does not parse an answer for them: it
searches for the usage object by name near the end. A model's text cannot be mistaken for it,
because quotes inside of JSON strings are escaped.

A model's name comes from the client, so only names that the fleet serves become labels, and only a
bounded number of pairs of a model and a group; everything else is counted as "other".
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Container, Sequence
from typing import Annotated

import msgspec
from msgspec.structs import astuple

from router.telemetry.metric_types import MetricRegistry, Reading, nearest_rank
from router.telemetry.record import UNKNOWN, Record, Tokens

logger = logging.getLogger("disagg_router")
MAX_BATCH_DELAY_S = 0.1
MAX_BATCH_RECORDS = 512
# A thread waits no longer for an event loop that is busy.
FLUSH_WAIT_S = 0.2
USAGE_NAME = b'"usage":'
# The usage object begins at most this far from the answer's end.
USAGE_SEARCH_BYTES = 8192
MAX_USAGE_BYTES = 512
MAX_SPACES = 1
MAX_LABEL_PAIRS = 64
MAX_UNSORTED = 1024
OTHER = "other"
ITL_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03),
    *(0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1),
)
# The latest times that percentiles are taken from, and which ones.
MAX_RECENT_TIMES = 1000
RECENT_SHARES = (0.5, 0.9, 0.99)
TOO_MANY = 10**15
Count = Annotated[int, msgspec.Meta(ge=0, lt=TOO_MANY)]
RecordReader = Callable[[Sequence[Record]], None]


class _Details(msgspec.Struct, gc=False):
    cached_tokens: Count | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    cached_tokens: Count | None = None
    prompt_tokens_details: _Details | None = None


_decode = msgspec.json.Decoder(_Usage).decode


def usage_in(answer: bytes) -> bytes:
    """Return the last usage object of an answer as bytes, or b"" if there is none."""
    at = answer.rfind(USAGE_NAME, -USAGE_SEARCH_BYTES)
    if at < 0:
        return b""
    start = answer.find(b"{", at, at + len(USAGE_NAME) + MAX_SPACES + 1)
    if start < 0:
        return b""
    latest = start + MAX_USAGE_BYTES
    end = answer.find(b"}", start, latest) + 1
    if answer.find(b"{", start + 1, end) >= 0:
        end = _end_of(answer, start, end, latest)
    return answer[start:end] if end else b""


def tokens_of(record: Record) -> Tokens:
    """Return the tokens by the decode engine, else by the prefill engine; the request may run."""
    usage = record.usage or usage_in(record.answer_end)
    tokens = tokens_in(usage) if usage else UNKNOWN
    if tokens.prompt is None and record.prefill_usage:
        prefilled = tokens_in(record.prefill_usage)
        tokens = Tokens(prefilled.prompt, tokens.completion, prefilled.cached)
    return tokens


def tokens_in(usage: bytes) -> Tokens:
    """Parse one usage object. What is no count of tokens is unknown."""
    try:
        reported = _decode(usage)
    except msgspec.ValidationError:
        return _valid_tokens_in(usage)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return UNKNOWN
    details = reported.prompt_tokens_details
    cached = reported.cached_tokens if details is None else details.cached_tokens
    return Tokens(reported.prompt_tokens, reported.completion_tokens, cached)


def _valid_tokens_in(usage: bytes) -> Tokens:
    """Return the counts of a usage object in which some field is not a count."""
    try:
        reported = msgspec.json.decode(usage)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return UNKNOWN

    def count(of: object, name: str) -> int | None:
        value = of.get(name) if isinstance(of, dict) else None
        return value if type(value) is int and 0 <= value < TOO_MANY else None

    details = reported.get("prompt_tokens_details") if isinstance(reported, dict) else None
    return Tokens(
        count(reported, "prompt_tokens"),
        count(reported, "completion_tokens"),
        count(reported if details is None else details, "cached_tokens"),
    )


def _end_of(answer: bytes, start: int, end: int, latest: int) -> int:
    """Return the end of an object that contains objects but no braces in text, or 0."""
    while end and answer.count(b"{", start, end) != answer.count(b"}", start, end):
        end = answer.find(b"}", end, latest) + 1
    return end


class RecordBatches:
    """Passes the records of ended requests to `readers`, many together.

    Batches make each record cheaper, and the work happens when no client waits for it. An exception
    in one reader does not affect the others.
    """

    def __init__(
        self, readers: Sequence[RecordReader], max_delay_s: float = MAX_BATCH_DELAY_S
    ) -> None:
        self._readers = [*readers]
        self._max_delay_s = max_delay_s
        self._ended: list[Record] = []
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def add_reader(self, reader: RecordReader) -> None:
        """Also pass records to `reader`, after the others."""
        self._readers.append(reader)

    def add(self, record: Record) -> None:
        self._ended.append(record)
        if self._timer is None:
            self._loop = asyncio.get_running_loop()
            self._timer = self._loop.call_later(self._max_delay_s, self.flush)
        elif len(self._ended) >= MAX_BATCH_RECORDS:
            self.flush()

    def flush_from_thread(self) -> None:
        """Have the event loop pass on all records now, and wait for that, but not for long. Called
        by another thread than the loop's."""
        loop, is_flushed = self._loop, threading.Event()
        if loop is None or self._timer is None:
            return

        def flush() -> None:
            self.flush()
            is_flushed.set()

        try:
            loop.call_soon_threadsafe(flush)
        except RuntimeError:  # the loop has ended
            return
        is_flushed.wait(FLUSH_WAIT_S)

    def flush(self) -> None:
        """Pass on all records now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        ended, self._ended = self._ended, []
        if not ended:
            return
        for record in ended:
            record.usage = record.usage or usage_in(record.answer_end)
            record.answer_end = b""  # records may be held for a while
            record.tokens = tokens_of(record)
        for read in self._readers:
            try:
                read(ended)
            except Exception:
                logger.exception("%d records of requests could not be processed", len(ended))


class RequestMetrics:
    """What ended requests count. `known_models` returns the models that the fleet serves."""

    def __init__(self, registry: MetricRegistry) -> None:
        self.known_models: Callable[[], Container[str]] = tuple
        self._histograms, self._unsorted = registry.histograms, 0
        self._pairs: dict[tuple[str, str], tuple[str, str]] = {}
        self.by_outcome = registry.local_counter(
            "requests{endpoint,flow,status,outcome}",
            "Finished requests, by the status and outcome that the client got.",
        )
        self.prefill_seconds = registry.histogram(
            "prefill_seconds", "Time from sending a prefill leg to its complete answer."
        ).series[()]
        self.ttft_seconds = registry.histogram(
            "time_to_first_byte_seconds",
            "Time from the arrival of a request to the first byte of the decode engine's body.",
        ).series[()]
        self._recent_ttft: deque[float] = deque(maxlen=MAX_RECENT_TIMES)
        registry.callback_gauge(
            "recent_time_to_first_byte_seconds{percentile}",
            f"Exact percentiles of the time to the first byte, of the last {MAX_RECENT_TIMES:,} "
            "answers of a worker process. Of several workers the highest one counts.",
        ).read = self._recent_percentiles
        registry.callback_gauge(
            "recent_answers", "Answers that the recent percentiles are of, of all workers together."
        ).read = lambda: [((), len(self._recent_ttft))]
        self.decode_first_byte_seconds = registry.histogram(
            "decode_first_byte_seconds",
            "Time from sending a decode leg to the first byte of its body.",
        ).series[()]
        self.request_seconds = registry.histogram(
            "request_seconds",
            "End-to-end latency: time from the arrival of a request to the end of its answer.",
        ).series[()]
        self.queue_seconds = registry.histogram(
            "queue_seconds",
            "Time that queued requests waited for a slot, whether they got one or not.",
        ).series[()]
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
        model_prompt = registry.local_counter(
            "model_prompt_tokens{model,group}", "Prompt tokens, as reported by engines."
        )
        model_completion = registry.local_counter(
            "model_completion_tokens{model,group}",
            "Completion tokens, as reported by engines. A stream reports them only if its client "
            "sets stream_options.include_usage.",
        )
        model_cached = registry.local_counter(
            "model_cached_tokens{model,group}",
            "Prompt tokens that were served from a cache, as reported by engines.",
        )
        self._token_counters = model_prompt, model_completion, model_cached

    def add_records(self, ended: Sequence[Record]) -> None:
        """Count requests that have ended."""
        alike: defaultdict[tuple[str, str, int, str, str, str], list[Record]] = defaultdict(list)
        for r in ended:
            alike[r.endpoint, r.flow, r.status, r.outcome, r.model, r.group].append(r)
            if r.conversation:
                self.conversation_turns.totals[r.conversation, r.conversation_reason] += 1
                self.conversation_tokens.totals[()] += r.offered_tokens
            if r.kept:
                self.conversation_kept.totals[r.kept,] += 1
        for (endpoint, flow, status, outcome, model, group), records in alike.items():
            labels = self._pairs.get((model, group)) or self._labels_of(model, group)
            self.by_outcome.totals[endpoint, flow, status, outcome] += len(records)
            self._model_requests.totals[*labels, outcome] += len(records)
            reported = zip(*[astuple(r.tokens) for r in records], strict=True)
            for counter, counts in zip(self._token_counters, reported, strict=True):
                if total := sum(filter(None, counts)):
                    counter.totals[labels] += total
            self._observe_times(labels, outcome == "ok", records)
        self._unsorted += len(ended)
        if self._unsorted >= MAX_UNSORTED:
            self._unsorted = 0
            for histogram in self._histograms:
                histogram.fold()

    def _observe_times(
        self, labels: tuple[str, str], are_ok: bool, records: Sequence[Record]
    ) -> None:
        self.request_seconds.extend([r.ended - r.started for r in records if r.ended is not None])
        queued = [
            r.admitted - r.queued
            for r in records
            if r.admitted is not None and r.queued is not None
        ]
        if queued:
            self._model_queue.series[labels].extend(queued)
        begun = [(r, r.first_byte) for r in records if r.first_byte is not None]
        if not begun:
            return
        first_byte = [first - r.started for r, first in begun]
        self.ttft_seconds.extend(first_byte)
        self._model_first_byte.series[labels].extend(first_byte)
        self._recent_ttft.extend(first_byte)
        self.decode_first_byte_seconds.extend(
            [first - r.decode_started for r, first in begun if r.decode_started is not None]
        )
        if are_ok:
            whole = [(r, first, r.ended) for r, first in begun if r.ended is not None]
            self._model_whole.series[labels].extend([end - r.started for r, _, end in whole])
            between = [
                (end - first) / (count - 1)
                for r, first, end in whole
                if r.streamed and (count := r.tokens.completion or 0) > 1
            ]
            if between:
                self._model_between.series[labels].extend(between)

    def _recent_percentiles(self) -> Sequence[Reading]:
        ordered = sorted(self._recent_ttft.copy())  # a copy is atomic: this thread is another one
        return [
            ((f"p{share * 100:g}",), nearest_rank(ordered, share))
            for share in RECENT_SHARES
            if ordered
        ]

    def _labels_of(self, model: str, group: str) -> tuple[str, str]:
        pair = (model if model in self.known_models() else OTHER, group)
        if pair not in self._pairs:
            if len(self._pairs) >= MAX_LABEL_PAIRS:
                return OTHER, OTHER
            self._pairs[pair] = pair
        return pair
