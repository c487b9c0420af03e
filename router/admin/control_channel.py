"""How the control of a router reaches its worker processes, over a Unix socket in a
private directory.

Each worker dials once and keeps the line. A state goes out as one line of JSON, at once to who has
just come; what the worker sees when it has taken it over comes back as one. There are no other
messages: nobody can miss a change, but only be late with all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from router.admin.desired_state import DesiredState, decoded, encoded
from router.admin.worker_process import WorkerProcess
from router.fleet.views import FleetView

logger = logging.getLogger("disagg_router.admin")
# Seconds for a worker's answer, and for the first state of a worker that has just started.
PATIENCE = 2.0
FIRST_WORD = 10.0
AGAIN = 0.2
LONGEST_LINE = 64 * 1024 * 1024


class WorkerChannel:
    """To one worker, one exchange at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._lock = asyncio.Lock()
        self.is_over = asyncio.Event()

    async def ask(self, board: ControlChannel) -> FleetView | None:
        """Ends the line where there is no answer in time: what came later would be another's."""
        if self.is_over.is_set():
            return None
        try:
            async with asyncio.timeout(PATIENCE), self._lock:
                self._writer.write(encoded(board.state) + b"\n")
                await self._writer.drain()
                return FleetView.model_validate_json(await self._reader.readuntil(b"\n"))
        except (TimeoutError, OSError, asyncio.IncompleteReadError, ValueError):
            self.is_over.set()
            return None

    @property
    def is_gone(self) -> bool:
        return self._reader.at_eof()

    def close(self) -> None:
        self.is_over.set()
        self._writer.transport.abort()


class ControlChannel:
    """The control's end: `known` workers there should be."""

    def __init__(self, state: DesiredState, known: int) -> None:
        self.state = state
        self._known = known
        self._lines: dict[WorkerChannel, None] = {}
        self._taken: set[asyncio.Task[Any]] = set()

    @contextlib.asynccontextmanager
    async def open(self, path: Path) -> AsyncIterator[None]:
        server = await asyncio.start_unix_server(self._take, path, limit=LONGEST_LINE)
        try:
            yield
        finally:
            server.close()
            for line in list(self._lines):
                line.close()
            if self._taken:
                await asyncio.wait(self._taken, timeout=PATIENCE)

    async def tell(self, state: DesiredState) -> Sequence[FleetView | None]:
        self.state = state
        views = await asyncio.gather(*[line.ask(self) for line in self._lines])
        told = [view for view in views if view is not None]
        return [*told, *[None] * (self._known - len(told))]

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for gone in [line for line in self._lines if line.is_gone]:
            gone.close()
        if (task := asyncio.current_task()) is not None:
            self._taken.add(task)
            task.add_done_callback(self._taken.discard)
        line = WorkerChannel(reader, writer)
        self._lines[line] = None  # before it is asked: what is told meanwhile is told to it, too
        try:
            await line.ask(self)
            await line.is_over.wait()
        finally:
            self._lines.pop(line, None)
            line.close()


@contextlib.asynccontextmanager
async def follow_control(path: Path, member: WorkerProcess) -> AsyncIterator[None]:
    """A worker's end, until the block ends. It has the state when the block begins; but an control
    that says nothing keeps no worker from serving."""
    has_heard = asyncio.Event()
    task = asyncio.create_task(_follow(path, member, has_heard))
    try:
        async with asyncio.timeout(FIRST_WORD):
            await has_heard.wait()
    except TimeoutError:
        logger.error("no word of what operators want: serving without")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _follow(path: Path, member: WorkerProcess, has_heard: asyncio.Event) -> None:
    while True:
        try:
            reader, writer = await asyncio.open_unix_connection(path, limit=LONGEST_LINE)
            with contextlib.closing(writer):
                while True:
                    state = decoded(await reader.readuntil(b"\n"))
                    view = member.adopt(state)
                    has_heard.set()
                    writer.write(view.model_dump_json().encode() + b"\n")
                    await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass  # the control is gone, or has given this line up
        except (ValidationError, asyncio.LimitOverrunError) as error:
            logger.error("what operators want cannot be read: %s", error)
        except Exception:
            logger.exception("what operators want cannot be done")
        await asyncio.sleep(AGAIN)
