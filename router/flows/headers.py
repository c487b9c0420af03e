"""Which headers travel, and in which direction.

A client's headers reach both engines, except those that belong to one connection or describe the
body (which is written anew), and X-Request-Id (which is decided here). X-data-parallel-rank is
passed to both legs untouched: the router does not know the engines' ranks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from random import getrandbits

from router.flows.exchange import Header

REQUEST_ID = b"x-request-id"
SANE_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:~@+=/-]{1,128}")
HOP_BY_HOP = frozenset(
    (
        b"connection",
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
PLAIN_CONNECTION = (b"keep-alive", b"close")
CONVERSATION_ID = b"x-conversation-id"
CONVERSATION_STREAM = b"x-conversation-stream"
NOT_TO_ENGINE = HOP_BY_HOP | {
    REQUEST_ID,
    CONVERSATION_ID,
    CONVERSATION_STREAM,
    b"accept-encoding",  # answers are read and spliced: never compressed
    b"content-encoding",
    b"content-length",
    b"content-type",
    b"expect",
    b"host",
}
NOT_TO_CLIENT = HOP_BY_HOP | {REQUEST_ID, b"content-length", b"date", b"server"}


def read(headers: Sequence[Header]) -> tuple[str, bytes]:
    """The request's id, the client's own where that is harmless, and the lines both legs share."""
    request_id = ""
    lines: list[bytes] = []
    for header in headers:
        name, value = header
        if name not in NOT_TO_ENGINE:
            lines.append(b"%s: %s\r\n" % header)
        elif name == REQUEST_ID:
            if not request_id and SANE_REQUEST_ID.fullmatch(value):
                request_id = value.decode("ascii")
        elif name == b"connection" and value.lower() not in PLAIN_CONNECTION:
            dropped = _nominated(headers) | {b"connection"}
            return read([header for header in headers if header[0] not in dropped])
    return request_id or f"{getrandbits(128):032x}", _block(lines)


def _block(lines: list[bytes]) -> bytes:
    block = b"".join(lines)
    count = block.count  # "in" would first take its bytes for a number, at ten times the price
    if count(b"\n") != len(lines) or count(b"\r") != len(lines) or count(b"\0"):
        return b"".join([line for line in lines if _is_one_line(line)])
    return block


def to_client(headers: Sequence[Header], request_id: str) -> list[Header]:
    for name, value in headers:
        if name == b"connection" and value.lower() not in PLAIN_CONNECTION:
            dropped = NOT_TO_CLIENT | _nominated(headers)
            break
    else:
        dropped = NOT_TO_CLIENT
    kept = [header for header in headers if header[0] not in dropped]
    kept.append((REQUEST_ID, request_id.encode("ascii")))
    return kept


def message(path: str, host: str, request_id: str, shared: bytes, content: bytes) -> bytes:
    """A whole request to an engine."""
    head = (_opening(path, host), b"%d\r\nx-request-id: " % len(content))
    return b"".join((*head, request_id.encode("ascii"), b"\r\n", shared, b"\r\n", content))


@lru_cache(maxsize=1024)
def _opening(path: str, host: str) -> bytes:
    lines = (
        f"POST {path} HTTP/1.1",
        f"host: {host}",
        "content-type: application/json",
        "content-length: ",
    )
    return "\r\n".join(lines).encode("ascii")


def _nominated(headers: Sequence[Header]) -> frozenset[bytes]:
    values = [value for name, value in headers if name == b"connection"]
    return frozenset(token.strip() for token in b",".join(values).lower().split(b","))


def _is_one_line(line: bytes) -> bool:
    inside = line[:-2]
    return not any(mark in inside for mark in (b"\r", b"\n", b"\0"))
