"""The dashboard's routes: its files, which are read once, and the feed of its events."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator
from importlib.resources import files

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send

from router.auth.api_keys import has_bearer_token, has_local_host
from router.openai.errors import OperatorError
from router.settings import is_loopback
from router.ui.hub import DashboardHub, Viewer

CONTENT_TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}
MAX_VIEWERS = 16
SECURITY_POLICY = (
    "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'"
)
FILE_HEADERS = {
    "content-security-policy": SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}
FEED_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-store",
    "x-accel-buffering": "no",
    "x-content-type-options": "nosniff",
}
# A comment keeps an idle connection open, and shows that the router lives.
HEARTBEAT_INTERVAL_S = 2.0
HEARTBEAT = b": still here\n\n"
SEND_TIMEOUT_S = 10.0


def dashboard_routes(hub: DashboardHub, token: str | None) -> APIRouter:
    """Return the routes of the dashboard.

    The feed requires `token` as a bearer token, unless it is None. The files hold no secrets.
    """
    known: dict[str, Response] = {}
    for entry in (files("router.ui") / "static").iterdir():
        if kind := CONTENT_TYPES.get(entry.name.rpartition(".")[2]):
            content = entry.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
            headers = {**FILE_HEADERS, "etag": etag, "content-type": kind}
            known[entry.name] = Response(content, 200, headers)
    router = APIRouter(tags=["Dashboard"])

    @router.head("/ui", include_in_schema=False)
    @router.get("/ui", summary="The dashboard: engines, requests, checks, and a chat")
    async def to_page() -> Response:
        """Redirect relatively: another server may stand before the router."""
        return RedirectResponse("ui/", 307)

    @router.get("/ui/events", summary="The dashboard's data, as server-sent events")
    async def events(request: Request) -> Response:
        _check_access(request, token)
        if hub.num_viewers >= MAX_VIEWERS:
            raise OperatorError(503, f"the dashboard has {MAX_VIEWERS} viewers already")
        return DashboardFeed(hub)

    @router.get("/ui/requests/{request_id}", summary="One recently ended request")
    async def one_request(request: Request, request_id: str) -> Response:
        _check_access(request, token)
        found = hub.source.find(request_id)
        if found is None:
            raise OperatorError(404, hub.unknown_request(request_id))
        return Response(found.model_dump_json(), media_type="application/json")

    @router.api_route("/ui/{name}", methods=["GET", "HEAD"], include_in_schema=False)
    async def static(request: Request, name: str) -> Response:
        if name not in known:
            raise HTTPException(404)
        file, etag = known[name], known[name].headers["etag"]
        if request.headers.get("if-none-match") == etag:
            return Response(None, 304, {**FILE_HEADERS, "etag": etag})
        return file

    @router.api_route("/ui/", methods=["GET", "HEAD"], include_in_schema=False)
    async def index(request: Request) -> Response:
        return await static(request, "index.html")

    return router


class DashboardFeed(Response):
    """One viewer's server-sent events, until the client disconnects or does not read for long."""

    def __init__(self, hub: DashboardHub) -> None:
        super().__init__()
        self._hub = hub

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await send(message)

        with self._hub.viewing() as viewer, contextlib.suppress(TimeoutError):
            stream = StreamingResponse(_events(viewer), headers=FEED_HEADERS)
            await stream(scope, receive, send_in_time)


async def _events(viewer: Viewer) -> AsyncIterator[bytes]:
    yield b": here you are\n\n"
    while not viewer.is_cut_off:
        is_finished = viewer.is_finished
        yield await viewer.next(HEARTBEAT_INTERVAL_S) or HEARTBEAT
        if is_finished:
            return


def _check_access(request: Request, token: str | None) -> None:
    """Raises OperatorError."""
    headers, server = request.headers, request.scope.get("server")
    if token is not None and not has_bearer_token(headers.raw, token):
        text = "the dashboard needs its token: Authorization: Bearer ..."
        raise OperatorError(401, text)
    is_on_loopback = server is not None and is_loopback(server[0])
    if token is None and is_on_loopback and not has_local_host(headers.raw):
        text = "without a dashboard token, Host must be localhost or a loopback address"
        raise OperatorError(403, text)
    # Another site's page may run in the browser of somebody who can reach this router.
    if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        raise OperatorError(403, "requests from other sites are not allowed")
