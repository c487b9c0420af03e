"""Whatever flows do not serve: the application behind, asked through ASGI.

https://asgi.readthedocs.io/en/latest/specs/www.html. The body was received whole, within the bounds
of all bodies, before the application is asked. Of a request that is refused instead, whoever asks
for its body meets the refusal: so it is told in the words of the endpoint that was asked.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any
from urllib.parse import unquote

import httptools
from starlette.types import ASGIApp, Message, Scope

from router.openai.errors import JSON, RequestError, body_of, headers_of, shape_of
from router.proxy.exchange import Header
from router.server.asgi import FROM_US
from router.server.request_reader import Incoming
from router.server.response_writer import NO_CONTENT, Outbound

logger = logging.getLogger("disagg_router.api")
NO_BODY = frozenset((NO_CONTENT, 304))


def scope_of(incoming: Incoming, transport: asyncio.BaseTransport, state: dict[str, Any]) -> Scope:
    path, query = _split(incoming.target)
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
        "extensions": {FROM_US: {}},
    }


async def answer(
    app: ASGIApp, scope: Scope, outbound: Outbound, refusal: RequestError | None = None
) -> None:
    """Runs the application until it has answered. Never raises: what it does wrong is logged, and
    its client is told as well as what it already got allows. An application does nothing wrong that
    returns without an answer after its client has disconnected."""
    bridge = Bridge(outbound, scope["method"] == "HEAD", refusal)
    try:
        await app(scope, bridge.receive, bridge.send)
    except Exception as error:
        if error is not refusal:
            logger.exception("%s %s failed", scope["method"], scope["path"])
        if not bridge.is_open:
            await outbound.respond(shape_of(error).status, headers_of(error), body_of(error))
    else:
        if not bridge.is_open and not outbound.is_over:
            logger.error("%s %s was not answered", scope["method"], scope["path"])
            await outbound.respond(500, JSON, body_of(Exception()))
    if not outbound.is_over:
        outbound.abort()


class Bridge:
    """`is_open`: an answer has begun."""

    def __init__(
        self, outbound: Outbound, is_head: bool, refusal: RequestError | None = None
    ) -> None:
        self.is_open = False
        self._refusal = refusal
        self._outbound = outbound
        self._is_head = is_head
        self._is_read = False
        self._status = 0
        self._headers: list[Header] = []
        self._has_body = True
        # Of a body whose length was told, what has not come yet.
        self._missing: int | None = None

    async def receive(self) -> Message:
        if self._is_read:
            await self._outbound.over()
            return {"type": "http.disconnect"}
        if self._refusal is not None:
            raise self._refusal
        self._is_read = True
        return {"type": "http.request", "body": self._outbound.body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status, self._headers = message["status"], list(message.get("headers", ()))
        elif message["type"] == "http.response.body":
            await self._outbound.drained()
            self._write(message.get("body", b""), not message.get("more_body", False))

    def _write(self, block: bytes, last: bool) -> None:
        if not self.is_open:
            self.is_open = True
            self._open()
        if not self._has_body:
            block = b""
        elif self._missing is not None:
            self._missing -= len(block)
            if self._missing < 0 or (last and self._missing):
                logger.error("an answer that is not as long as it says")
                self._outbound.abort()
        if block or last:
            self._outbound.write(block, last)

    def _open(self) -> None:
        headers, outbound = [(name.lower(), value) for name, value in self._headers], self._outbound
        told: dict[bytes, Any] = dict(headers)
        if told.get(b"connection", b"").lower() == b"close":
            outbound.keep_alive = False
        dropped = {b"connection", b"transfer-encoding"}
        if self._is_head or self._status in NO_BODY:
            self._has_body = False
            if self._status == NO_CONTENT:
                dropped.add(b"content-length")
            kept = [header for header in headers if header[0] not in dropped]
            outbound.open_bare(self._status, kept)
            return
        length = told.get(b"content-length", b"")
        self._missing = int(length) if length.isdigit() else None
        dropped.add(b"content-length")
        kept = [header for header in headers if header[0] not in dropped]
        outbound.open(self._status, kept, self._missing)


def _split(target: bytes) -> tuple[bytes, bytes]:
    """A path and a query, of whatever is asked for: the application knows what it has."""
    try:
        parsed = httptools.parse_url(target)
    except httptools.HttpParserInvalidURLError:
        return target, b""
    return parsed.path or b"/", parsed.query or b""


def _address(name: object) -> tuple[str, int] | None:
    return (str(name[0]), int(name[1])) if isinstance(name, tuple | list) else None
