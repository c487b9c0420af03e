"""Finding stop strings in streamed text, also across the pieces it comes in."""

from collections.abc import Sequence
from typing import NamedTuple


class Scanned(NamedTuple):
    text: str
    """What may leave."""
    matched: str | None
    """The stop string that ended the text."""


class StopStrings:
    """Keeps back exactly the text that may still become a stop string."""

    def __init__(self, stops: Sequence[str], *, include_in_output: bool) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._include = include_in_output
        self._held = ""

    def scan(self, piece: str) -> Scanned:
        text = self._held + piece
        first = min(
            ((at, stop) for stop in self._stops if (at := text.find(stop)) >= 0), default=None
        )
        if first is not None:
            at, stop = first
            self._held = ""
            return Scanned(text[: at + len(stop) if self._include else at], stop)
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        cut = len(text) - keep
        self._held = text[cut:]
        return Scanned(text[:cut], None)

    def flush(self) -> str:
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with, `stop` itself left out."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
