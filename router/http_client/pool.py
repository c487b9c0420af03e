"""The connections to one engine, kept alive between requests.

Idle connections form a stack: the youngest one is the likeliest to be still open, and the oldest
ones expire when there is less to do. The engine may close an idle connection at the very moment
when the pool reuses it: that is a StaleConnectionError. Only the caller knows whether a request may
be sent a second time (RFC 9110, section 9.2.2), so `request` and `send` do not repeat it; `fetch`,
which is for requests without side effects, does.
"""

from __future__ import annotations

import asyncio
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

from router.http_client.answer_memory import MemoryBudget
from router.http_client.connect import ConnectAttempt, EngineTls
from router.http_client.connection import EngineConnection
from router.http_client.deadlines import Deadlines, now
from router.http_client.engine_answer import EngineAnswer, Headers
from router.http_client.errors import StaleConnectionError, UpstreamError


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
