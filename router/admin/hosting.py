"""Runs the control, and its API on the admin port: beside a router, or on a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn

from router.admin.control import Control
from router.admin.endpoints import application
from router.admin.processes import ControlChannel, DesiredState, Tunables
from router.settings import Settings

logger = logging.getLogger("disagg_router.admin")
MAX_CONNECTIONS = 64
# Each connection is for one call, so a connection that lasts longer only keeps others out.
CONNECTION_LIFETIME_S = 30.0
# For calls that run when the router stops.
SHUTDOWN_TIMEOUT_S = 2
THREAD_TIMEOUT_S = 10.0
SOCKET_NAME = "control"


class EmbeddedServer(uvicorn.Server):
    """uvicorn's server without its signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def serve_control(control: Control, listener: socket.socket | None) -> AsyncIterator[None]:
    """Run the control until the block ends, with its API if there is a socket to listen on."""
    tasks = [asyncio.create_task(control.run())]
    server = None
    if listener is not None:
        config = uvicorn.Config(
            application(control),
            http="h11",  # which bounds the head of a request
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=MAX_CONNECTIONS,
            headers=[("connection", "close")],
            timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,
        )
        server = EmbeddedServer(config)
        tasks.append(asyncio.create_task(_end_old_connections(server)))
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


async def _end_old_connections(server: uvicorn.Server) -> None:
    """End connections that last too long, even those that never send a request."""
    since: dict[Any, float] = {}
    clock = asyncio.get_running_loop().time
    while True:
        since = {one: since.get(one, clock()) for one in server.server_state.connections}
        for connection, at in since.items():
            if clock() - at > CONNECTION_LIFETIME_S:
                connection.transport.abort()
        await asyncio.sleep(CONNECTION_LIFETIME_S / 10)


class ControlThread:
    """The control of several worker processes, on a thread of the process that supervises them.

    The workers connect to a socket in `directory`. Raises SettingsError.
    """

    def __init__(
        self,
        settings: Settings,
        read_again: Callable[[], Settings],
        directory: Path,
        listener: socket.socket | None,
    ) -> None:
        self._channel = ControlChannel(DesiredState(Tunables.of(settings)), settings.workers)
        self._control = Control(settings, self._channel.publish, read_again)
        self._path = directory / SOCKET_NAME
        self._listener = listener
        self._is_open = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: asyncio.Event | None = None

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Run the thread until the block ends."""
        thread = threading.Thread(target=self._run, name="admin", daemon=True)
        thread.start()
        if not self._is_open.wait(THREAD_TIMEOUT_S):
            logger.error("the worker control does not start, so there is no admin API")
        try:
            yield
        finally:
            if self._end is not None:
                self._call_soon(self._end.set)
            thread.join(THREAD_TIMEOUT_S)

    def reload(self) -> None:
        """Reload the settings. Safe in any thread and in a signal handler."""
        self._call_soon(self._control.reload_soon)

    def _call_soon(self, callback: Callable[[], object]) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has closed
                self._loop.call_soon_threadsafe(callback)

    def _run(self) -> None:
        try:
            asyncio.run(self._work())
        except Exception:
            logger.exception("the worker control failed, and the admin API has stopped")

    async def _work(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        async with self._channel.open(self._path), serve_control(self._control, self._listener):
            self._is_open.set()
            await self._end.wait()
