"""One attempt to connect to an engine, and whose fault it is when that fails.

Only what the engine did is a ConnectError. Our own limits are a LocalError, and so is a name that
cannot be resolved, or not in time. A request whose own time is over is late, whatever the engine
does meanwhile.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from router.http_client.deadlines import now
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

LOCAL = frozenset(
    (
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.ENOBUFS,
        errno.EADDRNOTAVAIL,  # no port is left, or we have no address of that family
        errno.EAFNOSUPPORT,
        errno.EAGAIN,
        errno.EPERM,
        errno.EACCES,
    )
)
# Bytes: about the most that one read brings, and so the most that a client which does not read can
# make us hold beyond its write buffer. The kernel would let it grow to megabytes.
READ_AT_ONCE = 64 * 1024
# A host that vanished is noticed in about ten seconds, whether we wait for it or it for us. A wait
# for an engine that is alive but reads nothing of a long request ends after the same time.
OPTIONS = (
    ("SOL_SOCKET", "SO_RCVBUF", READ_AT_ONCE),
    ("SOL_SOCKET", "SO_KEEPALIVE", 1),
    ("IPPROTO_TCP", "TCP_NODELAY", 1),
    ("IPPROTO_TCP", "TCP_KEEPIDLE", 5),
    ("IPPROTO_TCP", "TCP_KEEPINTVL", 2),
    ("IPPROTO_TCP", "TCP_KEEPCNT", 3),
    ("IPPROTO_TCP", "TCP_USER_TIMEOUT", 20_000),
)
KNOWN_OPTIONS = tuple(
    (getattr(socket, level), getattr(socket, name), value)
    for level, name, value in OPTIONS
    if hasattr(socket, name)  # which ones there are depends on the platform
)
# Once it is connected: a peer that speaks no TLS, or hangs up in the middle of it. Their numbers
# mean something else than those of a plain OSError.
HANDSHAKE = (ssl.SSLError, ConnectionResetError, ConnectionAbortedError)
# Seconds that a loop's timer may be early by; who is told of a deadline finds it over.
EARLY = 0.001
P = TypeVar("P", bound=asyncio.Protocol)


class EngineTls(NamedTuple):
    """`name`: what the engine's certificate is for; empty: the host."""

    context: ssl.SSLContext
    name: str = ""


class ConnectAttempt:
    """`deadline` is the request's, a time of `now`; a connect has `patience` seconds, its handshake
    included where it has `tls`."""

    def __init__(
        self, host: str, port: int, deadline: float, patience: float, tls: EngineTls | None = None
    ) -> None:
        self._host = host
        self._port = port
        self._secured: dict[str, Any] = {}
        if tls is not None:
            self._secured = {"ssl": tls.context, "server_hostname": tls.name or host}
        latest = now() + patience
        self._is_deadline_first = deadline <= latest
        self._limit = asyncio.timeout_at(min(deadline, latest) + EARLY)
        self._is_resolved = False
        self._failure: UpstreamError | None = None

    def fail(self, error: UpstreamError) -> None:
        """Ends the attempt at once, or what it has just reached.

        It raises ConnectError, whatever the `error`: nothing was sent, which is worth knowing.
        """
        self._failure = ConnectError(self._said(error))
        if not self._limit.expired():
            self._limit.reschedule(0.0)

    async def run(self, loop: asyncio.AbstractEventLoop, factory: Callable[[], P]) -> P:
        """Raises ConnectError, LocalError, SilenceError."""
        try:
            async with self._limit:
                hosts = await self._resolve(loop)
                self._is_resolved = True
                transport, protocol = await self._reach(loop, factory, hosts)
        except (OSError, UnicodeError) as error:
            raise self._blame(error) from error
        if self._failure is not None:
            transport.abort()
            raise self._failure
        _tune(transport)
        return protocol

    async def _resolve(self, loop: asyncio.AbstractEventLoop) -> list[str]:
        found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        return [_host_of(address) for _, _, _, _, address in found]

    async def _reach(
        self, loop: asyncio.AbstractEventLoop, factory: Callable[[], P], hosts: list[str]
    ) -> tuple[asyncio.Transport, P]:
        """Tries one address after the other; of their failures, one of the engine's counts more."""
        failures: list[OSError] = []
        for host in hosts:
            try:
                return await loop.create_connection(factory, host, self._port, **self._secured)
            except OSError as error:
                failures.append(error)
        raise min(failures, key=lambda error: error.errno in LOCAL)

    def _blame(self, error: OSError | UnicodeError) -> UpstreamError:
        if self._failure is not None:
            return self._failure
        if self._limit.expired():
            return self._blame_for_delay()
        if self._secured and isinstance(error, HANDSHAKE):
            return TlsError(self._said(error))
        if isinstance(error, socket.gaierror | UnicodeError):
            return UnresolvedError(self._said(error))
        if error.errno in LOCAL:
            return LocalError(self._said(error))
        if not self._is_resolved:  # a resolver without descriptors may speak of anything
            return UnresolvedError(self._said(error))
        kind = ConnectTimeoutError if isinstance(error, TimeoutError) else ConnectRefusedError
        return kind(self._said(error))

    def _blame_for_delay(self) -> UpstreamError:
        if not self._is_resolved:
            return UnresolvedError(self._said("not resolved in time"))
        if self._is_deadline_first:
            return SilenceError(self._said("no connection before the request's deadline"))
        return ConnectTimeoutError(self._said("did not accept in time"))

    def _said(self, what: object) -> str:
        return f"{self._host}:{self._port}: {what}"


def _tune(transport: asyncio.Transport) -> None:
    """On the descriptor itself: uvloop's own socket object is a dup and a close for each option."""
    given = transport.get_extra_info("socket")
    if given is None or given.fileno() < 0:
        return  # lost already
    connected = socket.socket(given.family, given.type, given.proto, given.fileno())
    try:
        for level, name, value in KNOWN_OPTIONS:
            connected.setsockopt(level, name, value)
    except OSError:
        pass
    finally:
        connected.detach()


def _host_of(address: tuple[object, ...]) -> str:
    """An address of getaddrinfo as a host that need not be resolved; IPv6 may have a scope."""
    host, scope = str(address[0]), address[3] if len(address) == 4 else 0
    return f"{host}%{scope}" if scope else host
