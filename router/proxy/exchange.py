"""What a flow knows of its client: one request, and the means to answer it.

router.server.response_writer implements it. Each request runs in a task of its own, which the
server cancels when the client disconnects.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from router.auth.api_keys import ApiKey
from router.http_client.engine_answer import AnswerSink
from router.http_client.errors import UpstreamError

Header = tuple[bytes, bytes]


class BodySource(Protocol):
    """An answer as a front needs it: see router.http_client.engine_answer.Answer."""

    @property
    def is_event_stream(self) -> bool: ...
    @property
    def length(self) -> int | None: ...
    async def relay(self, sink: AnswerSink, idle: float, latest: float) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def fail(self, error: UpstreamError) -> None:
        """Ends `relay` with this error, unless the end has arrived."""


class Exchange(Protocol):
    """`loop` is the one that runs the flow, so that it need not be looked for.

    Header names are lower case. Nothing can be answered twice; `started` says that it was."""

    loop: asyncio.AbstractEventLoop
    endpoint: str
    headers: Sequence[Header]
    arrived: float
    caller: ApiKey | None
    """The API key that the server has found valid; None if the request has no valid one, or if the
    router has no API keys."""

    @property
    def body(self) -> bytes: ...
    @property
    def started(self) -> bool: ...

    async def respond(self, status: int, headers: Sequence[Header], body: bytes) -> None:
        """Sends a complete answer."""

    async def relay(
        self, status: int, headers: Sequence[Header], answer: BodySource, idle: float, latest: float
    ) -> None:
        """Sends a head and then the answer's body as it comes, ended when that ends.

        Raises UpstreamError when the engine fails midway: the client's answer is then open, and
        another `relay` goes on with it.
        """

    async def finish(self, tail: bytes) -> None:
        """Ends an answer that `relay` left open, with a last piece of body."""

    def abort(self) -> None:
        """Cuts an answer that `relay` left open, so that no client can take it for complete."""


class ExchangeWrapper:
    """An Exchange before another one, for those that change some of what passes."""

    def __init__(self, inner: Exchange) -> None:
        self.loop: asyncio.AbstractEventLoop = inner.loop
        self.endpoint, self.arrived, self.caller = inner.endpoint, inner.arrived, inner.caller
        self.headers: Sequence[Header] = inner.headers
        self._inner = inner

    @property
    def body(self) -> bytes:
        return self._inner.body

    @property
    def started(self) -> bool:
        return self._inner.started

    async def respond(self, status: int, headers: Sequence[Header], body: bytes) -> None:
        await self._inner.respond(status, self._client_headers(headers), body)

    async def relay(
        self, status: int, headers: Sequence[Header], answer: BodySource, idle: float, latest: float
    ) -> None:
        await self._inner.relay(status, self._client_headers(headers), answer, idle, latest)

    async def finish(self, tail: bytes) -> None:
        await self._inner.finish(tail)

    def abort(self) -> None:
        self._inner.abort()

    def _client_headers(self, headers: Sequence[Header]) -> Sequence[Header]:
        """What the client is told of an answer's headers."""
        return headers
