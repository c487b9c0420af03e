"""How a worker wakes the engine's process when a transfer has ended.

vLLM asks its workers once per step, and steps all the time while a finished request's blocks wait
for a reader: that keeps two processes busy. Here the worker sends a datagram, and the engine sleeps
until it comes. Both are on one machine; a Unix socket in the abstract namespace leaves no file.
"""

import logging
import socket
import threading
from collections.abc import Callable

from engine_ext.common.log_rate_limit import LogRateLimit

logger = logging.getLogger(__name__)
logger.addFilter(LogRateLimit())

IDLE_TIMEOUT_SECONDS = 60.0
"""The engine is woken after this long, in case a datagram was lost. Each time costs a second of a
core: vLLM's workers spin for so long after every step."""
STOP_SECONDS = 5.0
RETRY_SECONDS = 1.0
"""After a socket's error, before it is read again; the engine is woken."""


def _address(name: str) -> str:
    return f"\0disagg-wakeup-{name}"


class WakeupSender:
    """Called from the worker's owner thread; never blocks, never raises."""

    def __init__(self, name: str) -> None:
        self._address = _address(name)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)

    def __call__(self) -> None:
        try:
            self._socket.sendto(b"1", self._address)
        except BlockingIOError:
            return  # Enough are under way.
        except OSError as error:
            logger.debug("the engine was not woken: %s", error)


class WakeupListener:
    """Calls `on_wakeup` from a thread of its own, with True if no datagram came for a while. Raises
    OSError when the address is taken."""

    def __init__(self, name: str, on_wakeup: Callable[[bool], None]) -> None:
        self._on_wakeup = on_wakeup
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(_address(name))
        self._socket.settimeout(IDLE_TIMEOUT_SECONDS)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-wakeup", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            logger.debug("wake-ups: %s", error)
        self._thread.join(timeout=STOP_SECONDS)
        self._socket.close()

    def _run(self) -> None:
        while not self._stopping.is_set():
            is_overdue = False
            try:
                self._socket.recv(16)
            except TimeoutError:
                is_overdue = True  # The engine looks all the same.
            except OSError as error:
                if self._stopping.wait(RETRY_SECONDS):
                    return
                logger.warning("wake-ups by transfers: %s", error)
            self._on_wakeup(is_overdue)
