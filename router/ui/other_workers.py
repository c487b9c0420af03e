"""Snapshots of the router's other worker processes, over Unix sockets in its private directory.

Each worker listens at its own socket. A worker with viewers connects to all the others, and each
sends it a snapshot four times a second, as one line of JSON. Without viewers there is no
connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from pydantic import ValidationError

from router.ui.live_requests import RequestSummary
from router.ui.snapshot import ProcessSnapshot

logger = logging.getLogger("disagg_router.ui")
SNAPSHOT_INTERVAL_S = 0.25
# For a line to arrive, and for the reader to take one.
LINE_TIMEOUT_S = 2.0
RECONNECT_DELAY_S = 1.0
MAX_LINE_BYTES = 16 * 1024 * 1024
MAX_CONNECTIONS = 256
MAX_ENDED = 1024
Reading = Callable[[], contextlib.AbstractContextManager[Callable[[], ProcessSnapshot]]]


def snapshot_socket(directory: Path, number: int) -> Path:
    """Return the path of a worker's socket."""
    return directory / f"{number}.page"


class OtherWorkers:
    """The snapshots of all workers but `number`, of `count` workers that there should be."""

    def __init__(self, directory: Path, number: int, count: int) -> None:
        self._paths = [snapshot_socket(directory, n) for n in range(count) if n != number]
        self._snapshots: dict[Path, ProcessSnapshot] = {}
        self._ended: deque[RequestSummary] = deque(maxlen=MAX_ENDED)
        self._missed = 0

    async def run(self) -> None:
        """Receive snapshots until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                for path in self._paths:
                    group.create_task(self._follow(path))
        finally:
            self._snapshots.clear()
            self._ended.clear()

    def snapshots(self) -> list[ProcessSnapshot | None]:
        """Return each worker's last snapshot, None for one that does not answer."""
        return [self._snapshots.get(path) for path in self._paths]

    def take_ended(self) -> tuple[Sequence[RequestSummary], int]:
        """Return the requests that ended since the last call, and how many more there were."""
        ended, missed = list(self._ended), self._missed
        self._ended.clear()
        self._missed = 0
        return ended, missed

    async def _follow(self, path: Path) -> None:
        while True:
            try:
                await self._receive(path)
            except (OSError, TimeoutError, asyncio.IncompleteReadError):
                pass  # the worker is gone, or has not started
            except (ValidationError, asyncio.LimitOverrunError):
                logger.exception("another worker's snapshot cannot be read")
            finally:
                self._snapshots.pop(path, None)
            await asyncio.sleep(RECONNECT_DELAY_S)

    async def _receive(self, path: Path) -> None:
        reader, writer = await asyncio.open_unix_connection(path, limit=MAX_LINE_BYTES)
        try:
            while True:
                async with asyncio.timeout(LINE_TIMEOUT_S):
                    line = await reader.readuntil(b"\n")
                self._snapshots[path] = snapshot = ProcessSnapshot.model_validate_json(line)
                self._missed += snapshot.missed
                self._ended.extend(snapshot.ended)
        finally:
            writer.transport.abort()


@contextlib.asynccontextmanager
async def serve_snapshots(path: Path, reading: Reading) -> AsyncIterator[None]:
    """Send this worker's snapshots to the workers that connect, until the block ends.

    `reading` is `SnapshotSource.reading`.
    """
    connections: set[asyncio.Task[None]] = set()

    async def send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        try:
            if len(connections) <= MAX_CONNECTIONS:
                with reading() as take_snapshot:
                    while not reader.at_eof():
                        writer.write(take_snapshot().model_dump_json().encode() + b"\n")
                        async with asyncio.timeout(LINE_TIMEOUT_S):
                            await writer.drain()
                        await asyncio.sleep(SNAPSHOT_INTERVAL_S)
        except (OSError, TimeoutError):
            pass  # the reader's last viewer has left
        except Exception:
            logger.exception("a snapshot cannot be sent to another worker")
        finally:
            connections.discard(task)
            writer.transport.abort()

    server = await asyncio.start_unix_server(send, path)
    try:
        yield
    finally:
        server.close()
        for task in list(connections):
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
