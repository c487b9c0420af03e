"""A streamed answer. Its first piece is known before the status goes out."""

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


async def read_body(request: Request, *, limit: int, timeout: float) -> bytes:
    """Raises EngineBodyTooLargeError above `limit` bytes.

    Raises EngineRequestTimeoutError after `timeout` seconds.
    """
    try:
        async with asyncio.timeout(timeout):
            return await _read(request, limit)
    except TimeoutError:
        raise EngineRequestTimeoutError(
            f"the request body did not arrive within {timeout:g} s"
        ) from None


async def _read(request: Request, limit: int) -> bytes:
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:20]) > limit:
        raise EngineBodyTooLargeError(f"the request body is larger than {limit} bytes")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
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


T = TypeVar("T")


class ClientGoneError(Exception):
    """Nobody is left to answer."""


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves: then ClientGoneError.

    The request's body must have been read to its end.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


logger = logging.getLogger(__name__)


DONE = b"data: [DONE]\n\n"


def event(value: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


class EventStream(Response):
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
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        await send(_piece(self._first))
        try:
            async for events in self._rest:
                await send(_piece(events))
        except ApiError as error:
            await send(_piece(event(error.body()) + DONE))
        except Exception:
            logger.exception("a stream broke")
            await send(_piece(event(EngineFailureError("internal error").body()) + DONE))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _piece(body: bytes) -> dict[str, object]:
    return {"type": "http.response.body", "body": body, "more_body": True}
