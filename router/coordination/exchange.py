"""Exchanges the reports of `peers` among the routers of a fleet, or the workers of one router.

Routers use the stream in Redis of redis_stream.py, and workers the sockets below. Each worker binds
a datagram socket in the private folder of the workers, and sends its report to all sockets there.
Only processes of the router's user can open the folder, so nothing is signed.

Workers send without waiting. A frozen or slow worker fills its own queue and misses reports. It
does not delay the others: each worker sends to each other worker from a separate socket, because
the kernel counts unread datagrams against the socket that sent them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from random import uniform
from time import monotonic as now
from typing import Protocol

from prometheus_client import Counter

from router.coordination.peers import MAX_REPORT_BYTES, LoadedEngine, PeerRouters
from router.telemetry.logs import LogThrottle

logger = logging.getLogger("disagg_router.routing")
# Processes that report at the same moments choose at the same moments, too.
INTERVAL_JITTER = 0.25
LOG_INTERVAL_S = 60.0
SOCKET_PREFIX = "peer-"
WORKER_INTERVAL_S = 0.1
# With this many other workers, each sends reports half as often, because it reads the reports of
# all others.
MANY_WORKERS = 8
# Reports that are read at once, before other events of the loop have their turn.
MAX_READ = 64


# Takes a report, its age in seconds, and why it is not to be believed, else "".
ReportReader = Callable[[bytes, float, str], None]


class ExchangeError(Exception):
    """The transport failed, which it has logged and counted."""


class Transport(Protocol):
    """Carries reports to the other processes, and theirs to this one."""

    @property
    def failure(self) -> str:
        """Why reports cannot be exchanged now; empty if they can."""
        ...

    def interval(self, num_peers: int) -> float:
        """Return the seconds between two reports, beside so many other processes."""
        ...

    def open(self, read: ReportReader) -> None:
        """Give the reports of the others to `read` from now on."""

    async def send(self, report: bytes) -> None:
        """Send a report to the others. Raises ExchangeError, or what is to be logged."""

    async def close(self) -> None: ...


class PeerExchange:
    """Runs until it is cancelled. Without its transport, a process goes by its own requests.
    `engines` returns the present engines."""

    def __init__(
        self,
        peers: PeerRouters,
        engines: Callable[[], Sequence[LoadedEngine]],
        transport: Transport,
        errors: Counter,
    ) -> None:
        self.transport = transport
        self._peers, self._engines, self._errors = peers, engines, errors
        self._throttle = LogThrottle(logger, LOG_INTERVAL_S)

    async def exchange_forever(self) -> None:
        """Exchange reports until cancelled."""
        self.transport.open(self._read)
        while True:
            pause = self.transport.interval(len(self._peers))
            await asyncio.sleep(pause * uniform(1 - INTERVAL_JITTER, 1 + INTERVAL_JITTER))
            await self.exchange()

    async def exchange(self) -> None:
        """Send a report, and add up those of the others."""
        try:
            await self.transport.send(self._peers.report(self._engines()))
        except ExchangeError:
            pass
        except Exception as error:
            self._note_failure("failed", "load cannot be exchanged", repr(error))
        self._peers.update(now())

    def _read(self, report: bytes, age: float, problem: str) -> None:
        if problem or not self._peers.take(report, now(), age):
            self._note_failure("invalid", "a report of load cannot be used", problem or "malformed")

    def _note_failure(self, result: str, message: str, detail: str) -> None:
        self._errors.labels("exchange", result).inc()
        self._throttle.warn(message, detail)


class WorkerSockets:
    """The sockets of the workers in their folder `directory`; `name` is this worker's."""

    def __init__(self, directory: Path, name: str) -> None:
        self.failure = ""
        self._directory, self._own = directory, f"{SOCKET_PREFIX}{name}"
        self._buffer = bytearray(MAX_REPORT_BYTES + 1)
        self._receiver = _datagram_socket()
        self._senders: dict[str, socket.socket] = {}

    def interval(self, num_peers: int) -> float:
        return WORKER_INTERVAL_S * (1 + num_peers / MANY_WORKERS)

    def open(self, read: ReportReader) -> None:
        try:
            self._receiver.bind(str(self._directory / self._own))
        except OSError as error:
            self.failure = f"workers cannot exchange their load: {error}"
            logger.error(self.failure)
        asyncio.get_running_loop().add_reader(self._receiver, self._receive, read)

    async def send(self, report: bytes) -> None:
        names = {name for name in os.listdir(self._directory) if name.startswith(SOCKET_PREFIX)}
        for name in self._senders.keys() - names:
            self._senders.pop(name).close()
        failure: OSError | None = None
        for name in names - {self._own}:
            try:
                if name not in self._senders:
                    self._senders[name] = _connect(str(self._directory / name))
                self._senders[name].send(report)
            except BlockingIOError:
                pass  # the worker is frozen or behind
            except ConnectionRefusedError:  # the worker has died
                (self._directory / name).unlink(missing_ok=True)
            except OSError as error:
                failure = error
        if failure is not None:
            raise failure

    async def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._receiver)
        (self._directory / self._own).unlink(missing_ok=True)
        for made in (self._receiver, *self._senders.values()):
            made.close()

    def _receive(self, read: ReportReader) -> None:
        for _ in range(MAX_READ):
            try:
                size = self._receiver.recv_into(self._buffer)
            except BlockingIOError:
                return
            read(bytes(memoryview(self._buffer)[:size]), 0.0, "")


def _datagram_socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    made.setblocking(False)
    return made


def _connect(path: str) -> socket.socket:
    """Raises OSError."""
    with contextlib.ExitStack() as stack:
        sender = stack.enter_context(_datagram_socket())
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_REPORT_BYTES)
        sender.connect(path)
        stack.pop_all()
    return sender
