"""Before the application: which of its pages want a router's key, and which are on which port.

Closed by default: a page wants a key, where there are keys, unless it is listed here. Endpoints
that flows serve ask for it a second time: on most fronts they do not pass by here.
"""

from __future__ import annotations

from starlette.datastructures import State
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from router.auth.authenticator import MISSING
from router.openai.errors import UnauthorizedError, body_of, error_body, headers_of, shape_of
from router.proxy.gateway import Gateway

CALLER = "router.caller"
OPEN = frozenset(
    ("/", "/docs", "/openapi.json", "/health", "/healthcheck", "/ready", "/version", "/metrics")
)
PAGE = "/ui"
METRICS = "/metrics"


class Guard:
    """`state`, the application's, says as `page_port` where the page alone is, None: on every port.
    `has_metrics`: on these ports."""

    def __init__(self, app: ASGIApp, gateway: Gateway, state: State, has_metrics: bool) -> None:
        self._app = app
        self._gateway = gateway
        self._state = state
        self._has_metrics = has_metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        await (refusal or self._app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        path: str = scope["path"]
        is_page = path == PAGE or path.startswith(PAGE + "/")
        if self._is_elsewhere(scope, path, is_page):
            method = scope["method"]
            body = error_body(404, "NotFoundError", f"{method} {path}: Not Found")
            return Response(body, 404, None, "application/json")
        authenticator = self._gateway.authenticator
        # A preflight shows no credential, and does nothing.
        if authenticator is None or is_page or path in OPEN or scope["method"] == "OPTIONS":
            return None
        key = authenticator.identify(scope["headers"])
        if isinstance(key, str):
            self._gateway.metrics.unauthorized.add((key,))
            error = UnauthorizedError(key == MISSING)
            headers = {name.decode(): value.decode() for name, value in headers_of(error)}
            headers["connection"] = "close"  # what is left of it is not read
            return Response(body_of(error), shape_of(error).status, headers)
        scope[CALLER] = key
        return None

    def _is_elsewhere(self, scope: Scope, path: str, is_page: bool) -> bool:
        if path == METRICS:
            return not self._has_metrics
        port: int | None = self._state.page_port
        if not is_page or port is None:
            return False
        server = scope.get("server")
        return not server or server[1] != port
