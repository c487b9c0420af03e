"""Booleans and numbers in other types mean on every API what they mean for vLLM."""

import json
from typing import Any

import pytest

from scripts.mock_engine import MockEngine
from tests.unit.router.conftest import StartRouter
from tests.unit.router.harness import Router

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/messages": {**CHAT, "max_tokens": 7},
    "/v1/responses": {"model": "m", "input": "hi"},
}
PATHS = pytest.mark.parametrize("path", BODIES)
NO, YES = ("false", "FALSE", "off", "0", 0, 0.0, "n"), ("true", "on", "1", 1, 1.0, "Yes")


@PATHS
@pytest.mark.parametrize("stream", [*NO, *YES])
async def test_stream_is_read_as_vllm_reads_it(
    start_router: StartRouter, d: MockEngine, path: str, stream: object
) -> None:
    router = await start_router(stream_heartbeat=60)
    answer = await router.client.post(path, json={**BODIES[path], "stream": stream})
    is_streamed = stream in YES
    assert answer.headers["content-type"].startswith("text/event-stream") is is_streamed
    assert d.last.json.get("stream", False) is is_streamed


@pytest.mark.parametrize("store", [*NO, *YES, None])
async def test_response_is_stored_unless_store_is_false(router: Router, store: object) -> None:
    made = (
        await router.client.post(
            "/v1/responses",
            json={**BODIES["/v1/responses"], "store": store, "background": "false"},
        )
    ).json()
    is_stored = store not in NO
    assert made["store"] is is_stored
    stored = await router.client.get(f"/v1/responses/{made['id']}")
    assert stored.status_code == (200 if is_stored else 404)


@PATHS
async def test_engines_get_numbers_and_flags_as_they_were_read(
    start_router: StartRouter, p: MockEngine, d: MockEngine, path: str
) -> None:
    name = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    fields = {name: "5", "n": "1", "parallel_tool_calls": "off", "top_logprobs": "2"}
    router = await start_router(stream_heartbeat=60)
    body = {**BODIES[path], **fields, "logprobs": "true"}
    assert (await router.client.post(path, json=body)).status_code == 200
    assert p.requests, "one answer is shared by two engines"
    sent = d.last.json
    assert sent.get("max_completion_tokens", sent.get("max_tokens")) == 5
    flags = {"parallel_tool_calls": False, "logprobs": True, "n": 1, "top_logprobs": 2}
    assert {name: json.dumps(sent[name]) for name in flags} == {
        name: json.dumps(value) for name, value in flags.items()
    }


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
@pytest.mark.parametrize(
    ("field", "value"),
    [("stream", "maybe"), ("stream", 2), ("store", []), ("background", "x"), ("n", 2), ("n", "z"),
     ("parallel_tool_calls", "perhaps"), ("max_output_tokens", 1.5), ("max_tokens", {})],
)  # fmt: skip
async def test_dialects_refuse_other_values(
    router: Router, p: MockEngine, d: MockEngine, path: str, field: str, value: object
) -> None:
    answer = await router.client.post(path, json={**BODIES[path], field: value})
    assert answer.status_code == 400
    assert field in answer.json()["error"]["message"]
    assert not p.requests
    assert not d.requests


@pytest.mark.parametrize(("flag", "sent"), [("off", None), ("true", False)])
async def test_nested_flags_of_messages_are_read_as_well(
    start_router: StartRouter, d: MockEngine, flag: str, sent: bool | None
) -> None:
    tool = {"name": "f", "input_schema": {"type": "object"}, "strict": flag}
    choice = {"type": "auto", "disable_parallel_tool_use": flag}
    body = {**BODIES["/v1/messages"], "tools": [tool], "tool_choice": choice}
    router = await start_router()
    assert (await router.client.post("/v1/messages", json=body)).status_code == 200
    assert d.last.json.get("parallel_tool_calls") is sent
    assert d.last.json["tools"][0]["function"]["strict"] is (flag == "true")
    wrong = {**body, "tool_choice": {"type": "auto", "disable_parallel_tool_use": "maybe"}}
    assert (await router.client.post("/v1/messages", json=wrong)).status_code == 400


async def test_completion_with_logprobs_of_its_prompt_is_recognized_in_any_spelling(
    router: Router, p: MockEngine
) -> None:
    fields: list[dict[str, Any]] = [
        {"echo": "true", "logprobs": "0"},
        {"echo": 1, "logprobs": False},
        {"prompt_logprobs": False},
        {"use_beam_search": "on"},
        {"n": "2"},
    ]
    for one in fields:
        assert (await router.complete(**one)).status_code == 200
        assert not p.requests, one
    for one in ({"echo": "false", "logprobs": 1}, {"use_beam_search": "no"}, {"best_of": "1"}):
        assert (await router.complete(**one)).status_code == 200
    assert len(p.requests) == 3
