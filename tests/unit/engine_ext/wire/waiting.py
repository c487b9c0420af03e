"""Waits for sockets and threads, for at most a minute: a machine may stand still for seconds."""

import select
import time
from collections.abc import Callable
from typing import TypeVar

from engine_ext.wire.dialer import HandshakeClient
from engine_ext.wire.handshake import HandshakePayload

T = TypeVar("T")

SECONDS = 60.0


def until(condition: Callable[[], T]) -> T:
    """Its first true value."""
    deadline = time.monotonic() + SECONDS
    while not (value := condition()):
        assert time.monotonic() < deadline, "condition not reached"
        time.sleep(0.001)
    return value


def answer(client: HandshakeClient) -> HandshakePayload:
    """Closes the client, too."""
    try:
        heard = select.poll()
        heard.register(client.socket, select.POLLIN)
        while (payload := client.receive()) is None:
            assert heard.poll(SECONDS * 1000), "the listener is silent"
        return payload
    finally:
        client.close()
