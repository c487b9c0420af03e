"""Server-sent events, as far as a relay must understand them: where one ends.

https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation
"""

from __future__ import annotations

BOUNDARIES = (b"\n\n", b"\r\n\r\n", b"\r\r")
HOLD_LIMIT = 256 * 1024


class EventGate:
    """Lets whole events pass and holds a started one back until its end is here.

    So a stream that breaks inside an event can still end with a well-formed error event. A stream
    without any boundary in HOLD_LIMIT bytes is no event stream, and passes as it comes.
    """

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held = b""

    def passing(self, block: bytes) -> bytes:
        if self._held:
            block, self._held = self._held + block, b""
        if block.endswith(BOUNDARIES):
            return block
        cut = end_of_last_event(block)
        if len(block) - cut > HOLD_LIMIT:
            return block
        self._held = block[cut:]
        return block[:cut]

    def rest(self) -> bytes:
        held, self._held = self._held, b""
        return held


def end_of_last_event(block: bytes) -> int:
    return max(at + len(mark) if (at := block.rfind(mark)) >= 0 else 0 for mark in BOUNDARIES)
