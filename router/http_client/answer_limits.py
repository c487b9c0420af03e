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
