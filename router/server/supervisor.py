"""Run several worker processes on one port.

Each worker has a listening socket of its own; the kernel spreads connections over them
(SO_REUSEPORT). The supervisor binds and keeps the sockets. So when a worker crashes, its open
connections are lost, but its successor accepts those that still wait. The supervisor forwards the
first signal to the workers, which shut down like a single router, and kills them at the second.
Workers die with the supervisor.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

from router.admin.api import ControlThread
from router.common.child_processes import die_with, handling_signals
from router.server import serve
from router.server.app import with_store_keys
from router.settings import BrokenFileError, Settings, SettingsError
from router.telemetry import logs
from router.telemetry.metrics_server import collect_worker_metrics, metrics_socket
from router.telemetry.tracing import warn_if_missing

logger = logging.getLogger("disagg_router")
# A worker that ends sooner after its start is restarted after a delay of this length.
RESTART_DELAY_S = 2.0
# Time that workers have after their shutdown timeouts before they are killed.
KILL_DELAY_S = 3.0
# The address of a Unix socket has at most 107 bytes. This many are left for the names in the
# workers' folder: the longest is that of the worker exchange.
MAX_FOLDER_BYTES = 107 - 32


@dataclass(slots=True)
class RunningWorker:
    number: int
    listeners: serve.Listeners
    process: SpawnProcess
    started: float


def run(settings: Settings, read_again: Callable[[], Settings]) -> int:
    """Serve until a signal, and return the exit code. Raises BindError and SettingsError."""
    warn_if_missing(os.environ)
    loaded, settings = settings, with_store_keys(settings)
    with contextlib.ExitStack() as stack:
        listeners = _bind_all(settings, stack)
        directory = stack.enter_context(_folder_for_sockets())
        stack.enter_context(serve.watched(settings, partial(collect_worker_metrics, directory)))
        admin = stack.enter_context(serve.admin_listener(settings))
        control_thread = ControlThread(loaded, read_again, directory, admin)
        stack.enter_context(control_thread.open())
        return Supervisor(settings, listeners, directory, control_thread.reload).run()


@contextlib.contextmanager
def _folder_for_sockets() -> Iterator[Path]:
    """Make the workers' private folder: in /tmp if the user's folder for temporary files has too
    long a name for sockets."""
    with tempfile.TemporaryDirectory(prefix="disagg-router-") as usual:
        if len(os.fsencode(usual)) <= MAX_FOLDER_BYTES:
            yield Path(usual)
            return
    with tempfile.TemporaryDirectory(prefix="disagg-router-", dir="/tmp") as short:
        yield Path(short)


class Supervisor:
    def __init__(
        self,
        settings: Settings,
        listeners: list[serve.Listeners],
        directory: Path,
        reload: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._reload = reload
        self._directory = directory
        self._signals: list[signal.Signals] = []
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_sender.setblocking(False)
        self._workers = [self._start(number, made) for number, made in enumerate(listeners)]

    def run(self) -> int:
        for number in serve.SIGNALS:
            signal.signal(number, self._end_with)
        on_hangup = serve.hangup_handler(self._reload, self._end_with)
        signal.signal(signal.SIGHUP, lambda *_: on_hangup())
        serve.announce(self._settings, self._workers[0].listeners)
        try:
            code = self._until_signalled()
            return code or self._end()
        finally:
            for worker in self._workers:
                worker.process.kill()
                worker.process.join()

    def _end_with(self, number: int, _: object = None) -> None:
        self._signals.append(signal.Signals(number))
        with contextlib.suppress(BlockingIOError):
            self._wake_sender.send(b"!")

    def _until_signalled(self) -> int:
        """Replace workers that die, until a signal. Return 2 if one cannot use its settings."""
        while not self._signals:
            self._wait(None, self._workers)
            for worker in [one for one in self._workers if not one.process.is_alive()]:
                if worker.process.exitcode == 2:
                    return 2
                self._replace(worker)
        return 0

    def _replace(self, dead: RunningWorker) -> None:
        status = dead.process.exitcode
        logger.error("worker %d ended with status %s and is restarted", dead.number, status)
        metrics_socket(self._directory, dead.number, dead.process.pid).unlink(missing_ok=True)
        if time.monotonic() - dead.started < RESTART_DELAY_S:
            self._wait(RESTART_DELAY_S)
        if not self._signals:
            self._workers[dead.number] = self._start(dead.number, dead.listeners)

    def _end(self) -> int:
        """Shut the workers down; return the exit code."""
        settings = self._settings
        for worker in self._workers:
            worker.process.terminate()
        self._wait(settings.shutdown_delay)
        for worker in self._workers:
            worker.listeners.close()
        seconds = settings.shutdown_timeout + serve.UVICORN_CLOSE_TIMEOUT_S + KILL_DELAY_S
        latest = time.monotonic() + seconds
        while alive := [worker for worker in self._workers if worker.process.is_alive()]:
            left = latest - time.monotonic()
            if left <= 0 or len(self._signals) > 1:
                return 128 + self._signals[-1]
            self._wait(left, alive)
        return 0

    def _wait(self, seconds: float | None, workers: Sequence[RunningWorker] = ()) -> None:
        """Wait for a signal or for the end of one of these workers."""
        sentinels = [worker.process.sentinel for worker in workers]
        if self._wake_receiver in wait([self._wake_receiver, *sentinels], seconds):
            self._wake_receiver.recv(64)

    def _start(self, number: int, listeners: serve.Listeners) -> RunningWorker:
        process = multiprocessing.get_context("spawn").Process(
            target=work,
            args=(self._settings, listeners, self._directory, number, os.getpid()),
            name=f"worker-{number}",
            daemon=True,
        )
        # The terminal sends Ctrl-C and hangups to all processes, but the supervisor decides when
        # workers end. The started process inherits that it ignores them.
        with handling_signals((signal.SIGINT, signal.SIGHUP), signal.SIG_IGN):
            process.start()
        logger.info("worker %d is process %d", number, process.pid)
        return RunningWorker(number, listeners, process, time.monotonic())


def work(
    settings: Settings, listeners: serve.Listeners, directory: Path, number: int, parent: int
) -> None:
    """Run one worker process."""
    die_with(parent)()
    logs.configure(settings.log_level, settings.log_format)
    try:
        serve.work(settings, listeners, directory, number)
    except BrokenFileError as error:  # a valid file may follow; the other workers still have one
        logger.error("%s", error)
        sys.exit(os.EX_TEMPFAIL)
    except SettingsError as error:
        logger.error("%s", error)
        sys.exit(2)


def _bind_all(settings: Settings, stack: contextlib.ExitStack) -> list[serve.Listeners]:
    """Bind the sockets of all workers. Fails if another program has the port. Raises BindError."""
    if settings.port:
        serve.bind_at(settings.host, settings.port).close()
    if settings.ui_port:
        serve.bind_at(settings.ui_host, settings.ui_port).close()
    bound = [stack.enter_context(serve.bind_all(settings, shared=True))]
    clients, dashboard = bound[0]
    ports = {"port": serve.port_of(clients), "ui_port": dashboard and serve.port_of(dashboard)}
    settings = settings.model_copy(update=ports)  # a port 0 is the same free port for all
    for _ in range(settings.workers - 1):
        bound.append(stack.enter_context(serve.bind_all(settings, shared=True)))
    return bound
