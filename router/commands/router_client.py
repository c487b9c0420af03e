"""The HTTP client of commands that ask a router something."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import NamedTuple

import httpx

ANSWER_TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 64 * 1024 * 1024


class AnswerLimitError(Exception):
    """An answer is too long or takes too long, as the message states."""


class RouterAnswer(NamedTuple):
    status: int
    content: bytes


class RouterClient:
    """Sends one request after the other; not for use within an event loop.

    A whole answer takes at most `timeout_s` seconds, however it is split, and `max_bytes` bytes.
    """

    def __init__(
        self,
        timeout_s: float,
        max_bytes: int = MAX_ANSWER_BYTES,
        headers: Mapping[str, str] | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        # httpx' timeouts are for each read, so an answer in small pieces would never time out.
        # The client cannot notice a connection that closes between two requests, so each request
        # opens a new one.
        self._client = httpx.AsyncClient(
            headers=headers,
            timeout=None,
            limits=httpx.Limits(max_keepalive_connections=0),
            trust_env=False,
            transport=transport,
        )
        self._runner = asyncio.Runner()

    def __enter__(self) -> RouterClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        try:
            self._runner.run(self._client.aclose())
        finally:
            self._runner.close()

    def request(self, method: str, url: str) -> RouterAnswer:
        """Raises AnswerLimitError, httpx.HTTPError, httpx.InvalidURL, or UnicodeError for a host
        that is not a name."""
        return self._runner.run(self._request(method, url))

    async def _request(self, method: str, url: str) -> RouterAnswer:
        parts, size = [], 0
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._client.stream(method, url) as answer,
            ):
                async for part in answer.aiter_bytes():
                    parts.append(part)
                    size += len(part)
                    if size > self._max_bytes:
                        raise AnswerLimitError(f"{url} sent more than {self._max_bytes} bytes")
                return RouterAnswer(answer.status_code, b"".join(parts))
        except TimeoutError:
            raise AnswerLimitError(
                f"no answer from {url}: not complete within {self._timeout_s:g} s"
            ) from None


def with_scheme(url: str) -> str:
    return url if "://" in url else f"http://{url}"


def one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
