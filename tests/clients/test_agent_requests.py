"""Requests of the shapes that coding agents send, through a loop of tools, without the agents.

Claude Code sends Anthropic's Messages with a line that changes with each request before its system
prompt, and asks Anthropic to manage the context. Codex sends Responses with tools that are no
functions and without stored state. Both bodies are written after the public documentation of these
programs and APIs; test_agents.py runs the programs.
"""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.clients.scripted_engine import Scripted, scripted

__all__ = ["scripted"]
Json = dict[str, Any]
RESULTS = ("sunny", "noon")
SCHEMAS: dict[str, Json] = {
    "Weather": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {"city": {"type": "string", "description": "Which one"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "Clock": {"type": "object", "properties": {}, "additionalProperties": False},
}


@pytest.fixture
async def client(scripted: Scripted) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=scripted.router.url, timeout=120) as made:
        yield made


async def posted_events(
    client: httpx.AsyncClient, path: str, body: Json, **headers: str
) -> list[Json]:
    answer = await client.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    lines = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def claude_code_body(number: int, turns: list[Json]) -> Json:
    cached = {"cache_control": {"type": "ephemeral"}}
    billing = f"x-anthropic-billing-header: cc_version=2.1.0; cc_entrypoint=cli; cch={number:05x};"
    return {
        "model": "m",
        "max_tokens": 32000,
        "stream": True,
        "system": [
            {"type": "text", "text": billing},
            {"type": "text", "text": "You are a coding agent.", **cached},
            {"type": "text", "text": "Be careful. " * 50, **cached},
        ],
        "messages": turns,
        "tools": [
            {"name": name, "description": "A tool.", "input_schema": schema}
            for name, schema in SCHEMAS.items()
        ],
        "metadata": {"user_id": "user_0123_account__session_4711"},
        "thinking": {"type": "enabled", "budget_tokens": 31999},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
    }


CLAUDE_CODE_HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,"
    "context-management-2025-06-27",
    "x-api-key": "k",
    "x-app": "cli",
    "x-claude-code-session-id": "5f0c9a30-0000-4000-8000-000000000001",
}


def blocks_of(events: list[Json]) -> list[Json]:
    blocks: list[Json] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            name = next(name for name in ("text", "thinking", "partial_json") if name in delta)
            blocks[event["index"]].setdefault(name, "")
            blocks[event["index"]][name] += delta[name]
        elif event["type"] == "content_block_stop" and "partial_json" in blocks[event["index"]]:
            block = blocks[event["index"]]
            block["input"] = json.loads(block.pop("partial_json"))
    return blocks


async def test_claude_codes_requests(scripted: Scripted, client: httpx.AsyncClient) -> None:
    reminder = {"type": "text", "text": "<system-reminder>The date is known.</system-reminder>"}
    question = {"type": "text", "text": "How is it?", "cache_control": {"type": "ephemeral"}}
    turns: list[Json] = [{"role": "user", "content": [reminder, question]}]
    path = "/v1/messages?beta=true"
    first = blocks_of(
        await posted_events(client, path, claude_code_body(1, turns), **CLAUDE_CODE_HEADERS)
    )
    assert [block["type"] for block in first] == ["thinking", "text", "tool_use", "tool_use"]
    assert [block["input"] for block in first[2:]] == [{"city": "Oslo"}, {}]
    before = scripted.decoder.last.json["messages"]
    results = [
        {
            "type": "tool_result",
            "tool_use_id": block["id"],
            "content": [{"type": "text", "text": said}],
        }
        for block, said in zip(first[2:], RESULTS, strict=True)
    ]
    turns += [{"role": "assistant", "content": first}, {"role": "user", "content": results}]
    second = blocks_of(
        await posted_events(client, path, claude_code_body(2, turns), **CLAUDE_CODE_HEADERS)
    )
    assert second[-1]["text"] == "The tools say: sunny, noon."
    scripted.check_last_turn()
    sent = scripted.decoder.last.json
    assert sent["messages"][: len(before)] == before
    assert [message["role"] for message in before] == ["system", "user"]
    assert "billing" not in json.dumps(sent)
    assert "context_management" not in sent
    title = {**claude_code_body(3, turns[:1]), "tools": [], "stream": False}
    answer = await client.post(path, json=title, headers=CLAUDE_CODE_HEADERS)
    assert answer.json()["content"][-1]["text"].replace(" ", "") == "Hellothere"


def codex_body(items: list[Json]) -> Json:
    functions = [
        {"type": "function", "name": name, "description": "A tool.", "strict": False,
         "parameters": schema}
        for name, schema in SCHEMAS.items()
    ]  # fmt: skip
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
    return {
        "model": "m",
        "instructions": "You are a coding agent. " * 20,
        "input": items,
        "tools": [
            *functions,
            {"type": "custom", "name": "apply_patch", "description": "Patch.", "format": grammar},
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "5f0c9a30-0000-7000-8000-000000000002",
        "client_metadata": {"originator": "codex_exec"},
        "text": {"verbosity": "low"},
    }


CODEX_HEADERS = {
    "authorization": "Bearer k",
    "originator": "codex_exec",
    "session-id": "5f0c9a30-0000-7000-8000-000000000002",
    "thread-id": "5f0c9a30-0000-7000-8000-000000000002",
    "accept": "text/event-stream",
}


async def test_codexs_requests(scripted: Scripted, client: httpx.AsyncClient) -> None:
    def message(role: str, text: str) -> Json:
        return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}

    items = [
        message("developer", "Commands run in a sandbox."),
        message("user", "<environment_context>Linux</environment_context>"),
        message("user", "How is it?"),
    ]
    events = await posted_events(client, "/v1/responses", codex_body(items), **CODEX_HEADERS)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    assert [item["type"] for item in done] == [
        "reasoning", "message", "function_call", "function_call",
    ]  # fmt: skip
    assert [json.loads(item["arguments"]) for item in done[2:]] == [{"city": "Oslo"}, {}]
    before = scripted.decoder.last.json
    assert [tool["function"]["name"] for tool in before["tools"]] == [*SCHEMAS]
    assert [one["role"] for one in before["messages"]].count("system") == 1
    assert before["messages"][0]["role"] == "system"
    assert "client_metadata" not in before
    # Codex sends no ids back, and a call's output may stand behind each call.
    again = [{name: value for name, value in item.items() if name != "id"} for item in done]
    outputs = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": said}
        for item, said in zip(done[2:], RESULTS, strict=True)
    ]
    items += [*again, *outputs]
    events = await posted_events(client, "/v1/responses", codex_body(items), **CODEX_HEADERS)
    assert (
        events[-1]["response"]["output"][-1]["content"][0]["text"] == "The tools say: sunny, noon."
    )
    scripted.check_last_turn()
    assert scripted.decoder.last.json["messages"][: len(before["messages"])] == before["messages"]
