"""The interface between the proxy and the server: one client request, and the means to answer it.

`router.server.response_writer` implements it. Each request runs in a task of its own, which the
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
    """An answer whose body can be relayed: see `router.http_client.engine_answer.EngineAnswer`."""

    @property
    def is_event_stream(self) -> bool: ...
    @property
    def length(self) -> int | None: ...
    async def relay(self, sink: AnswerSink, idle: float, latest: float) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def fail(self, error: UpstreamError) -> None:
        """End `relay` with this error, unless the end of the body has arrived."""


class Exchange(Protocol):
    """One client request. It can be answered once. Header names are lower case."""

    loop: asyncio.AbstractEventLoop
    """The loop that runs the request's task."""
    endpoint: str
    headers: Sequence[Header]
    arrived: float
    """The loop time in seconds at which the server received the request."""
    caller: ApiKey | None
    """The API key that the server has found valid; None if the request has no valid one, or if the
    router has no API keys."""

    @property
    def body(self) -> bytes: ...
    @property
    def started(self) -> bool:
        """The head of an answer was sent."""
        ...

    async def respond(self, status: int, headers: Sequence[Header], body: bytes) -> None:
        """Send a complete answer."""

    async def relay(
        self, status: int, headers: Sequence[Header], answer: BodySource, idle: float, latest: float
    ) -> None:
        """Send a head, and then the answer's body as it arrives.

        `idle` is the longest time in seconds between two pieces of the body, `latest` the loop time
        at which the body must have ended. Raises UpstreamError if the engine fails midway. The
        client's answer then stays open, and another `relay` may continue it.
        """

    async def finish(self, tail: bytes) -> None:
        """End an answer that `relay` has left open, with a last piece of the body."""

    def abort(self) -> None:
        """Cut an answer that `relay` has left open, so that no client takes it for complete."""


class BodySourceWrapper:
    """A BodySource that stands between an event stream and its sink. It is that stream's sink, and
    a subclass says in `write` what passes on to `_sink`."""

    is_event_stream = True

    def __init__(self, source: BodySource, length: int | None = None) -> None:
        self.length = length
        self._source = source
        self._sink: AnswerSink | None = None

    def write(self, block: bytes, last: bool) -> None:
        raise NotImplementedError

    async def relay(self, sink: AnswerSink, idle: float, latest: float) -> None:
        self._sink = sink
        await self._source.relay(self, idle, latest)

    def pause(self) -> None:
        self._source.pause()

    def resume(self) -> None:
        self._source.resume()

    def fail(self, error: UpstreamError) -> None:
        self._source.fail(error)


class ExchangeWrapper:
    """An Exchange that wraps another one, for subclasses that change a part of the answer."""

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
        """Return the headers that the client gets."""
        return headers
