"""The record of one request, which metrics, the access log and its trace are made from.

Token counts are those that engines report. The router does not parse an answer for them: it
searches for the usage object by name near the end. A model's text cannot be mistaken for it,
because quotes inside of JSON strings are escaped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import getrandbits
from typing import Annotated, NamedTuple

import msgspec

logger = logging.getLogger("disagg_router")
MAX_BATCH_DELAY_S = 0.1
MAX_BATCH_RECORDS = 512
SAMPLED = 0x01
USAGE_NAME = b'"usage":'
# The usage object begins at most this far from the answer's end.
USAGE_SEARCH_BYTES = 8192
MAX_USAGE_BYTES = 512
MAX_SPACES = 1
Count = Annotated[int, msgspec.Meta(ge=0, lt=10**15)]


class Tokens(NamedTuple):
    """Token counts of a request; None where unknown. `cached` prompt tokens came from a cache."""

    prompt: int | None
    completion: int | None
    cached: int | None


UNKNOWN = Tokens(None, None, None)


class ParentSpan(NamedTuple):
    """The client's span; `flags` are those that the router knows."""

    trace_id: int
    span_id: int
    flags: int
    state: str

    @property
    def is_sampled(self) -> bool:
        return bool(self.flags & SAMPLED)


@dataclass(slots=True)
class TracedLeg:
    """One request leg. `headers` are the lines that put the engine's spans under this leg.

    `kind` is the kind of failure or another special outcome, empty if the leg succeeded. Times are
    as in a Record; `usage` is not parsed yet.
    """

    span_id: int
    role: str
    engine: str
    started: float
    headers: bytes
    ended: float | None = None
    first_byte: float | None = None
    kind: str = ""
    error: str = ""
    usage: bytes = b""


@dataclass(slots=True)
class Trace:
    """A request's span. `began` is when the request was complete; `mode` is the transfer mode."""

    trace_id: int
    span_id: int
    parent: ParentSpan | None
    flags: int
    state: str
    began: float
    mode: str = ""
    legs: list[TracedLeg] = field(default_factory=list)

    @property
    def is_sampled(self) -> bool:
        return bool(self.flags & SAMPLED)

    def header_lines(self, span_id: int) -> bytes:
        """Return the header lines that put an engine's spans under the span `span_id`."""
        line = f"traceparent: 00-{self.trace_id:032x}-{span_id:016x}-{self.flags:02x}\r\n"
        if self.state:
            line += f"tracestate: {self.state}\r\n"
        return line.encode("latin-1")

    def add_leg(self, role: str, engine: str, started: float) -> TracedLeg:
        span_id = new_id(64)
        made = TracedLeg(span_id, role, engine, started, self.header_lines(span_id))
        self.legs.append(made)
        return made


def new_id(bits: int) -> int:
    """Return a random id, never 0, which W3C Trace Context forbids."""
    return getrandbits(bits) or 1


@dataclass(slots=True, eq=False)
class Record:
    """Facts about one request, filled in while the request runs.

    Times are seconds of the monotonic clock. No Struct, although a Struct is made in a quarter of
    the time: a request assigns some twenty fields, and each assignment would cost nine times as
    much.

    `stage` is where the request is: "receive", "queue", "prefill", "decode", "stream" or "done".
    `outcome` is "ok", "refused" (a 4xx from the router or an engine), "engine_error" (an engine's
    5xx, passed on), "failed" (the router failed), "broken_stream" (an error after the first byte)
    or "disconnected" (the client disconnected).
    """

    endpoint: str
    started: float
    request_id: str = ""
    flow: str = "none"
    stage: str = "receive"
    outcome: str = "failed"
    status: int = 0
    prefiller: str = ""
    decoder: str = ""
    conversation: str = ""
    """The outcome of reusing the last turn's KV; empty outside conversations."""
    conversation_reason: str = ""
    offered_tokens: int = 0
    """Tokens of the last turn that the prefill engine could pull."""
    kept: str = ""
    """Whether the turn left KV for the next one; empty outside conversations."""
    reused_from: str = ""
    """The decode engine from which the prefill engine pulled the last turn's KV."""
    borrowed_from: str = ""
    """The engine from whose prefix cache the prefill engine has read (the likeliest one, if its leg
    named several)."""
    borrowed_tokens: int = 0
    prefill_started: float | None = None
    prefill_done: float | None = None
    decode_started: float | None = None
    first_byte: float | None = None
    ended: float | None = None
    error: str = ""
    answer_end: bytes = b""
    """The end of an answer that was sent whole, in which `tokens_of` looks for the usage object."""
    usage: bytes = b""
    """The usage object of a streamed answer, not parsed yet; see `tokens_of`."""
    prefill_usage: bytes = b""
    """The usage object of the prefill answer, not parsed yet."""
    transfer_params: bytes = b""
    """The kv_transfer_params that the decode engine got, not parsed yet. Set only if access log
    lines report the number of blocks."""
    failures: tuple[str, ...] = ()
    """A line for each failed leg and what followed."""
    model: str = ""
    """The model that the client named, if that is a valid name."""
    key: str = ""
    """The name of the client's API key, if the router checks keys."""
    group: str = ""
    without_transfer: str = ""
    """Why the decode engine computed the prompt itself; empty if KV was offered to it, or if the
    request is one for a single engine anyway."""
    streamed: bool = False
    retries: int = 0
    resumes: int = 0
    """How often another engine had to continue the answer."""
    queued: float | None = None
    """When the request began to wait for a slot at an engine."""
    admitted: float | None = None
    """When the request got a slot."""
    tokens: Tokens = UNKNOWN
    """Read from the usage objects by RecordBatches, when the request has ended."""
    trace: Trace | None = None


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
    """Parse one usage object; an invalid one has no known tokens."""
    try:
        reported = _decode(usage)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return UNKNOWN
    details = reported.prompt_tokens_details
    cached = reported.cached_tokens if details is None else details.cached_tokens
    return Tokens(reported.prompt_tokens, reported.completion_tokens, cached)


def _end_of(answer: bytes, start: int, end: int, latest: int) -> int:
    """Return the end of an object that contains objects but no braces in text, or 0."""
    while end and answer.count(b"{", start, end) != answer.count(b"}", start, end):
        end = answer.find(b"}", end, latest) + 1
    return end


RecordReader = Callable[[Sequence[Record]], None]


class RecordBatches:
    """Passes the records of ended requests to `readers`, many together, and each record to
    `on_ended` at once.

    Batches make each record cheaper, and the work happens when no client waits for it. An exception
    in one reader does not affect the others.
    """

    def __init__(
        self,
        readers: Sequence[RecordReader],
        max_delay_s: float = MAX_BATCH_DELAY_S,
        on_ended: Callable[[Record], None] | None = None,
    ) -> None:
        self._readers = [*readers]
        self.on_ended = on_ended
        self._max_delay_s = max_delay_s
        self._ended: list[Record] = []
        self._timer: asyncio.TimerHandle | None = None

    def add_reader(self, reader: RecordReader) -> None:
        """Also pass records to `reader`, after the others."""
        self._readers.append(reader)

    def add(self, record: Record) -> None:
        if self.on_ended is not None:
            self.on_ended(record)
        self._ended.append(record)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._max_delay_s, self.flush)
        elif len(self._ended) >= MAX_BATCH_RECORDS:
            self.flush()

    def flush(self) -> None:
        """Pass on all records now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        ended, self._ended = self._ended, []
        if not ended:
            return
        for record in ended:
            record.tokens = tokens_of(record)
        for read in self._readers:
            try:
                read(ended)
            except Exception:
                logger.exception("%d records of requests could not be processed", len(ended))
