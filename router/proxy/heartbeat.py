"""Heartbeats: comments in the silences of an event stream, for proxies that cut silent connections.
The server translates them to events of the dialect, since Codex counts no comments.

Only requests for a stream have them, and only with the setting stream_heartbeat. Once a comment has
been sent, the status is 200, and a failure becomes an error event. The client has nothing of an
answer yet, so the router can still retry.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from time import monotonic as now

import orjson

from router.common.exact_json import dumps
from router.http_client.engine_answer import AnswerSink
from router.http_client.errors import BrokenAnswerError, ReaderStalledError, UpstreamError
from router.http_client.sse import is_between_events
from router.openai.answers import can_stream, parse_object, stream_events
from router.openai.errors import error_body, type_of_status
from router.proxy import messages
from router.proxy.exchange import BodySource, ExchangeWrapper, Header
from router.proxy.messages import EVENT_STREAM_TYPE
from router.proxy.relay import EVENT_STREAM
from router.proxy.request import Body, Request
from router.proxy.request_limits import RequestLimits

COMMENT = b": heartbeat\n\n"
NOT_JSON = "an engine's answer cannot be converted to an event stream"


class HeartbeatStream:
    """The stream that a client is sent: comments, and an answer once there is one.

    It is a BodySource for the client's exchange, and an AnswerSink for the answer. `last_write` is
    a time of `now`, in seconds. `has_answer`: some of an answer has passed. `failure` is the error
    with which the client's exchange has refused the answer.
    """

    is_event_stream: bool = True
    length: int | None = None

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.last_write = now()
        self.has_answer = False
        self._sink: AnswerSink | None = None
        self._early: list[tuple[bytes, bool]] = []
        self._over: asyncio.Future[None] = loop.create_future()
        self.failure: UpstreamError | None = None
        self._answer: BodySource | None = None
        self._is_paused = False
        self._is_between_events = True

    @property
    def is_over(self) -> bool:
        return self._over.done()

    # For the client's exchange.

    async def relay(self, sink: AnswerSink, idle: float, latest: float) -> None:
        self._sink = sink
        for block, last in self._early:
            sink.write(block, last)
        self._early.clear()
        await self._over

    def pause(self) -> None:
        self._is_paused = True
        if self._answer is not None:
            self._answer.pause()

    def resume(self) -> None:
        self._is_paused = False
        if self._answer is not None:
            self._answer.resume()

    def fail(self, error: UpstreamError) -> None:
        self.failure = error
        if self._answer is not None:
            self._answer.fail(error)

    # For the answer.

    def carry(self, answer: BodySource | None) -> None:
        self._answer = answer
        if answer is not None and self._is_paused:
            answer.pause()

    def write(self, block: bytes, last: bool) -> None:
        self.has_answer, self.last_write = True, now()
        if block:
            self._is_between_events = is_between_events(block)
        self._put(block, last)
        if last and not self.is_over:
            self._over.set_result(None)

    def beat(self) -> None:
        """Send a comment, unless that would split an event or the client does not read."""
        self.last_write = now()
        if self._is_between_events and not self._is_paused and not self.is_over:
            self._put(COMMENT, False)

    def _put(self, block: bytes, last: bool) -> None:
        if self._sink is None:
            self._early.append((block, last))
        else:
            self._sink.write(block, last)


class HeartbeatExchange(ExchangeWrapper):
    """An Exchange that sends heartbeats to another one. It must be closed after its request."""

    def __init__(self, request: Request, limits: RequestLimits) -> None:
        super().__init__(request.exchange)
        self._request = request
        self._interval, self._idle = limits.stream_heartbeat, limits.stream_idle_timeout
        self._stream: HeartbeatStream | None = None
        self._relaying: asyncio.Task[None] | None = None
        self._started_at = now()
        self._timer: asyncio.TimerHandle | None = None
        self._start_timer(self._interval)

    @property
    def started(self) -> bool:
        """Return True if the client has some of an answer. Comments are none."""
        return self._inner.started and (self._stream is None or self._stream.has_answer)

    async def respond(self, status: int, headers: Sequence[Header], body: bytes) -> None:
        if self._is_open:
            await self.finish(_as_events(status, headers, body, self._request.body))
        else:
            await self._discard_stream()
            await self._inner.respond(status, headers, body)

    async def relay(
        self, status: int, headers: Sequence[Header], answer: BodySource, idle: float, latest: float
    ) -> None:
        if answer.is_event_stream:
            if not self._is_open:
                await self._discard_stream()
                self._open(status, headers)
                self._start_timer(self._interval)
            await self._carry(answer, idle, latest)
        elif self._is_open:
            raise BrokenAnswerError("not an event stream, although the request set stream")
        else:
            await self._discard_stream()
            await self._inner.relay(status, headers, answer, idle, latest)

    async def finish(self, tail: bytes) -> None:
        self._stop_timer()
        stream, relaying = self._stream, self._relaying
        if stream is None or relaying is None:
            await self._inner.finish(tail)
            return
        if stream.is_over:  # the client has been sent an error
            return
        stream.write(tail, True)
        try:
            await relaying
        except ReaderStalledError:
            self._inner.abort()

    def abort(self) -> None:
        self.close()
        self._inner.abort()

    def close(self) -> None:
        self._stop_timer()
        if self._relaying is not None:
            self._relaying.cancel()

    @property
    def _is_open(self) -> bool:
        """Return True if the client has a head."""
        return self._stream is not None and self._inner.started

    def _open(self, status: int, headers: Sequence[Header]) -> HeartbeatStream:
        self._stream = stream = HeartbeatStream(self.loop)
        relaying = self._inner.relay(status, headers, stream, self._idle, self._request.latest)
        self._relaying = self.loop.create_task(relaying)
        self._relaying.add_done_callback(_retrieve_error)
        return stream

    async def _discard_stream(self) -> None:
        """Discard a stream of which nothing was sent: another head takes its place."""
        self._stop_timer()
        self._stream, relaying, self._relaying = None, self._relaying, None
        if relaying is not None:
            relaying.cancel()
            await asyncio.wait((relaying,))

    async def _carry(self, answer: BodySource, idle: float, latest: float) -> None:
        stream, relaying = self._stream, self._relaying
        assert stream is not None
        assert relaying is not None
        stream.carry(answer)
        carrying = self.loop.create_task(answer.relay(stream, idle, latest))
        try:
            await asyncio.wait((carrying, relaying), return_when=asyncio.FIRST_COMPLETED)
            # The client's exchange ends first, with an error, if the client does not read.
            await (carrying if carrying.done() else relaying)
            if stream.failure is not None:  # an answer that is complete does not fail itself
                raise stream.failure
            if relaying.done() or stream.is_over:
                await relaying
        finally:
            stream.carry(None)
            carrying.cancel()

    def _start_timer(self, seconds: float) -> None:
        self._timer = self.loop.call_later(seconds, self._on_timer)

    def _on_timer(self) -> None:
        last_write = self._started_at if self._stream is None else self._stream.last_write
        left = last_write + self._interval - now()
        if left <= 0:
            stream = self._stream
            if stream is None:
                request_id = self._request.record.request_id
                passed = messages.to_client(EVENT_STREAM, request_id, is_stream=True)
                stream = self._open(200, passed)
            stream.beat()
            left = self._interval
        self._start_timer(left)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _retrieve_error(relaying: asyncio.Task[None]) -> None:
    """Retrieve the error of a task that is perhaps not awaited, or asyncio logs it."""
    if not relaying.cancelled():
        relaying.exception()


def _as_events(status: int, headers: Sequence[Header], body: bytes, asked: Body) -> bytes:
    """Return a whole answer as events, for a client that has the head of a stream. Never raises."""
    kind = next((value for name, value in headers if name == b"content-type"), b"")
    if kind.startswith(EVENT_STREAM_TYPE):
        return body
    content = parse_object(body)
    try:
        if content is not None:
            return _events_of(status, content, asked)
    except orjson.JSONEncodeError:
        pass  # what can be read but not written: nesting beyond 250 levels
    status = max(status, 502) if status < 400 else status
    return b"data: " + error_body(status, type_of_status(status), NOT_JSON) + b"\n\n"


def _events_of(status: int, content: Body, asked: Body) -> bytes:
    if status < 400 and can_stream(content):
        return stream_events(content, asked)
    if status >= 400 and "error" not in content:
        content = {"error": content}
    return b"data: " + dumps(content) + b"\n\n"
