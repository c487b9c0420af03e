"""How many tokens a request had, as the engines' answers say.

An answer is not decoded for this. Its usage object is looked for near its end by name, which no
text of a model can be taken for: quotes inside of JSON strings are escaped.
"""

from __future__ import annotations

import re

from router.telemetry.record import Record, Tokens

NAME = b'"usage":'
# How far from an answer's end it is looked for, and how long it may be.
NEAR = 8192
LONGEST = 512
COUNT = re.compile(rb"\s*(\d{1,15})\b")
PROMPT, COMPLETION, CACHED = (b'"%b_tokens":' % n for n in (b"prompt", b"completion", b"cached"))


def usage_in(answer: bytes) -> bytes:
    """The part of an answer that begins with its last usage; empty if there is none."""
    at = answer.rfind(NAME, max(0, len(answer) - NEAR))
    return answer[at : at + LONGEST] if at >= 0 else b""


def tokens_of(record: Record) -> Tokens:
    """By what the decoder says, else the prefiller. Of a record that has ended: it is read once."""
    if record.tokens is None:
        told = record.usage
        asked = told if told.find(PROMPT) >= 0 else record.prefill_usage
        record.tokens = Tokens(
            _count(asked, PROMPT), _count(told, COMPLETION), _count(asked, CACHED)
        )
    return record.tokens


def tokens_in(usage: bytes) -> Tokens:
    """Of one usage, as it was told."""
    return Tokens(_count(usage, PROMPT), _count(usage, COMPLETION), _count(usage, CACHED))


def _count(usage: bytes, name: bytes) -> int | None:
    at = usage.find(name)  # ten times as fast as one pattern for all of it
    found = COUNT.match(usage, at + len(name)) if at >= 0 else None
    return None if found is None else int(found[1])
