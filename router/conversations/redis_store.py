"""Entries in Redis, shared by every router that is configured with the same store."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from redis.exceptions import ResponseError

from router.common.redis_backend import RedisBackend
from router.conversations.store import StoreError

NAMESPACE = "disagg-router:turn:"
WRONG_TYPE = "WRONGTYPE"
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
        name, client = NAMESPACE + key, self._client
        return await self._value(
            "take", lambda: client.getdel(name), on_wrong_type=lambda: client.delete(name)
        )

    async def read(self, key: str) -> bytes | None:
        return await self._value("read", lambda: self._client.get(NAMESPACE + key))

    async def put(self, key: str, value: bytes, seconds: float) -> list[bytes]:
        def set_value(get: bool) -> Awaitable[Any]:
            milliseconds = max(1, int(seconds * 1000))
            return self._client.set(NAMESPACE + key, value, px=milliseconds, get=get)

        older = await self._value("put", lambda: set_value(True), lambda: set_value(False))
        return [] if older is None else [older]

    async def _value(
        self, operation: str, command: Command, on_wrong_type: Command | None = None
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

        return await self.run(operation, send)
