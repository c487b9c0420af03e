"""Says a thing at most once per period, with how often it was held back."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable


class Throttle:
    def __init__(
        self,
        logger: logging.Logger,
        period: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._period = period
        self._clock = clock
        self._next: dict[str, float] = {}
        self._held: dict[str, int] = {}

    def warn(self, message: str, detail: str) -> None:
        """`message` is the key, so it must come from a small set; `detail` may be anything."""
        now = self._clock()
        if now < self._next.get(message, now):
            self._held[message] = self._held.get(message, 0) + 1
            return
        held = self._held.pop(message, 0)
        self._next[message] = now + self._period
        suffix = f" (and {held} times since it was last said)" if held else ""
        self._logger.warning("%s: %s%s", message, detail, suffix)
