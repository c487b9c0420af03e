"""The TLS handshake of a client's connection.

If the listener did TLS itself, a connection would be visible only after its handshake, and a client
could start any number of handshakes. So this protocol accepts the plain connection, counts it, runs
the handshake with a deadline, and then hands the connection over to a RouterProtocol.
"""

from __future__ import annotations

import asyncio
import ssl
from functools import partial
from typing import Any, cast

from uvicorn.config import Config
from uvicorn.server import ServerState

from router.proxy.gateway import Gateway
from router.server.client_connection import (
    LINGER_S,
    MAX_EXCESS_CONNECTIONS,
    RouterProtocol,
    count_connection,
)

HANDSHAKE_TIMEOUT_S, TLS_SHUTDOWN_TIMEOUT_S = 10.0, 1.0


class TlsHandshake(asyncio.Protocol):
    """Takes the place of a RouterProtocol until the handshake is done."""

    __slots__ = ("_connections", "_context", "_early_handshake", "_early_requests", "_gateway",
                 "_is_lost", "_is_tls_reading", "_loop", "_make_protocol", "_successor", "_task",
                 "_transport")  # fmt: skip

    def __init__(
        self,
        context: ssl.SSLContext,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._context = context
        self._loop = _loop or asyncio.get_running_loop()
        self._make_protocol = partial(RouterProtocol, config, server_state, app_state, self._loop)
        self._gateway: Gateway = app_state["router"].gateway
        self._connections: set[Any] = server_state.connections
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._task: asyncio.Task[None] | None = None
        # Bytes of the handshake that arrive before TLS reads them.
        self._early_handshake: list[bytes] = []
        self._is_tls_reading = False
        # The protocol after the handshake, and bytes of requests that arrived before it was made.
        self._successor: RouterProtocol | None = None
        self._early_requests: list[bytes] = []
        self._is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        over = count_connection(self, self._connections, self._gateway)
        if over > MAX_EXCESS_CONNECTIONS:
            self._uncount()
            self._transport.abort()
            return
        self._task = self._loop.create_task(
            self._handshake(LINGER_S if over > 0 else HANDSHAKE_TIMEOUT_S)
        )

    def data_received(self, data: bytes) -> None:
        if self._is_tls_reading:
            self._early_requests.append(data)
        else:
            self._early_handshake.append(data)
            self._transport.pause_reading()  # start_tls resumes it

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        if self._successor is not None:  # the loss was reported while the successor was made
            self._successor.connection_lost(exc)

    def shutdown(self) -> None:
        """Called by uvicorn. A handshake need not be finished."""
        self._transport.abort()

    async def _handshake(self, seconds: float) -> None:
        secured: asyncio.Transport | None = None
        try:
            if not self._is_lost:
                self._loop.call_soon(self._replay_handshake)  # runs as soon as start_tls has begun
                secured = await self._loop.start_tls(
                    self._transport,
                    self,
                    self._context,
                    server_side=True,
                    ssl_handshake_timeout=seconds,
                    ssl_shutdown_timeout=TLS_SHUTDOWN_TIMEOUT_S,
                )
        except OSError as error:
            self._gateway.metrics.tls_failures.add((_reason(error),))
        finally:
            self._uncount()
            if secured is None:
                self._transport.abort()
        if secured is None:
            return
        if self._is_lost or secured.is_closing():  # start_tls also returns for an aborted one
            secured.abort()
        else:
            self._switch_protocol(secured)

    def _replay_handshake(self) -> None:
        """Pass the bytes that have arrived to TLS, in the way of the event loop."""
        self._is_tls_reading = True
        tls_protocol = cast(asyncio.BufferedProtocol, self._transport.get_protocol())
        left = memoryview(b"".join(self._early_handshake))
        while left:
            room = memoryview(tls_protocol.get_buffer(len(left)))
            size = min(len(room), len(left))
            room[:size] = left[:size]
            tls_protocol.buffer_updated(size)
            left = left[size:]

    def _switch_protocol(self, secured: asyncio.Transport) -> None:
        self._successor = successor = self._make_protocol()
        secured.set_protocol(successor)
        successor.connection_made(secured)
        for data in self._early_requests:
            successor.data_received(data)

    def _uncount(self) -> None:
        self._connections.discard(self)
        self._gateway.metrics.connections.dec()


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return "refused"
    # The event loop raises ConnectionAbortedError at the deadline.
    return "timeout" if isinstance(error, ConnectionAbortedError) else "disconnected"
