"""Token counts of a request, as reported in the engines' answers.

The router does not parse an answer for this. It searches for the usage object by name near the end;
a model's text cannot be mistaken for it, because quotes inside of JSON strings are escaped.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from router.telemetry.record import Record, Tokens

NAME = b'"usage":'
# The usage object begins at most this far from the answer's end.
USAGE_SEARCH_BYTES = 8192
MAX_USAGE_BYTES = 512
MAX_SPACES = 1
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
    """Return the last usage object of an answer as bytes, or b"" if there is none."""
    at = answer.rfind(NAME, -USAGE_SEARCH_BYTES)
    if at < 0:
        return b""
    start = answer.find(b"{", at, at + len(NAME) + MAX_SPACES + 1)
    if start < 0:
        return b""
    latest = start + MAX_USAGE_BYTES
    end = answer.find(b"}", start, latest) + 1
    if answer.find(b"{", start + 1, end) >= 0:
        end = _end_of(answer, start, end, latest)
    return answer[start:end] if end else b""


def tokens_of(record: Record) -> Tokens:
    """Return the tokens of an ended request, by the decode engine, else by the prefill engine."""
    tokens = record.tokens
    if tokens is None:
        tokens = record.tokens = tokens_so_far(record)
    return tokens


def tokens_so_far(record: Record) -> Tokens:
    """Return the tokens of a request that may still run."""
    tokens = tokens_in(record.usage) if record.usage else UNKNOWN
    if tokens.prompt is None and record.prefill_usage:
        asked = tokens_in(record.prefill_usage)
        tokens = Tokens(asked.prompt, tokens.completion, asked.cached)
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
