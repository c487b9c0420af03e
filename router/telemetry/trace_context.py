"""One request's place in a trace, and that of each of its legs: what must be known ahead of their
end, because engines are told of it. What else spans say is read from the record, when it has ended.

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
# What the standard asks to be passed on at least; longer is not for us to carry.
LONGEST_STATE, MOST_MEMBERS = 2048, 32


class Parent(NamedTuple):
    """Of the client's span; `flags` are those that we know."""

    trace_id: int
    span_id: int
    flags: int
    state: str

    @property
    def is_sampled(self) -> bool:
        return bool(self.flags & SAMPLED)


@dataclass(slots=True)
class Leg:
    """One leg at one engine, which is told `line`. `kind`: of its failure, or what else became of
    it; empty if it did what it was asked for. Times as in a Record; `usage` is not read yet."""

    span_id: int
    role: str
    engine: str
    started: float
    line: bytes
    ended: float | None = None
    first_byte: float | None = None
    kind: str = ""
    error: str = ""
    usage: bytes = b""


@dataclass(slots=True)
class Trace:
    """`began`: when the request was whole, and work on it began. `mode`: how KV was to move."""

    trace_id: int
    span_id: int
    parent: Parent | None
    flags: int
    state: str
    began: float
    mode: str = ""
    legs: list[Leg] = field(default_factory=list)

    @property
    def is_sampled(self) -> bool:
        return bool(self.flags & SAMPLED)

    def lines(self, span_id: int) -> bytes:
        """The header lines that tell an engine its place: under that span."""
        line = f"traceparent: 00-{self.trace_id:032x}-{span_id:016x}-{self.flags:02x}\r\n"
        if self.state:
            line += f"tracestate: {self.state}\r\n"
        return line.encode("latin-1")

    def leg(self, role: str, engine: str, started: float) -> Leg:
        span_id = new_id(64)
        made = Leg(span_id, role, engine, started, self.lines(span_id))
        self.legs.append(made)
        return made


def parent_in(headers: Iterable[Header]) -> Parent | None:
    """Total: None where there is none, or none that makes sense; then its tracestate says nothing
    either."""
    told = [header for header in headers if header[0] in NAMES]
    if not told:
        return None
    given = [value for name, value in told if name == TRACEPARENT]
    found = SHAPE.fullmatch(given[0].strip().decode("latin-1")) if len(given) == 1 else None
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == "ff" or (version == "00" and more):
        return None
    if not (int(trace_id, 16) and int(span_id, 16)):
        return None
    state = b",".join(value.strip() for name, value in told if name == TRACESTATE)
    known = int(flags, 16) & (SAMPLED | RANDOM)
    return Parent(int(trace_id, 16), int(span_id, 16), known, _sane(state))


def without(headers: Sequence[Header]) -> Sequence[Header]:
    """The headers of a client without its place in a trace."""
    if NAMES.isdisjoint([name for name, _ in headers]):
        return headers
    return [header for header in headers if header[0] not in NAMES]


def new_id(bits: int) -> int:
    """Never 0, which stands for none."""
    return getrandbits(bits) or 1


def _sane(state: bytes) -> str:
    """As it came, or nothing: what does not follow the standard is for nobody."""
    text = state.decode("latin-1")
    members = [member.strip(" \t") for member in text.split(",")]
    members = [member for member in members if member]
    if len(state) > LONGEST_STATE or len(members) > MOST_MEMBERS:
        return ""
    keys = {member.partition("=")[0] for member in members if MEMBER.fullmatch(member)}
    return ",".join(members) if len(keys) == len(members) else ""
