"""One hot request on a uvicorn connection: a request cycle to uvicorn, an Exchange to a flow.

Its life: *queued* (pipelined behind another) → *active* (its turn) → *running* (wholly received, in
a task) → *complete*. A request that is refused while it is still being received goes from active
straight to complete; what is left of it is read and thrown away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from router.api import wire
from router.flows.dispatch import refuse, serve
from router.flows.exchange import Header, Relayed
from router.upstream.deadlines import now

if TYPE_CHECKING:
    from router.api.protocol import RouterProtocol


CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class HotCycle:
    # uvicorn sets this event for its own cycles; nobody waits for ours.
    message_event = asyncio.Event()

    def __init__(self, protocol: RouterProtocol, endpoint: str, headers: list[Header]) -> None:
        http_1_1 = protocol.parser.get_http_version() != "1.0"
        self.loop = protocol.loop
        self.endpoint = endpoint
        self.headers: Sequence[Header] = headers
        self.body = b""
        self.arrived = now()
        self.started = False
        self.response_complete = False
        self.disconnected = False
        self.keep_alive = http_1_1 and protocol.parser.should_keep_alive()
        self.received = False
        self.is_announced = False
        self._protocol = protocol
        self._http_1_1 = http_1_1
        self._expects = False
        self._pieces: list[bytes] = []
        self.size = 0
        self._held = 0
        self._active = False
        self._refusal: Exception | None = None
        self._task: asyncio.Task[None] | None = None
        self._answer: Relayed | None = None
        self._head = b""
        self._chunked = False

    # The connection's side.

    def begin(self) -> None:
        """Its turn has come."""
        self._active = True
        if self._refusal is not None:
            self._send_refusal(self._refusal)
        elif self.received:
            self._run()
        elif self._expects:
            self._protocol.transport.write(CONTINUE)

    def announce(self, expects_continue: bool) -> None:
        """The head is here, the body is not, and the client may wait for a word before it sends."""
        self.is_announced = True
        self._expects = expects_continue and self._http_1_1
        if self._expects and self._active and self._refusal is None:
            self._protocol.transport.write(CONTINUE)

    def take(self, piece: bytes) -> int:
        """Keeps a piece of the body; returns the body's size so far."""
        self.size += len(piece)
        if self._refusal is None:
            self._pieces.append(piece)
            self._held += len(piece)
            self._protocol.gateway.held.size += len(piece)
        return self.size

    def complete_request(self) -> None:
        self.received = True
        if self._active and self._refusal is None:
            self._run()

    def refuse(self, error: Exception) -> None:
        """Answers with an error as soon as it is its turn, and closes the connection."""
        if self._refusal is not None:
            return
        self._refusal = error
        self._pieces.clear()
        self._let_go()
        self.keep_alive = False
        if self._active:
            self._send_refusal(error)

    def disconnect(self) -> None:
        self.disconnected = True
        self._let_go()
        if self._task is not None and not self.response_complete:
            self._task.cancel()

    def pause(self) -> None:
        if self._answer is not None:
            self._answer.pause()

    def resume(self) -> None:
        if self._answer is not None:
            self._answer.resume()

    def _run(self) -> None:
        pieces, self._pieces = self._pieces, []
        self.body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        self._task = self.loop.create_task(serve(self, self._protocol.gateway))

    def _send_refusal(self, error: Exception) -> None:
        self._task = self.loop.create_task(refuse(self, self._protocol.gateway, error))

    # Exchange: the flow's side.

    async def respond(self, status: int, headers: Sequence[Header], body: bytes) -> None:
        self._send(status, headers, body)

    async def relay(
        self, status: int, headers: Sequence[Header], answer: Relayed, idle: float, latest: float
    ) -> None:
        self._head = self._open(status, headers, answer)
        self._answer = answer
        if self._protocol.flow.write_paused:
            answer.pause()
        try:
            await answer.relay(self, idle, latest)
        finally:
            self._answer = None

    async def finish(self, tail: bytes) -> None:
        self.write(tail, last=True)

    def abort(self) -> None:
        self.response_complete = True
        self._protocol.transport.abort()

    def write(self, block: bytes, last: bool) -> None:
        """Sink: all that arrived together leaves in one write, the first one behind the head."""
        if self.disconnected:
            return
        pieces = wire.chunk(block, last) if self._chunked else [block]
        if self._head:
            pieces.insert(0, self._head)
            self._head = b""
            self.started = True
        self._protocol.transport.write(b"".join(pieces))
        if last:
            self._end()

    def _open(self, status: int, headers: Sequence[Header], answer: Relayed) -> bytes:
        common = self._common()
        if answer.length is not None and not answer.is_event_stream:
            return wire.head(status, headers, wire.length(answer.length), *common)
        self._chunked = self._http_1_1
        framing = wire.CHUNKED if self._chunked else b""
        return wire.head(status, headers, framing, *common)

    def _send(self, status: int, headers: Sequence[Header], body: bytes) -> None:
        if self.disconnected:
            return
        self.started = True
        head = wire.head(status, headers, wire.length(len(body)), *self._common())
        self._protocol.transport.write(head + body)
        self._end()

    def _common(self) -> tuple[bytes, ...]:
        lines = self._protocol.default_lines()
        if self._protocol.gateway.draining and not self._protocol.pipeline:
            self.keep_alive = False  # who asks again is to find another; who has asked is answered
        return (lines,) if self.keep_alive else (lines, wire.CLOSE)

    def _let_go(self) -> None:
        """Of the body, as far as the bytes held by all requests go."""
        self._protocol.gateway.held.size -= self._held
        self._held = 0

    def _end(self) -> None:
        self.response_complete = True
        self._let_go()
        self._protocol.cycle_ended(self)
