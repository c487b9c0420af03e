"""Coarse deadlines for many things at once: one timer, however many wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

TICK = 0.1


class Expiring(Protocol):
    """A thing with a deadline in loop seconds, which it may move at any time."""

    deadline: float

    def expire(self) -> None:
        """Called once, after it was dropped from the watch list."""


class Deadlines:
    """Watches deadlines to within `tick` seconds. A watch is a set insertion; idling is free."""

    def __init__(self, tick: float = TICK) -> None:
        self._tick = tick
        self._watched: set[Expiring] = set()
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, item: Expiring) -> None:
        self._watched.add(item)
        if self._timer is None:
            self._arm(asyncio.get_running_loop())

    def drop(self, item: Expiring) -> None:
        self._watched.discard(item)

    def expired(self, now: float) -> list[Expiring]:
        return [item for item in self._watched if item.deadline <= now]

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_later(self._tick, self._sweep, loop, loop.time)

    def _sweep(self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float]) -> None:
        self._timer = None
        for item in self.expired(clock()):
            self._watched.discard(item)
            item.expire()
        if self._watched and self._timer is None:
            self._arm(loop)
