"""One client's connection, an asyncio protocol behind uvicorn's listener, and the answers on it.

    bytes -> RequestReader -> requests -> RouterProtocol -> proxy or application -> ResponseWriter

Requests to proxied endpoints go to the proxy, all others through the ASGI bridge to the FastAPI
application. They are answered in the order of their arrival. uvicorn makes the protocol (its
parameter `http`), calls its `shutdown`, and counts it in the server's state.

Authentication: the API key of a request is looked up once, when its head has arrived without its
body, else when it is answered. Proxied requests without a valid key are refused here; for others
the result is in the ASGI scope, where AccessMiddleware requires it.

A compressed body is decompressed once the key is known to be valid. The proxy sees neither the
compression nor its header.

Deadlines: a request must be received in time, an answer must be read in time, and an idle
connection is closed. Only one of the three runs at a time, so one timer is enough.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from functools import lru_cache
from http import HTTPStatus
from time import monotonic as now
from typing import Any, cast

from msgspec import Struct
from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE
from uvicorn.server import ServerState

from router.auth.api_keys import ApiKey
from router.common.deadlines import NEVER, Deadlines
from router.openai.errors import (
    MalformedRequestError,
    OverloadError,
    RequestError,
    RequestTimeoutError,
    ShuttingDownError,
    UnauthorizedError,
    UpgradeRequiredError,
    body_of,
    headers_of,
    shape_of,
    too_many_held_bodies,
)
from router.proxy.dispatch import serve
from router.proxy.exchange import BodySource, Header
from router.proxy.gateway import Gateway
from router.server import asgi_bridge
from router.server.content_coding import CONTENT_ENCODING, coding_of, decompress
from router.server.proxied_endpoints import GENERATION_PATHS, refuse_proxied, serve_proxied
from router.server.request_reader import IncomingRequest, RequestReader
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
LENGTH = b"content-length: %d\r\n"
CHUNKED, CLOSE = b"transfer-encoding: chunked\r\n", b"connection: close\r\n"
CHUNK, LAST_CHUNK = b"%x\r\n%b\r\n", b"0\r\n\r\n"


def count_connection(connection: Any, connections: set[Any], gateway: Gateway) -> int:
    """Count a new connection. Return by how many the limit is exceeded; not above 0 below it."""
    connections.add(connection)
    gateway.metrics.connections.inc()
    over = len(connections) - (gateway.limits.max_connections or len(connections))
    if over > MAX_EXCESS_CONNECTIONS:
        gateway.metrics.refusals.add(("connections",))
    return over


class RouterProtocol(asyncio.Protocol):
    """Expects a RouterState as "router" in the lifespan's state."""

    __slots__ = ("_app", "_app_state", "_body_size", "_deadlines", "_is_closing",
                 "_is_excess", "_is_receive_timed", "_is_shutting_down", "_keep_alive", "_loop",
                 "_read_ahead", "_reader", "_refused", "_sent_continue", "_server",
                 "_stored_responses", "_task", "_unread", "_unread_until", "_write_paused",
                 "_writer", "deadline", "gateway", "send", "transport")  # fmt: skip

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
        self._write_paused = False
        self._is_closing = False
        self._refused: IncomingRequest | None = None
        self._is_shutting_down = False
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
        over = count_connection(self, self._server.connections, self.gateway)
        self._is_excess = over > 0
        if over > MAX_EXCESS_CONNECTIONS:
            self.abort()
        else:
            self._watch(LINGER_S if over > 0 else self.gateway.limits.client_read_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        self._deadlines.drop(self)
        self.gateway.metrics.connections.dec()
        if not self._reader.is_closed or self._reader.requests:
            self._reader.close()
        if self._unread:
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
            # Read on while an answer is in progress, to notice a disconnect, but not without bound.
            self._read_ahead += len(data)
            if self._read_ahead > MAX_READ_AHEAD_BYTES:
                self.transport.pause_reading()
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
        self._body_size, gateway = request.size, self.gateway
        authenticator = gateway.authenticator
        if authenticator is not None:
            if request.caller is None:
                request.caller = gateway.identify(request.headers)
            elif isinstance(request.caller, ApiKey):
                # The key was found when the head arrived; it may have been revoked since.
                request.caller = authenticator.current(request.caller)
        writer = self._new_writer(request)
        if request.endpoint is None:
            self._bridge(request, writer)
        elif isinstance(request.caller, str):
            error = UnauthorizedError(request.caller)
            self._run(refuse_proxied(writer, gateway, self._stored_responses, error))
        elif request.has_coding:
            self._run(self._serve_decompressed(writer))
        else:
            self._run(self._serving(writer))

    def _serving(self, writer: ResponseWriter) -> Coroutine[Any, Any, None]:
        if writer.endpoint in GENERATION_PATHS:
            return serve(writer, self.gateway)
        return serve_proxied(writer, self.gateway, self._stored_responses)

    async def _serve_decompressed(self, writer: ResponseWriter) -> None:
        try:
            await self._decompress(writer)
        except RequestError as error:
            await refuse_proxied(writer, self.gateway, self._stored_responses, error)
        else:
            await self._serving(writer)

    async def _decompress(self, writer: ResponseWriter) -> None:
        """Replace the body of a request by the decompressed one, which counts as held instead.
        Raises RequestError."""
        coding = coding_of(writer.headers)
        writer.headers = [one for one in writer.headers if one[0] != CONTENT_ENCODING]
        if coding is None:
            return
        compressed, held = writer.body, self.gateway.memory.bodies
        writer.body, pieces = b"", []
        for piece in decompress(compressed, coding, self.gateway.limits.max_body_size):
            if held.limit and held.size + len(piece) > held.limit:
                raise too_many_held_bodies()
            held.size += len(piece)
            self._body_size += len(piece)
            pieces.append(piece)
            # Other requests run. If the client disconnects, this task is cancelled here, and
            # `connection_lost` has released `_body_size`.
            await asyncio.sleep(0)
        held.size -= len(compressed)
        self._body_size -= len(compressed)
        writer.body = b"".join(pieces)

    def _refuse(self, request: IncomingRequest, error: RequestError) -> None:
        """Answer with an error and close the connection: where the next request would begin is
        unknown."""
        self._refused, self._reader.is_closed = request, True
        self._reader.release_body(request)
        request.keep_alive = False
        writer = self._new_writer(request)
        if request.endpoint is not None:
            self._run(refuse_proxied(writer, self.gateway, self._stored_responses, error))
        elif request.method in REFUSED_BY_APPLICATION and not isinstance(
            error, MalformedRequestError | UpgradeRequiredError
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

    def _new_writer(self, request: IncomingRequest) -> ResponseWriter:
        self._writer = writer = ResponseWriter(
            self._loop,
            self,
            now(),
            request.endpoint or "",
            request.headers,
            request.body,
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

    # Called by the ResponseWriter.

    def common_lines(self, writer: ResponseWriter) -> bytes:
        """Return the header lines of every answer, with Connection: close on the last one."""
        # During a shutdown, requests that were received are answered, and later ones go elsewhere.
        reader = self._reader
        is_ending = self.gateway.tasks.is_draining or self._is_shutting_down
        if reader.next_is_invalid if reader.requests else is_ending:
            writer.keep_alive = False
        lines = _header_lines(*self._server.default_headers)
        return lines if writer.keep_alive else lines + CLOSE

    def finish_answer(self, writer: ResponseWriter) -> None:
        """Go on to the next request: the whole answer is written."""
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
            self.transport.resume_reading()

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
        elif writer is not None or not self.transport.is_reading():
            # The router causes the delay, not the client.
            self._watch(self.gateway.limits.client_read_timeout)
        else:
            reader.refuse(RequestTimeoutError("the request was not received in time"))
            self._answer_next()

    def _wait_for_client(self) -> None:
        """Read no more requests until the client has read this answer, or answers would pile up."""
        if not self._is_closing:
            self.transport.pause_reading()
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
            self.transport.resume_reading()
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

    def _watch(self, seconds: float) -> None:
        self.deadline = now() + seconds
        self._deadlines.watch(self)


class ResponseWriter(Struct, eq=False):
    """One answer. `is_paused` is True while the client reads too slowly. Once `is_over`, nothing
    more is written: the answer is complete, or the client has disconnected."""

    loop: asyncio.AbstractEventLoop
    connection: RouterProtocol
    arrived: float
    endpoint: str
    headers: Sequence[Header]
    body: bytes
    http_1_1: bool = True
    keep_alive: bool = True
    is_paused: bool = False
    caller: ApiKey | None = None
    is_over: bool = False
    started: bool = False
    chunked: bool = False
    head: bytes = b""
    answer: BodySource | None = None
    changed: asyncio.Event | None = None

    # Exchange: called by the proxy.

    async def respond(self, status: int, headers: Sequence[Header], body: bytes) -> None:
        if self.is_over:
            return
        self.started = True
        connection = self.connection
        framing = LENGTH % len(body) if body or status != HTTPStatus.NO_CONTENT else b""
        connection.send(_head(status, headers, framing + connection.common_lines(self)) + body)
        self._end()

    async def relay(
        self, status: int, headers: Sequence[Header], answer: BodySource, idle: float, latest: float
    ) -> None:
        if not self.started:  # else this answer continues one that another engine began
            self.open(status, headers, None if answer.is_event_stream else answer.length)
        self.answer = answer
        if self.is_paused:
            answer.pause()
        try:
            await answer.relay(self, idle, latest)
        finally:
            self.answer = None

    async def finish(self, tail: bytes) -> None:
        self.write(tail, last=True)

    def abort(self) -> None:
        self.is_over = True
        self.connection.abort()

    def write(self, block: bytes, last: bool) -> None:
        """Write one piece of body, in a single call; the first piece goes out behind the head."""
        if self.is_over:
            return
        if self.chunked and block and not (last or self.head):  # most pieces of streams
            self.connection.send(CHUNK % (len(block), block))
            return
        pieces = [self.head]
        if self.head:
            self.head = b""
            self.started = True
        if not self.chunked:
            pieces.append(block)
        elif block:  # an empty chunk would end the body
            pieces += (b"%x\r\n" % len(block), block, b"\r\n")
        if self.chunked and last:
            pieces.append(LAST_CHUNK)
        self.connection.send(b"".join(pieces))
        if last:
            self._end()

    def open(self, status: int, headers: Iterable[Header], length: int | None) -> None:
        """Prepare the head, which leaves with the first piece of body. Without a `length` the body
        ends with its last chunk, or with the connection."""
        if status == HTTPStatus.NO_CONTENT:  # neither body nor length (RFC 9110, 8.6)
            framing = b""
        elif length is not None:
            framing = LENGTH % length
        else:
            self.chunked = self.http_1_1
            framing = CHUNKED if self.chunked else b""
        self.head = _head(status, headers, framing + self.connection.common_lines(self))

    def open_bare(self, status: int, headers: Iterable[Header]) -> None:
        """Prepare the head of an answer that has its framing among the headers, or no body."""
        self.head = _head(status, headers, self.connection.common_lines(self))

    # Called by the connection.

    def pause(self) -> None:
        self.is_paused = True
        if self.answer is not None:
            self.answer.pause()

    def resume(self) -> None:
        self.is_paused = False
        if self.answer is not None:
            self.answer.resume()
        self._wake()

    def disconnect(self) -> None:
        """The client has disconnected."""
        self.is_over = True
        self._wake()

    # Called by the ASGI bridge.

    async def wait_for_change(self) -> None:
        """Wait until the client has read enough, or the answer is over."""
        if self.changed is None:
            self.changed = asyncio.Event()
        self.changed.clear()
        await self.changed.wait()

    def _wake(self) -> None:
        if self.changed is not None:
            self.changed.set()

    def _end(self) -> None:
        self.is_over = True
        if self.changed is not None:
            self.changed.set()
        self.connection.finish_answer(self)


@lru_cache(maxsize=4)  # the date among them changes once a second
def _header_lines(*headers: Header) -> bytes:
    return b"".join([b"%b: %b\r\n" % header for header in headers])


def _head(status: int, headers: Iterable[Header], lines: bytes) -> bytes:
    """Return the head of an answer; `lines` are whole header lines."""
    return STATUS_LINE[status] + b"\r\n".join([*map(b": ".join, headers), lines]) + b"\r\n"
