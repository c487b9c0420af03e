"""The limit on the memory of answers under way.

A relayed answer is held only up to a high-water mark. Other answers are held to their end or
longer: prefill answers, errors, answers of conversations, and answers that are translated for
another API. The holder of such an answer reserves its bytes in a MemoryBudget and releases them at
the end. Answers below UNCOUNTED_BYTES are neither counted nor rejected.
"""

from __future__ import annotations

UNCOUNTED_BYTES = 224 * 1024


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
