"""What mock engines have in common: HTTP/1.1 as they speak it, and the bytes of vLLM's answers."""

import asyncio
import json
from abc import abstractmethod
from typing import cast

import httptools

MODELS = {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "x"}]}
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


def whole(content: object, status: str = "200 OK", more: str = "") -> bytes:
    """`more` are further header lines."""
    body = json.dumps(content).encode()
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\n{more}"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def event(content: bytes, comments: bytes = b"") -> bytes:
    """One server-sent event in a chunk of its own. `comments` are whole lines before it."""
    return chunked(comments + b"data: " + content + b"\n\n")


def chunked(block: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(block), block)


class MockConnection(asyncio.Protocol):
    """One connection to a mock engine, and the tasks that answer on it."""

    def __init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._pieces: list[bytes] = []
        self._path = b""
        self._tasks: set[asyncio.Task[None]] = set()

    @abstractmethod
    def asked(self, path: bytes, body: bytes) -> None:
        """A whole request is here."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        for task in self._tasks:
            task.cancel()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._path = url

    def on_body(self, piece: bytes) -> None:
        self._pieces.append(piece)

    def on_message_complete(self) -> None:
        body = b"".join(self._pieces)
        self._pieces.clear()
        self.asked(self._path, body)

    def _spawn(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
