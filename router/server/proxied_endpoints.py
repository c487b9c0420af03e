"""The endpoints that flows serve, as both fronts know them."""

from __future__ import annotations

import httptools

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HOT = {path.encode(): path for path in (CHAT, COMPLETIONS)}


def hot_endpoint(target: bytes) -> str | None:
    """Of a request's target however it is spelt: with a query, with a slash at its end, in absolute
    form (RFC 9112, 3.2.2)."""
    try:
        path = httptools.parse_url(target).path
    except httptools.HttpParserInvalidURLError:
        return None
    return None if path is None else HOT.get(path.removesuffix(b"/"))
