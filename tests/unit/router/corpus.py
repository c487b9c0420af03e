"""Requests that servers in a row have read differently, so that one could be hidden in another.

Each value is what a client sends on one connection; HIDDEN must reach no engine.
"""

PATH = b"/v1/completions"
SHOWN = b'{"prompt":"shown"}'
HIDDEN = b'{"prompt":"hidden"}'
INNER = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (PATH, len(HIDDEN), HIDDEN)
CHUNKED = b"%x\r\n%s\r\n0\r\n\r\n" % (len(SHOWN), SHOWN)


def _post(headers: bytes, body: bytes, line: bytes = b"POST %s HTTP/1.1" % PATH) -> bytes:
    return line + b"\r\nhost: x\r\n" + headers + b"\r\n" + body


LENGTH = b"content-length: %d\r\n" % len(SHOWN)
ZERO = b"content-length: 0\r\n"

SMUGGLED = {
    "length, then chunked": _post(ZERO + b"transfer-encoding: chunked\r\n", b"0\r\n\r\n" + INNER),
    "chunked, then length": _post(
        b"transfer-encoding: chunked\r\n" + b"content-length: %d\r\n" % (5 + len(INNER)),
        b"0\r\n\r\n" + INNER,
    ),
    "two lengths": _post(ZERO + b"content-length: %d\r\n" % len(INNER), INNER),
    "a list of lengths": _post(b"content-length: 0, %d\r\n" % len(INNER), INNER),
    "a signed length": _post(b"content-length: +%d\r\n" % len(INNER), INNER),
    "a hexadecimal length": _post(b"content-length: 0x%x\r\n" % len(INNER), INNER),
    "a length with an underscore": _post(b"content-length: 1_0\r\n", INNER),
    "chunked in disguise": _post(LENGTH + b"transfer-encoding: xchunked\r\n", CHUNKED + INNER),
    "chunked twice": _post(b"transfer-encoding: chunked, chunked\r\n", CHUNKED + INNER),
    "chunked but not last": _post(b"transfer-encoding: chunked, identity\r\n", CHUNKED + INNER),
    "chunked with a tab": _post(ZERO + b"transfer-encoding:\tchunked\r\n", b"0\r\n\r\n" + INNER),
    "a space before the colon": _post(
        b"content-length : %d\r\n" % len(INNER) + b"transfer-encoding : chunked\r\n", INNER
    ),
    "a folded encoding": _post(ZERO + b"transfer-encoding:\r\n chunked\r\n", b"0\r\n\r\n" + INNER),
    "a bare line feed": _post(b"x: y\ncontent-length: %d\r\n" % len(INNER), INNER),
    "a bare carriage return": _post(b"x: y\rcontent-length: %d\r\n" % len(INNER), INNER),
    "a null in a name": _post(b"content-length\0: %d\r\n" % len(INNER), INNER),
    "a chunk that is too long": _post(
        b"transfer-encoding: chunked\r\n", b"1\r\n" + SHOWN + b"\r\n0\r\n\r\n" + INNER
    ),
    "a chunk size that overflows": _post(
        b"transfer-encoding: chunked\r\n", b"1000000000000000f\r\n" + INNER
    ),
    "a chunk extension with a line feed": _post(
        b"transfer-encoding: chunked\r\n", b"1;a\nb\r\n{\r\n0\r\n\r\n" + INNER
    ),
    "a chunk that ends in a line feed": _post(
        b"transfer-encoding: chunked\r\n", b"2\r\n{}\n0\r\n\r\n" + INNER
    ),
    "an old version with chunks": _post(
        b"transfer-encoding: chunked\r\n", CHUNKED + INNER, b"POST %s HTTP/1.0" % PATH
    ),
    "no version": b"POST %s\r\n" % PATH + INNER,
    "a path with a line in it": _post(LENGTH, SHOWN, b"POST /v1/\x0bcompletions HTTP/1.1"),
    "the rest of the first after an error": _post(LENGTH, b"{" * len(SHOWN)) + b"\0\r\n" + INNER,
}
"""Refused, or the connection closed, before the inner request is one."""

PLAIN = {
    "by length": _post(LENGTH, SHOWN),
    "chunked": _post(b"transfer-encoding: chunked\r\n", CHUNKED),
    "chunks with extensions and trailers": _post(
        b"transfer-encoding: chunked\r\n",
        b"%x;a=b\r\n%s\r\n0\r\nx: y\r\n\r\n" % (len(SHOWN), SHOWN),
    ),
    "the whole address": _post(LENGTH, SHOWN, b"POST http://x%s HTTP/1.1" % PATH),
    "empty lines first": b"\r\n\r\n" + _post(LENGTH, SHOWN),
    "two in a row": _post(LENGTH, SHOWN) * 2,
    "an old version": _post(LENGTH, SHOWN, b"POST %s HTTP/1.0" % PATH),
    "another method": _post(b"", b"", b"GET /health HTTP/1.1"),
}
"""Answered."""
