"""Entries in Redis, shared by every router that is configured with the same store."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from redis.exceptions import ResponseError

from router.common.redis_backend import WRONG_TYPE, RedisBackend
from router.conversations.store import StoreError

NAMESPACE = "disagg-router:turn:"
# Stands for a key that holds a list or another type: a value that no router has signed.
FOREIGN_VALUE = b""
Command = Callable[[], Awaitable[Any]]


class RedisStore(RedisBackend):
    """A Store over any URL that `redis_backend` reads.

    GETDEL (Redis 6.2) makes `take` atomic, and SET with GET returns what `put` replaced. A key that
    holds another type than a string is no failure of Redis: the operation removes it, and returns
    FOREIGN_VALUE for it.
    """

    does_io = True
    error = StoreError
    logger = logging.getLogger("disagg_router.conversations")
    failed_message = "Redis fails as conversation store, turns are not reused"
    recovered_message = "conversation store has recovered"

    async def take(self, key: str) -> bytes | None:
        name = NAMESPACE + key
        return await self._value(
            "take", name, lambda: self._client.getdel(name), lambda: self._client.delete(name)
        )

    async def read(self, key: str) -> bytes | None:
        name = NAMESPACE + key

        async def measure() -> int:
            try:
                return int(await self._client.strlen(name))
            except ResponseError:  # not permitted, or another type
                return 0

        size = await self.run("measure", measure, name)
        return await self._value("read", name, lambda: self._client.get(name), num_bytes=size)

    async def delete(self, key: str) -> None:
        name = NAMESPACE + key
        await self.run("delete", lambda: self._client.delete(name), name)

    async def put(self, key: str, value: bytes, seconds: float) -> list[bytes]:
        name = NAMESPACE + key

        def set_value(get: bool) -> Awaitable[Any]:
            milliseconds = max(1, int(seconds * 1000))
            return self._client.set(name, value, px=milliseconds, get=get)

        older = await self._value(
            "put", name, lambda: set_value(True), lambda: set_value(False), len(value)
        )
        return [] if older is None else [older]

    async def _value(
        self,
        operation: str,
        name: str,
        command: Command,
        on_wrong_type: Command | None = None,
        num_bytes: int = 0,
    ) -> bytes | None:
        """Return the command's value. `on_wrong_type` is the command for a key of that kind."""

        async def send() -> bytes | None:
            try:
                value = await command()
            except ResponseError as error:
                if not str(error).startswith(WRONG_TYPE):
                    raise
                if on_wrong_type is not None:
                    await on_wrong_type()
                return FOREIGN_VALUE
            return value if isinstance(value, bytes) else None

        return await self.run(operation, send, name, num_bytes)
