"""ASGI middleware of the application: API keys, ports, and the methods of HTTP.

Requests to proxied endpoints do not pass through here: the server and the proxy check their API
keys (see client_connection and router.proxy.dispatch).
"""

from __future__ import annotations

from collections.abc import Sequence

import anyio
from fastapi import FastAPI
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.auth.api_keys import ApiKey
from router.auth.authenticator import MISSING
from router.openai.anthropic_messages import error_body_for
from router.openai.errors import UnauthorizedError, body_of, error_body, headers_of, shape_of
from router.proxy.exchange import Header, cors_headers, preflight_headers
from router.server.router_state import RouterState

# The entry of a scope with the result of `Gateway.identify`.
CALLER = "router.caller"
PUBLIC_PATHS = frozenset(
    ("/", "/docs", "/openapi.json", "/health", "/healthcheck", "/ready", "/version", "/metrics")
)
DASHBOARD_PATH = "/ui"
METHODS = ("DELETE", "GET", "PATCH", "POST", "PUT")


class AccessMiddleware:
    """Requires an API key for all paths but PUBLIC_PATHS, if the router has API keys, and hides
    the dashboard on other ports than its own."""

    def __init__(self, app: ASGIApp, state: RouterState) -> None:
        self._app, self._state = app, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        await (refusal or self._app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        path: str = scope["path"]
        is_dashboard = path == DASHBOARD_PATH or path.startswith(DASHBOARD_PATH + "/")
        port, server = self._state.dashboard_port, scope.get("server")
        if is_dashboard and port is not None and (not server or server[1] != port):
            body = error_body(404, "NotFoundError", f"{scope['method']} {path}: Not Found")
            return Response(body, 404, None, "application/json")
        gateway = self._state.gateway
        # The dashboard has its own token. A CORS preflight carries no credential and does nothing.
        is_public = is_dashboard or path in PUBLIC_PATHS or scope["method"] == "OPTIONS"
        caller = scope.get(CALLER)
        if gateway.authenticator is None or is_public or isinstance(caller, ApiKey):
            return None
        reason: str = caller or MISSING
        gateway.metrics.unauthorized.add((reason,))
        error = UnauthorizedError(reason)
        headers = {name.decode(): value.decode() for name, value in headers_of(error)}
        headers["connection"] = "close"
        status = shape_of(error).status
        return Response(error_body_for(path, status, body_of(error)), status, headers)


class HttpMethodsMiddleware:
    """Answers OPTIONS and HEAD for every path, and adds CORS headers where they are enabled."""

    def __init__(self, app: ASGIApp, known: FastAPI, origins: Sequence[str]) -> None:
        self._app, self._known, self._origins = app, known, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["method"] == "OPTIONS" and (methods := self._methods(scope)):
            lines: list[Header] = [(b"allow", ", ".join(methods).encode())]
            lines += preflight_headers(scope["headers"], self._origins)
            await send({"type": "http.response.start", "status": 204, "headers": lines})
            await send({"type": "http.response.body", "body": b""})
        else:
            lines = cors_headers(scope["headers"], self._origins)
            send_with_lines = _adding(send, lines) if lines else send
            if scope["method"] == "HEAD" and "GET" in self._methods(scope):
                await _answer_head(self._app, scope, receive, send_with_lines)
            else:
                await self._app(scope, receive, send_with_lines)

    def _methods(self, scope: Scope) -> list[str]:
        found = [method for method in METHODS if self._has_route({**scope, "method": method})]
        if "GET" in found:
            found.append("HEAD")
        return sorted([*found, "OPTIONS"]) if found else []

    def _has_route(self, scope: Scope) -> bool:
        return any(route.matches(scope)[0] is Match.FULL for route in self._known.routes)


def _adding(send: Send, lines: Sequence[Header]) -> Send:
    async def send_with_lines(message: Message) -> None:
        if message["type"] == "http.response.start":
            given = list(message.get("headers", ()))
            have = {name for name, _ in given}
            given += [line for line in lines if line[0] not in have]
            message = {**message, "headers": given}
        await send(message)

    return send_with_lines


async def _answer_head(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Serve a GET up to the end of its head: the body may be a stream without an end."""
    with anyio.CancelScope() as running:

        async def send_head(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                await send({"type": "http.response.body", "body": b""})
                running.cancel()

        await app({**scope, "method": "GET"}, receive, send_head)
