"""Where entries wait for the next turn."""

from __future__ import annotations

from typing import Protocol


class StoreError(Exception):
    """The store cannot be asked now. The turn goes on without it."""


class UnverifiedError(StoreError):
    """The store was asked, and what it held is not ours. It is not there any more."""


class Store(Protocol):
    """Bytes by key, each readable once. Every method may raise StoreError."""

    waits: bool
    """For others. Where it does not, what was begun is done: nothing can cut it off between."""

    async def take(self, key: str) -> bytes | None:
        """Removes and returns the value. Of any number of takers, in any process, one gets it."""

    async def put(self, key: str, value: bytes, seconds: float) -> list[bytes]:
        """Keeps the value for at most `seconds`, in place of an older one.

        Returns what nobody can take any more: the older one, what had to make room, or the value
        itself where there is no room.
        """

    async def close(self) -> None:
        """Gives connections back. Nothing is asked afterwards."""


class Shelf(Store, Protocol):
    """A Store whose values may be read again and again, too."""

    async def read(self, key: str) -> bytes | None:
        """The value, which stays."""
