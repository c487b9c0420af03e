"""A bounded load: so many connections, each asking again as soon as it has its answer."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

import httptools

from scripts.bench.errors import BenchError

LONGEST = 60.0
"""Seconds that one request may take."""
DIALS = 128
"""Connections that are opened at once."""

Requests = Callable[[int, int], bytes]
"""The bytes of a request, by the number of its connection and its place on that."""


@dataclass(slots=True)
class Timing:
    """Of one answer, in seconds since its request was written."""

    first_byte: float = 0.0
    whole: float = 0.0


@dataclass(slots=True)
class Outcome:
    """What a load came to. `elapsed` is in seconds."""

    elapsed: float = 0.0
    timings: list[Timing] = field(default_factory=list)


class Asking(Protocol):
    """One client's way to an answer."""

    async def ask(self, connection: int, number: int) -> Timing: ...
    def close(self) -> None: ...


class Connection(asyncio.Protocol):
    """One HTTP/1.1 connection, one request at a time."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._first: asyncio.Future[None] | None = None
        self._started = 0.0
        self._timing = Timing()
        self._lost = False

    @classmethod
    async def open(cls, port: int) -> "Connection":
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(cls, "127.0.0.1", port)
        return made

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        for waiter in (self._first, self._waiter):
            if waiter is not None and not waiter.done():
                waiter.set_exception(BenchError(f"a connection was lost: {exc or 'closed'}"))

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    async def ask(self, request: bytes) -> Timing:
        self._send(request)
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter
        return self._timing

    async def first_byte(self, request: bytes) -> None:
        """Returns when a body has begun; the rest of it is left to come."""
        self._send(request)
        self._first = asyncio.get_running_loop().create_future()
        await self._first

    def close(self) -> None:
        self._transport.abort()

    def _send(self, request: bytes) -> None:
        if self._lost:
            raise BenchError("a connection was closed between two requests")
        self._timing = Timing()
        self._started = time.perf_counter()
        self._transport.write(request)

    def on_body(self, piece: bytes) -> None:
        if not self._timing.first_byte:
            self._timing.first_byte = time.perf_counter() - self._started
            if self._first is not None and not self._first.done():
                self._first.set_result(None)

    def on_message_complete(self) -> None:
        self._timing.whole = time.perf_counter() - self._started
        status = self._parser.get_status_code()
        if self._waiter is None or self._waiter.done():
            return
        if status == 200:
            self._waiter.set_result(None)
        else:
            self._waiter.set_exception(BenchError(f"an answer with status {status}"))


@dataclass(slots=True)
class Routed:
    """Through a router."""

    connection: Connection
    requests: Requests

    async def ask(self, connection: int, number: int) -> Timing:
        return await self.connection.ask(self.requests(connection, number))

    def close(self) -> None:
        self.connection.close()


@dataclass(slots=True)
class Direct:
    """The two hops without anybody between them: what no router can beat."""

    prefiller: Connection
    decoder: Connection
    requests: Requests

    async def ask(self, connection: int, number: int) -> Timing:
        request = self.requests(connection, number)
        before = await self.prefiller.ask(request)
        timing = await self.decoder.ask(request)
        return Timing(before.whole + timing.first_byte, before.whole + timing.whole)

    def close(self) -> None:
        self.prefiller.close()
        self.decoder.close()


async def drive(clients: Sequence[Asking], total: int) -> Outcome:
    """Asks `total` requests, spread over the clients as they come free."""
    left = iter(range(total))
    outcome = Outcome()

    async def work(connection: int, client: Asking) -> None:
        for number, _ in enumerate(left):
            async with asyncio.timeout(LONGEST):
                outcome.timings.append(await client.ask(connection, number))

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for connection, client in enumerate(clients):
            group.create_task(work(connection, client))
    outcome.elapsed = time.perf_counter() - started
    return outcome


async def dial(port: int, count: int) -> list[Connection]:
    made: list[Connection] = []
    while len(made) < count:
        batch = min(DIALS, count - len(made))
        made += await asyncio.gather(*[Connection.open(port) for _ in range(batch)])
    return made
