"""Which headers travel, and in which direction.

A client's headers reach both engines, except those that belong to one connection or describe the
body (which is written anew), and X-Request-Id (which is decided here). X-data-parallel-rank is
passed to both legs untouched: the router does not know the engines' ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
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


def to_engine(headers: Iterable[Header]) -> bytes:
    """The header lines that both legs share."""
    lines = [b"%s: %s\r\n" % header for header in _travelling(headers, NOT_TO_ENGINE)]
    block = b"".join(lines)
    if block.count(b"\n") != len(lines) or block.count(b"\r") != len(lines) or b"\0" in block:
        return b"".join(line for line in lines if _is_one_line(line))
    return block


def to_client(headers: Iterable[Header], request_id: str) -> list[Header]:
    kept = _travelling(headers, NOT_TO_CLIENT)
    kept.append((REQUEST_ID, request_id.encode("ascii")))
    return kept


def leg_head(path: str, host: str, shared: bytes, request_id: str, length: int) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        f"content-length: {length}\r\nx-request-id: {request_id}\r\n"
    ).encode("ascii") + b"%s\r\n" % shared


def _travelling(headers: Iterable[Header], dropped: frozenset[bytes]) -> list[Header]:
    headers = list(headers)
    nominated = [value for name, value in headers if name == b"connection"]
    if nominated:
        tokens = b",".join(nominated).lower().split(b",")
        dropped = dropped | {token.strip() for token in tokens}
    return [header for header in headers if header[0] not in dropped]


def _is_one_line(line: bytes) -> bool:
    inside = line[:-2]
    return not any(mark in inside for mark in (b"\r", b"\n", b"\0"))
