"""The connections to one engine, kept alive between requests.

Idle connections form a stack: the youngest one is the likeliest to be still open, and the oldest
ones expire when there is less to do. The engine may close an idle connection at the very moment
when the pool reuses it: that is a StaleConnectionError. Only the caller knows whether a request may
be sent a second time (RFC 9110, section 9.2.2), so `request` and `send` do not repeat it; `fetch`,
which is for requests without side effects, does.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from time import monotonic as now
from typing import Any, NamedTuple, TypeVar

from router.http_client.answer_limits import Deadlines, MemoryBudget
from router.http_client.connection import EngineConnection
from router.http_client.engine_answer import EngineAnswer, Headers
from router.http_client.errors import (
    ConnectError,
    ConnectRefusedError,
    ConnectTimeoutError,
    LocalError,
    SilenceError,
    StaleConnectionError,
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
# A loop's timer may fire this much early; the deadline must be over when it has fired.
TIMER_SLACK_S = 0.001
P = TypeVar("P", bound=asyncio.Protocol)


class EngineTls(NamedTuple):
    """TLS towards an engine. `name` is the name in the engine's certificate; empty: the host."""

    context: ssl.SSLContext
    name: str = ""


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """`connect_timeout_s` and `max_idle_s` are seconds; an older idle connection is closed."""

    connect_timeout_s: float
    max_idle_connections: int
    max_idle_s: float
    max_head_bytes: int


class CompleteAnswer(NamedTuple):
    """An answer with its whole body."""

    status: int
    headers: Headers
    body: bytes


class EnginePool:
    """All connections to one engine.

    `reads` counts the reads that brought bytes of the engine: while it grows, the engine is alive.
    `memory` bounds the answers that are read whole, apart from those of `fetch`.
    """

    def __init__(
        self,
        host: str,
        port: int,
        limits: PoolLimits,
        deadlines: Deadlines,
        tls: EngineTls | None = None,
        memory: MemoryBudget | None = None,
    ) -> None:
        self.reads = 0
        self._memory = memory
        self._tls = tls
        self._host = host
        self._port = port
        self._limits = limits
        self._deadlines = deadlines
        self._attempts: set[ConnectAttempt] = set()
        self._open: set[EngineConnection] = set()
        self._idle: list[EngineConnection] = []
        self._reaper: asyncio.TimerHandle | None = None

    @property
    def open_count(self) -> int:
        return len(self._open)

    @property
    def idle_count(self) -> int:
        return len(self._idle)

    async def request(self, request: bytes, deadline: float, fresh: bool = False) -> EngineAnswer:
        """Send a request and return its answer once the answer is ready. The caller must close it.

        `deadline` is a time of `now`. With `fresh` the request uses a new connection, which cannot
        be stale. Raises UpstreamError. On cancellation the connection is closed at once.
        """
        answer = await self.send(request, deadline, fresh)
        try:
            await answer.ready()
            answer.raise_if_failed()
        except BaseException:
            answer.close()
            raise
        return answer

    async def send(self, request: bytes, deadline: float, fresh: bool = False) -> EngineAnswer:
        """Send a request and return its answer, which is not ready yet and may have failed. Raises
        UpstreamError if there is no connection."""
        answer = None if fresh else self.send_on_idle(request, deadline)
        if answer is None:
            connection = await self._connect(deadline)
            answer = EngineAnswer(connection, self._deadlines, deadline, self._memory)
            connection.send(request, answer)
        return answer

    def send_on_idle(
        self, request: bytes, deadline: float, max_idle_s: float | None = None
    ) -> EngineAnswer | None:
        """Send a request on a kept connection, if possible one that was idle for at most
        `max_idle_s` seconds; return None if there is none. `send` seldom has to wait, so the hot
        path calls this first and saves a coroutine."""
        idle, moment = self._idle, now()
        if max_idle_s is not None and idle and idle[-1].idle_since < moment - max_idle_s:
            return None
        oldest = moment - self._limits.max_idle_s
        while idle:
            connection = idle.pop()
            transport = connection.transport
            if connection.idle_since >= oldest and transport and not transport.is_closing():
                answer = EngineAnswer(connection, self._deadlines, deadline, self._memory)
                connection.send(request, answer)
                return answer
            connection.abort()
        return None

    async def fetch(self, request: bytes, deadline: float, limit: int) -> CompleteAnswer:
        """Return the whole answer of at most `limit` bytes to a request without side effects. A
        stale connection is replaced once. Raises UpstreamError."""
        try:
            return await self._fetch(request, deadline, limit, fresh=False)
        except StaleConnectionError:
            return await self._fetch(request, deadline, limit, fresh=True)

    async def _fetch(
        self, request: bytes, deadline: float, limit: int, fresh: bool
    ) -> CompleteAnswer:
        answer = await self.send(request, deadline, fresh)
        answer.memory = None
        try:
            body = await answer.read(limit)
            return CompleteAnswer(answer.status, answer.headers, body)
        finally:
            answer.close()

    def fail_legs(self, error: UpstreamError) -> None:
        """Give up everything that is under way, because the engine is dead.

        Each incomplete answer fails with a copy of `error`, each connection is aborted, and each
        running connect raises ConnectError. Later requests are sent as usual.
        """
        for attempt in self._attempts:
            attempt.fail(error)
        self.close()
        for connection in tuple(self._open):
            connection.fail(copy(error))

    def fail_resumable(self, error: UpstreamError) -> None:
        """Fail only the streams that another engine can continue."""
        for connection in tuple(self._open):
            if connection.is_resumable:
                connection.fail(copy(error))

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().abort()
        if self._reaper is not None:
            self._reaper.cancel()
            self._reaper = None

    async def _connect(self, deadline: float) -> EngineConnection:
        loop, limits = asyncio.get_running_loop(), self._limits
        self._deadlines.start(loop)
        attempt = ConnectAttempt(
            self._host, self._port, deadline, limits.connect_timeout_s, self._tls
        )
        self._attempts.add(attempt)
        try:
            connection = await attempt.run(
                loop, lambda: EngineConnection(self, limits.max_head_bytes, loop)
            )
        finally:
            self._attempts.discard(attempt)
        if connection.transport is not None and not connection.transport.is_closing():
            self._open.add(connection)
        return connection

    # ConnectionOwner: called by the connections.

    def released(self, connection: EngineConnection) -> None:
        if len(self._idle) >= self._limits.max_idle_connections:
            connection.abort()
            return
        connection.idle_since = now()
        self._idle.append(connection)
        if self._reaper is None:
            loop = connection.loop
            self._reaper = loop.call_later(self._limits.max_idle_s, self._reap, loop)

    def lost(self, connection: EngineConnection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def _reap(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close the connections that are idle for too long; the stack has the oldest ones first."""
        self._reaper = None
        expired = now() - self._limits.max_idle_s
        keep = next((i for i, c in enumerate(self._idle) if c.idle_since > expired), None)
        old, self._idle = self._idle[:keep], self._idle[keep:] if keep is not None else []
        for connection in old:
            connection.abort()
        if self._idle:
            delay = self._idle[0].idle_since - expired
            self._reaper = loop.call_later(delay, self._reap, loop)


class ConnectAttempt:
    """One attempt to connect. `deadline` is the request's, a time of `now`. Connecting, with the
    handshake if `tls` is given, may take `timeout_s` seconds.

    Only failures caused by the engine are a ConnectError. The router's own limits are a LocalError,
    and so is a host name that cannot be resolved in time. If the request's own deadline is over
    first, the attempt raises SilenceError, whatever the engine does meanwhile.
    """

    def __init__(
        self, host: str, port: int, deadline: float, timeout_s: float, tls: EngineTls | None = None
    ) -> None:
        self._host = host
        self._port = port
        self._tls_options: dict[str, Any] = {}
        if tls is not None:
            self._tls_options = {"ssl": tls.context, "server_hostname": tls.name or host}
        latest = now() + timeout_s
        self._is_deadline_first = deadline <= latest
        self._limit = asyncio.timeout_at(min(deadline, latest) + TIMER_SLACK_S)
        self._is_resolved = False
        self._failure: UpstreamError | None = None

    def fail(self, error: UpstreamError) -> None:
        """End the attempt at once, or the connection it has just made. `run` then raises
        ConnectError with the text of `error`, since nothing was sent."""
        self._failure = ConnectError(self._describe(error))
        if not self._limit.expired():
            self._limit.reschedule(0.0)

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
        if self._limit.expired():
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
