"""Exchanges the reports of `router.coordination.peers` among the worker processes of one router.

Each worker binds a datagram socket in the private folder of the workers, and sends its report to
all sockets there. Only processes of the router's user can open the folder, so nothing is signed.

Reports are sent without waiting. A worker that is frozen or behind fills its own queue and misses
reports, which harms nobody: each worker has a socket for each other one, because unread datagrams
count against their sender.
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

from prometheus_client import Counter

from router.coordination.peers import MAX_REPORT_BYTES, LoadedEngine, PeerRouters
from router.telemetry.logs import LogThrottle

logger = logging.getLogger("disagg_router.routing")
SOCKET_PREFIX = "peer-"
INTERVAL_S = 0.1
JITTER = 0.25
# With this many other workers, each sends reports half as often, because it reads the reports of
# all others.
MANY_WORKERS = 8
# Reports that are read at once, before other events of the loop have their turn.
MAX_READ = 64
LOG_INTERVAL_S = 60.0


class WorkerExchange:
    """Runs until it is cancelled. `engines` returns the present engines, `directory` is the folder
    of the workers."""

    def __init__(
        self,
        peers: PeerRouters,
        engines: Callable[[], Sequence[LoadedEngine]],
        directory: Path,
        errors: Counter,
    ) -> None:
        self._peers, self._engines, self._errors = peers, engines, errors
        self._directory = directory
        self._own = f"{SOCKET_PREFIX}{peers.name}"
        self._buffer = bytearray(MAX_REPORT_BYTES + 1)
        self._senders: dict[str, socket.socket] = {}
        self._throttle = LogThrottle(logger, LOG_INTERVAL_S)
        self.failure = ""
        """The reason why this worker cannot exchange reports; empty if it can."""

    async def exchange_forever(self) -> None:
        """Exchange reports until cancelled."""
        loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as stack:
            receiver = stack.enter_context(_datagram_socket())
            try:
                receiver.bind(str(self._directory / self._own))
            except OSError as error:
                self.failure = f"workers cannot exchange their load: {error}"
                logger.error(self.failure)
                return
            loop.add_reader(receiver, self._receive, receiver)
            try:
                while True:
                    pause = INTERVAL_S * (1 + len(self._peers) / MANY_WORKERS)
                    await asyncio.sleep(pause * uniform(1 - JITTER, 1 + JITTER))
                    self.exchange()
            finally:
                loop.remove_reader(receiver)
                (self._directory / self._own).unlink(missing_ok=True)

    def exchange(self) -> None:
        """Send a report to the other workers, and add up theirs."""
        try:
            self._send(self._peers.report(self._engines()))
        except Exception as error:
            self._note_failure("failed", error)
        self._peers.update(now())

    async def close(self) -> None:
        for sender in self._senders.values():
            sender.close()
        self._senders.clear()

    def _receive(self, receiver: socket.socket) -> None:
        for _ in range(MAX_READ):
            try:
                size = receiver.recv_into(self._buffer)
            except BlockingIOError:
                return
            if not self._peers.take(bytes(memoryview(self._buffer)[:size]), now()):
                self._note_failure("invalid", "a report of another worker cannot be used")

    def _send(self, report: bytes) -> None:
        names = {name for name in os.listdir(self._directory) if name.startswith(SOCKET_PREFIX)}
        for name in self._senders.keys() - names:
            self._senders.pop(name).close()
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
                self._note_failure("failed", error)

    def _note_failure(self, result: str, error: object) -> None:
        self._errors.labels("exchange", result).inc()
        self._throttle.warn("workers cannot exchange their load", str(error))


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
