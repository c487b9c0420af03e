"""Server-sent events, as far as a relay must understand them: where one ends.

https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation
"""

from __future__ import annotations

from router.http_client.errors import EventTooLargeError

BOUNDARIES = (b"\n\n", b"\r\n\r\n", b"\r\r")
# Bytes of the longest boundary that may have come without its last byte.
SEAM = 3
# Bytes of one event. The largest that engines send tell the ids of a whole prompt, four characters
# for each: of two million tokens they take 8 MiB.
EVENT_LIMIT = 16 * 1024 * 1024


class EventGate:
    """Pass whole events and hold a started one back until its end is here.

    So whatever reads the events behind a gate never sees a piece of one, and a stream that breaks
    inside an event can still end with a well-formed error event. An event is put together once,
    however many reads it came in.
    """

    __slots__ = ("_held", "_limit")

    def __init__(self, limit: int = EVENT_LIMIT) -> None:
        self._held = bytearray()
        self._limit = limit

    def passing(self, block: bytes) -> bytes:
        """Return the whole events so far. Raises EventTooLargeError."""
        if self._held:
            return self._with_held(block)
        if block.endswith(BOUNDARIES):
            return block
        cut = end_of_last_event(block)
        self._hold(block[cut:])
        return block[:cut]

    def rest(self) -> bytes:
        """Return the event that has not ended."""
        held, self._held = bytes(self._held), bytearray()  # cleared, it would keep its memory
        return held

    def _with_held(self, block: bytes) -> bytes:
        seam = bytes(self._held[-SEAM:])
        cut = end_of_last_event(seam + block) - len(seam)
        if cut <= 0:
            self._hold(block)
            return b""
        self._held += block[:cut]
        events = self.rest()
        if len(events) > self._limit and _end_of_first_event(events) > self._limit:
            raise self._too_large()
        self._hold(block[cut:])
        return events

    def _hold(self, piece: bytes) -> None:
        self._held += piece
        if len(self._held) > self._limit:
            raise self._too_large()

    def _too_large(self) -> EventTooLargeError:
        return EventTooLargeError(f"an event of more than {self._limit} bytes")


def end_of_last_event(block: bytes) -> int:
    return max(at + len(mark) if (at := block.rfind(mark)) >= 0 else 0 for mark in BOUNDARIES)


def _end_of_first_event(block: bytes) -> int:
    return min(at + len(mark) for mark in BOUNDARIES if (at := block.find(mark)) >= 0)
