"""Deadlines of everything that waits, with one timer for all.

After the process stood still (a busy machine, a paused container), what has arrived meanwhile lies
unread in the sockets. A timer of its own would expire before that is read. These deadlines wait for
one more tick.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic as now
from types import TracebackType
from typing import Protocol

TICK_S = 0.1
NEVER = float("inf")
FEW_OBJECTS = 4096
"""A check of so many deadlines takes 0.2 ms; checks of more are rarer in proportion."""


class Expiring(Protocol):
    """An object with a deadline, in seconds of `now`, which it may move at any time."""

    deadline: float

    def expire(self) -> None:
        """Called once, after the object was dropped."""


class Deadlines:
    """Watch deadlines to within TICK_S, or longer for thousands of objects and after the process
    stood still.

    Nearly all deadlines are met. So watching an object costs next to nothing, and a timer that
    always runs looks at all objects.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        # When the next check is due, and the last time when the process stood still.
        self._due = NEVER
        self._pause = (0.0, 0.0)
        self._watched: set[Expiring] = set()
        # Methods of the set, so that neither costs a call of Python.
        self.watch: Callable[[Expiring], None] = self._watched.add
        self.drop: Callable[[Expiring], None] = self._watched.discard

    @property
    def watched_count(self) -> int:
        return len(self._watched)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Check deadlines from now on; a second call for the same loop changes nothing."""
        if self._loop is not loop:
            self._loop = loop
            self._check_later(loop, TICK_S, True)

    def seconds_since(self, moment: float) -> float:
        """Return the seconds since `moment`, a time of `now`, without the last time when the
        process stood still."""
        present = now()
        is_late = present > self._due + TICK_S  # and the timer has not fired yet
        begin, end = (self._due, present) if is_late else self._pause
        return present - moment - max(0.0, end - max(begin, moment))

    def _check_later(self, loop: asyncio.AbstractEventLoop, delay: float, may_wait: bool) -> None:
        self._due = now() + delay
        loop.call_later(delay, self._check, loop, may_wait)

    def _check(self, loop: asyncio.AbstractEventLoop, may_wait: bool) -> None:
        moment = now()
        if moment > self._due + TICK_S:
            self._pause = self._due, moment
            if may_wait:
                # Read what has arrived meanwhile before anything expires.
                self._check_later(loop, TICK_S, False)
                return
        expired = [item for item in self._watched if item.deadline <= moment]
        self._watched.difference_update(expired)
        self._check_later(loop, TICK_S * (1 + len(self._watched) // FEW_OBJECTS), True)
        for item in expired:
            item.expire()


class TimeLimit:
    """A limit on the time of an `async with` block, as asyncio.timeout is, that `deadlines` watch.

    The block ends with TimeoutError at `deadline`, a time of `now`, or when `expire` is called.
    """

    def __init__(self, deadlines: Deadlines, deadline: float) -> None:
        self.deadline = deadline
        self._deadlines = deadlines
        self._timeout = asyncio.timeout(None)

    @property
    def has_expired(self) -> bool:
        return self._timeout.expired()

    def expire(self) -> None:
        """End the block at once."""
        if not self._timeout.expired():
            self._timeout.reschedule(0.0)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()
        self._deadlines.start(asyncio.get_running_loop())
        self._deadlines.watch(self)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._deadlines.drop(self)
        await self._timeout.__aexit__(kind, error, trace)
