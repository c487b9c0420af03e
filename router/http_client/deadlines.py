"""Coarse deadlines for many things at once: one timer, however many wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

TICK = 0.1
NEVER = float("inf")
# The clock of event loops, read without asking which loop runs: that is a system call each time.
now = time.monotonic


class Expiring(Protocol):
    """A thing with a deadline, in seconds of `now`.

    It may move its deadline to a later time whenever it likes, to an earlier one with a new watch.
    """

    deadline: float

    def expire(self) -> None:
        """Called once, after it was dropped from the watch list."""


class Deadlines:
    """Watches deadlines to within `tick` seconds. A watch is a set insertion.

    All that are watched are looked at only when the earliest of them, as it was when it was last
    looked at, is over.
    """

    def __init__(self, tick: float = TICK) -> None:
        self._tick = tick
        self._watched: set[Expiring] = set()
        self.drop: Callable[[Expiring], None] = self._watched.discard
        self._earliest = NEVER
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, item: Expiring) -> None:
        self._watched.add(item)
        if item.deadline < self._earliest:
            self._earliest = item.deadline
        if self._timer is None:
            self._arm(asyncio.get_running_loop())

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_later(self._tick, self._sweep, loop)

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        moment = now()
        if moment >= self._earliest:
            self._expire(moment)
        if self._watched and self._timer is None:
            self._arm(loop)

    def _expire(self, moment: float) -> None:
        over = [item for item in self._watched if item.deadline <= moment]
        self._watched.difference_update(over)
        self._earliest = min([item.deadline for item in self._watched], default=NEVER)
        for item in over:
            item.expire()
