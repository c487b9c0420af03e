"""The hot front: uvicorn's own httptools protocol, with the hot endpoints served inside it.

A hot request is parsed by uvicorn's parser and answered on uvicorn's transport, without an ASGI
scope, message or task; everything else goes to the ASGI application behind. Pipelining, keep-alive
and graceful shutdown are uvicorn's: a HotCycle stands where uvicorn has its RequestResponseCycle.
What uvicorn lacks is added for all requests: a limit on the head, a deadline for reading a request,
errors as OpenAI's objects, Upgrade requests that keep their body, a bound on connections, and an
end for clients that do not read what they asked for.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from router.api import wire
from router.api.cycle import HotCycle
from router.api.endpoints import HOT
from router.flows.errors import (
    JSON,
    BodyTooLargeError,
    CrowdedError,
    HeadTooLargeError,
    MalformedRequestError,
    RequestError,
    RequestTimeoutError,
    bodies_too_large,
    body_of,
    shape_of,
)
from router.flows.gateway import Gateway
from router.upstream.deadlines import NEVER, Deadlines, now

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application

LINGER = 5.0
READ_AHEAD = 64 * 1024
# Connections beyond the most, which are told so if they ask for something soon, and may ask for
# health; those beyond these are cut.
CROWD = 128
UPGRADE_HEADERS = (b"upgrade", b"http2-settings")


class RouterProtocol(HttpToolsProtocol):
    """Expects a Gateway as "gateway" and Deadlines as "deadlines" in the lifespan state."""

    # uvicorn's attributes fill the compact form of an instance, which has room for thirty.
    __slots__ = (
        "_active",
        "_ahead",
        "_crowded",
        "_deadlines",
        "_deaf",
        "_default_headers",
        "_default_lines",
        "_hot",
        "_limits",
        "_overhead",
        "_receiving",
        "_timed",
        "_unread",
        "_unread_until",
        "deadline",
        "gateway",
    )

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.gateway: Gateway = app_state["gateway"]
        self.deadline = 0.0
        self._deadlines: Deadlines = app_state["deadlines"]
        self._limits = self.gateway.limits
        # Whose turn it is to be answered, and which hot request is being received.
        self._active: HotCycle | RequestResponseCycle | None = None
        self._hot: HotCycle | None = None
        self._receiving = False
        # Whether `deadline` is the one of the request that is being received.
        self._timed = False
        # Once deaf, what still comes is thrown away: it follows something that made no sense.
        self._deaf = False
        self._default_headers: list[tuple[bytes, bytes]] | None = None
        self._default_lines = b""
        # Bytes since the last piece of body: heads and trailers, which the parser does not limit.
        self._overhead = 0
        # Bytes of requests that are read while another one is being answered.
        self._ahead = 0
        # Came when there were enough of them.
        self._crowded = False
        # Of a whole answer that the client is slow to read: the bytes that it had not read when it
        # was last looked at, and until when it must have read them all.
        self._unread = 0
        self._unread_until = NEVER

    # asyncio.Protocol.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # uvicorn's
        super().connection_made(transport)
        self.gateway.metrics.connections.inc()
        over = len(self.connections) - (self._limits.max_connections or len(self.connections))
        self._crowded = over > 0
        if over > CROWD:
            self.gateway.metrics.refusals.add(("connections",))
            self._deaf = True
            transport.abort()
            return
        self._watch(LINGER if self._crowded else self._limits.client_read_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadlines.drop(self)
        self.gateway.metrics.connections.dec()
        for cycle in (self._active, *(queued for queued, _ in self.pipeline)):
            if isinstance(cycle, HotCycle):
                cycle.disconnect()
        self.pipeline.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        self._overhead += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            self._give_up(_reason(error))
            return
        active = self._active
        if self._receiving:
            self._watch_receiving()
        elif active is not None and not active.response_complete:
            self.deadline = NEVER  # until an answer ends: see on_response_complete
        if self.pipeline:
            self._limit_pipeline(len(data))
        else:
            self._ahead = 0

    def _watch_receiving(self) -> None:
        """A request has begun to come, and its end is not here yet."""
        if self._deaf:
            return
        if self._overhead > self._limits.max_header_size:
            self._give_up(self._head_too_large())
            return
        if not self._timed:
            self._timed = True
            self._watch(self._limits.client_read_timeout)
        hot = self._hot
        if hot is not None and not hot.is_announced:
            size = int(_value(self.headers, b"content-length") or b"0")
            if size > self._limits.max_body_size:
                hot.refuse(self._body_too_large())
            elif not self.gateway.held.has_room(size - hot.size):
                hot.refuse(bodies_too_large())
            hot.announce(_expects_continue(self.headers))

    def _limit_pipeline(self, size: int) -> None:
        """A client that leaves is noticed only while we read, so some requests are read ahead."""
        self._ahead += size
        if self._ahead > READ_AHEAD:
            self.flow.pause_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        active = self._active
        if active is None or active.response_complete:
            self._wait_for_reader()  # uvloop says so only after the answer's end was written
        elif isinstance(active, HotCycle):
            active.pause()
        else:
            self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if isinstance(self._active, HotCycle):
            self._active.resume()
        if self._unread:
            self._was_read()

    # httptools.

    def on_message_begin(self) -> None:
        if self._deaf or self.transport.is_closing():
            raise MalformedRequestError("the connection is closing")
        self.url = b""
        self.headers = []
        self._receiving = True
        self._timed = False
        self._hot = None

    def on_header(self, name: bytes, value: bytes) -> None:
        """uvicorn's, without a look at each name."""
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        limit = self._limits.max_header_size
        if self._overhead > limit and _size(self.headers) + len(self.url) > limit:
            raise self._head_too_large()
        if self.parser.should_upgrade():
            return
        endpoint = HOT.get(self.url)
        if endpoint is None or self.parser.get_method() != b"POST":
            self._make_scope()
            super().on_headers_complete()
            if self._crowded:
                self.cycle.keep_alive = False
        else:
            hot = HotCycle(self, endpoint, self.headers)
            self._queue(hot)
            if self._crowded:
                self._refuse_if_crowded(hot)

    def on_body(self, body: bytes) -> None:
        self._overhead = 0
        hot = self._hot
        if hot is None:
            super().on_body(body)
        elif hot.response_complete:
            return
        elif hot.take(body) > self._limits.max_body_size:
            hot.refuse(self._body_too_large())
        elif not self.gateway.held.has_room(0):
            hot.refuse(bodies_too_large())

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._receiving = False
        self._overhead = 0
        if self._hot is None:
            super().on_message_complete()
        elif not self._hot.response_complete:
            self._hot.complete_request()

    def on_response_complete(self) -> None:
        """uvicorn's, with our deadlines in the place of a timer for each answer."""
        self.server_state.total_requests += 1
        if self.flow.write_paused:
            self._wait_for_reader()
        elif not self.transport.is_closing():
            self._go_on()

    def _go_on(self) -> None:
        """An answer is out: on to the next request."""
        self._unread, self._unread_until = 0, NEVER
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif not self._receiving and not self._deaf:
            self._watch(self.timeout_keep_alive)

    # What a HotCycle needs.

    def default_lines(self) -> bytes:
        """The headers that uvicorn makes anew every second."""
        headers = self.server_state.default_headers
        if headers is not self._default_headers:
            self._default_headers = headers
            self._default_lines = b"".join([b"%s: %s\r\n" % header for header in headers])
        return self._default_lines

    def cycle_ended(self, cycle: HotCycle) -> None:
        if not cycle.keep_alive:
            self._close(lingering=not cycle.received)
        self.on_response_complete()

    # Expiring: a request must be received in time, and its answer read.

    def expire(self) -> None:
        active = self._active
        is_relaying = isinstance(active, HotCycle) and not active.response_complete
        if self.transport.get_write_buffer_size() and not is_relaying:
            self._look_at_reader()
        elif self._deaf or self.transport.is_closing():
            self.transport.abort()
        elif not self._receiving:
            if active is None or active.response_complete:
                self.transport.close()
        elif self.pipeline or self.flow.read_paused:
            self._watch(self._limits.client_read_timeout)  # it is we who let it wait
        else:
            self._give_up(RequestTimeoutError("the request was not received in time"))

    def _wait_for_reader(self) -> None:
        """Nothing more is asked of us before it has read this, or answers would pile up."""
        if not self._deaf and not self.transport.is_closing():
            self.flow.pause_reading()
        self._watch_reader()

    def _watch_reader(self) -> None:
        """A whole answer is written, and the client has not read it yet."""
        self._unread = self.transport.get_write_buffer_size()
        if self._unread_until == NEVER:
            self._unread_until = now() + self._limits.request_timeout
        self._watch(min(self._limits.stream_idle_timeout, self._unread_until - now()))

    def _look_at_reader(self) -> None:
        """It is given up when it has read nothing all the while, or takes too long altogether."""
        before, after = self._unread, self.transport.get_write_buffer_size()
        if 0 < before <= after or now() >= self._unread_until:
            self.transport.abort()
        else:
            self._watch_reader()

    def _was_read(self) -> None:
        if self._deaf or self.transport.is_closing():
            return
        active = self._active
        if active is None or active.response_complete:
            self._go_on()
        else:
            self._unread, self._unread_until = 0, NEVER
            self.deadline = NEVER
        if self._receiving:
            self._watch(self._limits.client_read_timeout)

    def _refuse_if_crowded(self, hot: HotCycle) -> None:
        if len(self.connections) > self._limits.max_connections:
            hot.refuse(CrowdedError("too many connections", "connections"))
        else:
            self._crowded = False

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        active: HotCycle | RequestResponseCycle = cycle
        self._active = active
        if isinstance(active, HotCycle):
            active.begin()
        else:
            super()._start_asgi_task(cycle, app)

    def _make_scope(self) -> None:
        """What uvicorn makes when a request begins, and hot requests do without."""
        url, headers = self.url, self.headers
        super().on_message_begin()
        self.url, self.headers = url, headers
        self.expect_100_continue = _expects_continue(headers)
        self.scope["headers"] = headers

    def _queue(self, hot: HotCycle) -> None:
        latest = self.cycle
        cycle: RequestResponseCycle = hot  # type: ignore[assignment]
        self._hot, self.cycle = hot, cycle
        if latest is None or latest.response_complete:
            self._start_asgi_task(cycle, self.app)
        else:
            self.pipeline.appendleft((cycle, self.app))

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._feed_without_upgrade(data[upgrade.args[0] :])

    def _feed_without_upgrade(self, rest: bytes) -> None:
        """Serves a request to upgrade as the plain request that it also is (RFC 9110, 7.8).

        The parser takes everything behind its head for the other protocol and drops the body, so
        the head is parsed again, without what asks for the upgrade.
        """
        method = self.parser.get_method()
        if method == b"CONNECT":
            raise httptools.HttpParserError("CONNECT is not for a router")
        kept = [header for header in self.headers if header[0] not in UPGRADE_HEADERS]
        version = self.parser.get_http_version().encode("ascii")
        lines = b"".join([b"%s: %s\r\n" % header for header in kept])
        head = b"%s %s HTTP/%s\r\n%s\r\n" % (method, self.url, version, lines)
        self.parser = httptools.HttpRequestParser(self)
        self._feed(head + rest)

    def _give_up(self, error: RequestError) -> None:
        """What follows cannot be understood: answers what still can be answered, then closes."""
        if self._deaf:
            return
        self._deaf = True
        active = self._active
        if active is None or active.response_complete:
            self._answer_bare(error)
        elif isinstance(active, HotCycle) and not active.received:
            active.refuse(error)
        elif isinstance(active, RequestResponseCycle) and active.more_body:
            self.transport.close()
        else:
            self._last_complete(active).keep_alive = False

    def _last_complete(self, active: HotCycle | RequestResponseCycle) -> RequestResponseCycle:
        if self._receiving and self.pipeline and self.pipeline[0][0] is self.cycle:
            cut = cast(HotCycle | RequestResponseCycle, self.pipeline.popleft()[0])
            if isinstance(cut, HotCycle):
                cut.disconnect()
        last = self.pipeline[0][0] if self.pipeline else active
        return cast(RequestResponseCycle, last)

    def _answer_bare(self, error: RequestError) -> None:
        body = body_of(error)
        extra = (wire.length(len(body)), wire.CLOSE)
        self.transport.write(wire.head(shape_of(error).status, JSON, *extra) + body)
        self._close(lingering=True)

    def _close(self, lingering: bool) -> None:
        """A connection closed under a client that still sends is reset, and our answer lost."""
        self._deaf = True
        if lingering and self.transport.can_write_eof():
            self.flow.resume_reading()
            self.transport.write_eof()
            self._watch(LINGER)
        else:
            self.transport.close()
            if self.transport.get_write_buffer_size():
                self._watch_reader()

    def _watch(self, seconds: float) -> None:
        self.deadline = now() + seconds
        self._deadlines.watch(self)

    def _head_too_large(self) -> HeadTooLargeError:
        return HeadTooLargeError(f"the head is larger than {self._limits.max_header_size:d} bytes")

    def _body_too_large(self) -> BodyTooLargeError:
        return BodyTooLargeError(f"the body is larger than {self._limits.max_body_size:d} bytes")


def _reason(error: httptools.HttpParserError) -> RequestError:
    inner = error.__context__
    if isinstance(inner, RequestError):
        return inner
    return MalformedRequestError(f"not a valid HTTP/1.1 request: {error}")


def _size(headers: list[tuple[bytes, bytes]]) -> int:
    return sum(len(name) + len(value) + 4 for name, value in headers)


def _value(headers: list[tuple[bytes, bytes]], wanted: bytes) -> bytes | None:
    return next((value for name, value in headers if name == wanted), None)


def _expects_continue(headers: list[tuple[bytes, bytes]]) -> bool:
    return (_value(headers, b"expect") or b"").lower() == b"100-continue"
