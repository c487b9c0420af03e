"""A request's position in a trace, and those of its legs.

These ids are sent to engines and must exist before the legs end. All other attributes of spans are
read from the record when the request has ended.

W3C Trace Context: https://www.w3.org/TR/trace-context/
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import getrandbits
from typing import NamedTuple

Header = tuple[bytes, bytes]
TRACEPARENT, TRACESTATE = b"traceparent", b"tracestate"
NAMES = frozenset((TRACEPARENT, TRACESTATE))
SHAPE = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
MEMBER = re.compile(r"[a-z0-9][a-z0-9_*/@-]{0,255}=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{1,256}")
SAMPLED, RANDOM = 0x01, 0x02
# Longer tracestates are dropped. The standard requires propagating at least 512 bytes.
MAX_STATE_BYTES, MAX_STATE_MEMBERS = 2048, 32


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


def parent_in(headers: Iterable[Header]) -> ParentSpan | None:
    """Return the client's span, or None if its traceparent is missing or invalid."""
    found_headers = [header for header in headers if header[0] in NAMES]
    if not found_headers:
        return None
    given = [value for name, value in found_headers if name == TRACEPARENT]
    found = SHAPE.fullmatch(given[0].strip().decode("latin-1")) if len(given) == 1 else None
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == "ff" or (version == "00" and more):
        return None
    if not (int(trace_id, 16) and int(span_id, 16)):
        return None
    state = b",".join(value.strip() for name, value in found_headers if name == TRACESTATE)
    known = int(flags, 16) & (SAMPLED | RANDOM)
    return ParentSpan(int(trace_id, 16), int(span_id, 16), known, _valid_state(state))


def without_trace_headers(headers: Sequence[Header]) -> Sequence[Header]:
    """Return `headers` without traceparent and tracestate."""
    if NAMES.isdisjoint([name for name, _ in headers]):
        return headers
    return [header for header in headers if header[0] not in NAMES]


def new_id(bits: int) -> int:
    """Return a random id, never 0, which the standard forbids."""
    return getrandbits(bits) or 1


def _valid_state(state: bytes) -> str:
    """Return the tracestate unchanged, or "" if it does not follow the standard."""
    text = state.decode("latin-1")
    members = [member.strip(" \t") for member in text.split(",")]
    members = [member for member in members if member]
    if len(state) > MAX_STATE_BYTES or len(members) > MAX_STATE_MEMBERS:
        return ""
    keys = {member.partition("=")[0] for member in members if MEMBER.fullmatch(member)}
    return ",".join(members) if len(keys) == len(members) else ""
