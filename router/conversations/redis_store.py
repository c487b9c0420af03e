"""Entries in Redis, shared by every router that is configured with the same store."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from redis.exceptions import RedisClusterException, RedisError, ResponseError

from router.common.redis_url import create_redis_clients
from router.conversations.store import StoreError

NAMESPACE = "disagg-router:turn:"
WRONG_TYPE = "WRONGTYPE"
# Stands for a key that holds a list or another type: a value that no router has signed.
FOREIGN_VALUE = b""


class RedisStore:
    """A Store over any URL that `redis_url` reads.

    GETDEL (Redis 6.2) makes `take` atomic, and SET with GET returns what `put` replaced. An
    operation that fails or lasts longer than `timeout` seconds raises StoreError. No operation is
    retried, since GETDEL may have succeeded. A key that holds another type than a string is no
    failure of Redis: the operation removes it, and returns FOREIGN_VALUE for it.
    """

    does_io = True

    def __init__(self, url: str, password: str | None, timeout: float) -> None:
        self._timeout = timeout
        self._client, self._others = create_redis_clients(url, password, timeout)

    async def take(self, key: str) -> bytes | None:
        name = NAMESPACE + key
        return await self._run(self._client.getdel(name), lambda: self._client.delete(name))

    async def read(self, key: str) -> bytes | None:
        return await self._run(self._client.get(NAMESPACE + key))

    async def put(self, key: str, value: bytes, seconds: float) -> list[bytes]:
        name, milliseconds = NAMESPACE + key, max(1, int(seconds * 1000))
        older = await self._run(
            self._client.set(name, value, px=milliseconds, get=True),
            lambda: self._client.set(name, value, px=milliseconds),
        )
        return [] if older is None else [older]

    async def close(self) -> None:
        for client in (self._client, *self._others):
            try:
                await client.aclose()
            except (RedisError, OSError) as error:
                logging.getLogger(__name__).debug("closing Redis: %s", error)

    async def _run(
        self, command: Awaitable[Any], on_wrong_type: Callable[[], Awaitable[Any]] | None = None
    ) -> bytes | None:
        """Return the command's value. `on_wrong_type` makes the command for a key of that kind."""
        try:
            async with asyncio.timeout(self._timeout):
                try:
                    value = await command
                except ResponseError as error:
                    if not str(error).startswith(WRONG_TYPE):
                        raise
                    if on_wrong_type is not None:
                        await on_wrong_type()
                    return FOREIGN_VALUE
                return value if isinstance(value, bytes) else None
        except TimeoutError as error:
            raise StoreError(f"Redis did not answer within {self._timeout:g} s") from error
        except (RedisError, RedisClusterException, OSError) as error:
            raise StoreError(f"{type(error).__name__}: {error}") from error
