"""Server-sent events, as far as a relay must understand them: where one ends.

https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation
"""

from __future__ import annotations

BOUNDARIES = (b"\n\n", b"\r\n\r\n", b"\r\r")
HOLD_LIMIT = 256 * 1024
# Where a comment tells the ids of a whole prompt, four characters each: two million of them.
HOLD_LIMIT_OF_IDS = 8 * 1024 * 1024


class EventGate:
    """Lets whole events pass and holds a started one back until its end is here.

    So a stream that breaks inside an event can still end with a well-formed error event. A stream
    without any boundary in `limit` bytes is no event stream, and passes as it comes.
    """

    __slots__ = ("_held", "_limit")

    def __init__(self, limit: int = HOLD_LIMIT) -> None:
        self._held = b""
        self._limit = limit

    def passing(self, block: bytes) -> bytes:
        if self._held:
            block, self._held = self._held + block, b""
        if block.endswith(BOUNDARIES):
            return block
        cut = end_of_last_event(block)
        if len(block) - cut > self._limit:
            return block
        self._held = block[cut:]
        return block[:cut]

    def rest(self) -> bytes:
        held, self._held = self._held, b""
        return held


def end_of_last_event(block: bytes) -> int:
    return max(at + len(mark) if (at := block.rfind(mark)) >= 0 else 0 for mark in BOUNDARIES)
