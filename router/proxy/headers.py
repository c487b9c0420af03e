"""The headers that the router passes from the client to engines, and from engines to the client.

Both engines get the client's headers, except those of one connection, those that describe the body
(the router writes a new one), and X-Request-Id (each leg has its own). X-data-parallel-rank passes
unchanged; if the client sends none, `push` or the retained KV of the last turn may choose a rank.

X-Forwarded-*, Forwarded, traceparent and tracestate pass unchanged as well. The router adds nothing
to them and does not rely on them. With tracing (router.telemetry.trace_export) each leg gets a
traceparent of its own, below the client's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from operator import itemgetter
from random import getrandbits

from router.auth.credentials import CREDENTIALS
from router.proxy.exchange import Header

REQUEST_ID = b"x-request-id"
VALID_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:~@+=/-]{1,128}")
# Hop-by-hop headers. The Connection header may name further ones.
HOP_BY_HOP = frozenset(
    (
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"http2-settings",
    )
)
CONVERSATION_ID = b"x-conversation-id"
CONVERSATION_STREAM = b"x-conversation-stream"
DIGITS = re.compile(rb"[0-9]{1,9}")
MAX_RETRY_AFTER_S = 3600
# Size of the cache of client heads, and the headers of a head up to which it is cached.
MAX_CACHED_HEADS, MAX_CACHED_HEADERS = 256, 64
HEADER_NAME = itemgetter(0)
# A head without these needs no further look.
SPECIAL_HEADERS = frozenset((REQUEST_ID, b"connection"))
NOT_TO_ENGINE = HOP_BY_HOP | {
    REQUEST_ID,
    CONVERSATION_ID,
    CONVERSATION_STREAM,
    b"accept-encoding",  # the router reads answers, so engines must not compress them
    b"content-encoding",
    b"content-length",
    b"content-type",
    b"expect",
    b"host",
}
# Credentials are among them because an engine may echo the headers that it got.
NOT_TO_CLIENT = (
    HOP_BY_HOP
    | CREDENTIALS
    | {
        REQUEST_ID,
        b"content-length",
        b"date",
        b"server",
        # The router has its own CORS setting, while engines allow all origins.
        b"access-control-allow-origin",
        b"access-control-allow-credentials",
        b"access-control-expose-headers",
    }
)


def read_client_headers(headers: Sequence[Header]) -> tuple[str, bytes]:
    """Return the request's id and the header lines that both legs share.

    The id is the client's X-Request-Id if that is valid, else a new one.
    """
    find = _read_cached if len(headers) <= MAX_CACHED_HEADERS else _read
    request_id, lines = find(tuple(headers))
    return request_id or getrandbits(128).to_bytes(16, "big").hex(), lines


def _read(headers: tuple[Header, ...]) -> tuple[str, bytes]:
    request_id: str = ""
    kept: Sequence[Header] = headers
    if not SPECIAL_HEADERS.isdisjoint(map(HEADER_NAME, headers)):
        given = (value for name, value in headers if name == REQUEST_ID)
        valid = (value.decode("ascii") for value in given if VALID_REQUEST_ID.fullmatch(value))
        request_id, kept = next(valid, ""), _without_connection_headers(headers)
    lines = [b": ".join(header) for header in kept if header[0] not in NOT_TO_ENGINE]
    lines.append(b"")
    return request_id, b"\r\n".join(lines)


# Most clients send the same headers with each request.
_read_cached = lru_cache(maxsize=MAX_CACHED_HEADS)(_read)


def to_client(headers: Sequence[Header], request_id: str) -> list[Header]:
    """Return the headers of an engine's answer for the client."""
    kept = [header for header in headers if header[0] not in NOT_TO_CLIENT]
    if b"connection" in map(HEADER_NAME, kept):
        kept = [*_without_connection_headers(kept)]
    kept.append((REQUEST_ID, request_id.encode("ascii")))
    return kept


def retry_after(headers: Sequence[Header]) -> int | None:
    """Return the seconds of an answer's Retry-After, 1 for a date or an invalid value, or None if
    the answer has no Retry-After."""
    given = next((value for name, value in headers if name == b"retry-after"), None)
    if given is None:
        return None
    return min(int(given), MAX_RETRY_AFTER_S) if DIGITS.fullmatch(given) else 1


def _without_connection_headers(headers: Sequence[Header]) -> Sequence[Header]:
    """Return the headers without Connection and those that Connection names."""
    values = [value for name, value in headers if name == b"connection"]
    dropped = {token.strip() for token in b",".join(values).lower().split(b",")}
    dropped.add(b"connection")
    return [header for header in headers if header[0] not in dropped]


def leg_message(
    path: str,
    host: str,
    request_id: str,
    shared: bytes,
    content: tuple[bytes | memoryview, bytes],
    form: bytes = b"",
) -> bytes:
    """Return a complete HTTP request for an engine.

    `shared` are the header lines of `read_client_headers`, `content` the halves of the body. `form`
    is the Content-Type of a body that is not JSON.
    """
    kind = "" if form else "content-type: application/json\r\n"
    if form:
        shared = b"content-type: %b\r\n%b" % (form, shared)
    start, end = content
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {host}\r\n{kind}"
        f"content-length: {len(start) + len(end)}\r\nx-request-id: {request_id}\r\n"
    )
    return b"".join((head.encode("ascii"), shared, b"\r\n", start, end))
