"""A store before another one, for doubles: what is compiled has no subclasses in Python."""

from router.conversations.store import Store


class Around:
    """Passes everything on; doubles do one thing otherwise."""

    does_io = True

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    async def take(self, key: str) -> bytes | None:
        return await self.inner.take(key)

    async def read(self, key: str) -> bytes | None:
        return await self.inner.read(key)

    async def put(self, key: str, value: bytes, seconds: float) -> list[bytes]:
        return await self.inner.put(key, value, seconds)

    async def close(self) -> None:
        await self.inner.close()
