"""Serve a request with the FastAPI application, through ASGI.

The server has received the body whole, within the limits for all bodies, before it calls the
application. If it has refused the request instead, the application meets the refusal where it asks
for the body, so that public endpoints can still answer.

https://asgi.readthedocs.io/en/latest/specs/www.html
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import httptools
from starlette.types import ASGIApp, Message, Scope

from router.openai.errors import JSON, RequestError, body_of, headers_of, shape_of
from router.server.middleware import CALLER
from router.server.request_reader import IncomingRequest

if TYPE_CHECKING:
    from router.server.client_connection import ResponseWriter

logger = logging.getLogger("disagg_router.server")
BODYLESS_STATUSES = frozenset((204, 304))


def scope_of(
    incoming: IncomingRequest, transport: asyncio.BaseTransport, state: dict[str, Any]
) -> Scope:
    try:
        url = httptools.parse_url(incoming.target)
        path, query = url.path or b"/", url.query or b""
    except httptools.HttpParserInvalidURLError:  # the application answers 404
        path, query = incoming.target, b""
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1" if incoming.http_1_1 else "1.0",
        "method": incoming.method.decode("ascii"),
        "scheme": "http" if transport.get_extra_info("sslcontext") is None else "https",
        "path": unquote(path.decode("latin-1")),
        "raw_path": path,
        "query_string": query,
        "root_path": "",
        "headers": incoming.headers,
        "server": _address(transport.get_extra_info("sockname")),
        "client": _address(transport.get_extra_info("peername")),
        "state": state.copy(),
        CALLER: incoming.caller,
    }


async def answer(
    app: ASGIApp, scope: Scope, writer: ResponseWriter, refusal: RequestError | None = None
) -> None:
    """Run the application until it has answered.

    Never raises: a failure is logged, and the client receives an error if no answer has begun, else
    the connection is cut. An application that returns without an answer after the client has
    disconnected has not failed.
    """
    bridge = AsgiBridge(writer, scope["method"] == "HEAD", refusal)
    try:
        await app(scope, bridge.receive, bridge.send)
    except Exception as error:
        if error is not refusal:
            logger.exception("%s %s failed", scope["method"], scope["path"])
        if not bridge.has_begun:
            await writer.respond(shape_of(error).status, headers_of(error), body_of(error))
    else:
        if not bridge.has_begun and not writer.is_over:
            logger.error("%s %s was not answered", scope["method"], scope["path"])
            await writer.respond(500, JSON, body_of(Exception()))
    if not writer.is_over:
        writer.abort()


class AsgiBridge:
    """The `receive` and `send` of one request."""

    def __init__(
        self, writer: ResponseWriter, is_head: bool, refusal: RequestError | None = None
    ) -> None:
        self.has_begun = False
        self._refusal = refusal
        self._writer = writer
        self._is_head = is_head
        self._is_read = False
        self._start: Message = {}
        self._has_body = True
        # The bytes that are still to come of a body with a Content-Length.
        self._missing: int | None = None

    async def receive(self) -> Message:
        if self._is_read:
            while not self._writer.is_over:
                await self._writer.wait_for_change()
            return {"type": "http.disconnect"}
        if self._refusal is not None:
            raise self._refusal
        self._is_read = True
        return {"type": "http.request", "body": self._writer.body, "more_body": False}

    async def send(self, message: Message) -> None:
        writer = self._writer
        if message["type"] == "http.response.start":
            self._start = message
            return
        while writer.is_paused and not writer.is_over:
            await writer.wait_for_change()
        if not self.has_begun:
            self.has_begun = True
            self._open()
        block = message.get("body", b"") if self._has_body else b""
        last = not message.get("more_body", False)
        if self._missing is not None:
            self._missing -= len(block)
            if self._missing < 0 or (last and self._missing):
                logger.error("an answer's length differs from its Content-Length")
                writer.abort()
        if block or last:
            writer.write(block, last)

    def _open(self) -> None:
        writer, status, headers = self._writer, self._start["status"], self._start["headers"]
        given = dict(headers)
        if b"connection" in given:  # to close it; the writer says so
            writer.keep_alive = False
            headers = [header for header in headers if header[0] != b"connection"]
        self._has_body = not self._is_head and status not in BODYLESS_STATUSES
        length = given.get(b"content-length")
        if self._has_body and length is None:
            writer.open(status, headers, None)
        else:
            self._missing = int(length) if self._has_body and length is not None else None
            writer.open_bare(status, headers)


def _address(name: object) -> tuple[str, int] | None:
    return (str(name[0]), int(name[1])) if isinstance(name, tuple | list) else None
