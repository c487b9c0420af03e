"""An engine over a real socket that does whatever a test says."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[3, 2, 1]],
    "remote_engine_id": "85654aea-3ebd-49ac-a237-52c3397970a4_dp0",
    "remote_request_id": "chatcmpl-1",
    "remote_host": "10.9.8.7",
    "remote_port": 5600,
    "tp_size": 1,
    "remote_num_tokens": 33,
    "remote_blocks_expiry_time": 12345.678901234567,
    "a_key_of_next_year": {"nested": [1, None, "é"]},
}
USUAL = {"id": "cmpl-1", "object": "text_completion", "choices": [{"index": 0, "text": "x"}]}
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(text: str) -> bytes:
    content = {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "text": text, "finish_reason": None}],
    }
    return b"data: " + json.dumps(content).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


@dataclass
class Received:
    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes
    connection: int

    @property
    def json(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self.body)
        return content

    def header(self, name: str) -> str | None:
        values = [value for key, value in self.headers if key == name]
        assert len(values) < 2, f"{name} came {len(values)} times"
        return values[0] if values else None


@dataclass
class Peer:
    """The router's connection, as the engine sees it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        if self.writer.is_closing():
            raise ConnectionResetError("the router has left")  # uvloop says RuntimeError
        self.writer.write(data)
        await self.writer.drain()

    async def answer(
        self, content: object, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        given = {"content-type": "application/json", "content-length": len(body)} | (headers or {})
        lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
        await self.send(f"HTTP/1.1 {status} Whatever\r\n{lines}\r\n".encode() + body)

    async def stream(self, *events: bytes) -> None:
        await self.send(STREAM_HEAD + b"".join(map(chunk, events)) + b"0\r\n\r\n")

    def close(self) -> None:
        self.writer.close()

    def reset(self) -> None:
        """Closes with a TCP reset."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.close()

    async def wait_left(self) -> None:
        """Returns when the router has closed this connection."""
        async with asyncio.timeout(5):
            with contextlib.suppress(ConnectionError):
                assert await self.reader.read() == b""


Script = Callable[[Received, Peer], Awaitable[None]]


async def usual_prefill(request: Received, peer: Peer) -> None:
    await peer.answer(USUAL | {"kv_transfer_params": PARAMS})


async def usual_decode(request: Received, peer: Peer) -> None:
    if request.json.get("stream"):
        await peer.stream(event("a"), event("b"), DONE)
    else:
        await peer.answer(USUAL)


async def fails(request: Received, peer: Peer) -> None:
    await peer.answer({"error": {"message": "no"}}, 500)


async def refuses(request: Received, peer: Peer) -> None:
    await peer.answer({"error": {"message": "no"}}, 400)


@dataclass
class MockEngine:
    """`scripts` answer the next POSTs, one each; then `usual` answers."""

    usual: Script
    scripts: list[Script] = field(default_factory=list)
    requests: list[Received] = field(default_factory=list)
    identity: dict[str, Any] | bytes | None = None
    models: list[str] = field(default_factory=lambda: ["m", "other"])
    contexts: dict[str, int] = field(default_factory=dict)
    """Tokens, of those models of which it tells."""
    healthy: bool = True
    is_mute: bool = False
    """It accepts, and answers nothing that it is asked from now on."""
    is_busy: bool = False
    """It answers no probe, and all the rest."""
    pages: dict[str, bytes] = field(default_factory=dict)
    """What it answers to other GETs, by path; 404 to all others."""
    probes: int = 0
    looks: int = 0
    """Other GETs that came."""
    connections: int = 0
    port: int = 0
    tls: ssl.SSLContext | None = None
    _server: asyncio.Server | None = None
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    failures: list[BaseException] = field(default_factory=list)

    @property
    def last(self) -> Received:
        return self.requests[-1]

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(
            self._serve, "127.0.0.1", port, limit=2**20, ssl=self.tls
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """From now on connections are refused, and existing ones are cut."""
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        self.connections += 1
        number = self.connections
        try:
            while (request := await _receive(reader, number)) is not None:
                await self._answer(request, Peer(reader, writer))
        except asyncio.CancelledError:
            pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        except BaseException as error:
            self.failures.append(error)
        finally:
            self._tasks.discard(task)
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, request: Received, peer: Peer) -> None:
        if self.is_mute or (self.is_busy and request.path == "/health"):
            self.requests += [request] if request.method == "POST" else []
            await peer.reader.read()
        elif request.path == "/health":
            self.probes += 1
            await peer.answer(b"", 200 if self.healthy else 503)
        elif request.path == "/v1/models":
            data = [
                {"id": name, "object": "model", "max_model_len": self.contexts.get(name)}
                for name in self.models
            ]
            await peer.answer({"object": "list", "data": data})
        elif request.path == "/disagg/identity":
            await peer.answer(self.identity or {}, 404 if self.identity is None else 200)
        elif request.method == "GET":
            self.looks += 1
            page = self.pages.get(request.path)
            await peer.answer(page or b"", 404 if page is None else 200)
        else:
            self.requests.append(request)
            is_aside = is_release(request) and request.path == "/v1/completions"
            script = self.scripts.pop(0) if self.scripts and not is_aside else self.usual
            await script(request, peer)


async def _receive(reader: asyncio.StreamReader, connection: int) -> Received | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.decode("latin-1").split("\r\n")[:-2]
    method, path, _ = first.split(" ")
    headers = [(name.lower(), value) for name, value in (line.split(": ", 1) for line in lines)]
    length = int(dict(headers).get("content-length", "0"))
    return Received(method, path, headers, await reader.readexactly(length), connection)


@contextlib.asynccontextmanager
async def running_engine(
    usual: Script, tls: ssl.SSLContext | None = None
) -> AsyncIterator[MockEngine]:
    engine = MockEngine(usual, tls=tls)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()
        assert not engine.failures, engine.failures


def is_release(request: Received) -> bool:
    """A request that exists to free a prefiller's blocks."""
    return (request.header("x-request-id") or "").endswith("-release")
