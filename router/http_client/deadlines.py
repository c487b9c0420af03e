"""Coarse deadlines for many objects at once, with one timer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

TICK_S = 0.1
NEVER = float("inf")
# The clock of event loops, read without looking up the running loop: that is a system call.
now = time.monotonic


class Expiring(Protocol):
    """An object with a deadline, in seconds of `now`.

    It may postpone its deadline at any time. To advance the deadline it must be watched anew.
    """

    deadline: float

    def expire(self) -> None:
        """Called once, after the object was dropped."""


class Deadlines:
    """Watch deadlines to within `tick` seconds. Watching is one set insertion.

    All objects are checked only when the earliest deadline known at the last check is over.
    """

    def __init__(self, tick: float = TICK_S) -> None:
        self._tick = tick
        self._watched: set[Expiring] = set()
        self.drop: Callable[[Expiring], None] = self._watched.discard
        self._earliest = NEVER
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, item: Expiring) -> None:
        """Call `item.expire()` once its deadline is over, unless it is dropped before."""
        self._watched.add(item)
        if item.deadline < self._earliest:
            self._earliest = item.deadline
        if self._timer is None:
            self._start_timer(asyncio.get_running_loop())

    def _start_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_later(self._tick, self._check, loop)

    def _check(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        moment = now()
        if moment >= self._earliest:
            expired = [item for item in self._watched if item.deadline <= moment]
            self._watched.difference_update(expired)
            self._earliest = min([item.deadline for item in self._watched], default=NEVER)
            for item in expired:
                item.expire()
        if self._watched and self._timer is None:
            self._start_timer(loop)
