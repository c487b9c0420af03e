"""HTTP/1.1 heads as bytes."""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus

from router.proxy.exchange import Header

_PHRASES = {status.value: status.phrase for status in HTTPStatus}
_STATUS_LINES = {
    status: f"HTTP/1.1 {status} {_PHRASES.get(status, '')}\r\n".encode("ascii")
    for status in range(200, 600)
}
CHUNKED = b"transfer-encoding: chunked\r\n"
CLOSE = b"connection: close\r\n"
CHUNK = b"%x\r\n%b\r\n"
LAST_CHUNK = b"0\r\n\r\n"


def head(status: int, headers: Iterable[Header], *extra: bytes) -> bytes:
    """A response head; `extra` are whole header lines."""
    pieces = [_STATUS_LINES[status]]
    for name, value in headers:
        pieces += (name, b": ", value, b"\r\n")
    pieces += extra
    pieces.append(b"\r\n")
    return b"".join(pieces)


def length(size: int) -> bytes:
    return b"content-length: %d\r\n" % size


def chunk(block: bytes, last: bool) -> list[bytes]:
    """The block as one chunk; an empty one would end the body, so it is left out."""
    pieces = [b"%x\r\n" % len(block), block, b"\r\n"] if block else []
    if last:
        pieces.append(LAST_CHUNK)
    return pieces
