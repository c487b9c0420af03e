"""What the other worker processes of this router see, over Unix sockets in its private directory.

Each worker listens at its own; who is looked at dials all others, and hears once a tick what they
see, one line of JSON each. While nobody looks there is no line.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from pydantic import ValidationError

from router.ui.request_view import RequestSummary
from router.ui.snapshot import ProcessSnapshot

logger = logging.getLogger("disagg_router.page")
SUFFIX = ".page"
TICK = 0.25
# Seconds for a line to be read by who wanted it, and for one to come.
PATIENCE = 2.0
AGAIN = 1.0
LONGEST_LINE = 16 * 1024 * 1024
MOST_LINES = 256
MOST_ENDED = 1024


Looking = Callable[[], contextlib.AbstractContextManager[Callable[[], ProcessSnapshot]]]


class OtherWorkers:
    """Of the worker `number`, of `count` that there should be."""

    def __init__(self, directory: Path, number: int, count: int) -> None:
        self._paths = [directory / f"{n}{SUFFIX}" for n in range(count) if n != number]
        self._pictures: dict[Path, ProcessSnapshot] = {}
        self._ended: deque[RequestSummary] = deque(maxlen=MOST_ENDED)
        self._untold = 0

    async def run(self) -> None:
        """Ends only when it is cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                for path in self._paths:
                    group.create_task(self._follow(path))
        finally:
            self._pictures.clear()
            self._ended.clear()

    def pictures(self) -> list[ProcessSnapshot | None]:
        """What each sees; None for one that does not answer."""
        return [self._pictures.get(path) for path in self._paths]

    def take_ended(self) -> tuple[Sequence[RequestSummary], int]:
        """Since the last time, and how many more did."""
        ended, untold = list(self._ended), self._untold
        self._ended.clear()
        self._untold = 0
        return ended, untold

    async def _follow(self, path: Path) -> None:
        while True:
            try:
                await self._hear(path)
            except (OSError, TimeoutError, asyncio.IncompleteReadError):
                pass  # it is gone, or has not begun
            except (ValidationError, asyncio.LimitOverrunError):
                logger.exception("what another worker tells the page cannot be read")
            finally:
                self._pictures.pop(path, None)
            await asyncio.sleep(AGAIN)

    async def _hear(self, path: Path) -> None:
        reader, writer = await asyncio.open_unix_connection(path, limit=LONGEST_LINE)
        try:
            while True:
                async with asyncio.timeout(PATIENCE):
                    seen = ProcessSnapshot.model_validate_json(await reader.readuntil(b"\n"))
                self._pictures[path] = seen
                self._untold += seen.untold
                self._ended.extend(seen.ended)
        finally:
            writer.transport.abort()


@contextlib.asynccontextmanager
async def serve_snapshots(path: Path, looked_at: Looking) -> AsyncIterator[None]:
    """Tells siblings what this worker sees, until the block ends."""
    lines: set[asyncio.Task[None]] = set()

    async def tell(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        lines.add(task)
        try:
            if len(lines) <= MOST_LINES:
                with looked_at() as look:
                    await _tell_on(reader, writer, look)
        except (OSError, TimeoutError):
            pass  # it does not look any more
        except Exception:
            logger.exception("another worker's page cannot be told what this one sees")
        finally:
            lines.discard(task)
            writer.transport.abort()

    server = await asyncio.start_unix_server(tell, path)
    try:
        yield
    finally:
        server.close()
        for task in list(lines):
            task.cancel()
        await asyncio.gather(*lines, return_exceptions=True)


async def _tell_on(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, look: Callable[[], ProcessSnapshot]
) -> None:
    while not reader.at_eof():
        writer.write(look().model_dump_json().encode() + b"\n")
        async with asyncio.timeout(PATIENCE):
            await writer.drain()
        await asyncio.sleep(TICK)
