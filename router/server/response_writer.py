"""An answer on its way to a client: the Exchange of a flow, and what the bridge writes to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from router.common.records import Thing
from router.proxy.exchange import Header, Relayed
from router.server import http_heads

NO_CONTENT = 204  # has no length either (RFC 9110, 8.6)


class Line(Protocol):
    """The connection that the answer leaves by."""

    @property
    def send(self) -> Callable[[bytes], None]: ...
    def common(self, outbound: Outbound) -> tuple[bytes, ...]:
        """Header lines that all answers have; says Connection: close where it is the last."""

    def answered(self, outbound: Outbound) -> None:
        """All of it is written."""

    def abort(self) -> None: ...


class Outbound(Thing):
    """`is_paused`: the client does not keep up, so writing is better put off. Once `is_over`,
    nothing is written any more: all is, or the client has left."""

    loop: asyncio.AbstractEventLoop
    line: Line
    arrived: float
    endpoint: str
    headers: Sequence[Header]
    body: bytes
    http_1_1: bool = True
    keep_alive: bool = True
    is_paused: bool = False
    is_over: bool = False
    started: bool = False
    chunked: bool = False
    head: bytes = b""
    answer: Relayed | None = None
    waiters: list[asyncio.Future[None]] | None = None

    # Exchange: the flow's side.

    async def respond(self, status: int, headers: Sequence[Header], body: bytes) -> None:
        if self.is_over:
            return
        self.started = True
        line = self.line
        framing = http_heads.length(len(body)) if body or status != NO_CONTENT else b""
        line.send(http_heads.head(status, headers, framing, *line.common(self)) + body)
        self._end()

    async def relay(
        self, status: int, headers: Sequence[Header], answer: Relayed, idle: float, latest: float
    ) -> None:
        if not self.started:  # else this goes on with what another answer has begun
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
        self.line.abort()

    def write(self, block: bytes, last: bool) -> None:
        """Sink: all that arrived together leaves in one write, the first one behind the head."""
        if self.is_over:
            return
        if self.chunked and block and not (last or self.head):
            self.line.send(http_heads.CHUNK % (len(block), block))  # as most are
            return
        pieces = http_heads.chunk(block, last) if self.chunked else [block]
        if self.head:
            pieces.insert(0, self.head)
            self.head = b""
            self.started = True
        self.line.send(b"".join(pieces))
        if last:
            self._end()

    def open(self, status: int, headers: Iterable[Header], length: int | None) -> None:
        """The head, which leaves with the first piece of body. Without a `length` the body ends
        with its last chunk, or with the connection."""
        if length is not None:
            framing = http_heads.length(length)
        else:
            self.chunked = self.http_1_1
            framing = http_heads.CHUNKED if self.chunked else b""
        self.head = http_heads.head(status, headers, framing, *self.line.common(self))

    def open_bare(self, status: int, headers: Iterable[Header]) -> None:
        """A head that is all there is: whatever it says of a body, none follows."""
        self.head = http_heads.head(status, headers, *self.line.common(self))

    # The connection's side.

    def pause(self) -> None:
        self.is_paused = True
        if self.answer is not None:
            self.answer.pause()

    def resume(self) -> None:
        self.is_paused = False
        if self.answer is not None:
            self.answer.resume()
        self._wake()

    def left(self) -> None:
        """The client has gone."""
        self.is_over = True
        self._wake()

    # The bridge's side.

    async def drained(self) -> None:
        """Until the client keeps up, or all is over."""
        while self.is_paused and not self.is_over:
            await self._news()

    async def over(self) -> None:
        while not self.is_over:
            await self._news()

    def _news(self) -> asyncio.Future[None]:
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
        self.line.answered(self)
