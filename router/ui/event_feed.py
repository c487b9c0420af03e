"""GET /ui/events: server-sent events, for who shows the token, if there is one."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.auth.credentials import has_bearer_token
from router.openai.errors import error_body
from router.ui.hub import DashboardHub, TooManyViewersError
from router.ui.viewers import MOST_WATCHERS, Viewer

logger = logging.getLogger("disagg_router.page")
# Seconds between two comments where nothing else is told, and for a client to take what is sent.
HEARTBEAT = 10.0
PATIENCE = 10.0
BEAT = b": still here\n\n"
HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-store",
    "x-accel-buffering": "no",
    "x-content-type-options": "nosniff",
}


class DashboardFeed(Response):
    """`token` is what callers have to show; None: nothing."""

    def __init__(self, hub: DashboardHub, token: str | None) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._hub = hub
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = _refusal_of(scope, self._token)
        if refusal is not None:
            return await refusal(scope, receive, send)
        try:
            with self._hub.watching() as watcher:
                await self._tell(watcher, receive, send)
        except TooManyViewersError:
            text = f"{MOST_WATCHERS} look at the page already"
            await _error(503, "ServiceUnavailableError", text)(scope, receive, send)

    async def _tell(self, watcher: Viewer, receive: Receive, send: Send) -> None:
        telling = asyncio.create_task(self._send_on(watcher, send))
        leaving = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait((telling, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (telling, leaving):
                task.cancel()
            await asyncio.gather(telling, leaving, return_exceptions=True)

    async def _send_on(self, watcher: Viewer, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        block = b": here you are\n\n"
        with contextlib.suppress(TimeoutError):
            while True:
                async with asyncio.timeout(PATIENCE):
                    await _send(send, block)
                if watcher.is_cut:
                    return await _send(send, b"", more=False)
                block = await watcher.next(HEARTBEAT) or BEAT


async def _send(send: Send, block: bytes, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": block, "more_body": more})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _refusal_of(scope: Scope, token: str | None) -> Response | None:
    """None for who may look."""
    headers = Headers(scope=scope)
    if token is not None and not has_bearer_token(scope["headers"], token):
        text = "the page wants its token: Authorization: Bearer ..."
        refusal = _error(401, "AuthenticationError", text)
        refusal.headers["www-authenticate"] = "Bearer"
        return refusal
    # Another site's page, in the browser of somebody who can reach this router.
    if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return _error(403, "PermissionDeniedError", "pages of other sites are not let in")
    return None


def _error(status: int, kind: str, text: str) -> Response:
    return Response(error_body(status, kind, text), status, None, "application/json")
