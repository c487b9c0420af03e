"""The one reader of event streams (server-sent events, SSE).

Every part of the router that needs the end or the data of an event uses this
module. The format is that of the HTML standard:
https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream

Grammar
-------
A stream is UTF-8 text, perhaps behind a byte order mark. A line ends with LF, CR LF or CR, and one
stream may mix them. An empty line ends an event. A line that begins with a colon is a comment. Any
other line is a field: a name, perhaps a colon, perhaps one space, and a value. The data of an event
are the values of its `data` lines, joined by LF. An event without a `data` line means nothing.

An event therefore ends behind two line ends in a row, which is behind one of these pairs of bytes:
LF LF, LF CR or CR CR. (CR LF is one line end.) Line ends that follow are further empty lines, which
mean nothing and count as the end of the same event. Two pairs may be the end of a block although an
LF belongs to them:

* LF CR is then probably a part of LF CR LF, in a stream with CR LF. `SseReader` waits for the
  next byte and passes the whole line end.
* CR CR passes at once, since a stream with CR would otherwise lag by one event. If an LF follows,
  it is an empty line at the start of the next block, and means nothing.

The standard has a byte order mark at the start of a stream only. This reader accepts one at the
start of each event, so that what it reads does not depend on how a stream was cut into blocks. An
event that the stream breaks off is discarded by clients; `events_in` returns it only `at_end`.

Theory of operation
-------------------
Bytes arrive in blocks, cut anywhere. `SseReader` returns the whole events of each block as bytes,
and holds a started event back until its end is here. Between the engine's socket and the client,
that happens once, in `EngineAnswer`. Its subscribers (the resume buffer, the validation of a
stream, the tail of a turn, dialects, rate limits, heartbeats) therefore get blocks of whole events
and need no state of their own: `events_in` reads the events of a block with their offsets, and
`data_in` their data alone. `SseReader.read` does both steps for a program that only reads.

To read events costs half a microsecond to one for each, and most chunks hold nothing that the
router needs to know. A subscriber therefore first searches for the bytes that it needs, for example
`"error"`, and reads the events only of a block that has them. Such a test must not depend on lines:
a JSON string never spans two lines, but a key and its value may stand in two `data` lines. GAP is
what may stand between them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from router.http_client.errors import EventTooLargeError

# Bytes of one event. The largest that engines send have the ids of a whole prompt, four characters
# for each: those of two million tokens take 8 MiB.
MAX_EVENT_BYTES = 16 * 1024 * 1024
DONE = b"[DONE]"
DONE_EVENT, DONE_AT_END = b"data: [DONE]", b"\n\ndata: [DONE]\n\n"
# What may stand between a JSON key and its value, as a regular expression: a colon, white space
# and, where they are in two lines, `data:`.
GAP = rb"[\sdat:]*"

_EVENT_END = re.compile(rb"(?:\n\n|\r\r|\n\r)[\r\n]*")
# How blocks end that certainly end with an event.
EVENT_ENDS = (b"\n\n", b"\n\r\n", b"\r\r", b"\r\r\n")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class SseEvent(NamedTuple):
    """One event, or comments that stand alone. `start` and `end` are byte offsets in what was read;
    the empty line belongs to the event. `data` is None without a `data` line."""

    start: int
    end: int
    data: bytes | None


class SseReader:
    """Reads a stream block by block: what arrives is passed on in whole events.

    No subscriber behind a reader sees a piece of an event, and a stream that breaks inside an
    event can still end with a well-formed error event. An event is put together once, however
    many blocks it came in. Bytes are neither changed nor, except with `read`, parsed.
    """

    __slots__ = ("_limit", "_offset", "held")

    def __init__(self, limit: int = MAX_EVENT_BYTES) -> None:
        self.held = bytearray()
        self._limit = limit
        self._offset = 0

    def whole_events(self, block: bytes) -> bytes:
        """Return the bytes of all events that end with this block. Raises EventTooLargeError for
        an event of more than the limit."""
        if not self.held:
            if block.endswith(EVENT_ENDS):
                return block
            end = end_of_last_event(block)
            self._hold(block[end:])
            return block[:end]
        seam = bytes(self.held[-2:])  # the first two bytes of what may be an event's end
        end = end_of_last_event(seam + block) - len(seam)
        if end < 0:
            self._hold(block)
            return b""
        self.held += block[:end]
        events = self.rest()
        if len(events) > self._limit and _end_of_first_event(events) > self._limit:
            raise self._too_large()
        self._hold(block[end:])
        return events

    def read(self, block: bytes, at_end: bool = False) -> list[SseEvent]:
        """Return the events that end with this block, with their offsets in the stream. `at_end`:
        no block follows, so the event that has not ended is returned, too. Raises
        EventTooLargeError."""
        block = self.whole_events(block)
        if at_end:
            block += self.rest()
        offset = self._offset
        self._offset += len(block)
        return [
            SseEvent(offset + start, offset + end, data)
            for start, end, data in events_in(block, at_end)
        ]

    def rest(self) -> bytes:
        """Return the event that has not ended, and forget it."""
        held, self.held = bytes(self.held), bytearray()  # cleared, it would keep its memory
        return held

    def _hold(self, piece: bytes) -> None:
        self.held += piece
        if len(self.held) > self._limit:
            raise self._too_large()

    def _too_large(self) -> EventTooLargeError:
        return EventTooLargeError(f"an event of more than {self._limit} bytes")


def events_in(block: bytes, at_end: bool = False) -> Iterator[SseEvent]:
    """Yield the events of a block that begins with an event. `at_end`: the block is the last of its
    stream, so yield an event that has not ended, too. Empty lines before an event belong to none.
    """
    start = _behind_line_ends(block, 0)
    is_simple = block.find(b"\r") < 0
    while start < len(block):
        end = _end_of_event(block, start, is_simple)
        if end < 0:
            if not at_end:
                return
            end = len(block)
        if is_simple and block.startswith(b"data: ", start) and block.find(b"\n", start) == end - 2:
            yield SseEvent(start, end, block[start + 6 : end - 2])  # as most are
        else:
            yield SseEvent(start, end, data_of(block[start:end]))
        start = end


def data_in(block: bytes) -> list[bytes]:
    """Return the data of a block's events that have some, and of one that has not ended."""
    if block.startswith(b"data: ") and block.find(b"\n") == len(block) - 2 and b"\r" not in block:
        return [block[6:-2]]  # most blocks are one event of one line
    events: list[bytes] = []
    data: bytes | None = None
    lines = block.splitlines()
    for number, line in enumerate(lines):
        if line.startswith(b"data:"):
            value = line[6:] if line.startswith(b" ", 5) else line[5:]
            data = value if data is None else data + b"\n" + value
        elif not line:
            if data is not None:
                events.append(data)
                data = None
        elif line == b"data":
            data = b"" if data is None else data + b"\n"
        elif line.startswith(_BYTE_ORDER_MARK) and not (number and lines[number - 1]):
            data = data_of(line)
    if data is not None:
        events.append(data)
    return events


def end_of_last_event(block: bytes) -> int:
    """Return the offset behind the last event that ends in the block, 0 if none does. An event that
    ends with LF CR at the end of the block does not count: an LF may follow."""
    if block.find(b"\r") < 0:
        at = block.rfind(b"\n\n")
        return at + 2 if at >= 0 else 0
    before_last = len(block) - 1
    at = max(block.rfind(b"\n\n"), block.rfind(b"\r\r"), block.rfind(b"\n\r", 0, before_last))
    return _behind_line_ends(block, at + 2) if at >= 0 else 0


def is_between_events(block: bytes) -> bool:
    """Return True if a comment may follow this block without splitting an event."""
    return block.endswith(EVENT_ENDS)


def data_of(event: bytes) -> bytes | None:
    """Return the data of one event: its `data` lines, joined. None if there is no such line."""
    data = data_in(event.removeprefix(_BYTE_ORDER_MARK))
    return data[0] if data else None


def with_data(event: bytes, data: bytes) -> bytes:
    """Return an event that has data, with other `data`, which is one line. The event's other lines
    stay as they are."""
    kept: list[bytes] = []
    is_written = False
    for line in event.removeprefix(_BYTE_ORDER_MARK).splitlines(keepends=True):
        content = line.rstrip(b"\r\n")
        if not content.startswith(b"data:") and content != b"data":
            kept.append(line)
        elif not is_written:
            kept += (b"data: ", data, line[len(content) :])
            is_written = True
    return b"".join(kept)


def comment_lines(name: bytes) -> re.Pattern[bytes]:
    """Return a pattern of the lines `: name value`, with the value as its last group. Replacing
    such a line by nothing leaves the events as they are."""
    # What begins with letters is found sooner: the start of the line is looked at second.
    return re.compile(rb": (?<![^\r\n]: )" + name + rb" ([^\r\n]*)(?:\r\n?|\n)")


def says_done(block: bytes, at_end: bool = False) -> bool:
    """Return True if the block has a [DONE] event. Text of an answer may contain [DONE], too."""
    # As it mostly comes: alone, or behind other events.
    if block.startswith(DONE_EVENT) or block.endswith(DONE_AT_END):
        return True
    if block.rfind(DONE) < 0:
        return False
    for event in events_in(block, at_end):
        if event.data is not None and event.data.startswith(DONE):
            return True
    return False


def _end_of_first_event(block: bytes) -> int:
    return _end_of_event(block, _behind_line_ends(block, 0), block.find(b"\r") < 0)


def _end_of_event(block: bytes, start: int, is_simple: bool) -> int:
    """Return the offset behind the event that starts at `start`, -1 if it does not end.
    `is_simple`: there is no CR in the block."""
    if is_simple:
        at = block.find(b"\n\n", start)
        return -1 if at < 0 else _behind_line_ends(block, at + 2)
    found = _EVENT_END.search(block, start)
    return -1 if found is None else found.end()


def _behind_line_ends(block: bytes, at: int) -> int:
    """Return the offset of the first byte from `at` on that ends no line."""
    while block[at : at + 1] in (b"\n", b"\r"):
        at += 1
    return at
