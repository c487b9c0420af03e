"""The mock engine of benchmarks, failure drills and tests: HTTP as vLLM speaks it, and no model.

It has one HTTP half and two ways to answer:

* `MockEngine` runs in the test's own process; each request is answered by a coroutine of the
  test, a `Script`, which may send any bytes.
* `PacedEngine` is a process, `python -m scripts.mock_engine ROLE PORT`, and answers chats at a
  pace that the request itself names. It is cheap enough to keep a router's core busy, and it can
  be made to fail: `POST /chaos/FAULT` switches a `Fault` on.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import socket
import ssl
import struct
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, cast

import httptools
import orjson

STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
LAST_CHUNK = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"
NO_LINGER = struct.pack("ii", 1, 0)
BACKLOG = 4096


def whole(content: object, status: str = "200 OK", headers: str = "") -> bytes:
    """Return an answer in JSON. `headers` are whole lines beside the usual ones."""
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\n{headers}"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def chunk(data: bytes) -> bytes:
    """Return `data` as a chunk of a chunked body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


class EngineConnection(asyncio.Protocol):
    """One connection to a mock engine: parses requests and keeps the tasks that answer them."""

    def __init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._pieces: list[bytes] = []
        self.path = b""
        self.tasks: set[asyncio.Task[None]] = set()

    @abstractmethod
    def on_request(self, method: bytes, path: bytes, body: bytes) -> None:
        """Handle a request that has arrived completely."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        for task in self.tasks:
            task.cancel()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.transport.abort()

    def on_url(self, url: bytes) -> None:
        self.path = url

    def on_body(self, piece: bytes) -> None:
        self._pieces.append(piece)

    def on_message_complete(self) -> None:
        body = b"".join(self._pieces)
        self._pieces.clear()
        self.on_request(self._parser.get_method(), self.path, body)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def reset(self) -> None:
        """Close the connection with a TCP reset."""
        raw: socket.socket = self.transport.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
        self.transport.abort()


# The engine that runs a test's scripts.


@dataclass
class Received:
    """A request as it arrived. `connection` counts the engine's connections from 1."""

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
        """Return a header's value; fail if the request has several of that name."""
        values = [value for key, value in self.headers if key == name]
        assert len(values) < 2, f"{name} came {len(values)} times"
        return values[0] if values else None


class Peer:
    """The router's connection, as a script uses it."""

    def __init__(self, connection: ScriptedConnection) -> None:
        self.connection = connection

    @property
    def transport(self) -> asyncio.Transport:
        return self.connection.transport

    async def send(self, data: bytes) -> None:
        """Send bytes and wait while the router does not read. Raises ConnectionResetError."""
        if self.transport.is_closing():
            raise ConnectionResetError("the router has closed the connection")
        self.transport.write(data)
        await self.connection.writable.wait()
        if self.connection.lost.is_set():
            raise ConnectionResetError("the router has closed the connection")

    async def answer(
        self, content: object, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        given = {"content-type": "application/json", "content-length": len(body)} | (headers or {})
        lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
        await self.send(f"HTTP/1.1 {status} Whatever\r\n{lines}\r\n".encode() + body)

    async def stream(self, *events: bytes) -> None:
        await self.send(STREAM_HEAD + b"".join(map(chunk, events)) + LAST_CHUNK)

    def close(self) -> None:
        self.transport.close()

    def reset(self) -> None:
        self.connection.reset()

    async def wait_left(self, timeout: float | None = 5) -> None:
        """Wait until the router closes the connection; fail if it sends another request first."""
        async with asyncio.timeout(timeout):
            await self.connection.left.wait()
        assert not self.connection.waiting


Script = Callable[[Received, Peer], Awaitable[None]]


class ScriptedConnection(EngineConnection):
    """Hands requests to its engine one after the other."""

    def __init__(self, engine: MockEngine) -> None:
        super().__init__()
        self.engine = engine
        self.waiting: list[Received] = []
        self.writable, self.left, self.lost = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.writable.set()
        self._headers: list[tuple[str, str]] = []
        self._number = 0
        self._is_answering = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.engine.connections += 1
        self.engine.open_connections.add(self)
        self._number = self.engine.connections

    def connection_lost(self, exc: Exception | None) -> None:
        """Leave it to the running script to notice."""
        self.engine.open_connections.discard(self)
        for event in (self.left, self.lost, self.writable):
            event.set()

    def data_received(self, data: bytes) -> None:
        """Wait for more after what is no HTTP, as a server does that reads up to an empty line."""
        with contextlib.suppress(httptools.HttpParserError):
            self._parser.feed_data(data)

    def eof_received(self) -> bool:
        """A router that closes only its own direction may still be answered, except over TLS."""
        self.left.set()
        if not self._is_answering:
            self.transport.close()
        return self.engine.tls is None

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def on_message_begin(self) -> None:
        self._headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.decode("latin-1").lower(), value.decode("latin-1")))

    def on_request(self, method: bytes, path: bytes, body: bytes) -> None:
        text = path.decode("latin-1")
        self.waiting.append(Received(method.decode(), text, self._headers, body, self._number))
        if not self._is_answering:  # a task that has ended is in `tasks` for one turn of the loop
            self._is_answering = True
            self.spawn(self._answer())

    async def _answer(self) -> None:
        try:
            while self.waiting:
                await self.engine.answer(self.waiting.pop(0), Peer(self))
            self._is_answering = False
            if not self.left.is_set():
                return
        except (asyncio.CancelledError, ConnectionError):
            pass
        except BaseException as error:
            self.engine.failures.append(error)
        self.transport.close()


@dataclass(eq=False)
class MockEngine:
    """An engine on 127.0.0.1. `scripts` answer the next POSTs, one each; then `usual` answers."""

    usual: Script
    scripts: list[Script] = field(default_factory=list)
    requests: list[Received] = field(default_factory=list)
    """Every POST."""
    identity: dict[str, Any] | bytes | None = None
    models: list[str] = field(default_factory=lambda: ["m", "other"])
    """The names of its model."""
    listing: Script | None = None
    """Answers GET /v1/models instead of the usual answer."""
    adapters: list[str] = field(default_factory=list)
    """LoRA adapters of the first model."""
    contexts: dict[str, int] = field(default_factory=dict)
    """`max_model_len` in tokens, by model."""
    healthy: bool = True
    is_mute: bool = False
    """It accepts connections and answers nothing."""
    is_busy: bool = False
    """It answers everything except GET /health."""
    pages: dict[str, bytes] = field(default_factory=dict)
    """Answers to other GETs, by path; 404 to all others."""
    probes: int = 0
    looks: int = 0
    """How many other GETs it received."""
    connections: int = 0
    open_connections: set[ScriptedConnection] = field(default_factory=set)
    port: int = 0
    tls: ssl.SSLContext | None = None
    failures: list[BaseException] = field(default_factory=list)
    """Errors of scripts, lost connections excepted."""
    _server: asyncio.Server | None = None

    @property
    def last(self) -> Received:
        return self.requests[-1]

    async def start(self, port: int = 0) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: ScriptedConnection(self), "127.0.0.1", port, ssl=self.tls
        )
        self.port = self._server.sockets[0].getsockname()[1]

    def stop_listening(self) -> None:
        """Refuse connections from now on; those that exist go on."""
        assert self._server is not None
        self._server.close()

    async def stop(self) -> None:
        """Refuse connections from now on, and cut those that exist."""
        self.stop_listening()
        connections = list(self.open_connections)
        tasks = [task for connection in connections for task in connection.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for connection in connections:
            connection.transport.abort()

    async def answer(self, request: Received, peer: Peer) -> None:
        """Answer a GET from the fields, and a POST with the next script."""
        if self.is_mute or (self.is_busy and request.path == "/health"):
            self.requests += [request] if request.method == "POST" else []
            await peer.wait_left(None)
        elif request.path == "/health":
            self.probes += 1
            await peer.answer(b"", 200 if self.healthy else 503)
        elif request.path == "/v1/models" and self.listing is not None:
            await self.listing(request, peer)
        elif request.path == "/v1/models":
            data = [
                {
                    "id": name,
                    "object": "model",
                    "root": "/mnt/models",
                    "max_model_len": self.contexts.get(name),
                }
                for name in self.models
            ]
            data += [{"id": name, "parent": self.models[0]} for name in self.adapters]
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


def is_release(request: Received) -> bool:
    """Tell whether a request only frees a prefiller's blocks."""
    return (request.header("x-request-id") or "").endswith("-release")


# The engine that answers chats at a pace.

CHAT = b"/v1/chat/completions"
CHAOS = b"/chaos/"
IDLE_TIMEOUT_S = 5.0
"""After which a drill's engine closes a connection, as uvicorn does under vLLM."""
SLOW_S = 1.0
PREFILL_S = 0.1
"""The prefill time of an engine in a drill, so that requests run when it breaks."""
PARAMS: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [list(range(64))],
    "remote_engine_id": "85654aea-3ebd-49ac-a237-52c3397970a4",
    "remote_request_id": "chatcmpl-1",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    "remote_num_tokens": 1024,
}
MODELS = {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "x"}]}
RESUMABLE = {"capabilities": ["begun", "tell_token_ids"], "renders": {"model": "m"}}
NOISE = (
    b"\x16\x03\x01 this is not HTTP\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n<nonsense",
    b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 999\r\n\r\n{"id": ',
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzzz\r\n",
    b"HTTP/1.1 200",
)


class Fault(StrEnum):
    """How an engine that answers GET /health fails chats."""

    NONE = "none"
    ERROR = "error"
    """Answers 500."""
    BUSY = "busy"
    """Answers 503 with Retry-After."""
    SILENT = "silent"
    """Never answers."""
    RUBBISH = "rubbish"
    """Answers what is not HTTP, not JSON, or ends too early."""
    RESET = "reset"
    """Resets the connection."""
    SLOW = "slow"
    """Answers a second later; this is no failure."""


def text_of(nonce: str, chunks: int) -> list[str]:
    """Return the chunks of a drill's answer to the request with this nonce."""
    return [f"{nonce}/{number} " for number in range(chunks)]


def _completion(kind: str, choice: dict[str, Any]) -> dict[str, Any]:
    choices = [{"index": 0, **choice}]
    return {"id": "chatcmpl-1", "object": kind, "created": 1, "model": "m", "choices": choices}


def _answer(text: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    usage = {"prompt_tokens": 100, "completion_tokens": 1, "total_tokens": 101}
    choice = {"message": message, "finish_reason": "stop"}
    return {**_completion("chat.completion", choice), "usage": usage}


def _event(
    delta: dict[str, str],
    finish: str | None,
    comments: bytes = b"",
    *,
    more: Mapping[str, Any] | None = None,
    fields: Mapping[str, Any] | None = None,
) -> bytes:
    """Return a chunk of a chat's stream. `more`: fields of its choice; `fields`: its own."""
    choice = {"delta": delta, "logprobs": None, "finish_reason": finish, **(more or {})}
    made = {**_completion("chat.completion.chunk", choice), **(fields or {})}
    content = json.dumps(made, separators=(",", ":")).encode()
    return chunk(comments + b"data: " + content + b"\n\n")


@dataclass
class PacedEngine:
    """`max_tokens` of a chat is its number of chunks, `seed` the microseconds before each of them.

    Where `is_drill`, the first word of the prompt is the request's nonce. The prefiller puts the
    nonce into its kv_transfer_params, and the decoder repeats it in each chunk, or names the nonce
    of whose KV it was given instead: so a client can tell a wrong answer. Otherwise all answers are
    the same bytes, made once, and `seed` 0 sends a stream in one write.
    """

    is_decoder: bool
    is_resumable: bool = False
    """Like our own engines it reports the token IDs of its streams, and continues what another
    decoder has begun (docs/wire-protocol.md)."""
    is_drill: bool = False
    rng: random.Random = field(default_factory=random.Random)
    is_stock: bool = False
    """Like stock vLLM it reports token IDs in its chunks, if it is asked to."""
    fault: Fault = Fault.NONE
    asked_at: list[float] = field(default_factory=list)
    """Monotonic times of a drill's chats since the last switch."""

    def __post_init__(self) -> None:
        self.identity = RESUMABLE if self.is_resumable else {}
        both = ({**_answer("x"), "kv_transfer_params": params} for params in (PARAMS, None))
        self.unary, self.without_kv = map(whole, both)
        self.last = chunk(DONE) + LAST_CHUNK
        self._bursts: dict[tuple[int, bool], list[bytes]] = {}

    def chunks(self, count: int, has_tokens: bool) -> list[bytes]:
        """Return the chunks of an answer outside drills, without its end."""
        made = self._bursts.get((count, has_tokens))
        if made is None and self.is_stock:
            ids = {"token_ids": [7]} if has_tokens else {}
            prompt = {"prompt_token_ids": [1] * 100} if has_tokens else {}
            made = [_event({"role": "assistant", "content": ""}, None, fields=prompt)]
            made += [_event({"content": " tok"}, None, more=ids)] * count
            made += [_event({}, "stop", more=ids)]
            self._bursts[count, has_tokens] = made
        if made is None:
            token = b": token_ids BwAA\n" if has_tokens else b""
            first = b": prompt_token_ids AQAA\n" + token if has_tokens else b""
            made = [_event({"content": " tok"}, None, first)]
            made += [_event({"content": " tok"}, None, token)] * (count - 1)
            made += [_event({}, "stop")] if self.is_resumable else []
            self._bursts[count, has_tokens] = made
        return made

    def switch(self, fault: str) -> list[float]:
        asked, self.asked_at = self.asked_at, []
        self.fault = Fault(fault)
        return asked


class PacedConnection(EngineConnection):
    def __init__(self, engine: PacedEngine) -> None:
        super().__init__()
        self._engine = engine
        self._idle: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._rest()

    def data_received(self, data: bytes) -> None:
        if self._idle is not None:
            self._idle.cancel()
        super().data_received(data)

    def on_request(self, method: bytes, path: bytes, body: bytes) -> None:
        engine = self._engine
        if path == CHAT and not engine.is_drill:
            self._answer_alike(body)
        elif path == CHAT:
            engine.asked_at.append(time.monotonic())
            self._answer_drill(json.loads(body))
        elif path.startswith(CHAOS):
            self._end(whole(engine.switch(path.removeprefix(CHAOS).decode())))
        else:
            pages = {b"/health": {}, b"/v1/models": MODELS, b"/disagg/identity": engine.identity}
            if engine.is_stock:
                pages[b"/version"] = {"version": "0.33.0"}
            found = path in pages or not engine.is_drill
            status = "200 OK" if found else "404 Not Found"
            self._end(whole(pages.get(path, {}), status))

    def _end(self, data: bytes) -> None:
        self.transport.write(data)
        self._rest()

    def _rest(self) -> None:
        if self._engine.is_drill:
            loop = asyncio.get_running_loop()
            self._idle = loop.call_later(IDLE_TIMEOUT_S, self.transport.close)

    def _answer_alike(self, body: bytes) -> None:
        wanted = orjson.loads(body) if self._engine.is_decoder else {}
        params = wanted.get("kv_transfer_params") or {}
        if not wanted.get("stream"):
            kept = not wanted or params.get("retain")
            return self.transport.write(self._engine.unary if kept else self._engine.without_kv)
        has_tokens = self._engine.is_resumable and bool(params.get("tell_token_ids"))
        has_tokens = has_tokens or wanted.get("return_token_ids") is True
        chunks = self._engine.chunks(int(wanted["max_tokens"]), has_tokens)
        if not wanted.get("seed"):
            return self.transport.write(STREAM_HEAD + b"".join(chunks) + self._engine.last)
        self.spawn(self._pace(chunks, wanted["seed"] / 1e6))

    async def _pace(self, chunks: list[bytes], interval: float) -> None:
        self.transport.write(STREAM_HEAD + chunks[0])
        for one in chunks[1:]:
            await asyncio.sleep(interval)
            self.transport.write(one)
        self.transport.write(self._engine.last)

    def _answer_drill(self, asked: dict[str, Any]) -> None:
        answer = self._decode if self._engine.is_decoder else self._prefill
        match self._engine.fault:
            case Fault.NONE:
                self.spawn(answer(asked, 0.0))
            case Fault.SLOW:
                self.spawn(answer(asked, SLOW_S))
            case Fault.ERROR:
                self._refuse("500 Internal Server Error", "EngineCore encountered an issue.")
            case Fault.BUSY:
                self._refuse("503 Service Unavailable", "overloaded", "retry-after: 1\r\n")
            case Fault.RUBBISH:
                self.transport.write(self._engine.rng.choice(NOISE))
                self.transport.close()
            case Fault.RESET:
                self.reset()
            case Fault.SILENT:
                pass

    def _refuse(self, status: str, text: str, headers: str = "") -> None:
        error = {"message": text, "type": "InternalServerError", "param": None}
        self._end(whole({"error": {**error, "code": int(status[:3])}}, status, headers))

    async def _prefill(self, asked: dict[str, Any], delay: float) -> None:
        await asyncio.sleep(delay + PREFILL_S)
        nonce = asked["messages"][-1]["content"].split()[0]
        params = {**PARAMS, "remote_request_id": f"chatcmpl-{nonce}", "nonce": nonce}
        self._end(whole({**_answer("x"), "kv_transfer_params": params}))

    async def _decode(self, asked: dict[str, Any], delay: float) -> None:
        nonce = asked["messages"][-1]["content"].split()[0]
        params = asked.get("kv_transfer_params") or {}
        if params.get("nonce", nonce) != nonce:
            nonce = f"the-KV-of-{params['nonce']}"
        await asyncio.sleep(delay)
        texts, interval = text_of(nonce, asked["max_tokens"]), asked["seed"] / 1e6
        if not asked.get("stream"):
            await asyncio.sleep(interval * len(texts))
            self._end(whole(_answer("".join(texts))))
            return
        from engine_ext.common.resume_payload import token_id_comment

        self.transport.write(STREAM_HEAD)
        for number in range(params.get("begun", {}).get("spoken", 0), len(texts)):
            await asyncio.sleep(interval)
            finish = "stop" if number == len(texts) - 1 else None
            has_tokens = "tell_token_ids" in params
            comments = (
                token_id_comment([number], () if number else [1]).encode() if has_tokens else b""
            )
            self.transport.write(_event({"content": texts[number]}, finish, comments))
        self._end(self._engine.last)


async def serve(engines: list[PacedEngine], host: str, port: int) -> None:
    """Serve each engine on a port of its own, print the ports, and run until killed."""
    loop = asyncio.get_running_loop()
    servers = [
        await loop.create_server(
            lambda engine=engine: PacedConnection(engine),  # type: ignore[misc]
            *(host, port),
            backlog=BACKLOG,
        )
        for engine in engines
    ]
    print(*(server.sockets[0].getsockname()[1] for server in servers), flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("role", choices=("prefill", "decode", "pair"), help="pair: one of each")
    parser.add_argument("port", type=int, nargs="?", default=0, help="0: any, and it is printed")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--resumable", action="store_true", help="name tokens, resume streams")
    parser.add_argument("--stock", action="store_true", help="name tokens as stock vLLM does")
    parser.add_argument("--drill", metavar="SEED", help="repeat nonces; can be made to fail")
    options = parser.parse_args()
    is_drill, rng = options.drill is not None, random.Random(options.drill)
    roles = ("prefill", "decode") if options.role == "pair" else (options.role,)
    engines = [
        PacedEngine(
            *(role == "decode", options.resumable or is_drill, is_drill, rng),
            is_stock=options.stock,
        )
        for role in roles
    ]
    import uvloop  # absent where tests/clients imports this module

    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(serve(engines, options.host, options.port))


if __name__ == "__main__":
    main()
