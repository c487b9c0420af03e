"""Two engines that answer at once, in a process of their own: `python -m ... mock_engine [tells]`.

Prints their two ports, prefiller first. A request says what it wants in OpenAI's own fields:
`max_tokens` is the number of chunks of a stream, `seed` the microseconds between two of them, 0
for all in one write. With `tells` the decoder names the tokens of a stream to who asks for them.
"""

import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import orjson
import uvloop

from scripts.bench.mock_http import MODELS, STREAM_HEAD, MockConnection, event, whole

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
UNARY = whole(ANSWER)
CHUNK = event(json.dumps(DELTA).encode())
ID = b": token_ids BwAA\n"
TOLD = event(json.dumps(DELTA).encode(), ID)
FIRST_TOLD = event(json.dumps(DELTA).encode(), b": prompt_token_ids AQAA\n" + ID)
FINISH = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
LAST_TOLD = event(json.dumps({**DELTA, "choices": [FINISH]}).encode())
LAST = event(b"[DONE]") + b"0\r\n\r\n"
TELLS = {"capabilities": ["begun", "tell_token_ids"], "renders": {"model": "m"}}


class Engine(MockConnection):
    """One connection. The prefiller always answers whole."""

    def __init__(self, is_decoder: bool, tells: bool) -> None:
        super().__init__()
        self._is_decoder, self._tells = is_decoder, tells

    def asked(self, path: bytes, body: bytes) -> None:
        if self._parser.get_method() == b"GET":
            pages = {b"/v1/models": MODELS, b"/disagg/identity": TELLS if self._tells else {}}
            self._transport.write(whole(pages.get(path, {})))
        else:
            self._answer(body)

    def _answer(self, body: bytes) -> None:
        wanted = orjson.loads(body) if self._is_decoder else {}
        if not wanted.get("stream"):
            self._transport.write(UNARY)
            return
        told = self._tells and wanted.get("kv_transfer_params", {}).get("tell_token_ids")
        first, chunk = (FIRST_TOLD, TOLD) if told else (CHUNK, CHUNK)
        more, last = int(wanted["max_tokens"]) - 1, LAST_TOLD + LAST if self._tells else LAST
        if not wanted.get("seed"):
            self._transport.write(STREAM_HEAD + first + chunk * more + last)
        else:
            stream = self._stream(STREAM_HEAD + first, [chunk] * more, last, wanted["seed"] / 1e6)
            self._spawn(asyncio.get_running_loop().create_task(stream))

    async def _stream(
        self, first: bytes, chunks: Sequence[bytes], last: bytes, interval: float
    ) -> None:
        self._transport.write(first)
        for chunk in chunks:
            await asyncio.sleep(interval)
            self._transport.write(chunk)
        self._transport.write(last)


async def serve(tells: bool) -> None:
    ports = [await _listen(partial(Engine, is_decoder, tells)) for is_decoder in (False, True)]
    sys.stdout.write(f"{ports[0]} {ports[1]}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


async def _listen(factory: Callable[[], Engine]) -> int:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(factory, "127.0.0.1", 0, backlog=BACKLOG)
    port: int = server.sockets[0].getsockname()[1]
    return port


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1:] == ["tells"]))
