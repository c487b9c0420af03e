"""A streamed answer. Its first piece is known before the status goes out."""

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine_ext.reference.server.answer import DONE, event
from engine_ext.reference.server.disconnect import ClientGoneError, until_disconnect
from engine_ext.reference.server.errors import ApiError, EngineFailureError

logger = logging.getLogger(__name__)


class EventStream(Response):
    media_type = "text/event-stream"

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None]) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache"})
        self._first = first
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._rest):
            try:
                await until_disconnect(receive, self._send(send))
            except ClientGoneError:
                logger.info("client left its stream")

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        await send(_piece(self._first))
        try:
            async for events in self._rest:
                await send(_piece(events))
        except ApiError as error:
            await send(_piece(event(error.body()) + DONE))
        except Exception:
            logger.exception("a stream broke")
            await send(_piece(event(EngineFailureError("internal error").body()) + DONE))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _piece(body: bytes) -> dict[str, object]:
    return {"type": "http.response.body", "body": body, "more_body": True}
