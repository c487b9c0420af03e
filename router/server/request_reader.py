"""What a client sends, as requests: parsed strictly, bounded, without any I/O.

Requests stand in `requests` in the order in which they came, from the end of their head on; whoever
answers takes them from there. One that cannot be served carries its `refusal` instead. A refusal is
the last there is: where it came from, nobody knows what follows (RFC 9112, 9.3 and 11.2), so
whatever comes after it is thrown away, and its answer closes the connection.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import httptools

from router.common.records import Thing
from router.http_client.head_cache import HeadCache, without_length
from router.openai.errors import (
    BodyTooLargeError,
    HeadTooLargeError,
    MalformedRequestError,
    RequestError,
    UnknownCodingError,
    too_many_held_bodies,
)
from router.proxy.admission import Held
from router.proxy.exchange import Header
from router.proxy.request_limits import Limits
from router.server.proxied_endpoints import HOT, hot_endpoint

UPGRADE_HEADERS = (b"upgrade", b"http2-settings")
CODING = b"transfer-encoding"


class Bounds(Protocol):
    """What a router admits. `held` counts the bodies of all its requests."""

    limits: Limits
    held: Held

    def refusal_of(self, headers: Sequence[Header], endpoint: str | None) -> RequestError | None:
        """Why who asks may not come in, as far as the head tells."""


class Incoming(Thing):
    """One request. `endpoint` is one that flows serve, None where that is for the application;
    `size` counts the bytes of its body, as far as they are held."""

    endpoint: str | None
    method: bytes
    target: bytes
    headers: Sequence[Header]
    http_1_1: bool
    keep_alive: bool
    pieces: list[bytes] = []  # noqa: RUF012 - msgspec makes one for each
    size: int = 0
    is_complete: bool = False
    is_weighed: bool = False
    """Whether its announced size was looked at, as is done for what does not come at once."""
    refusal: RequestError | None = None

    @property
    def body(self) -> bytes:
        pieces = self.pieces
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    @property
    def expects_continue(self) -> bool:
        """The client may wait for a word before it sends the body."""
        return self.http_1_1 and (self.header(b"expect") or b"").lower() == b"100-continue"

    def header(self, wanted: bytes) -> bytes | None:
        return next((value for name, value in self.headers if name == wanted), None)


class Inbound:
    """`is_receiving`: a request has begun to come, and its end is not here yet. `is_deaf`: nothing
    more is listened to."""

    __slots__ = ("_bounds", "_current", "_head_cache", "_headers", "_overhead", "_parser",
                 "_target", "is_deaf", "is_receiving", "requests")  # fmt: skip

    def __init__(self, bounds: Bounds) -> None:
        self.requests: deque[Incoming] = deque()
        self.is_receiving = False
        self.is_deaf = False
        self._bounds = bounds
        self._parser = httptools.HttpRequestParser(self)
        self._current: Incoming | None = None
        self._target = b""
        self._headers: list[Header] = []
        # The head of the last request for flows, and its endpoint and target.
        self._head_cache = HeadCache(("", b""))
        # Bytes since the last piece of body: heads and trailers, which the parser does not limit.
        self._overhead = 0

    @property
    def is_noise(self) -> bool:
        """What comes next is no request at all. It is answered only where nothing else is: who has
        asked one thing takes the next answer on this connection for that of the next thing."""
        return bool(self.requests) and not self.requests[0].method

    @property
    def is_waiting(self) -> bool:
        """A request is all here."""
        return bool(self.requests) and self.requests[0].is_complete

    def feed(self, data: bytes) -> None:
        is_between, count = not self.is_receiving, len(self.requests)
        if is_between:
            again = self._head_cache.match(data)
            if again is not None and self._takes(*again):
                return
        self._overhead += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            if not self.is_deaf:
                self.refuse(_reason(error))
        if self.is_deaf:
            return
        if self.is_receiving:
            self._look_at_unfinished()
        elif is_between and len(self.requests) == count + 1:
            self._note(data, self.requests[-1])

    def refuse(self, error: RequestError) -> None:
        """The request that is being received, or what came where one should have begun."""
        self.is_deaf, self.is_receiving = True, False
        refused = self._current
        if refused is None:
            refused = Incoming(None, b"", b"", [], True, False)
            self.requests.append(refused)
        refused.refusal, refused.keep_alive = error, False
        self.let_go(refused)

    def let_go(self, request: Incoming) -> None:
        """Its body is held no more."""
        request.pieces.clear()
        self._bounds.held.size -= request.size
        request.size = 0

    def close(self) -> None:
        """Nobody will be answered any more."""
        self.is_deaf = True
        while self.requests:
            self.let_go(self.requests.popleft())

    # httptools.

    def on_message_begin(self) -> None:
        if self.is_deaf:
            raise MalformedRequestError("nothing more is listened to")
        self._target, self._headers, self._current = b"", [], None
        self.is_receiving = True

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        headers, target, limit = self._headers, self._target, self._bounds.limits.max_header_size
        if self._overhead > limit and _size(headers) + len(target) > limit:
            raise self._head_too_large()
        parser = self._parser
        if parser.should_upgrade():
            return
        http_1_1 = parser.get_http_version() == "1.1"
        names = [name for name, _ in headers]
        hosts = names.count(b"host")
        if hosts != 1 and (hosts or http_1_1):
            raise MalformedRequestError("a request has exactly one Host (RFC 9112, 3.2)")
        if CODING in names and _codings(headers) != b"chunked":
            raise UnknownCodingError("of all transfer codings only chunked is known here")
        method, endpoint = parser.get_method(), None
        if method == b"POST":
            endpoint = HOT.get(target) or hot_endpoint(target)
        keep_alive = http_1_1 and parser.should_keep_alive()
        self._current = Incoming(endpoint, method, target, headers, http_1_1, keep_alive)
        self.requests.append(self._current)

    def on_body(self, piece: bytes) -> None:
        self._overhead = 0
        current, held = self._current, self._bounds.held
        if current is None or self.is_deaf:
            return
        size = current.size + len(piece)
        if size > self._bounds.limits.max_body_size:
            self.refuse(self._body_too_large())
        elif not held.has_room(len(piece)):
            self.refuse(too_many_held_bodies())
        else:
            current.size = size
            held.size += len(piece)
            current.pieces.append(piece)

    def on_message_complete(self) -> None:
        current = self._current
        if current is None or self.is_deaf:  # a request to upgrade, or refused
            return
        self._overhead = 0
        self._current = None
        self.is_receiving = False
        current.is_complete = True
        if current.endpoint is not None:
            current.headers = without_length(current.headers)
        if not current.keep_alive:
            self.is_deaf = True  # it said itself that it is the last one

    def _takes(self, line: tuple[str, bytes], headers: Sequence[Header], body: bytes) -> bool:
        """A request with the head of the one before, if there is room for it."""
        endpoint, target = line
        size, held = len(body), self._bounds.held
        if size > self._bounds.limits.max_body_size or not held.has_room(size):
            return False
        held.size += size
        self.requests.append(
            Incoming(endpoint, b"POST", target, headers, True, True, [body], size, True)
        )
        return True

    def _note(self, data: bytes, only: Incoming) -> None:
        """More may follow it, or we were deaf by now: so it is of version 1.1, too."""
        if only.endpoint is not None:
            self._head_cache.store(data, (only.endpoint, only.target), only.headers, only.size)

    def _parse(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._parse_without_upgrade(data[upgrade.args[0] :])

    def _parse_without_upgrade(self, rest: bytes) -> None:
        """Serves a request to upgrade as the plain request that it also is (RFC 9110, 7.8).

        The parser takes everything behind its head for the other protocol and drops the body, so
        the head is parsed again, without what asks for the upgrade.
        """
        method = self._parser.get_method()
        if method == b"CONNECT":
            raise httptools.HttpParserError("CONNECT is not for a router")
        kept = [header for header in self._headers if header[0] not in UPGRADE_HEADERS]
        version = self._parser.get_http_version().encode("ascii")
        lines = b"".join([b"%s: %s\r\n" % header for header in kept])
        head = b"%s %s HTTP/%s\r\n%s\r\n" % (method, self._target, version, lines)
        self._parser = httptools.HttpRequestParser(self)
        self._parse(head + rest)

    def _look_at_unfinished(self) -> None:
        """A request does not come in one piece: is it going to be too much?"""
        if self._overhead > self._bounds.limits.max_header_size:
            self.refuse(self._head_too_large())
            return
        current = self._current
        if current is None or current.is_weighed:
            return
        current.is_weighed = True
        refusal = self._bounds.refusal_of(current.headers, current.endpoint)
        if refusal is not None:
            self.refuse(refusal)
            return
        size = int(current.header(b"content-length") or b"0")
        if size > self._bounds.limits.max_body_size:
            self.refuse(self._body_too_large())
        elif not self._bounds.held.has_room(size - current.size):
            self.refuse(too_many_held_bodies())

    def _head_too_large(self) -> HeadTooLargeError:
        limit = self._bounds.limits.max_header_size
        return HeadTooLargeError(f"the head is larger than {limit:d} bytes")

    def _body_too_large(self) -> BodyTooLargeError:
        limit = self._bounds.limits.max_body_size
        return BodyTooLargeError(f"the body is larger than {limit:d} bytes")


def _reason(error: httptools.HttpParserError) -> RequestError:
    inner = error.__context__
    if isinstance(inner, RequestError):
        return inner
    return MalformedRequestError(f"not a valid HTTP/1.1 request: {error}")


def _codings(headers: list[Header]) -> bytes:
    return b", ".join([value for name, value in headers if name == CODING]).strip().lower()


def _size(headers: list[Header]) -> int:
    return sum(len(name) + len(value) + 4 for name, value in headers)
