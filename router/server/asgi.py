"""The plain front: the same flows behind any ASGI server.

Costs two helper tasks per request that the hot front does not need: one hears the client leave, one
takes the engine's bytes while the server is busy sending. So a router that is served this way says
so, once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Sequence
from functools import cache
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.http_client.deadlines import now
from router.http_client.engine_answer import HIGH_WATER
from router.http_client.errors import ReaderStalledError
from router.openai.errors import (
    BadRequestError,
    BodyTooLargeError,
    RequestError,
    RequestTimeoutError,
    too_many_held_bodies,
)
from router.proxy import headers
from router.proxy.admission import Held
from router.proxy.dispatch import BodyReader, refuse, serve
from router.proxy.exchange import Exchange, Header, Relayed
from router.proxy.gateway import Gateway

logger = logging.getLogger("disagg_router.api")


# In a scope's extensions: our own front asks, which bounds bodies itself, and what it refuses to
# receive it raises where the body is asked for.
FROM_US = "disagg_router"


@cache
def _say_once() -> None:
    logger.warning("requests are served through ASGI, at several times the price of our own front")


class Served(Response):
    """A response that runs a flow. It reads the request's body itself."""

    def __init__(self, gateway: Gateway, endpoint: str, reading: BodyReader | None = None) -> None:
        super().__init__()
        self._reading = reading
        self._gateway = gateway
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if FROM_US not in scope.get("extensions", ()):
            _say_once()
        exchange = AsgiExchange(scope, send, self._endpoint)
        await self._serve(exchange, exchange, self._reading, scope, receive)

    async def _serve(
        self,
        front: AsgiExchange,
        exchange: Exchange,
        reading: BodyReader | None,
        scope: Scope,
        receive: Receive,
    ) -> None:
        """`exchange` is the front itself, or what stands before it."""
        limits, held = self._gateway.limits, self._gateway.held
        if FROM_US in scope.get("extensions", ()):
            held = Held(0)  # our own front counts it already
        try:
            async with asyncio.timeout(limits.client_read_timeout):
                front.body = await _read_body(scope, receive, limits.max_body_size, held)
        except ClientDisconnect:
            return
        except TimeoutError:
            error = RequestTimeoutError("the request was not received in time")
            await refuse(exchange, self._gateway, error)
        except RequestError as refused:
            await refuse(exchange, self._gateway, refused)
        else:
            try:
                flow = serve(exchange, self._gateway, reading)
                await _serve_until_gone(front, flow, receive)
            finally:
                held.size -= len(front.body)


async def _read_body(scope: Scope, receive: Receive, limit: int, held: Held) -> bytes:
    """What is returned counts as held until the caller lets go of it."""
    announced = dict(scope["headers"]).get(b"content-length", b"0")
    if not announced.isdigit():
        raise BadRequestError("Content-Length is not a number")
    too_large = BodyTooLargeError(f"the body is larger than {limit:d} bytes")
    if int(announced) > limit:
        raise too_large
    if not held.has_room(int(announced)):
        raise too_many_held_bodies()
    body = bytearray()
    try:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            piece = message.get("body", b"")
            body += piece
            held.size += len(piece)
            if len(body) > limit:
                raise too_large
            if not held.has_room(0):
                raise too_many_held_bodies()
            if not message.get("more_body", False):
                return bytes(body)
    except BaseException:
        held.size -= len(body)
        raise


async def _serve_until_gone(
    exchange: AsgiExchange, flow: Coroutine[Any, Any, None], receive: Receive
) -> None:
    serving = asyncio.create_task(flow)
    listening = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((serving, listening), return_when=asyncio.FIRST_COMPLETED)
        if exchange.ended:  # a server calls that a disconnect, too
            await asyncio.wait((serving,))
    finally:
        listening.cancel()
        if not serving.done():
            serving.cancel()
        await asyncio.gather(serving, listening, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class AsgiExchange:
    def __init__(self, scope: Scope, send: Send, endpoint: str) -> None:
        self.loop = asyncio.get_running_loop()
        self.endpoint = endpoint
        self.headers: Sequence[Header] = headers.sound(scope["headers"])
        self.body = b""
        self.arrived = now()
        self.started = False
        self.ended = False
        self._send = send
        self._head: tuple[int, Sequence[Header], int | None] | None = None

    async def respond(self, status: int, headers: Sequence[Header], body: bytes) -> None:
        await self._start(status, headers, len(body))
        await self._send_body(body, more=False)

    async def relay(
        self, status: int, headers: Sequence[Header], answer: Relayed, idle: float, latest: float
    ) -> None:
        length = None if answer.is_event_stream else answer.length
        self._head = status, headers, length
        blocks = BlockQueue(answer)
        taking = asyncio.create_task(answer.relay(blocks, idle, latest))
        taking.add_done_callback(blocks.stop)
        try:
            async for block, last in blocks:
                async with asyncio.timeout(idle):
                    if not self.started:
                        await self._start(status, headers, length)
                    await self._send_body(block, more=not last)
            await taking
        except TimeoutError as error:
            raise ReaderStalledError("the client stopped reading") from error
        finally:
            taking.cancel()

    async def finish(self, tail: bytes) -> None:
        if not self.started and self._head is not None:
            await self._start(*self._head)
        await self._send_body(tail, more=False)

    def abort(self) -> None:
        """The server closes the connection of an application that returns without an end."""

    async def _start(self, status: int, headers: Sequence[Header], length: int | None) -> None:
        framing = [] if length is None else [(b"content-length", b"%d" % length)]
        self.started = True
        await self._send(
            {"type": "http.response.start", "status": status, "headers": [*headers, *framing]}
        )

    async def _send_body(self, body: bytes, more: bool) -> None:
        self.ended = not more
        await self._send({"type": "http.response.body", "body": body, "more_body": more})


class BlockQueue:
    """A Sink that is read by iteration: all that came since the last step, as one block."""

    def __init__(self, answer: Relayed) -> None:
        self._answer = answer
        self._held: list[bytes] = []
        self._size = 0
        self._last = False
        self._stopped = False
        self._changed = asyncio.Event()

    def write(self, block: bytes, last: bool) -> None:
        self._held.append(block)
        self._size += len(block)
        self._last = last
        self._changed.set()
        if self._size > HIGH_WATER and not last:
            self._answer.pause()

    def stop(self, taking: asyncio.Task[None]) -> None:
        """Nothing more will come, whether the last block came or not."""
        if not taking.cancelled():
            taking.exception()  # or asyncio logs it, where the client has disconnected meanwhile
        self._stopped = True
        self._changed.set()

    async def __aiter__(self) -> AsyncIterator[tuple[bytes, bool]]:
        while self._held or not self._stopped:
            if self._held:
                block, last = self._take(), self._last
                yield block, last
                if last:
                    return
            else:
                self._changed.clear()
                await self._changed.wait()

    def _take(self) -> bytes:
        block = b"".join(self._held)
        self._held.clear()
        self._size = 0
        self._answer.resume()
        return block
