"""What an engine that chats says, for tests: whole, and in chunks."""

import json
from typing import Any

from scripts.mock_engine import DONE, Peer, Received

USAGE = {
    "prompt_tokens": 10,
    "completion_tokens": 3,
    "total_tokens": 13,
    "prompt_tokens_details": {"cached_tokens": 4},
}


def chunk(delta: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish, **more}
    return _event({"choices": [choice]})


def usage() -> bytes:
    return _event({"choices": [], "usage": USAGE})


def _event(content: dict[str, Any]) -> bytes:
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return b"data: " + json.dumps(head | content).encode() + b"\n\n"


def whole(message: dict[str, Any], finish: str = "stop", **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}
    head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m"}
    return {**head, "choices": [choice | more], "usage": USAGE}


HELLO = (
    chunk({"role": "assistant", "content": ""}),
    chunk({"content": "Hel"}),
    chunk({"content": "lo"}),
    chunk({}, "stop", stop_reason=None),
    usage(),
    DONE,
)
CALLS = [
    {"id": "call_a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
    {"id": "call_b", "type": "function", "function": {"name": "g", "arguments": "{}"}},
]
SECOND = {"name": "g", "arguments": "{}"}
THOUGHTFUL = (
    chunk({"role": "assistant", "content": ""}),
    chunk({"reasoning": "hm"}),
    chunk({"reasoning": "m"}),
    chunk({"content": "Well"}),
    chunk({"tool_calls": [{"index": 0, "id": "call_a", "function": {"name": "f"}}]}),
    chunk({"tool_calls": [{"index": 0, "function": {"arguments": '{"x":'}}]}),
    chunk({"tool_calls": [{"index": 0, "function": {"arguments": " 1}"}}]}),
    chunk({"tool_calls": [{"index": 1, "id": "call_b", "function": SECOND}]}),
    chunk({}, "tool_calls"),
    usage(),
    DONE,
)  # fmt: skip


async def says_hello(request: Received, peer: Peer) -> None:
    if request.json.get("stream"):
        await peer.stream(*HELLO)
    else:
        await peer.answer(whole({"content": "Hello"}))


async def thinks_and_calls(request: Received, peer: Peer) -> None:
    if request.json.get("stream"):
        await peer.stream(*THOUGHTFUL)
    else:
        message = {"reasoning": "hmm", "content": "Well", "tool_calls": CALLS}
        await peer.answer(whole(message, "tool_calls"))


def events_of(raw: str) -> list[dict[str, Any]]:
    """Each event's data, checked to be of the type that its name says."""
    found: list[dict[str, Any]] = []
    for event in raw.split("\n\n"):
        lines = [line for line in event.splitlines() if not line.startswith(":")]
        if lines:
            name, data = lines
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
    return found
