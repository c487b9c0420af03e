"""The limits of answers and requests under way: deadlines, with one timer for all, and memory.

A relayed answer is held only up to a high-water mark. Other answers are held to their end or
longer: prefill answers, errors, answers of conversations, and answers that are translated for
another API. The holder of such an answer reserves its bytes in a MemoryBudget and releases them at
the end. Answers below UNCOUNTED_BYTES are neither counted nor rejected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic as now
from typing import Protocol

TICK_S = 0.1
NEVER = float("inf")
UNCOUNTED_BYTES = 256 * 1024
FEW_OBJECTS = 4096
"""A check of so many deadlines takes 0.2 ms; checks of more are rarer in proportion."""


class Expiring(Protocol):
    """An object with a deadline, in seconds of `now`, which it may move at any time."""

    deadline: float

    def expire(self) -> None:
        """Called once, after the object was dropped."""


class Deadlines:
    """Watch deadlines to within `tick` seconds, or longer for thousands of objects and after the
    process stood still.

    Nearly all deadlines are met. So watching an object costs next to nothing, and a timer that
    always runs looks at all objects.
    """

    def __init__(self, tick: float = TICK_S) -> None:
        self._tick = tick
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watched: set[Expiring] = set()
        # Methods of the set, so that neither costs a call of Python.
        self.watch: Callable[[Expiring], None] = self._watched.add
        self.drop: Callable[[Expiring], None] = self._watched.discard

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Check deadlines from now on; a second call for the same loop changes nothing."""
        if self._loop is not loop:
            self._loop = loop
            loop.call_later(self._tick, self._check, loop, now() + self._tick)

    def _check(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        moment = now()
        if moment > due + self._tick:
            # The process stood still. Read what has arrived meanwhile before anything expires.
            loop.call_later(self._tick, self._check, loop, NEVER)
            return
        expired = [item for item in self._watched if item.deadline <= moment]
        self._watched.difference_update(expired)
        delay = self._tick * (1 + len(self._watched) // FEW_OBJECTS)
        loop.call_later(delay, self._check, loop, moment + delay)
        for item in expired:
            item.expire()


class MemoryBudget:
    """A `limit` in bytes on memory that all requests use together, and the bytes in use (`size`).
    A limit of 0 means unlimited."""

    __slots__ = ("limit", "size")

    def __init__(self, limit: int = 0) -> None:
        self.limit, self.size = limit, 0

    def has_room(self, more: int) -> bool:
        return not self.limit or self.size + more <= self.limit


class Reservation:
    """The bytes that one holder has reserved. The holder must release them, once or more often."""

    __slots__ = ("_memory", "size")

    def __init__(self, memory: MemoryBudget) -> None:
        self._memory = memory
        self.size = 0

    def resize(self, size: int) -> bool:
        """Reserve `size` bytes instead of the bytes reserved before. Return False and keep the
        former reservation if there is no room."""
        memory = self._memory
        more = (size if size > UNCOUNTED_BYTES else 0) - self.size
        if more > 0 and not memory.has_room(more):
            return False
        memory.size += more
        self.size += more
        return True

    def release(self) -> None:
        self._memory.size -= self.size
        self.size = 0
