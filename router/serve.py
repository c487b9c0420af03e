"""Runs the router on a socket until it is told to stop.

uvicorn closes its listener in the moment of SIGTERM, while load balancers still send; so the
signals are ours. The first one makes /ready say 503 and changes nothing else for `shutdown_delay`;
then the listener closes and running requests have `shutdown_timeout` to end; then they are ended,
each telling its client so. A second signal ends the process at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import socket
from collections.abc import Iterator

import uvicorn
import uvloop

from router.api.protocol import RouterProtocol
from router.app import build
from router.flows.gateway import Gateway
from router.settings import Address, Settings

logger = logging.getLogger("disagg_router")
SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Left to uvicorn after our own deadline, to close what does not close by itself.
BACKSTOP = 6
BACKLOG = 4096
# Requests leave hardly any cycles behind, so there is little to collect.
RARELY = (50_000, 20, 50)


class BindError(Exception):
    """The address cannot be listened on."""


class Server(uvicorn.Server):
    """uvicorn's server without its signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Shutdown:
    """What signals do, in order."""

    def __init__(self, server: Server, gateway: Gateway, settings: Settings) -> None:
        self._server = server
        self._gateway = gateway
        self._settings = settings
        self._task: asyncio.Task[None] | None = None

    def on_signal(self, number: signal.Signals) -> None:
        if self._task is not None:
            logger.warning("%s again: exiting now", number.name)
            if self._gateway.access is not None:
                self._gateway.access.flush()
            os._exit(128 + number)
        logger.info("%s: shutting down", number.name)
        self._gateway.draining = True
        self._task = asyncio.get_running_loop().create_task(self._proceed())

    async def _proceed(self) -> None:
        await asyncio.sleep(self._settings.shutdown_delay)
        self._server.should_exit = True
        await asyncio.sleep(self._settings.shutdown_timeout)
        if self._gateway.running:
            logger.warning("ending %d requests that still run", len(self._gateway.running))
            self._gateway.interrupt()


def run(settings: Settings) -> None:
    """Serves until a signal. Raises BindError, or SettingsError for a store that makes no sense."""
    with bind(settings) as listener:
        _allow_many_connections()
        uvloop.run(_serve(settings, listener))


async def _serve(settings: Settings, listener: socket.socket) -> None:
    app = build(settings)
    gc.collect()
    gc.freeze()  # what lives from here on dies young; the rest need not be looked at again
    gc.set_threshold(*RARELY)
    server = Server(uvicorn_config(settings, app))
    shutdown = Shutdown(server, app.state.gateway, settings)
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, shutdown.on_signal, number)
    _announce(settings, listener)
    await server.serve(sockets=[listener])


def uvicorn_config(settings: Settings, app: object) -> uvicorn.Config:
    return uvicorn.Config(
        app,  # type: ignore[arg-type] # FastAPI's and uvicorn's ASGI types differ in spelling
        http=RouterProtocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=settings.keep_alive_timeout,  # type: ignore[arg-type] # float is fine
        timeout_graceful_shutdown=int(settings.shutdown_timeout) + BACKSTOP,
    )


def bind(settings: Settings) -> socket.socket:
    """A listening socket, so that a port in use is noticed before anything starts."""
    host, port = settings.host, settings.port
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        dual = host == "::" and socket.has_dualstack_ipv6()
        listener = socket.create_server(
            (host, port), family=family, backlog=BACKLOG, dualstack_ipv6=dual
        )
    except OSError as error:
        where = Address(host, port)
        raise BindError(f"cannot listen on {where}: {error.strerror or error}") from error
    listener.setblocking(False)
    return listener


def _announce(settings: Settings, listener: socket.socket) -> None:
    address = Address(settings.host, listener.getsockname()[1])
    logger.info(
        "disagg-router on http://%s with %d prefill and %d decode engines",
        address,
        len(settings.prefillers),
        len(settings.decoders),
    )


def _allow_many_connections() -> None:
    """Each request holds two sockets; the usual soft limit of 1024 is soon reached."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
