"""A decode engine that plays a model: what it answers follows from the request.

| the request | the answer |
|---|---|
| ends with tools' results | a text with the results |
| offers tools | a thought, a text, and a call of each of the first two; their pieces are mixed |
| asks for a JSON schema | `{"ok": true}` |
| has pictures | a text that counts them |
| anything else | a thought and a text |
"""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from scripts.mock_engine import DONE, MockEngine, Peer, Received
from tests.clients.conftest import scripted_stack
from tests.integration.processes import Server
from tests.unit.router.engine_scripts import usual_prefill
from tests.unit.router.openai.chats import chunk, usage, whole

Json = dict[str, Any]
# By a property of the tool.
ARGUMENTS = {"city": '{"city": "Oslo"}', "ok": '{"ok": true}'}


async def plays_a_model(request: Received, peer: Peer, is_mixed: bool = True) -> None:
    body = request.json
    messages: list[Json] = body["messages"]
    results = [text_of(message["content"]) for message in messages if message["role"] == "tool"]
    thought: Json = {"reasoning": "Let me see."}
    if messages[-1]["role"] == "tool":
        await answer(request, peer, [thought, {"content": f"The tools say: {', '.join(results)}."}])
    elif body.get("tools") and body.get("tool_choice") != "none":
        functions = [tool["function"] for tool in body["tools"][:2]]
        calls = calls_of(functions, is_mixed)
        await answer(request, peer, [thought, {"content": "I look."}, *calls])
    elif body.get("response_format"):
        await answer(request, peer, [{"content": '{"ok": true}'}])
    else:
        parts = [part for message in messages for part in parts_of(message["content"])]
        count = sum(part["type"] == "image_url" for part in parts)
        text = f"{count} pictures" if count else "Hello there"
        await answer(request, peer, [thought, *({"content": word} for word in text.split(" "))])


def text_of(content: object) -> str:
    return "".join(part.get("text", "") for part in parts_of(content))


def parts_of(content: object) -> list[Json]:
    return content if isinstance(content, list) else [{"type": "text", "text": content or ""}]


async def calls_one_by_one(request: Received, peer: Peer) -> None:
    """Play a model whose calls follow each other, for clients that read no mixed pieces of chat
    completions, which the router passes on as they are."""
    await plays_a_model(request, peer, is_mixed=False)


def calls_of(functions: list[Json], is_mixed: bool) -> list[Json]:
    """Return deltas of calls. If mixed, all begin in one chunk, and their arguments alternate."""
    heads: list[Json] = []
    arguments: list[str] = []
    for index, function in enumerate(functions):
        name, properties = function["name"], function["parameters"].get("properties", {})
        called = {"type": "function", "function": {"name": name, "arguments": ""}}
        heads.append({"index": index, "id": f"call_{name}", **called})
        nothing = "" if is_mixed else "{}"
        arguments.append(next((ARGUMENTS[one] for one in properties if one in ARGUMENTS), nothing))
    pieces = [
        [{"index": index, "function": {"arguments": part}} for part in (written[:4], written[4:])]
        for index, written in enumerate(arguments)
    ]
    if is_mixed:
        both = zip(*pieces, strict=True)
        return [{"tool_calls": heads}, *({"tool_calls": list(parts)} for parts in both)]
    ordered = [part for head, parts in zip(heads, pieces, strict=True) for part in (head, *parts)]
    return [{"tool_calls": [part]} for part in ordered]


async def answer(request: Received, peer: Peer, deltas: list[Json]) -> None:
    finish = "tool_calls" if "tool_calls" in deltas[-1] else "stop"
    if request.json.get("stream"):
        head = chunk({"role": "assistant", "content": ""})
        await peer.stream(head, *map(chunk, deltas), chunk({}, finish), usage(), DONE)
    else:
        await peer.answer(whole(message_of(deltas), finish))


def message_of(deltas: list[Json]) -> Json:
    message: Json = {"content": "".join(delta.get("content", "") for delta in deltas)}
    message["reasoning"] = "".join(delta.get("reasoning", "") for delta in deltas)
    calls: list[Json] = []
    for piece in [piece for delta in deltas for piece in delta.get("tool_calls", ())]:
        if "id" in piece:
            function = {"name": piece["function"]["name"], "arguments": ""}
            calls.append({"id": piece["id"], "type": "function", "function": function})
        else:
            calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    return {**message, "tool_calls": calls} if calls else message


@dataclass(frozen=True)
class Scripted:
    """A router before an engine that plays a model."""

    router: Server
    decoder: MockEngine

    @property
    def openai(self) -> str:
        return f"{self.router.url}/v1"

    def check_last_turn(self) -> None:
        """The engine's last request has both calls in one message, and their results after it."""
        messages = self.decoder.last.json["messages"]
        assert [message["role"] for message in messages[-3:]] == ["assistant", "tool", "tool"]
        calls = messages[-3]["tool_calls"]
        ids = [call["id"] for call in calls]
        assert [message["tool_call_id"] for message in messages[-2:]] == ids
        assert [json.loads(call["function"]["arguments"]) for call in calls] == [
            {"city": "Oslo"},
            {},
        ]
        assert [text_of(message["content"]) for message in messages[-2:]] == ["sunny", "noon"]


@pytest.fixture
async def scripted(tmp_path: Path) -> AsyncIterator[Scripted]:
    async with scripted_stack(usual_prefill, plays_a_model, tmp_path) as (server, _, decoder):
        yield Scripted(server, decoder)
