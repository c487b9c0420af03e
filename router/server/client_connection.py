"""One client's connection: an asyncio protocol behind uvicorn's listener.

    bytes -> RequestReader -> requests -> RouterProtocol -> proxy or application -> ResponseWriter

Requests to proxied endpoints go to the proxy, all others through the ASGI bridge to the FastAPI
application. They are answered in the order of their arrival. uvicorn makes the protocol (its
parameter `http`), calls its `shutdown`, and counts it in the server's state.

Authentication: the API key of a request is looked up once, when its head has arrived without its
body, else when it is answered. Proxied requests without a valid key are refused here; for others
the result is in the ASGI scope, where AccessMiddleware requires it.

Deadlines: a request must be received in time, an answer must be read in time, and an idle
connection is closed. Only one of the three runs at a time, so one timer is enough.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sized
from typing import Any, cast

from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.server import ServerState

from router.auth.api_keys import ApiKey
from router.http_client.deadlines import NEVER, Deadlines, now
from router.openai.errors import (
    MalformedRequestError,
    OverloadError,
    RequestError,
    RequestTimeoutError,
    ShuttingDownError,
    UnauthorizedError,
    body_of,
    headers_of,
    shape_of,
)
from router.proxy.dispatch import serve
from router.proxy.gateway import Gateway
from router.proxy.request_limits import RequestLimits
from router.server import asgi_bridge
from router.server.proxied_endpoints import GENERATION_PATHS, refuse_proxied, serve_proxied
from router.server.request_reader import IncomingRequest, RequestReader
from router.server.response_writer import CLOSE, ResponseWriter
from router.server.router_state import RouterState

LINGER_S = 5.0
MAX_READ_AHEAD_BYTES = 64 * 1024
# Connections beyond the limit that still receive an answer: an error, or that of an endpoint of the
# application such as /health. Connections beyond these are aborted.
MAX_EXCESS_CONNECTIONS = 128
# Methods of refused requests that the application may answer. It could carry out others without a
# look at the body; to a POST of the application the body matters.
REFUSED_BY_APPLICATION = frozenset((b"POST", b"GET", b"HEAD", b"OPTIONS"))
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def excess(connections: Sized, limits: RequestLimits) -> int:
    """Return by how many connections the limit is exceeded; negative below the limit."""
    return len(connections) - (limits.max_connections or len(connections))


class RouterProtocol(asyncio.Protocol):
    """Expects a RouterState as "router" in the lifespan's state."""

    __slots__ = ("_app", "_app_state", "_body_size", "_deadlines", "_default_headers",
                 "_default_lines", "_is_closing", "_is_excess", "_is_reading", "_is_receive_timed",
                 "_is_shutting_down", "_keep_alive", "_loop", "_read_ahead", "_reader", "_refused",
                 "_sent_continue", "_server", "_stored_responses", "_task", "_unread",
                 "_unread_until", "_write_paused", "_writer", "deadline", "gateway", "send",
                 "transport")  # fmt: skip

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        state: RouterState = app_state["router"]
        self.gateway: Gateway = state.gateway
        self.deadline = 0.0
        self._deadlines: Deadlines = state.deadlines
        self._stored_responses = state.stored_responses
        self._loop = _loop or asyncio.get_running_loop()
        self._app = cast(ASGIApp, config.loaded_app)
        self._app_state = app_state
        self._keep_alive: float = cast(Any, config).timeout_keep_alive  # which may be a float
        self._server = server_state
        self.transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._reader = RequestReader(self.gateway)
        # The answer in progress, its task, and the bytes of its request's body that are held.
        self._writer: ResponseWriter | None = None
        self._task: asyncio.Task[None] | None = None
        self._body_size = 0
        # True if 100 Continue was sent for the request whose turn it is.
        self._sent_continue = False
        # True while `deadline` is that of the request that is being received.
        self._is_receive_timed = False
        self._is_reading = True
        self._write_paused = False
        self._is_closing = False
        self._refused: IncomingRequest | None = None
        self._is_shutting_down = False
        self._default_headers: list[tuple[bytes, bytes]] | None = None
        self._default_lines = b""
        # Bytes of requests that were read while another one is being answered.
        self._read_ahead = 0
        # True for a connection beyond the limit.
        self._is_excess = False
        # Bytes of whole answers that the client had not read at the last check, and the time by
        # which it must have read them. They count as memory of answers.
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
        self._is_excess = over > 0
        if over > MAX_EXCESS_CONNECTIONS:
            self.gateway.metrics.refusals.add(("connections",))
            self.abort()
            return
        self._watch(LINGER_S if self._is_excess else limits.client_read_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        self._deadlines.drop(self)
        self.gateway.metrics.connections.dec()
        self._reader.close()
        self._count_unread(0)
        self._is_closing = True
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.disconnect()
            self._release_body()
            if self._task is not None and writer.endpoint:
                self._task.cancel()

    def eof_received(self) -> bool:
        """Treat a half-closed connection as a disconnect: no client closes and keeps reading."""
        return False

    def data_received(self, data: bytes) -> None:
        reader = self._reader
        if reader.is_closed:
            return
        reader.feed(data)
        if self._writer is None:
            self._answer_next()
        elif reader.requests:
            self._limit_read_ahead(len(data))
        if self._unread_until != NEVER:
            return  # `deadline` is that of an unread answer, whatever the client sends meanwhile
        if reader.is_receiving:
            if not self._is_receive_timed:
                self._is_receive_timed = True
                self._watch(self.gateway.limits.client_read_timeout)
        elif self._writer is not None:
            self._is_receive_timed = False
            self.deadline = NEVER  # until the answer ends

    def pause_writing(self) -> None:
        self._write_paused = True
        writer = self._writer
        if writer is None:
            self._wait_for_client()  # uvloop pauses only after the end of the answer was written
        else:
            writer.pause()
            if not writer.endpoint:
                self._watch_client()

    def resume_writing(self) -> None:
        self._write_paused = False
        if self._writer is not None:
            self._writer.resume()
        if self._unread:
            self._note_read()

    # Called by uvicorn, and at the end of the shutdown.

    def shutdown(self) -> None:
        self._is_shutting_down = True
        if self._writer is None and not self._reader.requests:
            self.transport.close()

    def end(self) -> None:
        """Refuse a request that is still incomplete: the client may send it to another router."""
        if self._writer is None and self._reader.is_receiving:
            self._reader.refuse(ShuttingDownError("the router is shutting down"))
            self._answer_next()

    # Requests.

    def _answer_next(self) -> None:
        """Answer the oldest request, if it is complete or refused."""
        reader = self._reader
        if not reader.requests or self._is_closing:
            return
        request = reader.requests[0]
        if request.refusal is not None:
            reader.requests.popleft()
            self._refuse(request, request.refusal)
        elif request.is_complete:
            reader.requests.popleft()
            self._sent_continue = False
            if self._is_excess and self._is_over_limit(request):
                self._refuse(request, OverloadError("too many connections", "connections"))
            else:
                self._answer(request)
        elif not self._sent_continue and request.expects_continue:
            self._sent_continue = True
            self.transport.write(CONTINUE)

    def _answer(self, request: IncomingRequest) -> None:
        self._body_size = request.size
        authenticator = self.gateway.authenticator
        if authenticator is not None and request.caller is None:
            request.caller = self.gateway.identify(request.headers)
        elif authenticator is not None and isinstance(request.caller, ApiKey):
            # The key was found when the head arrived; it may have been revoked since.
            request.caller = authenticator.current(request.caller)
        writer, gateway = self._new_writer(request, request.body), self.gateway
        if request.endpoint is None:
            self._bridge(request, writer)
        elif isinstance(request.caller, str):
            error = UnauthorizedError(request.caller)
            self._run(refuse_proxied(writer, gateway, self._stored_responses, error))
        elif request.endpoint in GENERATION_PATHS:
            self._run(serve(writer, gateway))
        else:
            self._run(serve_proxied(writer, gateway, self._stored_responses))

    def _refuse(self, request: IncomingRequest, error: RequestError) -> None:
        """Answer with an error and close the connection: where the next request would begin is
        unknown."""
        self._refused, self._reader.is_closed = request, True
        self._reader.release_body(request)
        request.keep_alive = False
        writer = self._new_writer(request, b"")
        if request.endpoint is not None:
            self._run(refuse_proxied(writer, self.gateway, self._stored_responses, error))
        elif request.method in REFUSED_BY_APPLICATION and not isinstance(
            error, MalformedRequestError
        ):
            if request.caller is None:
                request.caller = self.gateway.identify(request.headers)
            self._bridge(request, writer, error)
        else:
            body, status = body_of(error), shape_of(error).status
            writer.open(status, headers_of(error), len(body))
            writer.write(body, last=True)

    def _bridge(
        self, request: IncomingRequest, writer: ResponseWriter, refusal: RequestError | None = None
    ) -> None:
        scope = asgi_bridge.scope_of(request, self.transport, self._app_state)
        task = self._run(asgi_bridge.answer(self._app, scope, writer, refusal))
        self._server.tasks.add(task)
        task.add_done_callback(self._server.tasks.discard)

    def _new_writer(self, request: IncomingRequest, body: bytes) -> ResponseWriter:
        self._writer = writer = ResponseWriter(
            self._loop,
            self,
            now(),
            request.endpoint or "",
            request.headers,
            body,
            request.http_1_1,
            request.keep_alive,
            self._write_paused,
            None if isinstance(request.caller, str) else request.caller,
        )
        return writer

    def _run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self._task = task = self._loop.create_task(work)
        return task

    def _is_over_limit(self, request: IncomingRequest) -> bool:
        """Return True for a request that is refused because of too many connections. One to the
        application, such as /health, is answered, and then the connection is closed."""
        if len(self._server.connections) <= self.gateway.limits.max_connections:
            self._is_excess = False
            return False
        request.keep_alive = False
        return request.endpoint is not None

    def _limit_read_ahead(self, size: int) -> None:
        """Read on while an answer is in progress, to notice a disconnect, but not without bound."""
        self._read_ahead += size
        if self._read_ahead > MAX_READ_AHEAD_BYTES:
            self._pause_reading()

    # ResponseConnection: called by the ResponseWriter.

    def common_lines(self, writer: ResponseWriter) -> tuple[bytes, ...]:
        headers = self._server.default_headers
        if headers is not self._default_headers:  # uvicorn makes them anew every second
            self._default_headers = headers
            self._default_lines = b"".join([b"%s: %s\r\n" % header for header in headers])
        # During a shutdown, requests that were received are answered, and later ones go elsewhere.
        reader = self._reader
        is_ending = self.gateway.tasks.is_draining or self._is_shutting_down
        if reader.next_is_invalid if reader.requests else is_ending:
            writer.keep_alive = False
        return (self._default_lines,) if writer.keep_alive else (self._default_lines, CLOSE)

    def finish_answer(self, writer: ResponseWriter) -> None:
        self._writer = self._task = None
        self._release_body()
        self._server.total_requests += 1
        reader = self._reader
        if not writer.keep_alive or (reader.requests and reader.next_is_invalid):
            self._close()
        elif self._write_paused:
            self._wait_for_client()
        else:
            self._continue()

    def _release_body(self) -> None:
        self.gateway.memory.bodies.size -= self._body_size
        self._body_size = 0

    def _continue(self) -> None:
        """Go on to the next request, after an answer was written."""
        self._unread_until = NEVER
        if self._unread:
            self._count_unread(0)
        reader = self._reader
        if reader.requests:
            self._answer_next()
        elif self._is_shutting_down:
            self._close()  # the answer's head may have been sent before the shutdown
        elif not reader.is_receiving:
            self._watch(self._keep_alive)
        if self._is_closing:
            return
        if reader.is_receiving:
            self._watch(self.gateway.limits.client_read_timeout)
        # Read on only then, or a client could pile up requests faster than they are answered.
        if not (reader.requests and reader.next_is_complete):
            self._read_ahead = 0
            if not self._is_reading:
                self._resume_reading()

    # Deadlines.

    def expire(self) -> None:
        writer, reader = self._writer, self._reader
        if self.transport.get_write_buffer_size() and (writer is None or not writer.endpoint):
            self._check_client()
        elif self._is_closing or self.transport.is_closing():
            self.abort()
        elif not reader.is_receiving:
            if writer is None:
                self.transport.close()
        elif writer is not None or not self._is_reading:
            # The router causes the delay, not the client.
            self._watch(self.gateway.limits.client_read_timeout)
        else:
            reader.refuse(RequestTimeoutError("the request was not received in time"))
            self._answer_next()

    def _wait_for_client(self) -> None:
        """Read no more requests until the client has read this answer, or answers would pile up."""
        if not self._is_closing:
            self._pause_reading()
        self._watch_client()

    def _watch_client(self) -> None:
        """Set the deadline for the client to read a whole answer that was written."""
        limits = self.gateway.limits
        self._count_unread(self.transport.get_write_buffer_size())
        if self._unread_until == NEVER:
            self._unread_until = now() + limits.request_timeout
        self._watch(min(limits.stream_idle_timeout, self._unread_until - now()))

    def _check_client(self) -> None:
        """Abort if the client has read nothing since the last check, or takes too long in all."""
        before, after = self._unread, self.transport.get_write_buffer_size()
        if 0 < before <= after or now() >= self._unread_until:
            self.abort()
        else:
            self._watch_client()

    def _note_read(self) -> None:
        if self._is_closing or self.transport.is_closing():
            return
        if self._writer is None:
            self._continue()
        else:
            self._count_unread(0)
            self._unread_until = self.deadline = NEVER

    def _count_unread(self, size: int) -> None:
        self.gateway.memory.answers.size += size - self._unread
        self._unread = size

    # The connection.

    def _close(self) -> None:
        """Close the connection so that the client can still read the last answer.

        Closing while the client sends would reset the connection, and the answer would be lost.
        So the connection is half closed, until the client has closed its half. TLS cannot be half
        closed: there the connection stays open for a client that was cut off, which has only the
        answer to go by.
        """
        refused, can_half_close = self._refused, self.transport.can_write_eof()
        may_send = refused is not None or self._reader.is_receiving
        is_cut = refused is not None and not refused.is_complete
        self._is_closing = self._reader.is_closed = True
        if (may_send and can_half_close) or is_cut:
            self._resume_reading()
            if can_half_close:
                self.transport.write_eof()
            self._watch(LINGER_S)
        else:
            self.transport.close()
            if self.transport.get_write_buffer_size():
                self._watch_client()

    def abort(self) -> None:
        self._is_closing = self._reader.is_closed = True
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
