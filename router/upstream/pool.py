"""The connections to one engine, kept alive between requests.

Idle connections are a stack: the youngest is the likeliest to be still open, and the oldest ones
fall out when there is less to do. The engine may close an idle connection in the very moment that
it is used again; a request that dies on a *reused* connection before any byte came back is sent
once more on a fresh one, and nobody hears of it (RFC 9112, section 9.3.1).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from socket import SO_RCVBUF, SOL_SOCKET

from router.upstream.answer import Answer
from router.upstream.connection import EngineConnection
from router.upstream.deadlines import Deadlines, now
from router.upstream.errors import ConnectRefusedError, ConnectTimeoutError, DisconnectedError

# Bytes: about the most that one read brings, and so the most that a client which does not read can
# make us hold beyond its write buffer. The kernel would let it grow to megabytes.
READ_AT_ONCE = 64 * 1024


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Times in seconds, sizes in bytes."""

    connect_timeout: float
    idle_connections: int
    idle_age: float
    header_limit: int


class EnginePool:
    def __init__(self, host: str, port: int, limits: PoolLimits, deadlines: Deadlines) -> None:
        self._host = host
        self._port = port
        self._limits = limits
        self._deadlines = deadlines
        self._idle: list[EngineConnection] = []
        self._reaper: asyncio.TimerHandle | None = None

    @property
    def idle_count(self) -> int:
        return len(self._idle)

    async def ask(self, request: bytes, deadline: float, once: bool = False) -> Answer:
        """Sends a request and returns when its answer is ready; the answer must be closed.

        `deadline` is a time of `now`. `once`: the request uses something up, so it is not sent a
        second time, and not on a connection that may be closing. Raises UpstreamError; when
        cancelled, the connection is closed at once.
        """
        connection = None if once else self._youngest()
        while True:
            is_reused = connection is not None
            if connection is None:
                connection = await self._connect(deadline)
            answer = Answer(connection, self._deadlines, deadline)
            try:
                connection.ask(request, answer)
                await answer.ready()
                answer.check()
                return answer
            except BaseException as error:
                answer.close()
                if not is_reused or not isinstance(error, DisconnectedError):
                    raise
            connection = None

    def close(self) -> None:
        while self._idle:
            self._idle.pop().abort()
        if self._reaper is not None:
            self._reaper.cancel()
            self._reaper = None

    async def _connect(self, deadline: float) -> EngineConnection:
        loop = asyncio.get_running_loop()
        latest = min(deadline, now() + self._limits.connect_timeout)
        try:
            async with asyncio.timeout_at(latest):
                transport, connection = await loop.create_connection(
                    lambda: EngineConnection(self, self._limits.header_limit, loop),
                    self._host,
                    self._port,
                )
        except TimeoutError as error:
            raise ConnectTimeoutError(
                f"{self._host}:{self._port} did not accept in time"
            ) from error
        except (OSError, UnicodeError) as error:
            raise ConnectRefusedError(f"{self._host}:{self._port}: {error}") from error
        transport.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_RCVBUF, READ_AT_ONCE)
        return connection

    # Owner of its connections.

    def released(self, connection: EngineConnection) -> None:
        if len(self._idle) >= self._limits.idle_connections:
            connection.abort()
            return
        connection.idle_since = now()
        self._idle.append(connection)
        if self._reaper is None:
            loop = connection.loop
            self._reaper = loop.call_later(self._limits.idle_age, self._reap, loop)

    def lost(self, connection: EngineConnection) -> None:
        if connection in self._idle:
            self._idle.remove(connection)

    def _youngest(self) -> EngineConnection | None:
        oldest_allowed = now() - self._limits.idle_age
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable and connection.idle_since >= oldest_allowed:
                return connection
            connection.abort()
        return None

    def _reap(self, loop: asyncio.AbstractEventLoop) -> None:
        self._reaper = None
        expired = now() - self._limits.idle_age
        keep = next((i for i, c in enumerate(self._idle) if c.idle_since > expired), None)
        old, self._idle = self._idle[:keep], self._idle[keep:] if keep is not None else []
        for connection in old:
            connection.abort()
        if self._idle:
            delay = self._idle[0].idle_since - expired
            self._reaper = loop.call_later(delay, self._reap, loop)
