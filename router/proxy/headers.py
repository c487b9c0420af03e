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
HEADER_NAME = itemgetter(0)
NOT_TO_ENGINE = HOP_BY_HOP | {
    REQUEST_ID,
    CONVERSATION_ID,
    CONVERSATION_STREAM,
    b"connection",
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

    The id is the client's first valid X-Request-Id, or else a new one.
    """
    request_id, names_headers = "", False
    lines: list[bytes] = []
    for header in headers:
        name = header[0]
        if name not in NOT_TO_ENGINE:
            lines.append(b": ".join(header))
        elif name == REQUEST_ID:
            if not request_id and VALID_REQUEST_ID.fullmatch(header[1]):
                request_id = header[1].decode("ascii")
        elif name == b"connection" and header[1] != b"keep-alive":
            names_headers = True  # the value may list headers of this connection
    if names_headers:
        kept = _without_connection_headers(headers)
        lines = [b": ".join(header) for header in kept if header[0] not in NOT_TO_ENGINE]
    lines.append(b"")
    return request_id or getrandbits(128).to_bytes(16, "big").hex(), b"\r\n".join(lines)


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
