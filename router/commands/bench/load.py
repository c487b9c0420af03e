"""The load generator: clients that send prepared requests and note what comes back, and when.

`disagg-router bench` uses it, and so do the benchmarks and failure drills in `scripts/` and the
soak tests. A `Client` sends one request at a time over a connection that it keeps. It judges
nothing: an answer that is cut off, late or not HTTP becomes a `LoadExchange` with that problem.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, cast

import httptools

C = TypeVar("C")
J = TypeVar("J")

# Why there is no whole answer.
REFUSED = "no connection"
CLOSED = "the connection was closed before the answer ended"
TIMEOUT = "timeout"
MALFORMED = "malformed HTTP"


@dataclass(slots=True)
class LoadExchange:
    """A request and what came back. Times are of `time.monotonic`, in seconds.

    `status` is 0 without an answer's head, `first_byte` is 0 without a piece of its body.
    `problem` is empty for an answer that is complete by HTTP's rules, `error` is why there is no
    connection. `longest_gap` is the longest time between two pieces of an answer, its head and its
    end included.
    """

    started: float
    ended: float = 0.0
    first_byte: float = 0.0
    longest_gap: float = 0.0
    status: int = 0
    body: bytearray = field(default_factory=bytearray)
    problem: str = ""
    error: OSError | None = None

    @property
    def seconds(self) -> float:
        return self.ended - self.started


class ClientConnection(asyncio.Protocol):
    """One HTTP/1.1 connection to a server. Used by `Client` alone."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._exchange = LoadExchange(0.0)
        self._on_body: Callable[[bytes], object] = bytes
        self._done: asyncio.Future[None] | None = None
        self._latest = 0.0
        self.is_reusable = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_reusable = False
        self._finish(CLOSED)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._finish(MALFORMED)
            self.transport.abort()

    def eof_received(self) -> None:
        """End an answer that ends with its connection."""
        self.is_reusable = False

    def on_headers_complete(self) -> None:
        self._exchange.status = self._parser.get_status_code()
        self._note_gap()

    def on_body(self, piece: bytes) -> None:
        self._note_gap()
        if not self._exchange.first_byte:
            self._exchange.first_byte = self._latest
        self._on_body(piece)

    def on_message_complete(self) -> None:
        self.is_reusable = self.is_reusable and self._parser.should_keep_alive()
        self._finish("")

    async def send(
        self, request: bytes, exchange: LoadExchange, on_body: Callable[[bytes], object]
    ) -> None:
        """Return when the answer has ended, in whatever way."""
        self._exchange, self._on_body, self._latest = exchange, on_body, 0.0
        self._done = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        await self._done

    def _finish(self, problem: str) -> None:
        if self._done is not None and not self._done.done():
            self._note_gap()
            self._exchange.problem = problem
            self._done.set_result(None)

    def _note_gap(self) -> None:
        now, exchange = time.monotonic(), self._exchange
        if self._latest:
            exchange.longest_gap = max(exchange.longest_gap, now - self._latest)
        if exchange.status:
            self._latest = now


class Client:
    """Sends one request at a time. A changed `port` is that of the next connection."""

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self._connection: ClientConnection | None = None

    async def send(
        self, request: bytes, timeout: float, on_body: Callable[[bytes], object] | None = None
    ) -> LoadExchange:
        """Send a whole request and return when its answer has ended, or after `timeout` seconds.

        Pieces of the answer's body go to `on_body`, or else into `LoadExchange.body`.
        """
        exchange = LoadExchange(time.monotonic())
        try:
            async with asyncio.timeout(timeout):
                connection = await self.connect()
                await connection.send(request, exchange, on_body or exchange.body.extend)
        except TimeoutError:
            exchange.problem = TIMEOUT
        except OSError as error:
            exchange.problem, exchange.error = REFUSED, error
        except asyncio.CancelledError:
            self.close()
            raise
        exchange.ended = time.monotonic()
        if exchange.problem:
            self.close()
        return exchange

    async def connect(self) -> ClientConnection:
        """Return the kept connection, or a new one. Raises OSError."""
        if self._connection is None or not self._connection.is_reusable:
            self.close()
            loop = asyncio.get_running_loop()
            _, self._connection = await loop.create_connection(
                ClientConnection, self.host, self.port
            )
        return self._connection

    def close(self) -> None:
        """Close the connection at once; the next request opens another."""
        if self._connection is not None:
            self._connection.transport.abort()
            self._connection = None


async def drive(
    clients: Sequence[C], jobs: Iterable[J], perform: Callable[[C, J], Awaitable[object]]
) -> float:
    """Let each client take the next job as soon as it has done one, and return the seconds.

    Returns when there are no more jobs. The first exception of `perform` ends all clients.
    """
    left, started = iter(jobs), time.monotonic()

    async def work(client: C) -> None:
        for job in left:
            await perform(client, job)

    async with asyncio.TaskGroup() as group:
        for client in clients:
            group.create_task(work(client))
    return time.monotonic() - started


def request_bytes(
    path: str, body: bytes, headers: Iterable[tuple[str, str]] = (), host: str = "router"
) -> bytes:
    """Return a POST of a JSON body as the bytes that a client sends."""
    lines = [f"POST {path} HTTP/1.1", f"host: {host}", "content-type: application/json"]
    lines += [f"content-length: {len(body)}", *(f"{name}: {value}" for name, value in headers)]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body
