"""Parse what a client sends into requests: strictly, within limits, and without any I/O.

Requests enter `requests` in the order of their arrival, once their head is complete. The connection
takes them from there to answer them. A request that cannot be served carries its `refusal`. Such a
request is always the last one: where the next request would start is unknown (RFC 9112, 9.3 and
11.2), so the reader discards everything after it, and its answer closes the connection.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from urllib.parse import unquote_to_bytes

import httptools
from msgspec import Struct

from router.auth.api_keys import ApiKey
from router.http_client.head_cache import HeadCache
from router.openai.errors import (
    BodyTooLargeError,
    HeadTooLargeError,
    MalformedRequestError,
    RequestError,
    UnauthorizedError,
    UnknownCodingError,
    UpgradeRequiredError,
    too_many_held_bodies,
)
from router.proxy.exchange import Header
from router.proxy.gateway import Gateway
from router.server.content_coding import CONTENT_ENCODING, coding_of
from router.server.proxied_endpoints import PROXIED_PATHS

UPGRADE_HEADERS = (b"upgrade", b"http2-settings")
# Every WebSocket handshake has it (RFC 6455, 4.1).
WEBSOCKET_KEY = b"sec-websocket-key"
TRANSFER_ENCODING = b"transfer-encoding"


class IncomingRequest(Struct, eq=False):
    """One request of a client.

    `endpoint` is the path of a proxied endpoint, or None for a request to the application. `size`
    counts the bytes of the body that are held. `caller` is the result of `Gateway.identify`, None
    until that was called.
    """

    endpoint: str | None
    method: bytes
    target: bytes
    headers: Sequence[Header]
    http_1_1: bool
    keep_alive: bool
    body: bytes = b""
    size: int = 0
    is_complete: bool = False
    is_checked_early: bool = False
    """True once the key and the announced size were checked, before the body has arrived."""
    refusal: RequestError | None = None
    caller: ApiKey | str | None = None
    pieces: list[bytes] = []
    """The body while it is incomplete."""
    has_coding: bool = False
    """True for a proxied endpoint if there is a Content-Encoding: the body may be compressed."""

    @property
    def expects_continue(self) -> bool:
        """True if the client may wait for 100 Continue before it sends the body."""
        return self.http_1_1 and (self.header(b"expect") or b"").lower() == b"100-continue"

    def header(self, wanted: bytes) -> bytes | None:
        return next((value for name, value in self.headers if name == wanted), None)


class RequestReader:
    """The requests of one connection.

    `is_receiving` is True between the first and the last byte of a request. `is_closed` is True
    once the reader ignores further input.
    """

    __slots__ = ("_current", "_gateway", "_head_cache", "_headers", "_overhead", "_parser",
                 "_target", "_trailer_size", "is_closed", "is_receiving", "requests")  # fmt: skip

    def __init__(self, gateway: Gateway) -> None:
        self.requests: deque[IncomingRequest] = deque()
        self.is_receiving = False
        self.is_closed = False
        self._gateway = gateway
        self._parser = httptools.HttpRequestParser(self)
        self._current: IncomingRequest | None = None
        self._target = b""
        self._headers: list[Header] = []
        # The head of the last proxied request, with its endpoint and target.
        self._head_cache: HeadCache[tuple[str, bytes]] | None = None
        # Bytes since the last piece of body: heads and trailers, which the parser does not limit.
        self._overhead = 0
        self._trailer_size = 0

    @property
    def next_is_invalid(self) -> bool:
        """True if the next thing to answer is not an HTTP request.

        The connection answers such input only if nothing else is unanswered: a client that has sent
        one request takes the next answer for the answer to its second request.
        """
        return bool(self.requests) and not self.requests[0].method

    @property
    def next_is_complete(self) -> bool:
        return bool(self.requests) and self.requests[0].is_complete

    def feed(self, data: bytes) -> None:
        is_between, count = not self.is_receiving, len(self.requests)
        if is_between and self._head_cache is not None:
            again = self._head_cache.match(data)
            if again is not None and self._accept_repeated(*again):
                return
        self._overhead += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            if not self.is_closed:
                inner = error.__context__  # what a callback has raised
                if not isinstance(inner, RequestError):
                    inner = MalformedRequestError(f"not a valid HTTP/1.1 request: {error}")
                self.refuse(inner)
        if self.is_closed:
            return
        if self.is_receiving:
            self._check_unfinished()
        elif is_between and len(self.requests) == count + 1:
            only = self.requests[-1]
            # Another request may follow on this connection, so this one is of version 1.1.
            if only.endpoint is not None and not only.has_coding:
                if self._head_cache is None:
                    self._head_cache = HeadCache(("", b""))
                self._head_cache.store(data, (only.endpoint, only.target), only.headers, only.size)

    def refuse(self, error: RequestError) -> None:
        """Refuse the request that is being received, or the input where one should have begun."""
        self.is_closed, self.is_receiving = True, False
        refused = self._current
        if refused is None:
            refused = IncomingRequest(None, b"", b"", [], True, False)
            self.requests.append(refused)
        refused.refusal, refused.keep_alive = error, False
        self.release_body(refused)

    def release_body(self, request: IncomingRequest) -> None:
        request.pieces, request.body = [], b""
        self._gateway.memory.bodies.size -= request.size
        request.size = 0

    def close(self) -> None:
        """Drop all requests, after the connection was lost."""
        self.is_closed = True
        while self.requests:
            self.release_body(self.requests.popleft())

    # Callbacks of httptools.

    def on_message_begin(self) -> None:
        if self.is_closed:
            raise MalformedRequestError("the connection reads no further requests")
        self._target, self._headers, self._current = b"", [], None
        self._trailer_size = 0
        self.is_receiving = True

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        current = self._current
        if current is None:
            self._headers.append((name.lower(), value))
        elif not self.is_closed:
            # A trailer. It must not become a header (RFC 9110, 6.5.1), so it is only counted.
            self._trailer_size += len(name) + len(value) + 4
            if self._trailer_size > self._gateway.limits.max_header_size:
                self.refuse(self._head_too_large())

    def on_headers_complete(self) -> None:
        headers, target, limit = self._headers, self._target, self._gateway.limits.max_header_size
        if self._overhead > limit:  # the bytes may include a body
            size = sum(len(name) + len(value) + 4 for name, value in headers)
            if size + len(target) > limit:
                raise self._head_too_large()
        parser = self._parser
        if parser.should_upgrade():
            return
        http_1_1 = parser.get_http_version() == "1.1"
        names = [name for name, _ in headers]
        hosts = names.count(b"host")
        if hosts != 1 and (hosts or http_1_1):
            raise MalformedRequestError("a request has exactly one Host (RFC 9112, 3.2)")
        if TRANSFER_ENCODING in names:
            codings = [
                value.strip().lower() for name, value in headers if name == TRANSFER_ENCODING
            ]
            if codings != [b"chunked"]:
                raise UnknownCodingError("the only supported transfer coding is chunked")
        method, endpoint = parser.get_method(), None
        if method == b"POST":
            endpoint = PROXIED_PATHS.get(target) or _proxied_endpoint(target)
        keep_alive = http_1_1 and parser.should_keep_alive()
        self._current = IncomingRequest(endpoint, method, target, headers, http_1_1, keep_alive)
        self._current.has_coding = endpoint is not None and CONTENT_ENCODING in names
        self.requests.append(self._current)
        if method == b"GET" and WEBSOCKET_KEY in names:
            self.refuse(UpgradeRequiredError())

    def on_body(self, piece: bytes) -> None:
        self._overhead = 0
        current = self._current
        if current is None or self.is_closed:
            return
        size, more = current.size + len(piece), len(piece)
        error = self._size_error(size, more)
        if error is not None:
            self.refuse(error)
            return
        current.size = size
        self._gateway.memory.bodies.size += more
        current.pieces.append(piece)

    def on_message_complete(self) -> None:
        current = self._current
        if current is None or self.is_closed:  # a request to upgrade, or refused
            return
        self._overhead = 0
        self._current = None
        self.is_receiving = False
        current.is_complete = True
        pieces, current.pieces = current.pieces, []
        current.body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if current.endpoint is not None:
            current.headers = [one for one in current.headers if one[0] != b"content-length"]
        if not current.keep_alive:
            self.is_closed = True  # the client has announced that this request is its last

    def _accept_repeated(
        self, line: tuple[str, bytes], headers: Sequence[Header], body: bytes
    ) -> bool:
        """Accept a request with the same head as the one before, if its body fits the limits."""
        endpoint, target = line
        size = len(body)
        if self._size_error(size, size) is not None:
            return False
        self._gateway.memory.bodies.size += size
        self.requests.append(
            IncomingRequest(endpoint, b"POST", target, headers, True, True, body, size, True)
        )
        return True

    def _parse(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._parse_without_upgrade(data[upgrade.args[0] :])

    def _parse_without_upgrade(self, rest: bytes) -> None:
        """Serve a request to upgrade as the plain request that it also is (RFC 9110, 7.8).

        The parser takes everything behind its head for the other protocol and drops the body, so
        the head is parsed again without the headers that ask for the upgrade.
        """
        method = self._parser.get_method()
        if method == b"CONNECT":
            raise httptools.HttpParserError("CONNECT is not supported")
        kept = [header for header in self._headers if header[0] not in UPGRADE_HEADERS]
        version = self._parser.get_http_version().encode("ascii")
        lines = b"".join([b"%s: %s\r\n" % header for header in kept])
        head = b"%s %s HTTP/%s\r\n%s\r\n" % (method, self._target, version, lines)
        self._parser = httptools.HttpRequestParser(self)
        self._parse(head + rest)

    def _check_unfinished(self) -> None:
        """Refuse a request early, before its body has arrived, if its head allows that."""
        gateway = self._gateway
        if self._overhead > gateway.limits.max_header_size:
            self.refuse(self._head_too_large())
            return
        current = self._current
        if current is None or current.is_checked_early:
            return
        current.is_checked_early = True
        current.caller = gateway.identify(current.headers)
        size = int(current.header(b"content-length") or b"0")
        if isinstance(current.caller, str):
            self.refuse(UnauthorizedError(current.caller))
        elif current.has_coding and (unknown := _coding_error(current.headers)) is not None:
            self.refuse(unknown)
        elif (error := self._size_error(size, size - current.size)) is not None:
            self.refuse(error)

    def _head_too_large(self) -> HeadTooLargeError:
        limit = self._gateway.limits.max_header_size
        return HeadTooLargeError(f"the head is larger than {limit:d} bytes")

    def _size_error(self, size: int, more: int) -> RequestError | None:
        """Return why a body of `size` bytes is refused, of which `more` are not held yet."""
        limit, held = self._gateway.limits.max_body_size, self._gateway.memory.bodies
        if size > limit:
            return BodyTooLargeError(f"the body is larger than {limit:d} bytes")
        if held.limit and held.size + more > held.limit:
            return too_many_held_bodies()
        return None


def _coding_error(headers: Sequence[Header]) -> RequestError | None:
    try:
        coding_of(headers)
    except RequestError as error:
        return error
    return None


def _proxied_endpoint(target: bytes) -> str | None:
    """Return the endpoint of a target with a query, in percent-encoding, or in absolute form
    (RFC 9112, 3.2.2)."""
    try:
        path = httptools.parse_url(target).path
    except httptools.HttpParserInvalidURLError:
        return None
    return None if path is None else PROXIED_PATHS.get(unquote_to_bytes(path))
