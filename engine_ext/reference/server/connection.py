"""One HTTP exchange: the request's body, the client's disconnect, and the streamed answer."""

import asyncio
import codecs
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine_ext.reference.server.errors import (
    ApiError,
    EngineBadRequestError,
    EngineBodyTooLargeError,
    EngineFailureError,
    EngineRequestTimeoutError,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


class ClientGoneError(Exception):
    """The client has disconnected: there is no one to answer."""


async def read_body(request: Request, *, limit: int, timeout: float) -> bytes:
    """Raises EngineBodyTooLargeError above `limit` bytes, and EngineRequestTimeoutError after
    `timeout` seconds."""
    announced = request.headers.get("content-length", "")
    num_bytes = int(announced[:20]) if announced.isdecimal() else 0
    body = bytearray()
    try:
        async with asyncio.timeout(timeout):
            if num_bytes <= limit:
                async for chunk in request.stream():
                    body += chunk
                    num_bytes = len(body)
                    if num_bytes > limit:
                        break
    except TimeoutError:
        raise EngineRequestTimeoutError(
            f"the request body did not arrive within {timeout:g} s"
        ) from None
    if num_bytes > limit:
        raise EngineBodyTooLargeError(f"the request body is larger than {limit} bytes")
    return bytes(body)


def json_object(body: bytes) -> dict[str, Any]:
    """The object without its null members: in this API null means the same as absent.

    A byte order mark before it is no harm. orjson refuses what would hurt later: NaN and
    infinities, lone surrogates, deep nesting.
    """
    try:
        value = orjson.loads(body.removeprefix(codecs.BOM_UTF8))
    except orjson.JSONDecodeError as error:
        raise EngineBadRequestError(f"the request body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise EngineBadRequestError("the request body must be a JSON object")
    return {name: member for name, member in value.items() if member is not None}


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves: then ClientGoneError.

    The request's body must have been read to its end.
    """

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working = asyncio.create_task(work)
    watching = asyncio.create_task(disconnected())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


def event(value: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


class EventStream(Response):
    """A streamed answer. Its first piece is known before the status goes out."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None]) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache"})
        self._first = first
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._rest):
            try:
                await until_disconnect(receive, self._send(send))
            except ClientGoneError:
                logger.info("client left its stream")

    async def _send(self, send: Send) -> None:
        async def send_piece(body: bytes, more_body: bool = True) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": more_body})

        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        await send_piece(self._first)
        try:
            async for events in self._rest:
                await send_piece(events)
        except ApiError as error:
            await send_piece(event(error.body()) + DONE)
        except Exception:
            logger.exception("a stream broke")
            await send_piece(event(EngineFailureError("internal error").body()) + DONE)
        await send_piece(b"", more_body=False)
