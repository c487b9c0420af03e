"""What commands share that ask a router over HTTP."""

from __future__ import annotations

from collections.abc import Callable

import httpx


class EndlessError(Exception):
    """An answer that is too long, or comes too slowly."""


def with_scheme(url: str) -> str:
    return url if "://" in url else f"http://{url}"


def reason_of(error: Exception) -> str:
    """In one line, for people."""
    return " ".join(str(error).split()) or type(error).__name__


def whole(answer: httpx.Response, most: int, latest: float, clock: Callable[[], float]) -> bytes:
    """The body of a streamed answer. Raises EndlessError beyond `most` bytes, or once the `clock`
    is past `latest`; httpx.HTTPError."""
    parts, size = [], 0
    for part in answer.iter_bytes():
        parts.append(part)
        size += len(part)
        if size > most or clock() > latest:
            raise EndlessError(f"{answer.url} says too much, or too slowly")
    return b"".join(parts)
