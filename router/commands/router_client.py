"""What commands share that ask a router over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import NamedTuple

import httpx


class EndlessError(Exception):
    """An answer that is too long, or comes too slowly."""


class Said(NamedTuple):
    status: int
    content: bytes


class Remote:
    """Asks one thing after the other. No answer takes more than `patience` seconds, in whatever
    drops it comes, nor has more than `most` bytes. Not for use within an event loop."""

    def __init__(
        self,
        patience: float,
        most: int,
        headers: Mapping[str, str] | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._patience = patience
        self._most = most
        # Its own timeouts are of each read: a header's drops would begin them anew. Nobody sees
        # between two questions that a connection is closed: there is a new one for each.
        self._client = httpx.AsyncClient(
            headers=headers,
            timeout=None,
            limits=httpx.Limits(max_keepalive_connections=0),
            trust_env=False,
            transport=transport,
        )
        self._runner = asyncio.Runner()

    def __enter__(self) -> Remote:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        try:
            self._runner.run(self._client.aclose())
        finally:
            self._runner.close()

    def ask(self, method: str, url: str) -> Said:
        """Raises EndlessError; httpx.HTTPError, httpx.InvalidURL, UnicodeError for a host that is
        no name."""
        return self._runner.run(self._ask(method, url))

    async def _ask(self, method: str, url: str) -> Said:
        try:
            async with asyncio.timeout(self._patience):
                return await self._whole(method, url)
        except TimeoutError:
            raise EndlessError(
                f"no answer of {url}: not all of it came within {self._patience:g} s"
            ) from None

    async def _whole(self, method: str, url: str) -> Said:
        parts, size = [], 0
        async with self._client.stream(method, url) as answer:
            async for part in answer.aiter_bytes():
                parts.append(part)
                size += len(part)
                if size > self._most:
                    raise EndlessError(f"{url} says too much")
        return Said(answer.status_code, b"".join(parts))


def with_scheme(url: str) -> str:
    return url if "://" in url else f"http://{url}"


def reason_of(error: Exception) -> str:
    """In one line, for people."""
    return " ".join(str(error).split()) or type(error).__name__
