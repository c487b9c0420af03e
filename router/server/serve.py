"""Serve the router on its sockets until a signal stops it.

uvicorn closes its listener in the moment of SIGTERM, while load balancers still send; so the
signals are ours. The first one makes /ready say 503 and changes nothing else for `shutdown_delay`;
then the listener closes and running requests have `shutdown_timeout` to end; then they are ended,
each with an error to its client. A second signal ends the process at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import resource
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import uvicorn
import uvloop
from fastapi import FastAPI

from router.admin.api import SOCKET_NAME, EmbeddedServer, serve_control
from router.admin.control import Control
from router.admin.processes import WorkerProcess, follow_control
from router.common.tls import TlsContext
from router.fleet.sources.factory import describe_sources
from router.proxy.gateway import Gateway
from router.server.app import build
from router.server.client_connection import RouterProtocol
from router.server.router_state import RouterState, state_of
from router.server.tls_handshake import TlsHandshake
from router.settings import UNSAFE_REUSE, Address, Settings, flag_of, is_loopback
from router.telemetry.metrics_server import (
    LivenessServer,
    collect_worker_metrics,
    metrics_socket,
    serve_in_thread,
    serve_worker_metrics,
)
from router.telemetry.tracing import warn_if_missing
from router.ui.hub import DashboardHub
from router.ui.snapshot import OtherWorkers, serve_snapshots, snapshot_socket

logger = logging.getLogger("disagg_router")
SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Time that uvicorn has after the shutdown timeout to close remaining connections.
UVICORN_CLOSE_TIMEOUT_S = 6
BACKLOG = 4096
# Requests leave hardly any reference cycles behind, so garbage collection can be rare.
GC_THRESHOLDS = (50_000, 20, 50)
# Options of glibc's mallopt (malloc.h). The values are those that glibc itself sets once a block of
# 32 MiB has been freed.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
TRIM_THRESHOLD_BYTES = 64 * 1024 * 1024
MALLOC_VARIABLES = frozenset(("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"))


class BindError(Exception):
    """The router cannot listen on an address."""


def hangup_handler(
    reload: Callable[[], None], end: Callable[[signal.Signals], None]
) -> Callable[[], None]:
    """Return the handler of SIGHUP: reload the settings.

    If the router was started in a terminal that has closed since, it ends instead, as programs do
    there, unless SIGHUP was ignored at the start (nohup).
    """
    is_bound = signal.getsignal(signal.SIGHUP) is signal.SIG_DFL and _has_terminal()

    def on_hangup() -> None:
        if is_bound and not _has_terminal():
            end(signal.SIGHUP)
        else:
            reload()

    return on_hangup


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


class ShutdownSequence:
    """The steps of a shutdown, started by the first signal."""

    def __init__(self, server: EmbeddedServer, gateway: Gateway, settings: Settings) -> None:
        self._server = server
        self._gateway = gateway
        self._settings = settings
        self._task: asyncio.Task[None] | None = None

    def on_signal(self, number: signal.Signals) -> None:
        if self._task is not None:
            logger.warning("%s again: exiting now", number.name)
            self._gateway.records.flush()
            os._exit(128 + number)
        logger.info(
            "%s: shutting down: waiting up to %g s for %d requests; another %s ends them at once",
            number.name,
            self._settings.shutdown_delay + self._settings.shutdown_timeout,
            len(self._gateway.tasks.running),
            number.name,
        )
        self._gateway.tasks.is_draining = True
        self._task = asyncio.get_running_loop().create_task(self._proceed())

    async def _proceed(self) -> None:
        await asyncio.sleep(self._settings.shutdown_delay)
        self._server.should_exit = True
        await asyncio.sleep(self._settings.shutdown_timeout)
        if self._gateway.tasks.running:
            logger.warning("ending %d requests that still run", len(self._gateway.tasks.running))
            self._gateway.tasks.interrupt()
        for connection in tuple(self._server.server_state.connections):
            if isinstance(connection, RouterProtocol):
                connection.end()


def run(settings: Settings, read_again: Callable[[], Settings]) -> None:
    """Serve until a signal. Raises BindError and SettingsError."""
    warn_if_missing(os.environ)
    with bind_all(settings) as listeners, admin_listener(settings) as admin:
        uvloop.run(_serve_alone(settings, read_again, listeners, admin))


def work(settings: Settings, listeners: Listeners, directory: Path, number: int) -> None:
    """Serve as one of several worker processes, until SIGTERM. Raises SettingsError.

    `directory` is shared by all workers: each publishes its metrics there and serves the sum of
    all, and a restarted worker finds the last engine lists of service discovery there.
    """
    uvloop.run(_serve_as_worker(settings, listeners, directory, number))


async def _serve_alone(
    settings: Settings,
    read_again: Callable[[], Settings],
    listeners: Listeners,
    admin: socket.socket | None,
) -> None:
    app = build(settings)
    state = state_of(app)
    control = Control(settings, _worker_process(settings, state).publish, read_again)
    with watched(settings, state.exposition):
        announce(settings, listeners)
        async with serve_control(control, admin):
            await _serve(settings, listeners, app, SIGNALS, control)


async def _serve_as_worker(
    settings: Settings, listeners: Listeners, directory: Path, number: int
) -> None:
    app = build(settings, directory)
    state = state_of(app)
    own, state.exposition = state.exposition, partial(collect_worker_metrics, directory)
    process = _worker_process(settings, state)
    with serve_worker_metrics(metrics_socket(directory, number, os.getpid()), own):
        async with (
            follow_control(directory / SOCKET_NAME, process),
            _shared_dashboard(state.dashboard, settings, directory, number),
        ):
            await _serve(settings, listeners, app, (signal.SIGTERM,))


def _worker_process(settings: Settings, state: RouterState) -> WorkerProcess:
    return WorkerProcess(
        settings, state.gateway, state.registry, state.signed_store, state.watched_files
    )


@contextlib.asynccontextmanager
async def _shared_dashboard(
    hub: DashboardHub | None, settings: Settings, directory: Path, number: int
) -> AsyncIterator[None]:
    """Let the dashboard of each worker show the requests of all workers."""
    if hub is None:
        yield
        return
    hub.other_workers = OtherWorkers(directory, number, settings.workers)
    async with serve_snapshots(snapshot_socket(directory, number), hub.source.reading):
        yield


@contextlib.contextmanager
def watched(settings: Settings, exposition: Callable[[], bytes]) -> Iterator[None]:
    """Serve liveness probes and metrics on ports of their own, if they have any.

    Metrics that have a port of their own are served only there. Raises BindError.
    """
    wanted = [
        ("liveness", settings.host, settings.liveness_port, settings.metrics_port is None),
        ("metrics", settings.metrics_host, settings.metrics_port, True),
    ]
    with contextlib.ExitStack() as stack:
        for what, host, port, has_metrics in wanted:
            if port is None:
                continue
            with _binding(host, port):
                server = LivenessServer(host, port, exposition if has_metrics else None)
            stack.enter_context(serve_in_thread(server))
            logger.info("%s on http://%s", what, Address(host, server.server_address[1]))
        yield


async def _serve(
    settings: Settings,
    listeners: Listeners,
    app: FastAPI,
    signals: Iterable[signal.Signals],
    control: Control | None = None,
) -> None:
    _allow_many_connections()
    gc.collect()
    gc.freeze()  # objects from before live as long as the process: skip them in collections
    gc.set_threshold(*GC_THRESHOLDS)
    _keep_freed_memory()
    secured = settings.served_tls()
    state = state_of(app)
    if secured is not None and secured.files is not None:
        state.watched_files["tls"], state.certificates["tls"] = secured.files, secured
    config = uvicorn_config(settings, app, secured)
    server = EmbeddedServer(config)
    shutdown = ShutdownSequence(server, state.gateway, settings)
    loop = asyncio.get_running_loop()
    for number in signals:
        loop.add_signal_handler(number, shutdown.on_signal, number)
    if control is not None:
        on_hangup = hangup_handler(control.reload_soon, shutdown.on_signal)
        loop.add_signal_handler(signal.SIGHUP, on_hangup)
    if listeners.dashboard is not None:
        state.dashboard_port = port_of(listeners.dashboard)
    await server.serve(sockets=listeners.all)


def uvicorn_config(
    settings: Settings, app: object, secured: TlsContext | None = None
) -> uvicorn.Config:
    http: Any = RouterProtocol if secured is None else partial(TlsHandshake, secured.context)
    return uvicorn.Config(
        app,  # type: ignore[arg-type] # FastAPI's and uvicorn's ASGI types differ in spelling
        http=http,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=settings.keep_alive_timeout,  # type: ignore[arg-type] # float is fine
        timeout_graceful_shutdown=int(settings.shutdown_timeout) + UVICORN_CLOSE_TIMEOUT_S,
    )


class Listeners(NamedTuple):
    """The sockets of one process. `dashboard` is None if the dashboard has no port of its own."""

    clients: socket.socket
    dashboard: socket.socket | None

    @property
    def all(self) -> list[socket.socket]:
        return [self.clients] if self.dashboard is None else [self.clients, self.dashboard]

    def close(self) -> None:
        for listener in self.all:
            listener.close()


@contextlib.contextmanager
def bind_all(settings: Settings, shared: bool = False) -> Iterator[Listeners]:
    """Bind the sockets of one process. Raises BindError."""
    with bind_at(settings.host, settings.port, shared) as clients:
        if settings.ui_port is None:
            yield Listeners(clients, None)
        else:
            with bind_at(settings.ui_host, settings.ui_port, shared) as dashboard:
                yield Listeners(clients, dashboard)


def port_of(listener: socket.socket) -> int:
    port: int = listener.getsockname()[1]
    return port


def bind_at(host: str, port: int, shared: bool = False) -> socket.socket:
    """Return a listening socket; several `shared` ones can have the same port. Raises BindError."""
    with _binding(host, port):
        listener = socket.create_server(
            (host, port),
            family=socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0],
            backlog=BACKLOG,
            dualstack_ipv6=host == "::" and socket.has_dualstack_ipv6(),
            reuse_port=shared,
        )
    listener.setblocking(False)
    return listener


@contextlib.contextmanager
def _binding(host: str, port: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = Address(host, port)
        raise BindError(f"cannot listen on {where}: {error.strerror or error}") from error


@contextlib.contextmanager
def admin_listener(settings: Settings) -> Iterator[socket.socket | None]:
    """Bind the admin API's port, if it has one. Raises BindError."""
    if settings.admin_port is None:
        yield None
        return
    with bind_at(settings.admin_host, settings.admin_port) as listener:
        where = Address(settings.admin_host, listener.getsockname()[1])
        logger.info("admin API on http://%s", where)
        yield listener


def announce(settings: Settings, listeners: Listeners) -> None:
    address = Address(settings.host, port_of(listeners.clients))
    prefill, decode = set(settings.prefillers), set(settings.decoders)
    engines = f"{len(prefill - decode)} prefill and {len(decode - prefill)} decode engines"
    if both := prefill & decode:
        engines = f"{len(both)} engines of both roles" + f", {engines}" * (prefill != decode)
    known = [*([engines] if prefill | decode else []), *describe_sources(settings)]
    scheme = "http" if settings.tls_certfile is None else "https"
    sources = ", and those of ".join(known)
    logger.info("disagg-router on %s://%s with %s", scheme, address, sources)
    if settings.conversation_unproven in UNSAFE_REUSE:
        logger.warning(
            "%s %s: engines without prefix hashes may answer turns from KV of other tokens, "
            "because chat templates change earlier text; the value tokens is safe",
            flag_of("conversation_unproven"),
            settings.conversation_unproven,
        )
    if settings.ui:
        host = settings.host
        if listeners.dashboard is not None:
            host = settings.ui_host
            address = Address(host, port_of(listeners.dashboard))
        logger.info("dashboard on %s://%s/ui", scheme, address)
        if not (settings.ui_token or settings.ui_token_file or is_loopback(host)):
            logger.warning(
                "--ui without --ui-token-file: everyone who can reach %s sees engines, requests "
                "and settings",
                address,
            )


def _keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next large body.

    By default it returns free memory at the end of the heap to the kernel, and takes it back page
    by page, until a block of 32 MiB has been freed. Variables of the environment take precedence.
    Other C libraries have no such option.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and MALLOC_VARIABLES.isdisjoint(os.environ):
        mallopt(M_MMAP_THRESHOLD, TRIM_THRESHOLD_BYTES // 2)
        mallopt(M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES)


def _allow_many_connections() -> None:
    """Raise the soft limit of open files: each request holds two sockets, and 1024 is common."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
