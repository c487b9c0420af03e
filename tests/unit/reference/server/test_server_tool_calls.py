"""Calls that a client insists on: what a random model writes is one, whole or in pieces."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from engine_ext.reference.config import EngineConfig
from engine_ext.reference.engine import ReferenceEngine
from engine_ext.reference.host import build_engine
from tests.unit.reference.server.fake_engine import events_of, in_process, served_model

CHAT = "/v1/chat/completions"
PLACE = {"type": "object", "properties": {"lake": {"type": "boolean"}}, "required": ["lake"]}
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"where": {"$ref": "#/$defs/place"}, "days": {"enum": [1, 2, 3]}},
    "required": ["where", "days"],
    "additionalProperties": False,
    "$defs": {"place": {**PLACE, "additionalProperties": False}},
}
TIME: dict[str, Any] = {
    "type": "object",
    "properties": {"zone": {"enum": ["ütc", 'a"}b']}},
    "required": ["zone"],
    "additionalProperties": False,
}
SCHEMAS = {"weather": WEATHER, "time": TIME}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
NAMED = {"type": "function", "function": {"name": "time"}}
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "What is the weather like?"}],
    "max_tokens": 600,
    "temperature": 1.0,
    "tools": TOOLS,
}


@pytest.fixture
async def engine(directory: Path) -> AsyncIterator[ReferenceEngine]:
    engine = build_engine(EngineConfig(model=directory, num_blocks=129, num_threads=1))
    yield engine
    engine.check_integrity()
    engine.shutdown()


@pytest.fixture
async def client(directory: Path, engine: ReferenceEngine) -> AsyncIterator[httpx.AsyncClient]:
    model = served_model(directory, 2048)
    async with in_process(model, engine) as client:
        yield client


async def choice_of(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await client.post(CHAT, json=BODY | fields)
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def check(calls: list[dict[str, Any]]) -> None:
    assert len({call["id"] for call in calls}) == len(calls)
    for call in calls:
        assert call["type"] == "function"
        function = call["function"]
        jsonschema.validate(json.loads(function["arguments"]), SCHEMAS[function["name"]])


@pytest.mark.parametrize("seed", range(3))
async def test_required_is_a_call_of_the_only_tool(seed: int, client: httpx.AsyncClient) -> None:
    choice = await choice_of(client, tool_choice="required", tools=TOOLS[:1], seed=seed)
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "")
    check(choice["message"]["tool_calls"])


async def test_a_named_tool_is_called_whatever_other_form_is_wanted(
    client: httpx.AsyncClient,
) -> None:
    choice = await choice_of(
        client, tool_choice=NAMED, response_format={"type": "json_object"}, seed=1
    )
    assert choice["finish_reason"] == "stop"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "time"
    check([call])


async def test_a_streamed_call_is_the_whole_one_in_pieces(client: httpx.AsyncClient) -> None:
    fields = {"tool_choice": NAMED, "seed": 2}
    whole = await choice_of(client, **fields)
    response = await client.post(CHAT, json=BODY | fields | {"stream": True})
    choices = [event["choices"][0] for event in events_of(response)]
    assert choices[-1]["finish_reason"] == whole["finish_reason"]
    assert not any(one["delta"].get("content") for one in choices)
    said = [call for one in choices for call in one["delta"].get("tool_calls", [])]
    assert said[0]["function"]["name"] == whole["message"]["tool_calls"][0]["function"]["name"]
    arguments = "".join(call["function"]["arguments"] for call in said)
    assert arguments == whole["message"]["tool_calls"][0]["function"]["arguments"]
    assert {call["index"] for call in said} == {0}
    assert len(said) > 5
    assert [call.get("id") for call in said].count(None) == len(said) - 1


async def test_what_was_cut_off_says_so_and_no_choice_is_no_call(client: httpx.AsyncClient) -> None:
    choice = await choice_of(client, tool_choice=NAMED, max_tokens=1)
    (call,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], call["function"]["arguments"]) == ("length", "{")
    auto = await choice_of(client, tool_choice="auto", max_tokens=3)
    assert auto["message"]["tool_calls"] == []
