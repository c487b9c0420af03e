"""A store that wraps another one, as a base for test doubles."""

from router.conversations.store import Store


class StoreWrapper:
    """Passes every call on; a double overrides one method."""

    does_io = True
    failure = ""

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    async def take(self, key: str) -> bytes | None:
        return await self.inner.take(key)

    async def read(self, key: str) -> bytes | None:
        return await self.inner.read(key)

    async def delete(self, key: str) -> None:
        await self.inner.delete(key)

    async def put(self, key: str, value: bytes, seconds: float) -> list[bytes]:
        return await self.inner.put(key, value, seconds)

    async def close(self) -> None:
        await self.inner.close()
