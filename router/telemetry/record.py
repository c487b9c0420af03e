"""The record of one request, which metrics, the access log and its trace are made from."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import getrandbits
from typing import NamedTuple

from msgspec import Struct

SAMPLED = 0x01


class Tokens(Struct, frozen=True, gc=False):
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
    answer_change: str = ""
    """The change that the client made to the last turn's answer, from `find_answer_change`."""
    diverges_in: str = ""
    """The first part that differs from all remembered prompts. Only `--ui` sets this field."""
    offered_tokens: int = 0
    """Tokens of the last turn that the prefill engine could pull."""
    kept: str = ""
    """Label of the metric conversation_kept_total: the turn left KV for the next one or not. Empty
    outside conversations."""
    reused_from: str = ""
    """The decode engine from which the prefill engine pulled the last turn's KV."""
    borrowed_from: str = ""
    """The engine from whose prefix cache another has read (the likeliest one that the leg named,
    if an older engine does not report it)."""
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
    """The usage object of a streamed answer, not parsed yet; see `request_metrics.tokens_of`."""
    streamed_tokens: int = 0
    """Tokens of a stream by the ids that its engines reported, 0 where they reported none."""
    streamed_events: int = 0
    """Events with output of a stream, 0 unless the dashboard was open when it began."""
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
    """Read from the usage objects when the request has ended; see `request_metrics`."""
    trace: Trace | None = None
