"""The connections to one engine: kept alive between requests, and each parsed strictly.

A connection is *idle* (kept by its pool), *busy* (it has an answer to feed) or *closed*. It returns
to its pool only after an answer that ended by its own framing, if the engine keeps the connection
open, everything was sent and nothing unexpected was received. In all other cases it is aborted. It
is never closed gracefully: that would wait until the engine has read everything, maybe for ever.

Idle connections form a stack: the youngest one is the likeliest to be still open, and the oldest
ones expire when there is less to do. The engine may close an idle connection at the very moment
when the pool reuses it: that is a StaleConnectionError. Only the caller knows whether a request may
be sent a second time (RFC 9110, section 9.2.2), so `request` and `send` do not repeat it; `fetch`,
which is for requests without side effects, does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from time import monotonic as now
from typing import NamedTuple, Protocol, cast

import httptools

from router.common.deadlines import Deadlines
from router.http_client.answer_limits import MemoryBudget
from router.http_client.connecting import ConnectAttempt, EngineTls
from router.http_client.engine_answer import EngineAnswer, Resumable
from router.http_client.errors import (
    BrokenAnswerError,
    CompressedAnswerError,
    DisconnectedError,
    StaleConnectionError,
    UpstreamError,
)
from router.http_client.head_cache import HeadCache, Header, Headers

NO_BODY_STATUSES = frozenset((204, 304))
# If a reused connection is lost within this time after a request was sent, the engine had closed it
# before: its FIN needs one way through the network, and this process a moment to read it. A time in
# which this process stood still does not count. If the connection is lost later, the engine may
# have worked on the request.
STALE_WITHIN_S = 0.25
LENGTH = b"content-length"
CODING = b"content-encoding"
NO_CODING = (b"", b"identity")
MAX_CODING_CHARS = 40


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

    `host`, `port` and `tls` are where new connections go.
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
        self.memory = memory
        self.tls = tls
        self.host = host
        self.port = port
        self._limits = limits
        self.deadlines = deadlines
        self._attempts: set[ConnectAttempt] = set()
        self._open: set[EngineConnection] = set()
        self._idle: list[EngineConnection] = []
        self._reaper: asyncio.TimerHandle | None = None

    def at_port(self, port: int) -> EnginePool:
        """Return a pool for another server on the engine's host, without TLS."""
        return EnginePool(self.host, port, self._limits, self.deadlines)

    @property
    def open_count(self) -> int:
        return len(self._open)

    @property
    def idle_count(self) -> int:
        return len(self._idle)

    @property
    def connecting_count(self) -> int:
        return len(self._attempts)

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
            answer = connection.send(request, deadline, self.deadlines, self.memory)
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
                return connection.send(request, deadline, self.deadlines, self.memory)
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

    def fail_resumable(
        self, error: UpstreamError, wanted: Callable[[Resumable], bool] = lambda buffer: True
    ) -> None:
        """Fail only the streams that another engine can continue, and of these the `wanted`."""
        for connection in tuple(self._open):
            buffer = connection.resumable
            if buffer is not None and wanted(buffer):
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
            self.host, self.port, deadline, limits.connect_timeout_s, self.deadlines, self.tls
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
        while self._idle and self._idle[0].idle_since <= expired:
            self._idle.pop(0).abort()
        if self._idle:
            delay = self._idle[0].idle_since - expired
            self._reaper = loop.call_later(delay, self._reap, loop)


class ConnectionOwner(Protocol):
    """The pool that a connection reports to. `reads` counts the reads on all its connections."""

    reads: int
    deadlines: Deadlines

    def released(self, connection: EngineConnection) -> None: ...
    def lost(self, connection: EngineConnection) -> None: ...


class EngineConnection(asyncio.Protocol):
    """`transport` is None before the connection is made and after it is lost. `idle_since` and
    `sent_at` are times of `now`; `idle_since` is 0.0 until the first answer has ended."""

    __slots__ = ("_answer", "_complete", "_half_closed", "_head_cache", "_head_done", "_headers",
                 "_max_head_bytes", "_may_stay", "_overhead", "_owner", "_parser", "_pieces",
                 "_started", "_until_close", "idle_since", "loop", "on_body", "sent_at",
                 "transport")  # fmt: skip

    def __init__(
        self, owner: ConnectionOwner, max_head_bytes: int, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.loop = loop
        self.sent_at = self.idle_since = 0.0
        self.transport: asyncio.Transport | None = None
        self._owner = owner
        self._max_head_bytes = max_head_bytes
        self._pieces: list[bytes] = []
        # A callback of the parser; as a bound method of the list it costs no Python frame.
        self.on_body = self._pieces.append
        self._parser = httptools.HttpResponseParser(self)
        # The head of the last answer, if that was a complete 200 on a kept connection.
        self._head_cache = HeadCache(200)
        self._answer: EngineAnswer | None = None
        self._until_close = False
        self._may_stay = False
        self._half_closed = False
        self._headers: list[Header] = []
        self._started = False
        # Bytes received since the last piece of body: heads and trailers.
        self._overhead = 0
        self._head_done = False
        self._complete = False

    def send(
        self, request: bytes, deadline: float, deadlines: Deadlines, memory: MemoryBudget | None
    ) -> EngineAnswer:
        """Send a request. Return its answer, which has failed if the connection is lost already."""
        assert self._answer is None, "one request at a time"
        self._started = False
        self.sent_at = now()
        if self.transport is not None:
            self.transport.write(request)
        answer = EngineAnswer(self, deadlines, deadline, memory)
        if self.transport is None:
            answer.fail(self._no_answer_error(None))
        else:
            self._answer = answer
        return answer

    @property
    def resumable(self) -> Resumable | None:
        """The record of the stream that is running here, if another engine can continue it."""
        buffer = None if self._answer is None else self._answer.resume_buffer
        return buffer if buffer is not None and buffer.can_resume else None

    def fail(self, error: UpstreamError) -> None:
        """Fail the running answer, if any, and abort the connection."""
        answer = self._answer
        self.abort()
        if answer is not None:
            answer.fail(error)

    # AnswerConnection: called by the answer.

    def half_close(self) -> None:
        """Close the sending side, which a server takes for a disconnected client."""
        self._half_closed = True
        if self.transport is not None and self.transport.can_write_eof():
            self.transport.write_eof()

    def pause(self) -> None:
        if self.transport is not None and self.transport.is_reading():
            self.transport.pause_reading()

    def resume(self) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.resume_reading()

    def abort(self) -> None:
        self._answer = None
        if self.transport is not None:
            self.transport.abort()

    # asyncio.Protocol.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._owner.lost(self)
        answer, self._answer = self._answer, None
        if answer is None:
            return
        if self._until_close and exc is None:
            answer.feed(b"", True)
        elif self._started:
            answer.fail(BrokenAnswerError("the answer ended early"))
        else:
            answer.fail(self._no_answer_error(exc))

    def eof_received(self) -> None:
        """Abort: a graceful close would wait for an engine that may not read."""
        assert self.transport is not None
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        self._owner.reads += 1
        answer = self._answer
        if answer is None:
            self.abort()
            return
        is_first = not self._started
        if is_first:
            cached = self._head_cache.match(data)
            if cached is not None:
                self._answer = None
                self._release(not self._half_closed)
                answer.feed_complete(*cached)
                return
            self._started = True
            self._headers = []
            self._head_done = self._complete = False
            self._overhead = 0
        self._overhead += len(data)
        error: BrokenAnswerError | None = None
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as failure:
            cause = failure.__context__
            if not isinstance(cause, BrokenAnswerError):
                cause = BrokenAnswerError(str(cause or failure))
            error = cause
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as failure:
            error = BrokenAnswerError(f"not an HTTP/1.1 answer: {failure}")
        block = b"".join(self._pieces)
        self._pieces.clear()
        if self._complete:
            self._answer = None
            may_stay = self._may_stay and error is None
            # The first answer of a connection is not cached: often there is no second one.
            is_cacheable = is_first and may_stay and self.idle_since and answer.status == 200
            if is_cacheable and not answer.is_event_stream:
                self._head_cache.store(data, 200, answer.headers, answer.length or 0)
            self._release(may_stay)
            answer.feed(block, True)
            return
        if block:
            self._overhead = 0
            answer.feed(block, False)
        elif self._overhead > self._max_head_bytes and error is None:
            error = self._head_too_large()
        if error is not None:
            answer.fail(error)
            self.abort()

    def _release(self, may_stay: bool) -> None:
        """Return to the pool, unless the engine closes or a part of the request is unsent."""
        transport = self.transport
        if transport is None:
            return
        if may_stay and not transport.get_write_buffer_size() and not transport.is_closing():
            self._owner.released(self)
        else:
            transport.abort()

    def _no_answer_error(self, exc: Exception | None) -> DisconnectedError:
        seconds = self._owner.deadlines.seconds_since(self.sent_at)
        is_stale = self.idle_since and seconds < STALE_WITHIN_S
        kind = StaleConnectionError if is_stale else DisconnectedError
        return kind(f"the connection was lost: {exc or 'closed'}")

    # Callbacks of httptools.

    def on_message_begin(self) -> None:
        if self._complete:
            raise BrokenAnswerError("an answer without a request")

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._head_done:  # trailers are ignored
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if not 200 <= status <= 599:
            if not 102 <= status < 200 and status != 100:
                raise BrokenAnswerError(f"an answer with status {status}")
            self._headers = []  # the head of an interim answer is ignored
            return
        headers = self._headers
        if self._overhead > self._max_head_bytes and _size(headers) > self._max_head_bytes:
            raise self._head_too_large()
        by_name = dict(headers)  # llhttp rejects a second Content-Length
        length = by_name.get(LENGTH)
        if b"transfer-encoding" in by_name:
            for name, value in headers:
                if name == b"transfer-encoding" and value.strip().lower() != b"chunked":
                    raise BrokenAnswerError("an unknown transfer encoding")
        elif length is None and status not in NO_BODY_STATUSES:
            self._until_close = True
        if CODING in by_name:
            _require_uncompressed(headers, status)
        self._head_done = True
        answer = self._answer
        assert answer is not None
        answer.status, answer.headers = status, headers
        if length is not None:
            answer.length = int(length)
            answer.headers = [header for header in headers if header[0] != LENGTH]
        content_type = by_name.get(b"content-type", b"")
        answer.is_event_stream = content_type.lower().startswith(b"text/event-stream")
        if status >= 500:
            answer.note_server_error()

    def on_message_complete(self) -> None:
        if self._head_done:
            self._complete = True
            self._may_stay = self._parser.should_keep_alive() and not self._half_closed

    def _head_too_large(self) -> BrokenAnswerError:
        return BrokenAnswerError(f"headers of more than {self._max_head_bytes} bytes")


def _require_uncompressed(headers: Headers, status: int) -> None:
    """Raises CompressedAnswerError."""
    values = [value.strip().lower() for name, value in headers if name == CODING]
    codings = b", ".join([value for value in values if value not in NO_CODING])
    if codings and status not in NO_BODY_STATUSES:
        raise CompressedAnswerError(codings.decode("latin-1")[:MAX_CODING_CHARS])


def _size(headers: Headers) -> int:
    return sum(len(name) + len(value) + 4 for name, value in headers)
