"""Where entries wait for the next turn: in memory, or in a store that others can write to.

A value in such a store is signed. The MAC covers the key and the value, so that an attacker without
the secret cannot make an entry, alter it, or move it to another conversation.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from typing import Protocol

from msgspec import Struct
from prometheus_client import Counter

from router.telemetry.logs import LogThrottle

MAC_BYTES = 32
MAC_PURPOSE = b"disagg-turn"
MAX_VALUE_BYTES = 16 * 1024 * 1024
MAX_REMEMBERED_TAKES = 65_536
# A smaller heap of expiries is not worth to be made anew.
MIN_EXPIRIES = 64
UNVERIFIED_WARNING = (
    "the conversation store holds values that our --conversation-store-key did not sign, or that "
    "were taken before; the router ignores them"
)


class StoreError(Exception):
    """The store failed. The turn continues without it."""


class UnverifiedError(StoreError):
    """The store held a value that no trusted router put there."""


class Store(Protocol):
    """Bytes by key. Every method may raise StoreError."""

    does_io: bool
    """False where no method suspends: nothing can cancel one halfway."""

    @property
    def failure(self) -> str:
        """The message about the present failure of the store; empty if the store works."""

    async def take(self, key: str) -> bytes | None:
        """Remove and return the value. Of concurrent takers, in any process, one gets it."""

    async def read(self, key: str) -> bytes | None:
        """Return the value, and leave it there."""

    async def delete(self, key: str) -> None:
        """Remove the value, if there is one."""

    async def put(self, key: str, value: bytes, seconds: float) -> list[bytes]:
        """Keep the value for at most `seconds`, in place of an older one.

        Returns the values that can no longer be taken: the older one, evicted ones, or the value
        itself where the store has no room for it.
        """

    async def close(self) -> None:
        """Close the connections. No other call follows."""


class StoredValue(Struct, frozen=True, gc=False):
    value: bytes
    expires_at: float


class MemoryStore:
    """A Store that ends with its process. It drops expired values, and evicts those that were put
    first."""

    does_io = False
    failure = ""

    def __init__(
        self, max_entries: int, max_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._clock = clock
        self._values: OrderedDict[str, StoredValue] = OrderedDict()
        # A heap of when values expire, with their keys. Some of these values are gone or replaced.
        self._expiries: list[tuple[float, str]] = []
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

    async def delete(self, key: str) -> None:
        self._remove(key)

    async def put(self, key: str, value: bytes, seconds: float) -> list[bytes]:
        older = self._remove(key)
        lost = [] if older is None else [older.value]
        if len(value) > self._max_bytes:
            return [*lost, value]
        now = self._clock()
        self._drop_expired(now)
        self._values[key] = StoredValue(value, now + seconds)
        heappush(self._expiries, (now + seconds, key))
        self._num_bytes += len(value)
        while len(self._values) > self._max_entries or self._num_bytes > self._max_bytes:
            _, oldest = self._values.popitem(last=False)
            self._num_bytes -= len(oldest.value)
            lost.append(oldest.value)
        return lost

    async def close(self) -> None:
        self._values.clear()
        self._expiries.clear()
        self._num_bytes = 0

    def _drop_expired(self, now: float) -> None:
        heap = self._expiries
        while heap and heap[0][0] <= now:
            _, key = heappop(heap)
            found = self._values.get(key)
            if found is not None and found.expires_at <= now:
                self._remove(key)
        if len(heap) > 2 * len(self._values) + MIN_EXPIRIES:
            heap[:] = [(value.expires_at, key) for key, value in self._values.items()]
            heapify(heap)

    def _remove(self, key: str) -> StoredValue | None:
        found = self._values.pop(key, None)
        if found is not None:
            self._num_bytes -= len(found.value)
        return found


class ValueSigner:
    """Signs values with the first of `secrets`, and verifies them with all, so that secrets can be
    rotated. There is at least one, each of any length."""

    def __init__(self, secrets: Sequence[bytes]) -> None:
        # A secret is hashed first, because BLAKE2b keys have at most 64 bytes.
        self._keyed = [
            hashlib.blake2b(
                key=hashlib.blake2b(secret).digest(), digest_size=MAC_BYTES, person=MAC_PURPOSE
            )
            for secret in secrets
        ]

    def sign(self, key: str, value: bytes) -> bytes:
        """Return the signature and the value."""
        return _mac(self._keyed[0], key, value) + value

    def verify(self, key: str, signed: bytes) -> bytes | None:
        """Return the value, or None if it was not signed for `key` with one of the secrets."""
        mac, value = signed[:MAC_BYTES], signed[MAC_BYTES:]
        for keyed in self._keyed:
            if hmac.compare_digest(mac, _mac(keyed, key, value)):
                return value
        return None


def _mac(keyed: hashlib.blake2b, key: str, value: bytes) -> bytes:
    digest = keyed.copy()
    raw = key.encode()
    digest.update(b"%d:%b" % (len(raw), raw))
    digest.update(value)
    return digest.digest()


class SignedStore:
    """A Store that signs what it puts into another store, and returns only values with a signature.

    An attacker who can read the other store could put a value back after a router took it. So this
    store remembers the values that it took for `life` seconds, in which they could be used again.
    `errors` counts unverified values.
    """

    does_io = True

    def __init__(
        self,
        store: Store,
        signer: ValueSigner,
        errors: Counter,
        life: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._signer = signer
        self._errors = errors
        self._life = life
        self._clock = clock
        self._taken: OrderedDict[bytes, float] = OrderedDict()
        self._throttle = LogThrottle(logging.getLogger("disagg_router.conversations"))

    @property
    def failure(self) -> str:
        return self._store.failure

    def use_signer(self, signer: ValueSigner) -> None:
        """Use other keys from now on; values that were signed with a remaining key stay valid."""
        self._signer = signer

    def sign(self, key: str, value: bytes) -> bytes:
        """Return the value with a signature by the present signer."""
        return self._signer.sign(key, value)

    def verify(self, key: str, signed: bytes) -> bytes | None:
        """Return the value, or None if it was not signed for `key` with one of the secrets."""
        return self._signer.verify(key, signed)

    async def take(self, key: str) -> bytes | None:
        """Remove and return a value. Raises UnverifiedError, too; the value is gone even then."""
        signed = await self._store.take(key)
        if signed is None:
            return None
        value = self._verify("take", key, signed)
        now = self._clock()
        self._taken[signed[:MAC_BYTES]] = now + self._life
        oldest = next(iter(self._taken))
        while self._taken[oldest] <= now or len(self._taken) > MAX_REMEMBERED_TAKES:
            del self._taken[oldest]
            oldest = next(iter(self._taken))
        return value

    async def read(self, key: str) -> bytes | None:
        """Return a value. Raises UnverifiedError, too."""
        signed = await self._store.read(key)
        return None if signed is None else self._verify("read", key, signed)

    async def delete(self, key: str) -> None:
        await self._store.delete(key)

    async def put(self, key: str, value: bytes, seconds: float) -> list[bytes]:
        if len(value) > MAX_VALUE_BYTES:
            return [value]
        dropped = await self._store.put(key, self._signer.sign(key, value), seconds)
        opened = [self._open("put", key, signed) for signed in dropped]
        return [value for value in opened if value is not None]

    async def close(self) -> None:
        await self._store.close()

    def _verify(self, operation: str, key: str, signed: bytes) -> bytes:
        value = self._open(operation, key, signed)
        if value is None:
            raise UnverifiedError("not signed with our keys, or used before")
        return value

    def _open(self, operation: str, key: str, signed: bytes) -> bytes | None:
        value = None
        was_taken = self._taken.get(signed[:MAC_BYTES], 0.0) > self._clock()
        if len(signed) <= MAX_VALUE_BYTES + MAC_BYTES and not was_taken:
            value = self._signer.verify(key, signed)
        if value is None:
            self._errors.labels(operation, "unverified").inc()
            self._throttle.warn(UNVERIFIED_WARNING, operation)
        return value
