"""The scripted mock engine of the router's tests, with the answers that most of them want."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator

from scripts.mock_engine import (
    DONE,
    STREAM_HEAD,
    MockEngine,
    Peer,
    Received,
    Script,
    chunk,
    is_release,
)

__all__ = [
    "DONE",
    "PARAMS",
    "STREAM_HEAD",
    "USUAL",
    "MockEngine",
    "Peer",
    "Received",
    "Script",
    "answer_after",
    "chunk",
    "event",
    "fails",
    "is_release",
    "refuses",
    "running_engine",
    "usual_decode",
    "usual_prefill",
]

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


def event(text: str) -> bytes:
    content = {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "text": text, "finish_reason": None}],
    }
    return b"data: " + json.dumps(content).encode() + b"\n\n"


async def usual_prefill(request: Received, peer: Peer) -> None:
    await peer.answer(USUAL | {"kv_transfer_params": PARAMS})


async def usual_decode(request: Received, peer: Peer) -> None:
    if request.json.get("stream"):
        await peer.stream(event("a"), event("b"), DONE)
    else:
        await peer.answer(USUAL)


def answer_after(released: asyncio.Event, script: Script) -> Script:
    """Return a script that answers as `script` does once `released` is set."""

    async def answer(request: Received, peer: Peer) -> None:
        await released.wait()
        await script(request, peer)

    return answer


async def fails(request: Received, peer: Peer) -> None:
    await peer.answer({"error": {"message": "no"}}, 500)


async def refuses(request: Received, peer: Peer) -> None:
    await peer.answer({"error": {"message": "no"}}, 400)


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
