"""Where entries wait for the next turn: the interface, the store in memory, and the breaker."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol, TypeVar

from prometheus_client import Counter

T = TypeVar("T")
logger = logging.getLogger("disagg_router.conversations")


class StoreError(Exception):
    """The store failed. The turn continues without it."""


class UnverifiedError(StoreError):
    """The store held a value that no trusted router put there."""


class Store(Protocol):
    """Bytes by key. Every method may raise StoreError."""

    does_io: bool
    """False where no method suspends: nothing can cancel one halfway."""

    async def take(self, key: str) -> bytes | None:
        """Remove and return the value. Of concurrent takers, in any process, one gets it."""

    async def read(self, key: str) -> bytes | None:
        """Return the value, and leave it there."""

    async def put(self, key: str, value: bytes, seconds: float) -> list[bytes]:
        """Keep the value for at most `seconds`, in place of an older one.

        Returns the values that can no longer be taken: the older one, evicted ones, or the value
        itself where the store has no room for it.
        """

    async def close(self) -> None:
        """Close the connections. No other call follows."""


class StoredValue(NamedTuple):
    value: bytes
    expires_at: float


class MemoryStore:
    """A Store that ends with its process, and evicts the values that were put first."""

    does_io = False

    def __init__(
        self, max_entries: int, max_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._clock = clock
        self._values: OrderedDict[str, StoredValue] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._values)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    async def take(self, key: str) -> bytes | None:
        found = self._remove(key)
        return None if found is None or found.expires_at <= self._clock() else found.value

    async def read(self, key: str) -> bytes | None:
        found = self._values.get(key)
        return None if found is None or found.expires_at <= self._clock() else found.value

    async def put(self, key: str, value: bytes, seconds: float) -> list[bytes]:
        older = self._remove(key)
        lost = [] if older is None else [older.value]
        if len(value) > self._max_bytes:
            return [*lost, value]
        now = self._clock()
        # Oldest first: values that share one lifetime expire in the order of this dictionary.
        while self._values and next(iter(self._values.values())).expires_at <= now:
            self._remove(next(iter(self._values)))
        self._values[key] = StoredValue(value, now + seconds)
        self._num_bytes += len(value)
        while len(self._values) > self._max_entries or self._num_bytes > self._max_bytes:
            _, oldest = self._values.popitem(last=False)
            self._num_bytes -= len(oldest.value)
            lost.append(oldest.value)
        return lost

    async def close(self) -> None:
        self._values.clear()
        self._num_bytes = 0

    def _remove(self, key: str) -> StoredValue | None:
        found = self._values.pop(key, None)
        if found is not None:
            self._num_bytes -= len(found.value)
        return found


class StoreBreaker:
    """A circuit breaker around a Store, so that a dead one costs one timeout per `pause` seconds.

    While the breaker is open, every call raises StoreError at once. After `pause` seconds one call
    tries the store again; the other calls do not wait for it. `errors` counts failed and skipped
    operations.
    """

    does_io = True

    def __init__(
        self,
        store: Store,
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
            if self._open_until is None:
                logger.warning("conversation store failed, turns are not reused: %s", error)
            self._open_until = self._clock() + self._pause
            raise
        if self._open_until is not None:
            logger.info("conversation store has recovered")
            self._open_until = None
        return result
