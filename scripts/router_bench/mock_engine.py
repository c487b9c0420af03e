"""Two engines that answer at once, in a process of their own: `python -m ... mock_engine`.

Prints their two ports, prefiller first. A request says what it wants in OpenAI's own fields:
`max_tokens` is the number of chunks of a stream, `seed` the microseconds between two of them, 0
for all in one write.
"""

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any, cast

import httptools
import orjson
import uvloop

BACKLOG = 4096
PARAMS: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [list(range(64))],
    "remote_engine_id": "85654aea-3ebd-49ac-a237-52c3397970a4",
    "remote_request_id": "cmpl-1",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    "remote_num_tokens": 1024,
}
ANSWER = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "x"},
            "finish_reason": "stop",
        }
    ],
    "usage": {"prompt_tokens": 100, "completion_tokens": 1, "total_tokens": 101},
    "kv_transfer_params": PARAMS,
}
DELTA = {
    "id": "chatcmpl-1",
    "object": "chat.completion.chunk",
    "created": 1,
    "model": "m",
    "choices": [
        {"index": 0, "delta": {"content": " tok"}, "logprobs": None, "finish_reason": None}
    ],
}
MODELS = {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "x"}]}
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


def whole(content: object) -> bytes:
    body = json.dumps(content).encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


def event(content: bytes) -> bytes:
    block = b"data: " + content + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(block), block)


UNARY = whole(ANSWER)
CHUNK = event(json.dumps(DELTA).encode())
LAST = event(b"[DONE]") + b"0\r\n\r\n"


class Engine(asyncio.Protocol):
    """One connection. The prefiller always answers whole."""

    def __init__(self, is_decoder: bool) -> None:
        self._is_decoder = is_decoder
        self._parser = httptools.HttpRequestParser(self)
        self._pieces: list[bytes] = []
        self._path = b""
        self._streams: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        for stream in self._streams:
            stream.cancel()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._path = url

    def on_body(self, piece: bytes) -> None:
        self._pieces.append(piece)

    def on_message_complete(self) -> None:
        body = b"".join(self._pieces)
        self._pieces.clear()
        if self._parser.get_method() == b"GET":
            self._transport.write(whole(MODELS if self._path == b"/v1/models" else {}))
        else:
            self._answer(body)

    def _answer(self, body: bytes) -> None:
        wanted = orjson.loads(body) if self._is_decoder else {}
        if not wanted.get("stream"):
            self._transport.write(UNARY)
        elif not wanted.get("seed"):
            self._transport.write(STREAM_HEAD + CHUNK * int(wanted["max_tokens"]) + LAST)
        else:
            stream = self._stream(int(wanted["max_tokens"]), wanted["seed"] / 1e6)
            task = asyncio.get_running_loop().create_task(stream)
            self._streams.add(task)
            task.add_done_callback(self._streams.discard)

    async def _stream(self, chunks: int, interval: float) -> None:
        self._transport.write(STREAM_HEAD + CHUNK)
        for _ in range(chunks - 1):
            await asyncio.sleep(interval)
            self._transport.write(CHUNK)
        self._transport.write(LAST)


async def serve() -> None:
    ports = [await _listen(lambda: Engine(False)), await _listen(lambda: Engine(True))]
    sys.stdout.write(f"{ports[0]} {ports[1]}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


async def _listen(factory: Callable[[], Engine]) -> int:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(factory, "127.0.0.1", 0, backlog=BACKLOG)
    port: int = server.sockets[0].getsockname()[1]
    return port


if __name__ == "__main__":
    uvloop.run(serve())
