"""What mock engines answer in conversations, as ours and stock vLLM's do."""

import json
from collections.abc import Callable
from typing import Any

from scripts.mock_engine import DONE, Peer, Received, Script
from tests.unit.router.mock_engine import PARAMS

PROOF = {"v": 1, "block": 16, "n": 33, "h": "AAAA"}
KEPT = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_block_ids": [list(range(40))],
    "remote_engine_id": "decoder-1",
    "remote_request_id": "chatcmpl-d",
    "remote_host": "10.1.1.1",
    "remote_port": 5601,
    "tp_size": 1,
    "remote_num_tokens": 633,
    "remote_blocks_expiry_time": 98765.432109876543,
    "next_year": [1, {"é": None}],
}
Chunk = dict[str, Any]


def prefilling(prompt_tokens: int | None = 600, **params: Any) -> Script:
    """A prefiller; with `prefix_proof` it is one of ours."""

    async def script(request: Received, peer: Peer) -> None:
        usage = {} if prompt_tokens is None else {"usage": {"prompt_tokens": prompt_tokens}}
        choices = [{"index": 0, "text": "x", "message": {"role": "assistant", "content": "x"}}]
        given = {"kv_transfer_params": {**PARAMS, **params}}
        await peer.answer({"id": "1", "choices": choices, **usage, **given})

    return script


def decoding(
    message: dict[str, Any] | None = None,
    kept: dict[str, Any] | None = KEPT,
    in_stream: bool = True,
    alone: bool = False,
) -> Script:
    """A decoder that keeps KV where it is asked to: `retain` (ours), or any params (stock)."""

    said = {"role": "assistant", "content": "fine", **(message or {})}

    async def script(request: Received, peer: Peer) -> None:
        body = request.json
        params = kept if body.get("kv_transfer_params") else None
        if body.get("stream"):
            await peer.stream(*stream(said, params if in_stream else None, alone))
        else:
            await peer.answer(whole(request, said, params))

    return script


def whole(request: Received, said: dict[str, Any], params: dict[str, Any] | None) -> Chunk:
    chat = "chat" in request.path
    choice = {"message": said} if chat else {"text": said["content"]}
    return {
        "id": "1",
        "object": "chat.completion" if chat else "text_completion",
        "created": 5,
        "model": "m",
        "choices": [{"index": 0, **choice, "logprobs": None, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 600, "completion_tokens": 2, "total_tokens": 602},
        "kv_transfer_params": params,
    }


def sse(chunk: Chunk) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def delta(content: dict[str, Any], finish: str | None = None, **rest: Any) -> Chunk:
    choice = {"index": 0, "delta": content, "finish_reason": finish}
    head = {"id": "1", "object": "chat.completion.chunk", "created": 5, "model": "m"}
    return {**head, "choices": [choice], **rest}


def stream(said: dict[str, Any], params: dict[str, Any] | None, alone: bool) -> list[bytes]:
    """A chat's events, params in the last chunk or in one of their own."""
    rest = {} if params is None or alone else {"kv_transfer_params": params}
    parts = [delta({"role": "assistant", "content": ""})]
    parts += [delta({name: value}) for name, value in said.items() if name != "role"]
    parts.append(delta({}, "stop", **rest))
    events = [sse(part) for part in parts]
    if params is not None and alone:
        events.append(sse({**delta({}), "choices": [], "kv_transfer_params": params}))
    return [*events, DONE]


def rejecting(*events: bytes) -> Script:
    """A decoder whose cache does not hold enough: it rejects what has a threshold above 0."""

    async def script(request: Received, peer: Peer) -> None:
        if not request.json.get("cache_hit_threshold"):
            await decoding()(request, peer)
        elif request.json.get("stream"):
            await peer.stream(*events)
        else:
            choice = {"index": 0, "message": {}, "text": "", "finish_reason": "cache_threshold"}
            await peer.answer({"id": "1", "choices": [choice]})

    return script


Maker = Callable[..., Script]
