"""uvicorn, with the signals in our hands: the first ends politely, the second at once."""

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

KEEP_ALIVE_SECONDS = 75
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
    """A bound socket that does not listen yet: who connects too early is refused.

    Raises OSError where the address is taken or is none of ours.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except BaseException:
        bound.close()
        raise
    return bound


class Stopwatch:
    """How long ago the first signal came."""

    def __init__(self) -> None:
        self._started: float | None = None

    def start(self) -> None:
        self._started = time.monotonic()

    def seconds(self) -> float:
        return 0.0 if self._started is None else time.monotonic() - self._started


async def serve(
    app: ASGIApp, bound: socket.socket, signalled: Stopwatch, *, shutdown_timeout: int
) -> None:
    """Until SIGINT or SIGTERM; then requests have `shutdown_timeout` seconds to finish."""
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=shutdown_timeout,
    )
    server = ReferenceServer(config)
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, _stop, server, signalled, number)
    try:
        await server.serve(sockets=[bound])
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)


def _stop(server: ReferenceServer, signalled: Stopwatch, number: signal.Signals) -> None:
    if server.should_exit:
        os._exit(128 + number)
    signalled.start()
    server.should_exit = True
