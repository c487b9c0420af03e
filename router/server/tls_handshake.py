"""A client's TLS handshake: a connection that counts from the start, and is soon over or done.

TLS that a listener does by itself tells nobody of a connection before its handshake is done, so
any number of them might be begun and left. Here it is this protocol that does it, and then makes
way for the front.
"""

from __future__ import annotations

import asyncio
import ssl
from functools import partial
from typing import Any, cast

from uvicorn.config import Config
from uvicorn.server import ServerState

from router.proxy.gateway import Gateway
from router.server.client_connection import LINGER_S, MAX_EXCESS_CONNECTIONS, RouterProtocol, excess

# Seconds for a client's handshake, and for its answer to our end of TLS.
HANDSHAKE_TIMEOUT_S, TLS_SHUTDOWN_TIMEOUT_S = 10.0, 1.0


class TlsHandshake(asyncio.Protocol):
    """Made in the place of a RouterProtocol, for connections over TLS with this context."""

    __slots__ = ("_begun", "_connections", "_context", "_early", "_front", "_gateway", "_is_lost",
                 "_is_sealed", "_loop", "_make", "_task", "_transport")  # fmt: skip

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
        self._make = partial(RouterProtocol, config, server_state, app_state, self._loop)
        self._gateway: Gateway = app_state["router"].gateway
        self._connections: set[Any] = server_state.connections
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._task: asyncio.Task[None] | None = None
        # What of the handshake comes before TLS is listening.
        self._begun: list[bytes] = []
        self._is_sealed = False
        # Who comes after us, and what it has missed: requests may follow the handshake at once.
        self._front: RouterProtocol | None = None
        self._early: list[bytes] = []
        self._is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._connections.add(self)
        self._gateway.metrics.connections.inc()
        over = excess(self._connections, self._gateway.limits)
        if over > MAX_EXCESS_CONNECTIONS:
            self._gateway.metrics.refusals.add(("connections",))
            self._forget()
            self._transport.abort()
            return
        self._task = self._loop.create_task(
            self._shake(LINGER_S if over > 0 else HANDSHAKE_TIMEOUT_S)
        )

    def data_received(self, data: bytes) -> None:
        if self._is_sealed:
            self._early.append(data)
        else:
            self._begun.append(data)
            self._transport.pause_reading()  # TLS resumes it

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        if self._front is not None:  # it was on its way when the front came
            self._front.connection_lost(exc)

    def shutdown(self) -> None:
        """uvicorn's: there is nothing to be finished."""
        self._transport.abort()

    async def _shake(self, seconds: float) -> None:
        secured: asyncio.Transport | None = None
        try:
            if not self._is_lost:
                self._loop.call_soon(self._hand_over)  # TLS begins right after it
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
            self._forget()
            if secured is None:
                self._transport.abort()
        if secured is None:
            return
        if self._is_lost or secured.is_closing():  # an aborted one looks as if it were done
            secured.abort()
        else:
            self._make_way(secured)

    def _hand_over(self) -> None:
        """What has come to us, to TLS, as the loop would give it."""
        self._is_sealed = True
        sealed = cast(asyncio.BufferedProtocol, self._transport.get_protocol())
        left = memoryview(b"".join(self._begun))
        while left:
            room = memoryview(sealed.get_buffer(len(left)))
            size = min(len(room), len(left))
            room[:size] = left[:size]
            sealed.buffer_updated(size)
            left = left[size:]

    def _make_way(self, secured: asyncio.Transport) -> None:
        self._front = front = self._make()
        secured.set_protocol(front)
        front.connection_made(secured)
        for data in self._early:
            front.data_received(data)

    def _forget(self) -> None:
        self._connections.discard(self)
        self._gateway.metrics.connections.dec()


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return "refused"
    return "late" if isinstance(error, ConnectionAbortedError) else "left"  # the loop's word
