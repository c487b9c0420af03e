"""What happened: time, who, what. Kept as it is until somebody reads it; a run of one seed gives
the same lines wherever it runs."""

from typing import NamedTuple

from engine_ext.common.orders import StepMetadata
from engine_ext.wire.notifications import decode_notification


class Event(NamedTuple):
    at: float
    who: str
    what: str
    details: object = ""


class Trace:
    LIMIT = 100_000

    def __init__(self) -> None:
        self.events: list[Event] = []

    def add(self, at: float, who: str, what: str, details: object = "") -> None:
        if len(self.events) < self.LIMIT:
            self.events.append(Event(at, who, what, details))

    def lines(self, last: int | None = None) -> list[str]:
        events = self.events if last is None else self.events[-last:]
        return [f"{e.at:10.3f}  {e.who:<12} {e.what} {_in_words(e.details)}" for e in events]


def _in_words(details: object) -> str:
    if isinstance(details, bytes):
        return f"{decode_notification(details)!r:.240}"
    if isinstance(details, StepMetadata):
        return f"{sorted(map(str, details.orders))}"
    if isinstance(details, set | frozenset):
        return f"{sorted(details)}"
    return f"{details!s:.240}"
