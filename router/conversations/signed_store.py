"""A store that others can write to: what they wrote is not believed, and counted."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable

from prometheus_client import Counter

from router.common.signature import MAC_BYTES, Seal
from router.conversations.store import Shelf, UnverifiedError
from router.telemetry.log_throttle import Throttle

LARGEST = 16 * 1024 * 1024
MOST_TAKEN = 65_536
DOUBT = (
    "the conversation store holds what no router with our --conversation-store-key put there, or "
    "what was taken before; it is not used"
)


class SignedStore:
    """A Store before another one, which keeps what was put under the same key and nothing else.

    Whoever can read the other one may put back what was taken. So what we took is remembered for
    `life` seconds, in which it could be used.
    """

    waits = True

    def __init__(
        self,
        store: Shelf,
        seal: Seal,
        errors: Counter,
        life: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._seal = seal
        self._errors = errors
        self._life = life
        self._clock = clock
        self._taken: OrderedDict[bytes, float] = OrderedDict()
        self._throttle = Throttle(logging.getLogger("disagg_router.conversations"))

    def reseal(self, seal: Seal) -> None:
        """From now on. What was sealed with a key that is still there can still be opened."""
        self._seal = seal

    async def take(self, key: str) -> bytes | None:
        """Raises UnverifiedError, too: what was there is gone, and nobody uses it."""
        sealed = await self._store.take(key)
        if sealed is None:
            return None
        value = self._open("take", key, sealed)
        if value is None:
            raise UnverifiedError("not signed with our keys, or taken before")
        self._note_taken(sealed[:MAC_BYTES])
        return value

    async def read(self, key: str) -> bytes | None:
        """Raises UnverifiedError, too."""
        sealed = await self._store.read(key)
        if sealed is None:
            return None
        value = self._open("read", key, sealed)
        if value is None:
            raise UnverifiedError("not signed with our keys")
        return value

    async def put(self, key: str, value: bytes, seconds: float) -> list[bytes]:
        if len(value) > LARGEST:
            return [value]
        given_up = await self._store.put(key, self._seal.close(key, value), seconds)
        opened = [self._open("put", key, sealed) for sealed in given_up]
        return [value for value in opened if value is not None]

    async def close(self) -> None:
        await self._store.close()

    def _open(self, operation: str, key: str, sealed: bytes) -> bytes | None:
        value = None
        if len(sealed) <= LARGEST + MAC_BYTES and not self._was_taken(sealed[:MAC_BYTES]):
            value = self._seal.open(key, sealed)
        if value is None:
            self._errors.labels(operation, "unverified").inc()
            self._throttle.warn(DOUBT, operation)
        return value

    def _note_taken(self, mac: bytes) -> None:
        now = self._clock()
        self._taken[mac] = now + self._life
        oldest = next(iter(self._taken))
        while self._taken[oldest] <= now or len(self._taken) > MOST_TAKEN:
            del self._taken[oldest]
            oldest = next(iter(self._taken))

    def _was_taken(self, mac: bytes) -> bool:
        return self._taken.get(mac, 0.0) > self._clock()
