"""Several worker processes on one port, each with its share of the connections.

Each worker has a listening socket of its own (SO_REUSEPORT: the kernel spreads connections) that
the supervisor made and keeps, so a worker that dies loses its connections but none that still
wait: its successor takes them over. Signals to the supervisor go on to the workers, which end as a
single router does; a second one ends them at once. Workers die with the supervisor.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

from router.admin.hosting import ControlThread
from router.common.child_processes import die_with
from router.server import serve
from router.server.app import with_store_keys
from router.settings import BrokenFileError, Settings, SettingsError
from router.telemetry import logs
from router.telemetry.trace_export import warn_if_missing
from router.telemetry.worker_metrics import collect_worker_metrics

logger = logging.getLogger("disagg_router")
# A worker that ends sooner than this many seconds after its start is not started again at once.
SOON = 2.0
# Seconds between the end that a worker was given and the end it is made to find.
GRACE = 3.0


@dataclass(slots=True)
class Worker:
    number: int
    listeners: serve.Listeners
    process: SpawnProcess
    started: float


def run(settings: Settings, read_again: Callable[[], Settings]) -> int:
    """Serves until a signal; the exit code. Raises BindError, SettingsError."""
    warn_if_missing(os.environ)
    loaded, settings = settings, with_store_keys(settings)
    with contextlib.ExitStack() as stack:
        listeners = _bind_all(settings, stack)
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="disagg-router-")))
        stack.enter_context(serve.watched(settings, partial(collect_worker_metrics, directory)))
        admin = stack.enter_context(serve.admin_listener(settings))
        control_thread = ControlThread(loaded, read_again, directory, admin)
        stack.enter_context(control_thread.open())
        return Supervisor(settings, listeners, directory, control_thread.reload).run()


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
        self._ears, self._mouth = socket.socketpair()
        self._mouth.setblocking(False)
        self._workers = [self._start(number, made) for number, made in enumerate(listeners)]

    def run(self) -> int:
        for number in serve.SIGNALS:
            signal.signal(number, self._on_signal)
        hangup = serve.Hangup(self._reload, self._end_with)
        signal.signal(signal.SIGHUP, lambda *_: hangup.on_signal())
        serve.announce(self._settings, self._workers[0].listeners)
        try:
            code = self._until_signalled()
            return code or self._end()
        finally:
            for worker in self._workers:
                worker.process.kill()
                worker.process.join()

    def _on_signal(self, number: int, _: object) -> None:
        self._end_with(number)

    def _end_with(self, number: int) -> None:
        self._signals.append(signal.Signals(number))
        with contextlib.suppress(BlockingIOError):
            self._mouth.send(b"!")

    def _until_signalled(self) -> int:
        """Replaces workers that die. Returns 2 when one cannot use its settings."""
        while not self._signals:
            self._wait(None, self._workers)
            for worker in [one for one in self._workers if not one.process.is_alive()]:
                if worker.process.exitcode == 2:
                    return 2
                self._replace(worker)
        return 0

    def _replace(self, dead: Worker) -> None:
        logger.error(
            "worker %d ended with status %s, another takes its place",
            dead.number,
            dead.process.exitcode,
        )
        if time.monotonic() - dead.started < SOON:
            self._hear(SOON)
        if not self._signals:
            self._workers[dead.number] = self._start(dead.number, dead.listeners)

    def _end(self) -> int:
        """Passes the first signal on, and lets nobody outlive the deadline."""
        settings = self._settings
        for worker in self._workers:
            worker.process.terminate()
        self._hear(settings.shutdown_delay)
        for worker in self._workers:
            worker.listeners.close()
        latest = time.monotonic() + settings.shutdown_timeout + serve.BACKSTOP + GRACE
        while alive := [worker for worker in self._workers if worker.process.is_alive()]:
            left = latest - time.monotonic()
            if left <= 0 or len(self._signals) > 1:
                return 128 + self._signals[-1]
            self._wait(left, alive)
        return 0

    def _wait(self, seconds: float | None, workers: list[Worker]) -> None:
        """Until a signal comes or one of these ends; one that has ended already counts."""
        sentinels = [worker.process.sentinel for worker in workers]
        if self._ears in wait([self._ears, *sentinels], seconds):
            self._ears.recv(64)

    def _hear(self, seconds: float) -> None:
        """Until a signal comes."""
        if wait([self._ears], seconds):
            self._ears.recv(64)

    def _start(self, number: int, listeners: serve.Listeners) -> Worker:
        process = multiprocessing.get_context("spawn").Process(
            target=work,
            args=(self._settings, listeners, self._directory, number, os.getpid()),
            name=f"worker-{number}",
            daemon=True,
        )
        with _deaf_to_the_terminal():
            process.start()
        logger.info("worker %d is process %d", number, process.pid)
        return Worker(number, listeners, process, time.monotonic())


def work(
    settings: Settings, listeners: serve.Listeners, directory: Path, number: int, parent: int
) -> None:
    """A worker's life."""
    die_with(parent)()
    logs.configure(settings.log_level, settings.log_format)
    try:
        serve.work(settings, listeners, directory, number)
    except BrokenFileError as error:  # the others go on with what it said before
        logger.error("%s", error)
        sys.exit(os.EX_TEMPFAIL)
    except SettingsError as error:
        logger.error("%s", error)
        sys.exit(2)


@contextlib.contextmanager
def _deaf_to_the_terminal() -> Iterator[None]:
    """Ctrl-C and a hangup reach every process of the terminal; workers wait for the supervisor's
    word."""
    numbers = (signal.SIGINT, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _bind_all(settings: Settings, stack: contextlib.ExitStack) -> list[serve.Listeners]:
    """Raises BindError. Sockets of ours may share a port, but not with those of others."""
    if settings.port:
        serve.bind(settings).close()
    if settings.ui_port:
        serve.bind_at(settings.ui_host, settings.ui_port).close()
    first = stack.enter_context(serve.bind_all(settings, shared=True))
    more = range(settings.workers - 1)
    return [first, *(stack.enter_context(serve.bind_all(settings, first, True)) for _ in more)]
