"""The interface between the proxy and the server: one client request, and the means to answer it.

`ResponseWriter` in `router.server.client_connection` implements it. Each request runs in a task of
its own, which the server cancels when the client disconnects. Wrappers change a part of the answer;
the one for CORS adds the headers that let web pages of other origins read it (setting
cors_origins). An API key is a header that the page sets itself, and never a cookie, so no answer
allows credentials.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Sequence
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


class FilteredStream(BodySourceWrapper):
    """An event stream of which each block passes on as `passing` returns it."""

    def __init__(self, source: BodySource, passing: Callable[[bytes], bytes]) -> None:
        super().__init__(source, source.length)
        self._passing = passing

    def write(self, block: bytes, last: bool) -> None:
        assert self._sink is not None
        passed = self._passing(block)
        if passed or last:
            self._sink.write(passed, last)


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


ANY_ORIGIN = "*"
ALLOWED_METHODS = b"GET, HEAD, POST, DELETE, OPTIONS"
EXPOSED_HEADERS = b", ".join(
    (
        b"x-request-id",
        b"retry-after",
        *(
            b"x-ratelimit-%b-%b" % (what, of)
            for of in (b"requests", b"tokens")
            for what in (b"limit", b"remaining", b"reset")
        ),
    )
)
# Seconds for which a browser may cache the answer to a preflight request.
PREFLIGHT_MAX_AGE_S = b"600"
HEADER_NAMES = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,2048}")
REQUESTED_METHOD = b"access-control-request-method"
REQUESTED_HEADERS = b"access-control-request-headers"


def cors_headers(headers: Iterable[Header], origins: Sequence[str]) -> list[Header]:
    """Return the headers that allow the requesting page to read the answer, [] if it may not."""
    if not origins:
        return []
    vary: list[Header] = [] if ANY_ORIGIN in origins else [(b"vary", b"origin")]
    origin = next((value for name, value in headers if name == b"origin"), None)
    if origin is None or not (ANY_ORIGIN in origins or origin.decode("latin-1") in origins):
        return vary
    allowed = b"*" if ANY_ORIGIN in origins else origin
    return [
        (b"access-control-allow-origin", allowed),
        (b"access-control-expose-headers", EXPOSED_HEADERS),
        *vary,
    ]


def preflight_headers(headers: Sequence[Header], origins: Sequence[str]) -> list[Header]:
    """Return the headers of the answer to a preflight request. They allow nothing if the origin is
    not allowed."""
    given = dict(headers)
    found = cors_headers(headers, origins)
    if REQUESTED_METHOD not in given or len(found) < 2:
        return found
    found += [
        (b"access-control-allow-methods", ALLOWED_METHODS),
        (b"access-control-max-age", PREFLIGHT_MAX_AGE_S),
    ]
    wanted = given.get(REQUESTED_HEADERS, b"")
    if HEADER_NAMES.fullmatch(wanted):
        found.append((b"access-control-allow-headers", wanted))
    return found


class CorsExchange(ExchangeWrapper):
    """An Exchange that adds CORS headers to the answer."""

    def __init__(self, inner: Exchange, lines: Sequence[Header]) -> None:
        super().__init__(inner)
        self._lines = lines

    def _client_headers(self, headers: Sequence[Header]) -> list[Header]:
        return [*headers, *self._lines]
