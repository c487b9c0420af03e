"""Which headers travel, and in which direction.

A client's headers reach both engines, except those that belong to one connection or describe the
body (which is written anew), and X-Request-Id (which is decided here). X-data-parallel-rank is
passed to both legs untouched: the router does not know the engines' ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
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
LEG_HEAD = (
    b"POST %s HTTP/1.1\r\nhost: %s\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\nx-request-id: %s\r\n%s\r\n"
)
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


def request_id_of(headers: Iterable[Header]) -> str:
    """The client's X-Request-Id when it is harmless, else a new one."""
    for name, value in headers:
        if name == REQUEST_ID and SANE_REQUEST_ID.fullmatch(value):
            return value.decode("ascii")
    return f"{getrandbits(128):032x}"


def to_engine(headers: Sequence[Header]) -> bytes:
    """The header lines that both legs share."""
    dropped = _dropped(headers, NOT_TO_ENGINE)
    lines = [b"%s: %s\r\n" % header for header in headers if header[0] not in dropped]
    block = b"".join(lines)
    if block.count(b"\n") != len(lines) or block.count(b"\r") != len(lines) or b"\0" in block:
        return b"".join(line for line in lines if _is_one_line(line))
    return block


def to_client(headers: Sequence[Header], request_id: str) -> list[Header]:
    dropped = _dropped(headers, NOT_TO_CLIENT)
    kept = [header for header in headers if header[0] not in dropped]
    kept.append((REQUEST_ID, request_id.encode("ascii")))
    return kept


def leg_head(path: str, host: str, shared: bytes, request_id: str, length: int) -> bytes:
    return LEG_HEAD % (path.encode(), host.encode(), length, request_id.encode(), shared)


def _dropped(headers: Sequence[Header], always: frozenset[bytes]) -> frozenset[bytes]:
    """Also those that a Connection header nominates."""
    for name, value in headers:
        if name == b"connection" and value.lower() not in PLAIN_CONNECTION:
            return always | _nominated(headers)
    return always


def _nominated(headers: Sequence[Header]) -> frozenset[bytes]:
    values = [value for name, value in headers if name == b"connection"]
    return frozenset(token.strip() for token in b",".join(values).lower().split(b","))


def _is_one_line(line: bytes) -> bool:
    inside = line[:-2]
    return not any(mark in inside for mark in (b"\r", b"\n", b"\0"))
