"""Entries in this process, within bounds: what was put longest ago gives way."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple


class StoredValue(NamedTuple):
    value: bytes
    expires_at: float


class MemoryStore:
    """A Store that ends with its process. An entry is read once, so its age is its last use."""

    waits = False

    def __init__(
        self, max_entries: int, max_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._clock = clock
        self._kept: OrderedDict[str, StoredValue] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    async def take(self, key: str) -> bytes | None:
        kept = self._remove(key)
        if kept is None or kept.expires_at <= self._clock():
            return None
        return kept.value

    async def read(self, key: str) -> bytes | None:
        kept = self._kept.get(key)
        return None if kept is None or kept.expires_at <= self._clock() else kept.value

    async def put(self, key: str, value: bytes, seconds: float) -> list[bytes]:
        older = self._remove(key)
        lost = [] if older is None else [older.value]
        if len(value) > self._max_bytes:
            return [*lost, value]
        self._drop_expired()
        self._kept[key] = StoredValue(value, self._clock() + seconds)
        self._num_bytes += len(value)
        while len(self._kept) > self._max_entries or self._num_bytes > self._max_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._num_bytes -= len(oldest.value)
            lost.append(oldest.value)
        return lost

    async def close(self) -> None:
        self._kept.clear()
        self._num_bytes = 0

    def _remove(self, key: str) -> StoredValue | None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._num_bytes -= len(kept.value)
        return kept

    def _drop_expired(self) -> None:
        """Oldest first, as far as they have expired: with one lifetime for all, that is all."""
        now = self._clock()
        while self._kept and next(iter(self._kept.values())).expires_at <= now:
            self._remove(next(iter(self._kept)))
