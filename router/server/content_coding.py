"""Decompress the bodies of requests (Content-Encoding; RFC 9110, 8.4), in pieces, within a limit.

A compressed body may be a bomb: a kilobyte for a megabyte. So no more is decompressed than a body
may have, and other requests run between two pieces.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

from router.openai.errors import BadRequestError, BodyTooLargeError, UnsupportedEncodingError
from router.proxy.exchange import Header

CONTENT_ENCODING = b"content-encoding"
# By the name of a coding, the window bits with which zlib reads it. A "deflate" body has the header
# of zlib (RFC 9110, 8.4.1.2), but many clients leave it out.
GZIP, ZLIB, RAW_DEFLATE = 31, 15, -15
CODINGS = {b"gzip": GZIP, b"x-gzip": GZIP, b"deflate": ZLIB}
# Bytes that zlib reads and writes in one step: a step takes about a millisecond.
MAX_INPUT_BYTES, MAX_PIECE_BYTES = 64 * 1024, 256 * 1024
# A gzip body may have several members (RFC 1952, 2.2). Each costs a new decompressor.
MAX_MEMBERS = 16


def coding_of(headers: Sequence[Header]) -> int | None:
    """Return the window bits for zlib, or None for a body that is not compressed. Raises
    UnsupportedEncodingError."""
    values = [value.strip().lower() for name, value in headers if name == CONTENT_ENCODING]
    given = [value for value in values if value not in (b"", b"identity")]
    if not given:
        return None
    if len(given) > 1 or given[0] not in CODINGS:
        raise UnsupportedEncodingError(b", ".join(given)[:100].decode("ascii", "replace"))
    return CODINGS[given[0]]


def decompress(body: bytes, coding: int, limit: int) -> Iterator[bytes]:
    """Yield the decompressed body in pieces, which may be empty. `coding` is that of `coding_of`.

    Raises BadRequestError for a broken body, and BodyTooLargeError for one of more than `limit`
    bytes.
    """
    if coding == ZLIB and not _has_zlib_header(body):
        coding = RAW_DEFLATE
    unread, rest, size, num_members = b"", memoryview(body), 0, 1
    decoder = zlib.decompressobj(coding)
    while True:
        if not unread:
            unread, rest = bytes(rest[:MAX_INPUT_BYTES]), rest[MAX_INPUT_BYTES:]
        try:
            piece = decoder.decompress(unread, min(MAX_PIECE_BYTES, limit + 1 - size))
        except zlib.error as error:
            raise BadRequestError(f"the compressed body is broken: {error}") from error
        size += len(piece)
        if size > limit:
            raise BodyTooLargeError(f"the body is larger than {limit:d} bytes without compression")
        yield piece
        if decoder.eof:
            unread = decoder.unused_data
            if not unread and not rest:
                return
            if coding != GZIP or num_members == MAX_MEMBERS:
                raise BadRequestError("the compressed body is broken: more bytes follow its end")
            decoder, num_members = zlib.decompressobj(coding), num_members + 1
        else:
            unread = decoder.unconsumed_tail
            # zlib may have more to write even if it has read everything.
            if not unread and not rest and not piece:
                raise BadRequestError("the compressed body is broken: it ends too early")


def _has_zlib_header(body: bytes) -> bool:
    """Return True for the header of RFC 1950, 2.2: compression method 8, and a check of both
    bytes."""
    return body[:1] != b"" and body[0] & 15 == 8 and int.from_bytes(body[:2], "big") % 31 == 0
