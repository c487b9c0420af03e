"""The memory of answers that are held whole, with one limit for all of them together.

An answer that is relayed to its client is held only up to a high-water mark. Other answers are held
until their end, or longer: a prefiller's, an engine's error, a conversation's, and those that are
translated for another API. Whoever holds one reserves its bytes here, and releases them in the end.
Answers below UNCOUNTED bytes are neither counted nor refused, as every request may hold that much.
"""

from __future__ import annotations

UNCOUNTED = 256 * 1024


class AnswerMemory:
    """The bytes that are reserved. `limit` 0 is no limit."""

    __slots__ = ("limit", "size")

    def __init__(self, limit: int = 0) -> None:
        self.limit, self.size = limit, 0


class Reservation:
    """The bytes that one holder has reserved. They must be released; releasing twice is allowed."""

    __slots__ = ("_memory", "size")

    def __init__(self, memory: AnswerMemory) -> None:
        self._memory = memory
        self.size = 0

    def resize(self, size: int) -> bool:
        """Reserve `size` bytes in place of those before. Returns False if there is no room for
        them; those before stay reserved."""
        memory = self._memory
        more = (size if size > UNCOUNTED else 0) - self.size
        if more > 0 and 0 < memory.limit < memory.size + more:
            return False
        self._add(more)
        return True

    def release(self) -> None:
        self._add(-self.size)

    def _add(self, more: int) -> None:
        self._memory.size += more
        self.size += more
