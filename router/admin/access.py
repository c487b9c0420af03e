"""Who may come in to the admin API, and with how much."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.auth.credentials import Headers, has_bearer_token
from router.openai.errors import error_body

MOST_BYTES = 64 * 1024
# Seconds for a body to arrive.
PATIENCE = 10.0


class AdminBodyTooLargeError(Exception):
    pass


class AdminGate:
    """Before an ASGI application. `token` is what callers have to show now; None: nothing, which is
    for loopback alone."""

    def __init__(self, app: ASGIApp, token: Callable[[], str | None]) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        refusal = refusal_of(scope["headers"], self._token())
        if refusal is None:
            try:
                async with asyncio.timeout(PATIENCE):
                    body = await _body(scope["headers"], receive)
            except AdminBodyTooLargeError:
                text = f"the body is larger than {MOST_BYTES} bytes"
                refusal = _refusal(413, "RequestEntityTooLargeError", text)
            except TimeoutError:
                refusal = _refusal(408, "RequestTimeoutError", "the body was not received in time")
            else:
                return None if body is None else await self._app(scope, _again(body, receive), send)
        await refusal(scope, receive, send)


def refusal_of(headers: Headers, token: str | None) -> Response | None:
    """None for who may come in."""
    if token is None:
        # Any page that a browser on this machine shows may ask loopback for something.
        if any(name == b"origin" for name, _ in headers):
            text = "browsers are not let in without an admin token"
            return _refusal(403, "PermissionDeniedError", text)
        return None
    if has_bearer_token(headers, token):
        return None
    text = "the admin API wants its token: Authorization: Bearer ..."
    return _refusal(401, "AuthenticationError", text, {"www-authenticate": "Bearer"})


def _refusal(status: int, kind: str, text: str, headers: dict[str, str] | None = None) -> Response:
    more = {"connection": "close", **(headers or {})}
    return Response(error_body(status, kind, text), status, more, "application/json")


async def _body(headers: Headers, receive: Receive) -> bytes | None:
    """None where the client has left. Raises AdminBodyTooLargeError."""
    announced = dict(headers).get(b"content-length", b"0")
    if not announced.isdigit() or len(announced) > 18 or int(announced) > MOST_BYTES:
        raise AdminBodyTooLargeError
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if len(body) > MOST_BYTES:
            raise AdminBodyTooLargeError
        if not message.get("more_body", False):
            return bytes(body)


def _again(body: bytes, receive: Receive) -> Receive:
    """What was received already, then what comes."""
    left = [body]

    async def receive_again() -> Message:
        if left:
            return {"type": "http.request", "body": left.pop(), "more_body": False}
        return await receive()

    return receive_again
