"""A store that fails is left alone for a while: the dead one costs one timeout in a while."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from prometheus_client import Counter

from router.conversations.store import Shelf, StoreError

T = TypeVar("T")
logger = logging.getLogger("disagg_router.conversations")


class StoreBreaker:
    """A Store before another one. While it is open every call raises StoreError at once.

    After `pause` seconds one call tries again, and the others still do not wait for it.
    """

    waits = True

    def __init__(
        self,
        store: Shelf,
        errors: Counter,
        pause: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._errors = errors
        self._pause = pause
        self._clock = clock
        self._open_until: float | None = None

    async def take(self, key: str) -> bytes | None:
        return await self._guarded("take", lambda: self._store.take(key))

    async def read(self, key: str) -> bytes | None:
        return await self._guarded("read", lambda: self._store.read(key))

    async def put(self, key: str, value: bytes, seconds: float) -> list[bytes]:
        return await self._guarded("put", lambda: self._store.put(key, value, seconds))

    async def close(self) -> None:
        await self._store.close()

    async def _guarded(self, operation: str, call: Callable[[], Awaitable[T]]) -> T:
        now = self._clock()
        if self._open_until is not None:
            if now < self._open_until:
                self._errors.labels(operation, "skipped").inc()
                raise StoreError("the store failed a moment ago")
            self._open_until = now + self._pause
        try:
            result = await call()
        except StoreError as error:
            self._errors.labels(operation, "failed").inc()
            self._failed(error)
            raise
        self._succeeded()
        return result

    def _failed(self, error: StoreError) -> None:
        if self._open_until is None:
            logger.warning("the conversation store fails, turns are not reused: %s", error)
        self._open_until = self._clock() + self._pause

    def _succeeded(self) -> None:
        if self._open_until is not None:
            logger.info("the conversation store answers again")
            self._open_until = None
