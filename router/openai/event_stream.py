"""The events of a streamed answer: chunks, errors, finish reasons and the end.

Where events end is for `router.http_client.sse`. What is looked for in bytes here, before any JSON
is decoded, is a key or a string with its quotes: no text of a model can be taken for it, since
quotes inside JSON strings are escaped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from router.http_client.sse import (
    GAP,
    SseEvent,
    data_in,
    data_of,
    end_of_last_event,
    events_in,
    says_done,
)
from router.openai.answers import Json, choices_of, parse_object

ERROR_KEY = b'"error"'
ABORT_VALUE, REJECTION_VALUE = b'"abort"', b'"cache_threshold"'
FINISH_KEY = b'finish_reason"'
# A finish reason that is not null. What begins with letters is found sooner: the quote before the
# key is looked at second.
FINISH_REASON = re.compile(FINISH_KEY + b'(?<="finish_reason")' + GAP + b'"([^"]+)"')
# Finish reasons of an answer that its engine did not complete.
BROKEN_OFF = frozenset((b"abort", b"error", b"cache_threshold"))
MAX_LAST_EVENTS = 4
# Up to this size, a block counts as few events.
SHORT_BLOCK_BYTES = 2048
# Fields of a choice and of its delta that are no output.
NO_OUTPUT = frozenset(("index", "role", "delta", "finish_reason", "stop_reason"))


def json_events(block: bytes, at_end: bool = False) -> Iterator[tuple[SseEvent, Json]]:
    """Yield the events of a block whose data are JSON objects. `at_end`: as for `events_in`."""
    for event in events_in(block, at_end):
        if event.data is not None and (content := parse_object(event.data)) is not None:
            yield event, content


def chunks_in(stream: bytes) -> Iterator[Json]:
    """Yield the JSON objects of a stream's events, of one that has not ended, too."""
    for data in data_in(stream):
        if (content := parse_object(data)) is not None:
            yield content


def may_fail(content: bytes) -> bool:
    """Return False if JSON text, or the events of a stream, certainly report no failure.

    One of these strings stands in each failure. Python finds them in half the time from the right.
    """
    return (
        content.rfind(ERROR_KEY) >= 0
        or content.rfind(ABORT_VALUE) >= 0
        or content.rfind(REJECTION_VALUE) >= 0
    )


def last_events(block: bytes) -> bytes:
    """Return the end of a block of a stream with one choice where a failure would stand.

    A failure ends such a stream: a usage, [DONE] and a comment may follow, and no more.
    """
    at = len(block)
    if at <= SHORT_BLOCK_BYTES:
        return block
    for _ in range(MAX_LAST_EVENTS + 1):  # the first one ends the block
        at = block.rfind(b"\n\n", 0, at)
        if at < 0:
            return block
    return block[at:]


def error_in(content: Json) -> object:
    """Return what a chunk or an answer reports as an error, None if it reports none.

    That is its `error`, unless output stands beside it, or all of an object that says of itself
    that it is an error, as vLLM's before 0.10 and some events do.
    """
    error = content.get("error")
    if error and not any(map(has_output, choices_of(content))):
        return error
    return content if "error" in (content.get("object"), content.get("type")) else None


def has_output(choice: Json) -> bool:
    """Return True if a choice has a finish reason or more than a role."""
    delta = choice.get("delta")
    fields = {**choice, **delta} if isinstance(delta, dict) else choice
    return bool(choice.get("finish_reason")) or any(
        value for name, value in fields.items() if name not in NO_OUTPUT
    )


def ends_inside_event(ending: bytes) -> bool:
    """Return True if a stream with this end stops inside an event and has sent no [DONE]. Comments
    and a JSON object are whole without the empty line behind them."""
    rest = ending[end_of_last_event(ending) :].strip()
    if all(line.startswith(b":") for line in rest.splitlines()) or says_done(ending, at_end=True):
        return False
    data = data_of(rest)
    return data is None or parse_object(data) is None
