"""The page itself: a few files of ours, read once, and the routes to them and to the feed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response
from starlette.exceptions import HTTPException

from router.ui.event_feed import DashboardFeed
from router.ui.hub import DashboardHub

TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}
INDEX = "index.html"
POLICY = "; ".join(
    (
        "default-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "object-src 'none'",
    )
)
SAFE = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class StaticFile:
    content: bytes
    kind: str
    tag: str


def read_files() -> Mapping[str, StaticFile]:
    """By name; there are no folders."""
    return {
        entry.name: _file(entry.name, entry.read_bytes())
        for entry in (files("router.ui") / "static").iterdir()
        if entry.name.rpartition(".")[2] in TYPES
    }


def dashboard_routes(hub: DashboardHub, token: str | None) -> APIRouter:
    """`token` is what who looks has to show; None: nothing. The files have no secrets."""
    known = read_files()
    router = APIRouter(tags=["Page"])

    @router.head("/ui", include_in_schema=False)
    @router.get("/ui", summary="A page to watch engines and requests, and to chat")
    async def to_page() -> Response:
        """Its files are named relative to it, whatever stands before the router."""
        return RedirectResponse("ui/", 307)

    @router.get("/ui/events", summary="What the page shows, as server-sent events")
    async def events() -> Response:
        return DashboardFeed(hub, token)

    @router.head("/ui/{name}", include_in_schema=False)
    @router.get("/ui/{name}", include_in_schema=False)
    async def static(request: Request, name: str) -> Response:
        return _answer(known.get(name), request)

    @router.head("/ui/", include_in_schema=False)
    @router.get("/ui/", include_in_schema=False)
    async def index(request: Request) -> Response:
        return _answer(known.get(INDEX), request)

    return router


def _answer(file: StaticFile | None, request: Request) -> Response:
    if file is None:
        raise HTTPException(404)
    headers = {**SAFE, "etag": file.tag}
    if request.headers.get("if-none-match") == file.tag:
        return Response(None, 304, headers)
    return Response(file.content, 200, headers | {"content-type": file.kind})


def _file(name: str, content: bytes) -> StaticFile:
    digest = hashlib.sha256(content).hexdigest()[:16]
    return StaticFile(content, TYPES[name.rpartition(".")[2]], f'"{digest}"')
