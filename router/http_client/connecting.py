"""Connect to an engine: resolve its host, connect, make the TLS handshake, set options."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable
from time import monotonic as now
from typing import Any, NamedTuple, TypeVar

from router.common.deadlines import Deadlines, TimeLimit
from router.http_client.errors import (
    ConnectError,
    ConnectRefusedError,
    ConnectTimeoutError,
    LocalError,
    SilenceError,
    TlsError,
    UnresolvedError,
    UpstreamError,
)

LOCAL_ERRNOS = frozenset(
    (
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.ENOBUFS,
        errno.EADDRNOTAVAIL,  # no port is left, or the host has no address of that family
        errno.EAFNOSUPPORT,
        errno.EAGAIN,
        errno.EPERM,
        errno.EACCES,
    )
)
# The receive buffer: about the size of one read, and so the most that a client which does not read
# makes the router hold beyond its write buffer. The kernel would let it grow to megabytes.
RECEIVE_BUFFER_BYTES = 64 * 1024
# A vanished host is noticed in about ten seconds, whichever side is waiting. A wait for an engine
# that is alive but reads nothing of a long request ends after the same time.
SOCKET_OPTIONS = tuple(
    (getattr(socket, level), getattr(socket, name), value)
    for level, name, value in (
        ("SOL_SOCKET", "SO_RCVBUF", RECEIVE_BUFFER_BYTES),
        ("SOL_SOCKET", "SO_KEEPALIVE", 1),
        ("IPPROTO_TCP", "TCP_NODELAY", 1),
        ("IPPROTO_TCP", "TCP_KEEPIDLE", 5),
        ("IPPROTO_TCP", "TCP_KEEPINTVL", 2),
        ("IPPROTO_TCP", "TCP_KEEPCNT", 3),
        ("IPPROTO_TCP", "TCP_USER_TIMEOUT", 20_000),
    )
    if hasattr(socket, name)  # the platform decides which ones exist
)
# Failures of a handshake once the connection stands: the peer speaks no TLS or hangs up.
HANDSHAKE_ERRORS = (ssl.SSLError, ConnectionResetError, ConnectionAbortedError)
P = TypeVar("P", bound=asyncio.Protocol)


class EngineTls(NamedTuple):
    """TLS towards an engine. `name` is the name in the engine's certificate; empty: the host."""

    context: ssl.SSLContext
    name: str = ""


class ConnectAttempt:
    """One attempt to connect. `deadline` is the request's, a time of `now`. Connecting, with the
    handshake if `tls` is given, may take `timeout_s` seconds. `deadlines` watches both limits, so
    that an engine is not blamed for a time in which the router stood still.

    Only failures caused by the engine are a ConnectError. The router's own limits are a LocalError,
    and so is a host name that cannot be resolved in time. If the request's own deadline is over
    first, the attempt raises SilenceError, whatever the engine does meanwhile.
    """

    def __init__(
        self,
        host: str,
        port: int,
        deadline: float,
        timeout_s: float,
        deadlines: Deadlines,
        tls: EngineTls | None = None,
    ) -> None:
        self._host = host
        self._port = port
        self._tls_options: dict[str, Any] = {}
        if tls is not None:
            self._tls_options = {"ssl": tls.context, "server_hostname": tls.name or host}
        latest = now() + timeout_s
        self._is_deadline_first = deadline <= latest
        self._limit = TimeLimit(deadlines, min(deadline, latest))
        self._is_resolved = False
        self._failure: UpstreamError | None = None

    def fail(self, error: UpstreamError) -> None:
        """End the attempt at once, or the connection it has just made. `run` then raises
        ConnectError with the text of `error`, since nothing was sent."""
        self._failure = ConnectError(self._describe(error))
        self._limit.expire()

    async def run(self, loop: asyncio.AbstractEventLoop, factory: Callable[[], P]) -> P:
        """Return the connected protocol. Raises ConnectError, LocalError, SilenceError."""
        try:
            async with self._limit:
                hosts = await self._resolve(loop)
                self._is_resolved = True
                transport, protocol = await self._connect_to_any(loop, factory, hosts)
        except (OSError, UnicodeError) as error:
            raise self._classify(error) from error
        if self._failure is not None:
            transport.abort()
            raise self._failure
        _set_options(transport)
        return protocol

    async def _resolve(self, loop: asyncio.AbstractEventLoop) -> list[str]:
        found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        return [_numeric_host(address) for _, _, _, _, address in found]

    async def _connect_to_any(
        self, loop: asyncio.AbstractEventLoop, factory: Callable[[], P], hosts: list[str]
    ) -> tuple[asyncio.Transport, P]:
        """Try the addresses in turn. An engine's failure outweighs a local one."""
        failures: list[OSError] = []
        for host in hosts:
            try:
                return await loop.create_connection(factory, host, self._port, **self._tls_options)
            except OSError as error:
                failures.append(error)
        raise min(failures, key=lambda error: error.errno in LOCAL_ERRNOS)

    def _classify(self, error: OSError | UnicodeError) -> UpstreamError:
        if self._failure is not None:
            return self._failure
        if self._limit.has_expired:
            if not self._is_resolved:
                return UnresolvedError(self._describe("not resolved in time"))
            if self._is_deadline_first:
                text = "no connection before the request's deadline"
                return SilenceError(self._describe(text))
            return ConnectTimeoutError(self._describe("did not accept in time"))
        text = self._describe(error)
        if self._tls_options and isinstance(error, HANDSHAKE_ERRORS):
            return TlsError(text)
        if isinstance(error, socket.gaierror | UnicodeError):
            return UnresolvedError(text)
        if error.errno in LOCAL_ERRNOS:
            return LocalError(text)
        if not self._is_resolved:  # a resolver without file descriptors may raise anything
            return UnresolvedError(text)
        if isinstance(error, TimeoutError):
            return ConnectTimeoutError(text)
        return ConnectRefusedError(text)

    def _describe(self, problem: object) -> str:
        return f"{self._host}:{self._port}: {problem}"


def _set_options(transport: asyncio.Transport) -> None:
    """Work on the descriptor: uvloop's socket object costs a dup and a close for each option."""
    given = transport.get_extra_info("socket")
    if given is None or given.fileno() < 0:
        return  # the connection is lost already
    connected = socket.socket(given.family, given.type, given.proto, given.fileno())
    try:
        for level, name, value in SOCKET_OPTIONS:
            connected.setsockopt(level, name, value)
    except OSError:
        pass
    finally:
        connected.detach()


def _numeric_host(address: tuple[object, ...]) -> str:
    """Return getaddrinfo's address as a host that need not be resolved; IPv6 may have a scope."""
    host, scope = str(address[0]), address[3] if len(address) == 4 else 0
    return f"{host}%{scope}" if scope else host
