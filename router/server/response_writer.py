"""Write one answer to a client as HTTP/1.1: the Exchange of a proxied request, and the target of
the ASGI bridge."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from http import HTTPStatus
from typing import Protocol

from router.auth.api_keys import ApiKey
from router.common.structs import IdentityStruct
from router.proxy.exchange import BodySource, Header

NO_CONTENT = 204  # an answer without a body and without a length (RFC 9110, 8.6)
_PHRASES = {status.value: status.phrase for status in HTTPStatus}
_STATUS_LINES = {
    status: f"HTTP/1.1 {status} {_PHRASES.get(status, '')}\r\n".encode("ascii")
    for status in range(200, 600)
}
CHUNKED = b"transfer-encoding: chunked\r\n"
CLOSE = b"connection: close\r\n"
CHUNK = b"%x\r\n%b\r\n"
LAST_CHUNK = b"0\r\n\r\n"


class ResponseConnection(Protocol):
    """The connection that carries the answer."""

    @property
    def send(self) -> Callable[[bytes], None]: ...
    def common_lines(self, writer: ResponseWriter) -> tuple[bytes, ...]:
        """Return the header lines of every answer, with Connection: close on the last one."""

    def finish_answer(self, writer: ResponseWriter) -> None:
        """Go on to the next request: the whole answer is written."""

    def abort(self) -> None: ...


class ResponseWriter(IdentityStruct):
    """One answer. `is_paused` is True while the client reads too slowly. Once `is_over`, nothing
    more is written: the answer is complete, or the client has disconnected."""

    loop: asyncio.AbstractEventLoop
    connection: ResponseConnection
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
    waiters: list[asyncio.Future[None]] | None = None

    # Exchange: called by the proxy.

    async def respond(self, status: int, headers: Sequence[Header], body: bytes) -> None:
        if self.is_over:
            return
        self.started = True
        connection = self.connection
        framing = _length(len(body)) if body or status != NO_CONTENT else b""
        connection.send(_head(status, headers, framing, *connection.common_lines(self)) + body)
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
            pieces.append(CHUNK % (len(block), block))
        if self.chunked and last:
            pieces.append(LAST_CHUNK)
        self.connection.send(b"".join(pieces))
        if last:
            self._end()

    def open(self, status: int, headers: Iterable[Header], length: int | None) -> None:
        """Prepare the head, which leaves with the first piece of body. Without a `length` the body
        ends with its last chunk, or with the connection."""
        if status == NO_CONTENT:
            framing = b""
        elif length is not None:
            framing = _length(length)
        else:
            self.chunked = self.http_1_1
            framing = CHUNKED if self.chunked else b""
        self.head = _head(status, headers, framing, *self.connection.common_lines(self))

    def open_bare(self, status: int, headers: Iterable[Header]) -> None:
        """Prepare the head of an answer without a body, whatever the head declares."""
        self.head = _head(status, headers, *self.connection.common_lines(self))

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

    async def wait_writable(self) -> None:
        """Wait until the client has read enough, or the answer is over."""
        while self.is_paused and not self.is_over:
            await self._change()

    async def wait_over(self) -> None:
        while not self.is_over:
            await self._change()

    def _change(self) -> asyncio.Future[None]:
        waiter: asyncio.Future[None] = self.loop.create_future()
        self.waiters = [*(self.waiters or ()), waiter]
        return waiter

    def _wake(self) -> None:
        waiters, self.waiters = self.waiters, None
        for waiter in waiters or ():
            if not waiter.done():
                waiter.set_result(None)

    def _end(self) -> None:
        self.is_over = True
        if self.waiters is not None:
            self._wake()
        self.connection.finish_answer(self)


def _head(status: int, headers: Iterable[Header], *lines: bytes) -> bytes:
    """Return the head of an answer; `lines` are whole header lines."""
    pieces = [_STATUS_LINES[status]]
    for name, value in headers:
        pieces += (name, b": ", value, b"\r\n")
    pieces += lines
    pieces.append(b"\r\n")
    return b"".join(pieces)


def _length(size: int) -> bytes:
    return b"content-length: %d\r\n" % size
