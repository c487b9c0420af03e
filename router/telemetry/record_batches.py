"""Requests that have ended, handed on together: what is done for each costs less that way, and is
done when no client waits for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from router.telemetry.record import Record

logger = logging.getLogger("disagg_router")
# Seconds that an ended request may wait for others.
LATE = 0.1
MOST = 512

Reader = Callable[[Sequence[Record]], None]


class Books:
    """`readers` are each given all that ended; a fault of one is no other's."""

    def __init__(self, readers: Sequence[Reader], late: float = LATE) -> None:
        self._readers = readers
        self._late = late
        self._ended: list[Record] = []
        self._timer: asyncio.TimerHandle | None = None

    def add(self, record: Record) -> None:
        self._ended.append(record)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._late, self.flush)
        elif len(self._ended) >= MOST:
            self.flush()

    def flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        ended, self._ended = self._ended, []
        if not ended:
            return
        for read in self._readers:
            try:
                read(ended)
            except Exception:
                logger.exception("the books of %d requests could not be read", len(ended))
