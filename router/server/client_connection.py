"""The front door: one client's connection, a Protocol of our own behind uvicorn's listener.

    bytes -> inbound: requests -> here: whose turn it is -> flows or bridge -> outbound -> bytes

Requests to the hot endpoints go to flows, all others through the bridge to the application. They
are answered in the order in which they came. What is uvicorn's is what it gives to any protocol
(its parameter `http`) and asks of it: `shutdown`, and its place in the server's state.

Deadlines: a request must be received in time, an answer read, and a connection on which nothing
happens is closed. One clock is enough for the three, for only one of them runs at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sized
from typing import Any, cast

from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.server import ServerState

from router.http_client.deadlines import NEVER, Deadlines, now
from router.openai.errors import (
    MalformedRequestError,
    OverloadError,
    RequestError,
    RequestTimeoutError,
    ShuttingDownError,
    body_of,
    headers_of,
    shape_of,
)
from router.proxy.dispatch import refuse, serve
from router.proxy.gateway import Gateway
from router.proxy.request_limits import Limits
from router.server import bridge, http_heads
from router.server.request_reader import Inbound, Incoming
from router.server.response_writer import Outbound

LINGER = 5.0
READ_AHEAD = 64 * 1024
# Connections beyond the most, which are told so if they ask for something soon, and may ask for
# health; those beyond these are cut.
CROWD = 128
# Of requests that are refused before their end. The application may do what one asks without a look
# at its body, so it hears only of those that ask for nothing to be done, and of POSTs: to whatever
# it has for these, the body is what counts.
REFUSED_THERE = frozenset((b"POST", b"GET", b"HEAD", b"OPTIONS"))
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def excess(connections: Sized, limits: Limits) -> int:
    """How many there are more than there may be."""
    return len(connections) - (limits.max_connections or len(connections))


class RouterProtocol(asyncio.Protocol):
    """Expects a Gateway as "gateway" and Deadlines as "deadlines" in the lifespan's state."""

    __slots__ = ("_ahead", "_answering", "_app", "_app_state", "_crowded", "_deadlines",
                 "_default_headers", "_default_lines", "_held", "_inbound", "_is_asked_to_end",
                 "_is_closing", "_is_continued", "_is_reading", "_is_timed", "_keep_alive",
                 "_loop", "_refused", "_server", "_task", "_unread", "_unread_until",
                 "_write_paused", "deadline", "gateway", "send", "transport")  # fmt: skip

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.gateway: Gateway = app_state["gateway"]
        self.deadline = 0.0
        self._deadlines: Deadlines = app_state["deadlines"]
        self._loop = _loop or asyncio.get_running_loop()
        self._app = cast(ASGIApp, config.loaded_app)
        self._app_state = app_state
        self._keep_alive: float = cast(Any, config).timeout_keep_alive  # which may be a float
        self._server = server_state
        self.transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._inbound = Inbound(self.gateway)
        # What is being answered, the task that does it, and how much of its body is held.
        self._answering: Outbound | None = None
        self._task: asyncio.Task[None] | None = None
        self._held = 0
        # Whether the request whose turn it is was told to go on.
        self._is_continued = False
        # Whether `deadline` is the one of the request that is being received.
        self._is_timed = False
        self._is_reading = True
        self._write_paused = False
        # Nothing more is answered.
        self._is_closing = False
        self._refused: Incoming | None = None
        self._is_asked_to_end = False
        self._default_headers: list[tuple[bytes, bytes]] | None = None
        self._default_lines = b""
        # Bytes of requests that are read while another one is being answered.
        self._ahead = 0
        # Came when there were enough of them.
        self._crowded = False
        # Of a whole answer that the client is slow to read: the bytes that it had not read when it
        # was last looked at, which take memory of answers, and until when it must have read them.
        self._unread = 0
        self._unread_until = NEVER

    # asyncio.Protocol.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.send = self.transport.write
        connections, limits = self._server.connections, self.gateway.limits
        connections.add(self)  # type: ignore[arg-type] # a set of uvicorn's own protocols
        self.gateway.metrics.connections.inc()
        over = excess(connections, limits)
        self._crowded = over > 0
        if over > CROWD:
            self.gateway.metrics.refusals.add(("connections",))
            self.abort()
            return
        self._watch(LINGER if self._crowded else limits.client_read_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        self._deadlines.drop(self)
        self.gateway.metrics.connections.dec()
        self._inbound.close()
        self._count_unread(0)
        self._is_closing = True
        outbound, self._answering = self._answering, None
        if outbound is not None:
            outbound.left()
            self._let_go()
            if self._task is not None and outbound.endpoint:
                self._task.cancel()

    def eof_received(self) -> bool:
        """A client that half closes has left: nobody asks and then stays only to listen."""
        return False

    def data_received(self, data: bytes) -> None:
        inbound = self._inbound
        if inbound.is_deaf:
            return
        inbound.feed(data)
        if self._answering is None:
            self._answer_next()
        elif inbound.requests:
            self._limit_ahead(len(data))
        if self._unread_until != NEVER:
            return  # the clock runs for what the client has not read, whatever it asks meanwhile
        if inbound.is_receiving:
            if not self._is_timed:
                self._is_timed = True
                self._watch(self.gateway.limits.client_read_timeout)
        elif self._answering is not None:
            self._is_timed = False
            self.deadline = NEVER  # until its answer ends

    def pause_writing(self) -> None:
        self._write_paused = True
        outbound = self._answering
        if outbound is None:
            self._wait_for_reader()  # uvloop says so only after the answer's end was written
        else:
            outbound.pause()
            if not outbound.endpoint:
                self._watch_reader()

    def resume_writing(self) -> None:
        self._write_paused = False
        if self._answering is not None:
            self._answering.resume()
        if self._unread:
            self._was_read()

    # uvicorn's.

    def shutdown(self) -> None:
        self._is_asked_to_end = True
        if self._answering is None and not self._inbound.requests:
            self.transport.close()

    def end(self) -> None:
        """What has not come by now is not waited for: it may be asked of another router."""
        if self._answering is None and self._inbound.is_receiving:
            self._inbound.refuse(ShuttingDownError("the router is shutting down"))
            self._answer_next()

    # Whose turn it is.

    def _answer_next(self) -> None:
        """The oldest request, if it is all here, or will not be served."""
        inbound = self._inbound
        if not inbound.requests or self._is_closing:
            return
        request = inbound.requests[0]
        if request.refusal is not None:
            inbound.requests.popleft()
            self._refuse(request, request.refusal)
        elif request.is_complete:
            inbound.requests.popleft()
            self._is_continued = False
            if self._crowded and self._is_too_many(request):
                self._refuse(request, OverloadError("too many connections", "connections"))
            else:
                self._answer(request)
        elif not self._is_continued and request.expects_continue:
            self._is_continued = True
            self.transport.write(CONTINUE)

    def _answer(self, request: Incoming) -> None:
        self._held = request.size
        outbound = self._outbound(request, request.body)
        if request.endpoint is None:
            self._bridge(request, outbound)
        else:
            self._run(serve(outbound, self.gateway))

    def _refuse(self, request: Incoming, error: RequestError) -> None:
        """Closes: nobody knows what follows."""
        self._refused, self._inbound.is_deaf = request, True
        self._inbound.let_go(request)
        request.keep_alive = False
        outbound = self._outbound(request, b"")
        if request.endpoint is not None:
            self._run(refuse(outbound, self.gateway, error))
        elif request.method in REFUSED_THERE and not isinstance(error, MalformedRequestError):
            self._bridge(request, outbound, error)
        else:
            body, status = body_of(error), shape_of(error).status
            outbound.open(status, headers_of(error), len(body))
            outbound.write(body, last=True)

    def _bridge(
        self, request: Incoming, outbound: Outbound, refusal: RequestError | None = None
    ) -> None:
        scope = bridge.scope_of(request, self.transport, self._app_state)
        task = self._run(bridge.answer(self._app, scope, outbound, refusal))
        self._server.tasks.add(task)
        task.add_done_callback(self._server.tasks.discard)

    def _outbound(self, request: Incoming, body: bytes) -> Outbound:
        self._answering = outbound = Outbound(
            self._loop,
            self,
            now(),
            request.endpoint or "",
            request.headers,
            body,
            request.http_1_1,
            request.keep_alive,
            self._write_paused,
        )
        return outbound

    def _run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self._task = task = self._loop.create_task(work)
        return task

    def _is_too_many(self, request: Incoming) -> bool:
        """Of connections. Whoever asks for health is answered, and then closed."""
        if len(self._server.connections) <= self.gateway.limits.max_connections:
            self._crowded = False
            return False
        request.keep_alive = False
        return request.endpoint is not None

    def _limit_ahead(self, size: int) -> None:
        """A client that leaves is noticed only while we read, so some requests are read ahead."""
        self._ahead += size
        if self._ahead > READ_AHEAD:
            self._pause_reading()

    # Line: what an answer needs of its connection.

    def common(self, outbound: Outbound) -> tuple[bytes, ...]:
        headers = self._server.default_headers
        if headers is not self._default_headers:  # uvicorn makes them anew every second
            self._default_headers = headers
            self._default_lines = b"".join([b"%s: %s\r\n" % header for header in headers])
        # Who asks again is to find another router; who has asked is answered.
        inbound = self._inbound
        is_ending = self.gateway.draining or self._is_asked_to_end
        if inbound.is_noise if inbound.requests else is_ending:
            outbound.keep_alive = False
        return (
            (self._default_lines,)
            if outbound.keep_alive
            else (self._default_lines, http_heads.CLOSE)
        )

    def answered(self, outbound: Outbound) -> None:
        self._answering = self._task = None
        self._let_go()
        self._server.total_requests += 1
        inbound = self._inbound
        if not outbound.keep_alive or (inbound.requests and inbound.is_noise):
            self._close()
        elif self._write_paused:
            self._wait_for_reader()
        else:
            self._go_on()

    def _let_go(self) -> None:
        self.gateway.held.size -= self._held
        self._held = 0

    def _go_on(self) -> None:
        """An answer is out: on to the next request."""
        self._unread_until = NEVER
        if self._unread:
            self._count_unread(0)
        inbound = self._inbound
        if inbound.requests:
            self._answer_next()
        elif self._is_asked_to_end:
            self._close()  # the head of the answer may have left before
        elif not inbound.is_receiving:
            self._watch(self._keep_alive)
        if self._is_closing:
            return
        if inbound.is_receiving:
            self._watch(self.gateway.limits.client_read_timeout)
        # Or more would come with each answer than is answered.
        if not (inbound.requests and inbound.is_waiting):
            self._ahead = 0
            if not self._is_reading:
                self._resume_reading()

    # Expiring: a request must be received in time, and its answer read.

    def expire(self) -> None:
        outbound, inbound = self._answering, self._inbound
        if self.transport.get_write_buffer_size() and (outbound is None or not outbound.endpoint):
            self._look_at_reader()
        elif self._is_closing or self.transport.is_closing():
            self.abort()
        elif not inbound.is_receiving:
            if outbound is None:
                self.transport.close()
        elif outbound is not None or not self._is_reading:
            self._watch(self.gateway.limits.client_read_timeout)  # it is we who let it wait
        else:
            inbound.refuse(RequestTimeoutError("the request was not received in time"))
            self._answer_next()

    def _wait_for_reader(self) -> None:
        """Nothing more is asked of us before it has read this, or answers would pile up."""
        if not self._is_closing:
            self._pause_reading()
        self._watch_reader()

    def _watch_reader(self) -> None:
        """A whole answer is written, and the client has not read it yet."""
        limits = self.gateway.limits
        self._count_unread(self.transport.get_write_buffer_size())
        if self._unread_until == NEVER:
            self._unread_until = now() + limits.request_timeout
        self._watch(min(limits.stream_idle_timeout, self._unread_until - now()))

    def _look_at_reader(self) -> None:
        """It is given up when it has read nothing all the while, or takes too long altogether."""
        before, after = self._unread, self.transport.get_write_buffer_size()
        if 0 < before <= after or now() >= self._unread_until:
            self.abort()
        else:
            self._watch_reader()

    def _was_read(self) -> None:
        if self._is_closing or self.transport.is_closing():
            return
        if self._answering is None:
            self._go_on()
        else:
            self._count_unread(0)
            self._unread_until = self.deadline = NEVER

    def _count_unread(self, size: int) -> None:
        self.gateway.answers.size += size - self._unread
        self._unread = size

    # The connection.

    def _close(self) -> None:
        """A connection closed under a client that still sends is reset, and our answer lost: so it
        is half closed until the client has seen that, if it may still be sending. TLS cannot be
        half closed: there, who was cut off in the middle has our answer alone to go by."""
        refused, can_half_close = self._refused, self.transport.can_write_eof()
        may_send = refused is not None or self._inbound.is_receiving
        is_cut = refused is not None and not refused.is_complete
        self._is_closing = self._inbound.is_deaf = True
        if (may_send and can_half_close) or is_cut:
            self._resume_reading()
            if can_half_close:
                self.transport.write_eof()
            self._watch(LINGER)
        else:
            self.transport.close()
            if self.transport.get_write_buffer_size():
                self._watch_reader()

    def abort(self) -> None:
        self._is_closing = self._inbound.is_deaf = True
        self.transport.abort()

    def _pause_reading(self) -> None:
        if self._is_reading:
            self._is_reading = False
            self.transport.pause_reading()

    def _resume_reading(self) -> None:
        if not self._is_reading:
            self._is_reading = True
            self.transport.resume_reading()

    def _watch(self, seconds: float) -> None:
        self.deadline = now() + seconds
        self._deadlines.watch(self)
