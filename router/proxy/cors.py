"""CORS: the headers that allow web pages of other origins to read answers (setting cors_origins).

An API key is a header that the page sets itself, and never a cookie. So no answer allows
credentials.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from router.proxy.exchange import Exchange, ExchangeWrapper, Header

ANY_ORIGIN = "*"
ALLOWED_METHODS = b"GET, HEAD, POST, DELETE, OPTIONS"
EXPOSED_HEADERS = b", ".join(
    (
        b"x-request-id",
        b"retry-after",
        *(
            b"x-ratelimit-%b-%b" % (what, of)
            for of in (b"requests", b"tokens")
            for what in (b"limit", b"remaining", b"reset")
        ),
    )
)
# Seconds for which a browser may cache the answer to a preflight request.
PREFLIGHT_MAX_AGE_S = b"600"
HEADER_NAMES = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,2048}")
REQUESTED_METHOD = b"access-control-request-method"
REQUESTED_HEADERS = b"access-control-request-headers"


def cors_headers(headers: Iterable[Header], origins: Sequence[str]) -> list[Header]:
    """Return the headers that allow the requesting page to read the answer, [] if it may not."""
    if not origins:
        return []
    vary: list[Header] = [] if ANY_ORIGIN in origins else [(b"vary", b"origin")]
    origin = next((value for name, value in headers if name == b"origin"), None)
    if origin is None or not (ANY_ORIGIN in origins or origin.decode("latin-1") in origins):
        return vary
    allowed = b"*" if ANY_ORIGIN in origins else origin
    return [
        (b"access-control-allow-origin", allowed),
        (b"access-control-expose-headers", EXPOSED_HEADERS),
        *vary,
    ]


def preflight_headers(headers: Sequence[Header], origins: Sequence[str]) -> list[Header]:
    """Return the headers of the answer to a preflight request. They allow nothing if the origin is
    not allowed."""
    given = dict(headers)
    found = cors_headers(headers, origins)
    if REQUESTED_METHOD not in given or len(found) < 2:
        return found
    found += [
        (b"access-control-allow-methods", ALLOWED_METHODS),
        (b"access-control-max-age", PREFLIGHT_MAX_AGE_S),
    ]
    wanted = given.get(REQUESTED_HEADERS, b"")
    if HEADER_NAMES.fullmatch(wanted):
        found.append((b"access-control-allow-headers", wanted))
    return found


class CorsExchange(ExchangeWrapper):
    """An Exchange that adds CORS headers to the answer."""

    def __init__(self, inner: Exchange, lines: Sequence[Header]) -> None:
        super().__init__(inner)
        self._lines = lines

    def _client_headers(self, headers: Sequence[Header]) -> list[Header]:
        return [*headers, *self._lines]
