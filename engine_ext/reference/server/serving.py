"""uvicorn, with the signals handled here: the first one drains, the second ends the process."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)
KEEP_ALIVE_TIMEOUT_S = 75
"""Longer than a router's pool keeps an idle connection, so that the router closes first."""


class ReferenceServer(uvicorn.Server):
    """uvicorn raises a signal again when it is done, and then no exit status could be 0."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for bound in sockets or []:
            host, port = bound.getsockname()[:2]
            logger.info("ready on http://%s:%d", f"[{host}]" if ":" in host else host, port)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: a client that connects too early is refused.

    Raises OSError if the address is taken or not ours.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    with contextlib.ExitStack() as undo:
        bound = undo.enter_context(socket.socket(family, kind, protocol))
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        undo.pop_all()
    return bound


async def serve(app: ASGIApp, bound: socket.socket, *, shutdown_timeout: int) -> float:
    """Until SIGINT or SIGTERM; then requests have `shutdown_timeout` seconds to finish. Returns the
    seconds since the signal."""
    signalled_at = time.monotonic()
    server = ReferenceServer(
        uvicorn.Config(
            app,
            http="h11",  # with httptools, uvicorn takes trailers for headers
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_keep_alive=KEEP_ALIVE_TIMEOUT_S,
            timeout_graceful_shutdown=shutdown_timeout,
        )
    )

    def stop(number: signal.Signals) -> None:
        nonlocal signalled_at
        if server.should_exit:
            os._exit(128 + number)
        signalled_at = time.monotonic()
        server.should_exit = True

    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, stop, number)
    try:
        await server.serve(sockets=[bound])
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
    return time.monotonic() - signalled_at
