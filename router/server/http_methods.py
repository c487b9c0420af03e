"""What HTTP expects of every path behind the hot ones: OPTIONS, HEAD, and CORS where it is on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from fastapi import FastAPI
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.proxy.cors import allowing, preflight
from router.proxy.exchange import Header

METHODS = ("DELETE", "GET", "PATCH", "POST", "PUT")


class Manners:
    """ASGI middleware. `known` says which methods a path has."""

    def __init__(self, app: ASGIApp, known: FastAPI, origins: Sequence[str]) -> None:
        self._app, self._known, self._origins = app, known, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["method"] == "OPTIONS" and (methods := self._methods(scope)):
            lines: list[Header] = [(b"allow", ", ".join(methods).encode())]
            lines += preflight(scope["headers"], self._origins)
            await send({"type": "http.response.start", "status": 204, "headers": lines})
            await send({"type": "http.response.body", "body": b""})
        else:
            lines = allowing(scope["headers"], self._origins)
            telling = _with_lines(send, lines) if lines else send
            if scope["method"] == "HEAD" and "GET" in self._methods(scope):
                await _head(self._app, scope, receive, telling)
            else:
                await self._app(scope, receive, telling)

    def _methods(self, scope: Scope) -> list[str]:
        found = [method for method in METHODS if self._has({**scope, "method": method})]
        if "GET" in found:
            found.append("HEAD")
        return sorted([*found, "OPTIONS"]) if found else []

    def _has(self, scope: Scope) -> bool:
        return any(route.matches(scope)[0] is Match.FULL for route in self._known.routes)


def _with_lines(send: Send, lines: Sequence[Header]) -> Send:
    async def telling(message: Message) -> None:
        if message["type"] == "http.response.start":
            given = list(message.get("headers", ()))
            have = {name for name, _ in given}
            given += [line for line in lines if line[0] not in have]
            message = {**message, "headers": given}
        await send(message)

    return telling


async def _head(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """As GET, up to the end of the head: what would follow may be a stream without an end."""
    is_told = asyncio.Event()

    async def head_only(message: Message) -> None:
        if message["type"] == "http.response.start" and not is_told.is_set():
            is_told.set()
            await send(message)
            await send({"type": "http.response.body", "body": b""})

    async def serve() -> None:
        await app({**scope, "method": "GET"}, receive, head_only)

    serving = asyncio.create_task(serve())
    telling = asyncio.create_task(is_told.wait())
    try:
        await asyncio.wait((serving, telling), return_when=asyncio.FIRST_COMPLETED)
        if not is_told.is_set():
            await serving
    finally:
        for task in (serving, telling):
            task.cancel()
        await asyncio.gather(serving, telling, return_exceptions=True)
