"""One HTTP/1.1 connection to an engine: one request at a time, parsed strictly.

The connection is *idle* (kept by its pool), *busy* (it has an answer to feed) or *closed*. It goes
back to its pool only after an answer that ended by its own framing, on a connection that the engine
keeps open, with nothing unsent and nothing unasked for. Everything else aborts it: to close is to
wait until the engine has read what it was sent, and it may never do that.
"""

from __future__ import annotations

import asyncio
from typing import Protocol, cast

import httptools

from router.http_client.deadlines import now
from router.http_client.engine_answer import EngineAnswer, Headers
from router.http_client.errors import (
    BrokenAnswerError,
    DisconnectedError,
    StaleConnectionError,
    UpstreamError,
)
from router.http_client.repeated_heads import LENGTH, Header, Repeated, without_length

NO_BODY = frozenset((204, 304))
# Seconds after a request was sent in which the loss of a kept connection still means that the
# engine had closed it before. The engine's FIN or reset needs one way through the network, and this
# process a moment to look. A connection that is lost later had an engine that could work.
STALE_WITHIN = 0.25


class ConnectionOwner(Protocol):
    """The pool that a connection reports to. `reads` counts the reads on any connection."""

    reads: int

    def released(self, connection: EngineConnection) -> None: ...
    def lost(self, connection: EngineConnection) -> None: ...


class EngineConnection(asyncio.Protocol):
    """`transport` is None before and after it is connected."""

    __slots__ = (
        "_answer",
        "_complete",
        "_head_done",
        "_header_limit",
        "_headers",
        "_heard",
        "_hung_up",
        "_may_stay",
        "_overhead",
        "_owner",
        "_parser",
        "_pieces",
        "_repeated",
        "_until_close",
        "idle_since",
        "loop",
        "on_body",
        "sent_at",
        "transport",
    )  # fmt: skip

    def __init__(
        self, owner: ConnectionOwner, header_limit: int, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.loop = loop
        self.sent_at = self.idle_since = 0.0
        self.transport: asyncio.Transport | None = None
        self._owner = owner
        self._header_limit = header_limit
        self._pieces: list[bytes] = []
        # The parser's: as it is, it costs no frame.
        self.on_body = self._pieces.append
        self._parser = httptools.HttpResponseParser(self)
        # The head of the last whole answer, if it was a 200 and the connection is kept.
        self._repeated = Repeated(200)
        self._answer: EngineAnswer | None = None
        self._until_close = False
        self._may_stay = False
        self._hung_up = False
        self._headers: list[Header] = []
        self._heard = False
        self._overhead = 0
        self._head_done = False
        self._complete = False

    def send(self, request: bytes, answer: EngineAnswer) -> None:
        """Sends a request, or fails its answer: a connection may be lost as soon as it is made."""
        assert self._answer is None, "one request at a time"
        self._heard = False
        self.sent_at = now()
        answer.deadlines.watch(answer)
        if self.transport is None:
            answer.fail(self._unanswered(None))
            return
        self._answer = answer
        self.transport.write(request)

    @property
    def is_resumable(self) -> bool:
        buffer = None if self._answer is None else self._answer.resume_buffer
        return buffer is not None and buffer.can_resume

    def fail(self, error: UpstreamError) -> None:
        """Fails the answer that is running, if any, and ends the connection."""
        answer = self._answer
        self.abort()
        if answer is not None:
            answer.fail(error)

    # Wire: what the answer does with its connection.

    def half_close(self) -> None:
        """Half closes: a server takes that for a client that has left."""
        self._hung_up = True
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
        elif self._heard:
            answer.fail(BrokenAnswerError("the answer ended early"))
        else:
            answer.fail(self._unanswered(exc))

    def eof_received(self) -> None:
        """The engine may still not read: a mere close would wait for that."""
        assert self.transport is not None
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        self._owner.reads += 1
        answer = self._answer
        if answer is None:
            self.abort()
            return
        is_first = not self._heard
        if is_first:
            again = self._repeated.read(data)
            if again is not None:
                self._answer = None
                self._go_back(not self._hung_up)
                answer.feed_complete(*again)
                return
            self._begin()
        self._overhead += len(data)
        error = None
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as failure:
            error = BrokenAnswerError(str(failure.__context__ or failure))
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as failure:
            error = BrokenAnswerError(f"not an HTTP/1.1 answer: {failure}")
        block = b"".join(self._pieces)
        self._pieces.clear()
        if self._complete:
            self._answer = None
            may_stay = self._may_stay and error is None
            if is_first and may_stay and self.idle_since:  # many a connection is asked once
                self._note(answer, data)
            self._go_back(may_stay)
            answer.feed(block, True)
            return
        # Bytes that are no body: a head or trailers, which the parser gathers without a limit.
        if block:
            self._overhead = 0
            answer.feed(block, False)
        elif self._overhead > self._header_limit and error is None:
            error = self._head_too_large()
        if error is not None:
            answer.fail(error)
            self.abort()

    def _begin(self) -> None:
        """What is new with each answer; the rest ends with the connection."""
        self._heard = True
        self._headers = []
        self._head_done = self._complete = False
        self._overhead = 0

    def _note(self, answer: EngineAnswer, data: bytes) -> None:
        if answer.status == 200 and not answer.is_event_stream:
            self._repeated.note(data, 200, answer.headers, answer.length or 0)

    def _go_back(self, may_stay: bool) -> None:
        """To the pool, unless something of the request is still unsent."""
        transport = self.transport
        if transport is None:
            return
        if may_stay and not transport.get_write_buffer_size() and not transport.is_closing():
            self._owner.released(self)
        else:
            transport.abort()

    def _unanswered(self, exc: Exception | None) -> DisconnectedError:
        is_stale = self.idle_since and now() - self.sent_at < STALE_WITHIN
        kind = StaleConnectionError if is_stale else DisconnectedError
        return kind(f"the connection was lost: {exc or 'closed'}")

    # httptools.

    def on_message_begin(self) -> None:
        if self._complete:
            raise BrokenAnswerError("an answer that nobody asked for")

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._head_done:  # trailers say nothing to a relay
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if not 200 <= status <= 599:
            if not 102 <= status < 200 and status != 100:
                raise BrokenAnswerError(f"an answer with status {status}")
            self._headers = []  # an interim answer has a head of its own, which is forgotten
            return
        if self._overhead > self._header_limit and _size(self._headers) > self._header_limit:
            raise self._head_too_large()
        headers = self._headers
        given = dict(headers)  # llhttp admits no two content-lengths
        length = given.get(LENGTH)
        if b"transfer-encoding" in given:
            _require_chunked(headers)
        elif length is None and status not in NO_BODY:
            self._until_close = True
        self._head_done = True
        answer = self._answer
        assert answer is not None
        answer.status, answer.headers = status, headers
        if length is not None:
            answer.length = int(length)
            answer.headers = without_length(headers)
        kind = given.get(b"content-type", b"")
        answer.is_event_stream = kind.lower().startswith(b"text/event-stream")
        if status >= 500:
            answer.note_server_error()

    def on_message_complete(self) -> None:
        if self._head_done:
            self._complete = True
            self._may_stay = self._parser.should_keep_alive() and not self._hung_up

    def _head_too_large(self) -> BrokenAnswerError:
        return BrokenAnswerError(f"headers of more than {self._header_limit} bytes")


def _require_chunked(headers: Headers) -> None:
    for name, value in headers:
        if name == b"transfer-encoding" and value.strip().lower() != b"chunked":
            raise BrokenAnswerError("an unknown transfer encoding")


def _size(headers: Headers) -> int:
    return sum(len(name) + len(value) + 4 for name, value in headers)
