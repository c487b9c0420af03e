"""An engine that answers as vLLM does and can be made to fail: `... mock_engine ROLE PORT SEED`.

`max_tokens` is the number of chunks of an answer and `seed` the microseconds between two of them.
The first word of the prompt is the request's nonce: the prefiller puts it into its
kv_transfer_params, and the decoder says it in every chunk, or whose KV it was given instead.

Like our own engines it names the tokens that it says, one in each chunk, and goes on with what
another has begun (docs/mid-answer.md).

POST /chaos/FAULT switches a fault; it answers when requests came since the last switch.
"""

import asyncio
import json
import random
import socket
import struct
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import httptools

from engine_ext.base.begun import told
from scripts.bench.mock_http import (
    MODELS,
    STREAM_HEAD,
    MockConnection,
    chunked,
    event,
    whole,
)
from scripts.chaos_bench.faults import Fault

CHAT = b"/v1/chat/completions"
CONTROL = b"/chaos/"
KEEP_ALIVE = 5.0
"""Seconds after which an idle connection is closed, as uvicorn does under vLLM."""
PREFILL_SECONDS = 0.1
"""So long that whoever breaks a prefiller finds requests there."""
SLOW_SECONDS = 1.0
PARAMS: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [list(range(64))],
    "remote_engine_id": "85654aea-3ebd-49ac-a237-52c3397970a4",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
}
IDENTITY = {"capabilities": ["begun", "tell_token_ids"], "renders": {"model": "m"}}
PROMPT = [1]
NOISE = (
    b"\x16\x03\x01 this is not HTTP\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n<nonsense",
    b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 999\r\n\r\n{"id": ',
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzzz\r\n",
    b"HTTP/1.1 200",
)
NO_LINGER = struct.pack("ii", 1, 0)


def text_of(nonce: str, chunks: int) -> list[str]:
    """What a decoder says, chunk by chunk."""
    return [f"{nonce}/{number} " for number in range(chunks)]


def error(status: str, text: str, more: str = "") -> bytes:
    code = int(status.split()[0])
    told = {"message": text, "type": "InternalServerError", "param": None, "code": code}
    return whole({"error": told}, status, more)


@dataclass
class Engine:
    is_decoder: bool
    rng: random.Random
    fault: Fault = Fault.NONE
    asked_at: list[float] = field(default_factory=list)
    """By the machine's monotonic clock, which all processes share."""

    def switch(self, fault: str) -> list[float]:
        asked, self.asked_at = self.asked_at, []
        self.fault = Fault(fault)
        return asked


class Connection(MockConnection):
    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine
        self._idle: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._rest()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stir()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._stir()
        try:
            super().data_received(data)
        except httptools.HttpParserError:
            self._transport.abort()

    def asked(self, path: bytes, body: bytes) -> None:
        if path == CHAT:
            self._engine.asked_at.append(time.monotonic())
            self._meet(json.loads(body))
        elif path.startswith(CONTROL):
            fault = path.removeprefix(CONTROL).decode()
            self._end(whole(self._engine.switch(fault)))
        else:
            self._end(self._page())

    def _page(self) -> bytes:
        pages: dict[bytes, object] = {
            b"/health": {},
            b"/v1/models": MODELS,
            b"/disagg/identity": IDENTITY,
        }
        if self._path not in pages:
            return whole({"detail": "Not Found"}, "404 Not Found")
        return whole(pages[self._path])

    def _meet(self, asked: dict[str, Any]) -> None:
        match self._engine.fault:
            case Fault.NONE:
                self._begin(asked, 0.0)
            case Fault.SLOW:
                self._begin(asked, SLOW_SECONDS)
            case Fault.ERROR:
                self._end(error("500 Internal Server Error", "EngineCore encountered an issue."))
            case Fault.BUSY:
                self._end(error("503 Service Unavailable", "overloaded", "retry-after: 1\r\n"))
            case Fault.RUBBISH:
                self._transport.write(self._engine.rng.choice(NOISE))
                self._transport.close()
            case Fault.RESET:
                self._reset()
            case Fault.SILENT:
                pass

    def _reset(self) -> None:
        raw: socket.socket = self._transport.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
        self._transport.abort()

    def _begin(self, asked: dict[str, Any], delay: float) -> None:
        answer = self._decode if self._engine.is_decoder else self._prefill
        self._spawn(asyncio.get_running_loop().create_task(answer(asked, delay)))

    async def _prefill(self, asked: dict[str, Any], delay: float) -> None:
        await asyncio.sleep(delay + PREFILL_SECONDS)
        nonce = _nonce(asked)
        params = {**PARAMS, "remote_request_id": f"chatcmpl-{nonce}", "nonce": nonce}
        self._end(whole({**_answer("x"), "kv_transfer_params": params}))

    async def _decode(self, asked: dict[str, Any], delay: float) -> None:
        nonce = _nonce(asked)
        params = asked.get("kv_transfer_params") or {}
        if params.get("nonce", nonce) != nonce:
            nonce = f"the-KV-of-{params['nonce']}"
        await asyncio.sleep(delay)
        chunks, interval = text_of(nonce, asked["max_tokens"]), asked["seed"] / 1e6
        if asked.get("stream"):
            spoken = params.get("begun", {}).get("spoken", 0)
            await self._stream(chunks, interval, spoken, "tell_token_ids" in params)
        else:
            await asyncio.sleep(interval * len(chunks))
            self._end(whole(_answer("".join(chunks))))

    async def _stream(self, chunks: list[str], interval: float, spoken: int, tells: bool) -> None:
        self._transport.write(STREAM_HEAD)
        for number in range(spoken, len(chunks)):
            await asyncio.sleep(interval)
            finish = "stop" if number == len(chunks) - 1 else None
            said = json.dumps(_chunk(chunks[number], finish))
            comment = told([number], () if number else PROMPT) if tells else ""
            self._transport.write(chunked(f"{comment}data: {said}\n\n".encode()))
        self._end(event(b"[DONE]") + b"0\r\n\r\n")

    def _end(self, data: bytes) -> None:
        self._transport.write(data)
        self._rest()

    def _rest(self) -> None:
        loop = asyncio.get_running_loop()
        self._stir()
        self._idle = loop.call_later(KEEP_ALIVE, self._transport.close)

    def _stir(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None


def _nonce(asked: dict[str, Any]) -> str:
    content: str = asked["messages"][-1]["content"]
    return content.split()[0]


def _answer(text: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    usage = {"prompt_tokens": 100, "completion_tokens": 1, "total_tokens": 101}
    return {**_of("chat.completion", choice), "usage": usage}


def _chunk(text: str, finish: str | None) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return _of("chat.completion.chunk", choice)


def _of(kind: str, choice: dict[str, Any]) -> dict[str, Any]:
    return {"id": "chatcmpl-1", "object": kind, "created": 1, "model": "m", "choices": [choice]}


async def serve(role: str, port: int, seed: str) -> None:
    engine = Engine(role == "decode", random.Random(seed))
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(engine), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
