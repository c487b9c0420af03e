"""The connections to one engine, kept alive between requests.

Idle connections are a stack: the youngest is the likeliest to be still open, and the oldest ones
fall out when there is less to do. The engine may close an idle connection in the very moment that
it is used again: that is a StaleConnectionError. Whether the request may be sent a second time is
for who asks to say (RFC 9110, section 9.2.2): `ask_whole` does so, `ask` and `send` do not.
"""

from __future__ import annotations

import asyncio
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

from router.http_client.answer_memory import AnswerMemory
from router.http_client.connect import ConnectAttempt, EngineTls
from router.http_client.connection import EngineConnection
from router.http_client.deadlines import Deadlines, now
from router.http_client.engine_answer import EngineAnswer, Headers
from router.http_client.errors import StaleConnectionError, UpstreamError


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Times in seconds, sizes in bytes."""

    connect_timeout_s: float
    max_idle_connections: int
    max_idle_s: float
    max_head_bytes: int


class CompleteAnswer(NamedTuple):
    """An answer that is all here."""

    status: int
    headers: Headers
    body: bytes


class EnginePool:
    """`heard` counts the reads that brought bytes of the engine, whatever they were. `memory`: of
    answers that are read whole, but for those to small questions."""

    def __init__(
        self,
        host: str,
        port: int,
        limits: PoolLimits,
        deadlines: Deadlines,
        tls: EngineTls | None = None,
        memory: AnswerMemory | None = None,
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
        """Sends a request and returns when its answer is ready; the answer must be closed.

        `deadline` is a time of `now`. `fresh`: on a new connection, which cannot be stale. Raises
        UpstreamError; when cancelled, the connection is closed at once.
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
        """The same, without waiting: the answer is not ready yet, and may have failed."""
        answer = None if fresh else self.send_on_idle(request, deadline)
        if answer is None:
            connection = await self._connect(deadline)
            answer = EngineAnswer(connection, self._deadlines, deadline, self._memory)
            connection.send(request, answer)
        return answer

    def send_on_idle(
        self, request: bytes, deadline: float, longest: float | None = None
    ) -> EngineAnswer | None:
        """The same on a kept connection, None where there is none, or none that was idle for less
        than `longest` seconds. No coroutine: that it seldom waits makes `send` dear."""
        idle, moment = self._idle, now()
        if longest is not None and idle and idle[-1].idle_since < moment - longest:
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
        """A small question, for which it does no harm to be asked twice: it is asked once more on a
        new connection where a kept one had been closed. Raises UpstreamError."""
        try:
            return await self._ask_whole(request, deadline, limit, fresh=False)
        except StaleConnectionError:
            return await self._ask_whole(request, deadline, limit, fresh=True)

    async def _ask_whole(
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
        """The engine is dead: every answer fails at once with a copy of `error`, unless its end is
        here, every connection is aborted, and a connect that is under way raises ConnectError.

        What is asked afterwards is asked as ever.
        """
        for attempt in self._attempts:
            attempt.fail(error)
        self.close()
        for connection in tuple(self._open):
            connection.fail(copy(error))

    def fail_resumable(self, error: UpstreamError) -> None:
        """The same of streams that have begun and that another engine can go on with, alone."""
        for connection in tuple(self._open):
            if connection.is_resumable:
                connection.fail(copy(error))

    def close(self) -> None:
        """Closes what is idle."""
        while self._idle:
            self._idle.pop().abort()
        if self._reaper is not None:
            self._reaper.cancel()
            self._reaper = None

    async def _connect(self, deadline: float) -> EngineConnection:
        loop = asyncio.get_running_loop()
        patience = self._limits.connect_timeout_s
        attempt = ConnectAttempt(self._host, self._port, deadline, patience, self._tls)
        self._attempts.add(attempt)
        try:
            connection = await attempt.run(
                loop, lambda: EngineConnection(self, self._limits.max_head_bytes, loop)
            )
        finally:
            self._attempts.discard(attempt)
        if connection.transport is not None and not connection.transport.is_closing():
            self._open.add(connection)
        return connection

    # Owner of its connections.

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
        self._reaper = None
        expired = now() - self._limits.max_idle_s
        keep = next((i for i, c in enumerate(self._idle) if c.idle_since > expired), None)
        old, self._idle = self._idle[:keep], self._idle[keep:] if keep is not None else []
        for connection in old:
            connection.abort()
        if self._idle:
            delay = self._idle[0].idle_since - expired
            self._reaper = loop.call_later(delay, self._reap, loop)
