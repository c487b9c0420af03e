"""Who looks at the page: each has a bounded queue, and who is too slow for it is cut."""

from __future__ import annotations

import asyncio
from collections import deque

MOST_WATCHERS = 16
MOST_QUEUED = 64
MOST_BYTES = 8 * 1024 * 1024


class Viewer:
    """One that looks: events for it, in order. The first may be as large as it likes."""

    def __init__(self) -> None:
        self._queue: deque[bytes] = deque()
        self._size = 0
        self._changed = asyncio.Event()
        self.is_cut = False

    def put(self, event: bytes) -> None:
        if self.is_cut:
            return
        self._queue.append(event)
        self._size += len(event)
        if len(self._queue) > MOST_QUEUED or (len(self._queue) > 1 and self._size > MOST_BYTES):
            self.cut()
        self._changed.set()

    def cut(self) -> None:
        """It gets nothing more, be it too slow or the router at its end."""
        self.is_cut = True
        self._queue.clear()
        self._size = 0
        self._changed.set()

    async def next(self, patience: float) -> bytes:
        """All that is there, after `patience` seconds at most; may be empty."""
        if not self._queue and not self.is_cut:
            self._changed.clear()
            try:
                async with asyncio.timeout(patience):
                    await self._changed.wait()
            except TimeoutError:
                return b""
        block = b"".join(self._queue)
        self._queue.clear()
        self._size = 0
        return block
