"""Entries in Redis, shared by every router that has the same store."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import Any

from redis.exceptions import RedisClusterException, RedisError, ResponseError

from router.common.redis_url import connect
from router.conversations.store import StoreError

NAMESPACE = "disagg-router:turn:"
WRONG_TYPE = "WRONGTYPE"
NOT_OURS = b""


class RedisStore:
    """A Store over any URL that redis_url knows.

    GETDEL (Redis 6.2) makes taking atomic, and SET with GET tells what it replaced. No operation
    lasts longer than `timeout` seconds; one that does, or fails, raises StoreError. Nothing is
    tried twice: GETDEL may have succeeded. A list, or whatever else somebody put where entries are,
    says nothing of Redis: it is removed, and told as a value that no router put there.
    """

    waits = True

    def __init__(self, url: str, password: str | None, timeout: float) -> None:
        self._timeout = timeout
        self._client, self._others = connect(url, password, timeout)

    async def take(self, key: str) -> bytes | None:
        value = await self._in_time(self._take(NAMESPACE + key))
        return value if isinstance(value, bytes) else None

    async def read(self, key: str) -> bytes | None:
        value = await self._in_time(self._read(NAMESPACE + key))
        return value if isinstance(value, bytes) else None

    async def put(self, key: str, value: bytes, seconds: float) -> list[bytes]:
        milliseconds = max(1, int(seconds * 1000))
        older = await self._in_time(self._put(NAMESPACE + key, value, milliseconds))
        return [older] if isinstance(older, bytes) else []

    async def close(self) -> None:
        for client in (self._client, *self._others):
            try:
                await client.aclose()
            except (RedisError, OSError) as error:
                logging.getLogger(__name__).debug("closing Redis: %s", error)

    async def _take(self, name: str) -> object:
        try:
            return await self._client.getdel(name)
        except ResponseError as error:
            if not str(error).startswith(WRONG_TYPE):
                raise
            await self._client.delete(name)
            return NOT_OURS

    async def _read(self, name: str) -> object:
        try:
            return await self._client.get(name)
        except ResponseError as error:
            if not str(error).startswith(WRONG_TYPE):
                raise
            return NOT_OURS

    async def _put(self, name: str, value: bytes, milliseconds: int) -> object:
        try:
            return await self._client.set(name, value, px=milliseconds, get=True)
        except ResponseError as error:
            if not str(error).startswith(WRONG_TYPE):
                raise
            await self._client.set(name, value, px=milliseconds)
            return NOT_OURS

    async def _in_time(self, answer: Awaitable[Any]) -> Any:
        try:
            async with asyncio.timeout(self._timeout):
                return await answer
        except TimeoutError as error:
            raise StoreError(f"Redis did not answer within {self._timeout:g} s") from error
        except (RedisError, RedisClusterException, OSError) as error:
            raise StoreError(f"{type(error).__name__}: {error}") from error
