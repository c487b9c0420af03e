"""A client: one connection at a time, one request at a time, kept alive unless told otherwise."""

import asyncio
import time
from dataclasses import dataclass
from typing import cast

import httptools

from scripts.chaos_bench.answers import GARBLED, REFUSED, TIMEOUT, Ask, Received, judge

PATIENCE = 30.0


@dataclass(slots=True)
class Result:
    """`silence` is the longest time between two pieces of an answer, its end included."""

    kind: str
    started: float
    ended: float
    silence: float = 0.0

    @property
    def waited(self) -> float:
        return self.ended - self.started


class Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._done: asyncio.Future[None] | None = None
        self._spoke_at = 0.0
        self.received = Received()
        self.silence = 0.0
        self.is_open = True
        self.is_broken = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._close()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.is_broken = True
            self.close()

    def on_headers_complete(self) -> None:
        self.received.status = self._parser.get_status_code()
        self._note_silence()

    def on_body(self, piece: bytes) -> None:
        self._note_silence()
        self.received.body += piece

    def on_message_complete(self) -> None:
        self.received.is_complete = True
        if not self._parser.should_keep_alive():
            self.is_open = False
        self._finish()

    async def ask(self, request: bytes) -> None:
        """Until the answer has ended, in whatever way."""
        self.received, self.silence, self._spoke_at = Received(), 0.0, 0.0
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._done

    def close(self) -> None:
        self._close()
        self._transport.abort()

    def _close(self) -> None:
        self.is_open = False
        self._finish()

    def _finish(self) -> None:
        if self._done is not None and not self._done.done():
            self._note_silence()
            self._done.set_result(None)

    def _note_silence(self) -> None:
        now = time.monotonic()
        if self._spoke_at:
            self.silence = max(self.silence, now - self._spoke_at)
        if self.received.status is not None:
            self._spoke_at = now


class Client:
    def __init__(self) -> None:
        self._connection: Connection | None = None

    async def ask(self, port: int, ask: Ask) -> Result:
        started = time.monotonic()
        try:
            async with asyncio.timeout(PATIENCE):
                connection = await self._connected(port)
                await connection.ask(ask.request)
        except TimeoutError:
            silence = self._connection.silence if self._connection else 0.0
            self.close()
            return Result(TIMEOUT, started, time.monotonic(), silence)
        except OSError:
            return Result(REFUSED, started, time.monotonic())
        kind = GARBLED if connection.is_broken else judge(ask, connection.received)
        return Result(kind, started, time.monotonic(), connection.silence)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    async def _connected(self, port: int) -> Connection:
        if self._connection is None or not self._connection.is_open:
            self.close()
            loop = asyncio.get_running_loop()
            _, self._connection = await loop.create_connection(Connection, "127.0.0.1", port)
        return self._connection
