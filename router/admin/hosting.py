"""The control at work: it answers on its port, if it has one, beside a router or beside several."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import uvicorn

from router.admin.control import Control
from router.admin.control_channel import ControlChannel
from router.admin.desired_state import DesiredState, Tunables
from router.admin.endpoints import application
from router.admin.worker_process import WorkerProcess
from router.fleet.views import FleetView
from router.settings import Settings

logger = logging.getLogger("disagg_router.admin")
MOST_AT_ONCE = 64
# Seconds that a connection may last. Each is for one call, so who lasts longer keeps others out.
LONGEST = 30.0
# Seconds for calls that run when the router ends, and for the control of several to open.
PARTING = 2
PATIENCE = 10.0
ADDRESS = "control"


class AdminServer(uvicorn.Server):
    """uvicorn's server without its signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class SingleProcess:
    """The only process of a router, which is this one."""

    def __init__(self, member: WorkerProcess) -> None:
        self._member = member

    async def tell(self, state: DesiredState) -> Sequence[FleetView | None]:
        return [self._member.adopt(state)]


@contextlib.asynccontextmanager
async def serve_control(control: Control, listener: socket.socket | None) -> AsyncIterator[None]:
    """Until the block ends."""
    tasks = [asyncio.create_task(control.run())]
    server = None
    if listener is not None:
        server = AdminServer(_config(control))
        tasks.append(asyncio.create_task(_sweep(server)))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        if server is not None:
            server.should_exit = True
            tasks.append(serving)
        await asyncio.gather(*tasks, return_exceptions=True)


async def _sweep(server: AdminServer) -> None:
    """Ends connections that last too long, be it that they never ask for anything."""
    since: dict[Any, float] = {}
    clock = asyncio.get_running_loop().time
    while True:
        since = {one: since.get(one, clock()) for one in server.server_state.connections}
        for connection, at in since.items():
            if clock() - at > LONGEST:
                connection.transport.abort()
        await asyncio.sleep(LONGEST / 10)


def _config(control: Control) -> uvicorn.Config:
    return uvicorn.Config(
        application(control),
        http="h11",  # which bounds the head of a request
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=MOST_AT_ONCE,
        headers=[("connection", "close")],
        timeout_graceful_shutdown=PARTING,
    )


class ControlThread:
    """The control of several worker processes, on a thread of its own, since the process that has
    it waits for its workers."""

    def __init__(
        self,
        settings: Settings,
        read_again: Callable[[], Settings],
        directory: Path,
        listener: socket.socket | None,
    ) -> None:
        """Raises SettingsError."""
        self._board = ControlChannel(DesiredState(Tunables.of(settings)), settings.workers)
        self._control = Control(settings, self._board, read_again)
        self._path = directory / ADDRESS
        self._listener = listener
        self._is_open = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: asyncio.Event | None = None

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run, name="admin", daemon=True)
        thread.start()
        if not self._is_open.wait(PATIENCE):
            logger.error("the control of the workers does not open: there is no admin API")
        try:
            yield
        finally:
            if self._end is not None:
                self._soon(self._end.set)
            thread.join(PATIENCE)

    def reload(self) -> None:
        """From any thread, or a signal's handler."""
        self._soon(self._control.reload_soon)

    def _soon(self, what: Callable[[], object]) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has closed
                self._loop.call_soon_threadsafe(what)

    def _run(self) -> None:
        try:
            asyncio.run(self._work())
        except Exception:
            logger.exception("the control of the workers died: there is no admin API any more")

    async def _work(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        async with self._board.open(self._path), serve_control(self._control, self._listener):
            self._is_open.set()
            await self._end.wait()
