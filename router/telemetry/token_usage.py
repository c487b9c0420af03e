"""How many tokens a request had, as the engines' answers say.

An answer is not decoded for this. Its usage object is looked for near its end by name, which no
text of a model can be taken for: quotes inside of JSON strings are escaped.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from router.telemetry.record import Record, Tokens

NAME = b'"usage":'
# How far from an answer's end it is looked for, how long it may be, and how many spaces may stand
# before it.
NEAR = 8192
LONGEST = 512
SPACES = 1
UNKNOWN = Tokens(None, None, None)


Count = Annotated[int, msgspec.Meta(ge=0, lt=10**15)]


class _Details(msgspec.Struct, gc=False):
    cached_tokens: Count | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    cached_tokens: Count | None = None
    prompt_tokens_details: _Details | None = None


_decode = msgspec.json.Decoder(_Usage).decode


def usage_in(answer: bytes) -> bytes:
    """An answer's last usage, as it was told and no byte more, for it is kept until many requests
    have ended; empty if there is none."""
    at = answer.rfind(NAME, -NEAR)
    if at < 0:
        return b""
    start = answer.find(b"{", at, at + len(NAME) + SPACES + 1)
    if start < 0:
        return b""
    latest = start + LONGEST
    end = answer.find(b"}", start, latest) + 1
    if answer.find(b"{", start + 1, end) >= 0:
        end = _end_of(answer, start, end, latest)
    return answer[start:end] if end else b""


def tokens_of(record: Record) -> Tokens:
    """By what the decoder says, else the prefiller. Of a record that has ended: it is read once."""
    tokens = record.tokens
    if tokens is None:
        tokens = record.tokens = tokens_so_far(record)
    return tokens


def tokens_so_far(record: Record) -> Tokens:
    """Of a record that may run: nothing of it is kept, for there is more to come."""
    tokens = tokens_in(record.usage) if record.usage else UNKNOWN
    if tokens.prompt is None and record.prefill_usage:
        asked = tokens_in(record.prefill_usage)
        tokens = Tokens(asked.prompt, tokens.completion, asked.cached)
    return tokens


def tokens_in(usage: bytes) -> Tokens:
    """Of one usage, as it was told; nothing is known of one that makes no sense."""
    try:
        told = _decode(usage)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return UNKNOWN
    details = told.prompt_tokens_details
    cached = told.cached_tokens if details is None else details.cached_tokens
    return Tokens(told.prompt_tokens, told.completion_tokens, cached)


def _end_of(answer: bytes, start: int, end: int, latest: int) -> int:
    """Of an object that holds others, but no text that could have a brace in it; 0 if there is no
    end."""
    while end and answer.count(b"{", start, end) != answer.count(b"}", start, end):
        end = answer.find(b"}", end, latest) + 1
    return end
