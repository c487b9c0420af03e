"""The bytes of a request, read within a size and a time, and the JSON object in them."""

import asyncio
import codecs
from typing import Any

import orjson
from starlette.requests import Request

from engine_ext.reference.server.errors import (
    EngineBadRequestError,
    EngineBodyTooLargeError,
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
