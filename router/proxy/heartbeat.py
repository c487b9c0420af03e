"""Comments in the silences of an event stream, for proxies that cut what is silent.

Only in front of requests that ask for a stream, and only where the setting stream_heartbeat says
so; nobody else pays for it. Once a comment has been sent the status is 200 for good, and a failure
is told as an event. But the client has seen nothing of an answer yet, so whatever could be tried
again before still can be.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import orjson

from router.common.exact_json import dumps
from router.http_client.deadlines import now
from router.http_client.engine_answer import AnswerSink
from router.http_client.errors import BrokenAnswerError, ReaderStalledError, UpstreamError
from router.http_client.sse import is_between_events
from router.openai import stream_from_answer
from router.openai.answers import parse_object
from router.openai.errors import error_body, type_of_status
from router.proxy import headers as head
from router.proxy.exchange import BodySource, Header
from router.proxy.relay import EVENT_STREAM
from router.proxy.request import Body, Request
from router.proxy.request_limits import RequestLimits

COMMENT = b": heartbeat\n\n"
EVENT_STREAM_TYPE = b"text/event-stream"
NOT_JSON = "an engine answered with something that cannot be told in a stream"


class Line:
    """What a front relays as long as a stream is open: comments, and an answer once there is one.

    A Relayed to the front, a Sink to the answer. Seconds of `now`.
    """

    is_event_stream: bool = True
    length: int | None = None

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.spoke = now()
        self.is_said = False
        """Whether anything of an answer has passed."""
        self._sink: AnswerSink | None = None
        self._early: list[tuple[bytes, bool]] = []
        self._over: asyncio.Future[None] = loop.create_future()
        self._answer: BodySource | None = None
        self._is_paused = False
        self._is_between_events = True

    @property
    def is_over(self) -> bool:
        return self._over.done()

    # The front's side.

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
        if self._answer is not None:
            self._answer.fail(error)

    # The answer's side.

    def carry(self, answer: BodySource | None) -> None:
        self._answer = answer
        if answer is not None and self._is_paused:
            answer.pause()

    def write(self, block: bytes, last: bool) -> None:
        self.is_said, self.spoke = True, now()
        if block:
            self._is_between_events = is_between_events(block)
        self._put(block, last)
        if last and not self.is_over:
            self._over.set_result(None)

    def beat(self) -> None:
        """Not where it would split an event, nor before a client that does not read."""
        self.spoke = now()
        if self._is_between_events and not self._is_paused and not self.is_over:
            self._put(COMMENT, False)

    def _put(self, block: bytes, last: bool) -> None:
        if self._sink is None:
            self._early.append((block, last))
        else:
            self._sink.write(block, last)


class Beating:
    """An Exchange before the front's own one. It must be closed when its request is over."""

    def __init__(self, request: Request, limits: RequestLimits) -> None:
        front = request.exchange
        self.loop, self.endpoint, self.arrived = front.loop, front.endpoint, front.arrived
        self.headers, self.body, self.caller = front.headers, front.body, front.caller
        self._front = front
        self._request = request
        self._interval, self._idle = limits.stream_heartbeat, limits.stream_idle_timeout
        self._line: Line | None = None
        self._relaying: asyncio.Task[None] | None = None
        self._spoke = now()
        self._timer: asyncio.TimerHandle | None = None
        self._wait(self._interval)

    @property
    def started(self) -> bool:
        """Comments alone are no answer."""
        return self._front.started and (self._line is None or self._line.is_said)

    async def respond(self, status: int, headers: Sequence[Header], body: bytes) -> None:
        if self._is_open:
            await self.finish(_as_events(status, headers, body, self._request.body))
        else:
            await self._put_away()
            await self._front.respond(status, headers, body)

    async def relay(
        self, status: int, headers: Sequence[Header], answer: BodySource, idle: float, latest: float
    ) -> None:
        if answer.is_event_stream:
            if not self._is_open:
                await self._put_away()
                self._open(status, headers)
                self._wait(self._interval)
            await self._carry(answer, idle, latest)
        elif self._is_open:
            raise BrokenAnswerError("no event stream, though one was asked for")
        else:
            await self._put_away()
            await self._front.relay(status, headers, answer, idle, latest)

    async def finish(self, tail: bytes) -> None:
        self._be_quiet()
        line, relaying = self._line, self._relaying
        if line is None or relaying is None:
            await self._front.finish(tail)
            return
        if line.is_over:  # it ended with what cannot be told, and the client knows
            return
        line.write(tail, True)
        try:
            await relaying
        except ReaderStalledError:
            self._front.abort()

    def abort(self) -> None:
        self.close()
        self._front.abort()

    def close(self) -> None:
        self._be_quiet()
        if self._relaying is not None:
            self._relaying.cancel()

    @property
    def _is_open(self) -> bool:
        """Whether the client has a head, and nothing more can be put before it."""
        return self._line is not None and self._front.started

    def _open(self, status: int, headers: Sequence[Header]) -> Line:
        self._line = line = Line(self.loop)
        relaying = self._front.relay(status, headers, line, self._idle, self._request.latest)
        self._relaying = self.loop.create_task(relaying)
        self._relaying.add_done_callback(_note_end)
        return line

    async def _put_away(self) -> None:
        """A line on which nothing was sent: another head takes its place."""
        self._be_quiet()
        self._line, relaying, self._relaying = None, self._relaying, None
        if relaying is not None:
            relaying.cancel()
            await asyncio.wait((relaying,))

    async def _carry(self, answer: BodySource, idle: float, latest: float) -> None:
        line, relaying = self._line, self._relaying
        assert line is not None
        assert relaying is not None
        line.carry(answer)
        carrying = self.loop.create_task(answer.relay(line, idle, latest))
        try:
            await asyncio.wait((carrying, relaying), return_when=asyncio.FIRST_COMPLETED)
            # The front ends first where its client does not read, and says so.
            await (carrying if carrying.done() else relaying)
            if relaying.done() or line.is_over:
                await relaying
        finally:
            line.carry(None)
            carrying.cancel()

    def _wait(self, seconds: float) -> None:
        self._timer = self.loop.call_later(seconds, self._look)

    def _look(self) -> None:
        spoke = self._spoke if self._line is None else self._line.spoke
        left = spoke + self._interval - now()
        if left <= 0:
            line = self._line
            if line is None:
                told = head.to_client(EVENT_STREAM, self._request.record.request_id)
                line = self._open(200, told)
            line.beat()
            left = self._interval
        self._wait(left)

    def _be_quiet(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _note_end(relaying: asyncio.Task[None]) -> None:
    """How it ended is told to whoever waits for it, if anyone does."""
    if not relaying.cancelled():
        relaying.exception()


def _as_events(status: int, headers: Sequence[Header], body: bytes, asked: Body) -> bytes:
    """A whole answer, for a client that has been given the head of a stream. Total."""
    kind = next((value for name, value in headers if name == b"content-type"), b"")
    if kind.startswith(EVENT_STREAM_TYPE):
        return body
    content = parse_object(body)
    try:
        if content is not None:
            return _told(status, content, asked)
    except orjson.JSONEncodeError:
        pass  # what can be read but not written: nesting beyond 250 levels
    status = max(status, 502) if status < 400 else status
    return b"data: " + error_body(status, type_of_status(status), NOT_JSON) + b"\n\n"


def _told(status: int, content: Body, asked: Body) -> bytes:
    if status < 400 and stream_from_answer.is_answer(content):
        return stream_from_answer.events(content, asked)
    if status >= 400 and "error" not in content:
        content = {"error": content}
    return b"data: " + dumps(content) + b"\n\n"
