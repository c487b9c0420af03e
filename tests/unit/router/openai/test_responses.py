"""OpenAI's Responses, translated to chats and back, and gone on with."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.conversations.store import MemoryStore, StoreError
from router.conversations.stored_responses import (
    ResponseStore,
    StoredResponse,
    UnknownResponseError,
)
from router.openai.errors import BadRequestError, ResponseStoreError
from router.openai.responses import chat_from_response
from tests.redis_server import running_redis
from tests.unit.router.conftest import StartRouter
from tests.unit.router.conversations.store_wrapper import StoreWrapper
from tests.unit.router.harness import Router, eventually, running_router, settings_for
from tests.unit.router.mock_engine import STREAM_HEAD, MockEngine, Peer, Received
from tests.unit.router.mock_engine import chunk as framed
from tests.unit.router.openai.chats import HELLO, events_of, thinks_and_calls, whole

PATH = "/v1/responses"
ASKED = {"model": "m", "input": "hi"}
HI = {"role": "user", "content": "hi"}


def chat(**fields: Any) -> dict[str, Any]:
    return chat_from_response(ASKED | fields, []).chat


def test_a_text_is_a_users_message() -> None:
    assert chat() == {"model": "m", "messages": [HI]}


def test_what_a_response_asks_for_a_chat_asks_for() -> None:
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}
    given = chat(
        instructions="be kind",
        max_output_tokens=5,
        temperature=0.5,
        top_p=0.9,
        top_logprobs=2,
        include=["message.output_text.logprobs"],
        stream=True,
        text={"format": schema},
        reasoning={"effort": "low"},
        tools=[tool],
        tool_choice={"type": "function", "name": "f"},
        parallel_tool_calls=False,
        metadata={"a": "b"},
        store=False,
        seed=7,
    )
    assert given == {
        "model": "m",
        "messages": [{"role": "system", "content": "be kind"}, HI],
        "max_completion_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_logprobs": 2,
        "logprobs": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
        },
        "reasoning_effort": "low",
        "tools": [
            {
                "type": "function",
                "function": {"name": "f", "parameters": {"type": "object"}, "strict": False},
            }
        ],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": False,
        "seed": 7,
    }


def test_items_become_messages() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    items = [
        {"role": "developer", "content": "be kind"},
        {
            "role": "user",
            "type": "message",
            "content": [
                {"type": "input_text", "text": "what?"},
                {"type": "input_image", "image_url": "http://x/y.png", "detail": "low"},
            ],
        },
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"role": "assistant", "content": [{"type": "output_text", "text": "I look"}]},
        call,
        {**call, "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "windy"}],
        },
    ]
    calls = [
        {"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}}
        for name in ("c1", "c2")
    ]
    image = {"type": "image_url", "image_url": {"url": "http://x/y.png", "detail": "low"}}
    assert chat(input=items)["messages"] == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "what?"}, image]},
        {"role": "assistant", "content": "I look", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "c2", "content": "windy"},
    ]


@pytest.mark.parametrize(
    ("fields", "where", "what"),
    [
        ({"input": None}, "input", "required"),
        ({"input": []}, "input", "required"),
        ({"input": 7}, "input", "list"),
        ({"input": ["a"]}, "input[0]", "object"),
        ({"input": [{"type": "computer_call"}]}, "input[0]", "computer_call"),
        ({"input": [{"type": 7}]}, "input[0]", "none"),
        ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role", "one of"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
            "input[0].content[0]",
            "input_file",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "web_search"),
        ({"background": True}, "background", "not supported"),
        ({"truncation": "auto"}, "truncation", "disabled"),
        ({"instructions": ["a"]}, "instructions", "string"),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    fields: dict[str, Any], where: str, what: str
) -> None:
    with pytest.raises(BadRequestError, match=what) as refused:
        chat(**fields)
    assert refused.value.param == where


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4)
    | st.sampled_from(["message", "function_call", "function_call_output", "input_text", "user"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(
            ["type", "role", "content", "text", "call_id", "name", "arguments", "output", "format",
             "schema", "image_url", "effort"]
        ), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip
FIELDS = st.sampled_from(
    ["input", "instructions", "tools", "tool_choice", "text", "reasoning", "include", "stream"]
)


@settings(max_examples=200)
@given(st.dictionaries(FIELDS, JSON))
def test_any_json_is_translated_or_refused(fields: dict[str, Any]) -> None:
    with contextlib.suppress(BadRequestError):
        chat(**fields)


# Through the router.


async def test_a_response_goes_along_both_legs(
    router: Router, p: MockEngine, d: MockEngine
) -> None:
    answer = await router.client.post(PATH, json={**ASKED, "max_output_tokens": 5})
    told = answer.json()
    assert (answer.status_code, told["status"], told["object"]) == (200, "completed", "response")
    (item,) = told["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"][0]["text"] == "Hello"
    assert told["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 4},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 13,
    }
    assert p.last.path == d.last.path == "/v1/chat/completions"
    assert d.last.json["max_completion_tokens"] == 5
    labels = {"endpoint": PATH, "flow": "pull", "status": "200", "outcome": "ok"}
    assert router.metric("requests_total", **labels) == 1


async def test_a_stream_is_the_same_response_as_it_goes(router: Router, d: MockEngine) -> None:
    d.scripts = [thinks_and_calls, thinks_and_calls]
    whole_one = (await router.client.post(PATH, json=ASKED)).json()
    answer = await router.client.post(PATH, json={**ASKED, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = events_of(answer.text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert last["type"] == "response.completed"
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert last["response"]["output"] == items
    kinds = ["reasoning", "message", "function_call", "function_call"]
    assert [item["type"] for item in items] == kinds
    for streamed, told in zip(items, whole_one["output"], strict=True):
        assert {**streamed, "id": ""} == {**told, "id": ""}
    deltas = [e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta"]
    assert "".join(deltas) == '{"x": 1}{}'
    assert last["response"]["usage"] == whole_one["usage"]


async def test_what_was_cut_off_is_incomplete(router: Router, d: MockEngine) -> None:
    async def cut(_: Received, peer: Peer) -> None:
        await peer.answer(whole({"content": "x"}, "length"))

    d.scripts = [cut]
    told = (await router.client.post(PATH, json=ASKED)).json()
    assert told["status"] == "incomplete"
    assert told["incomplete_details"] == {"reason": "max_output_tokens"}


@pytest.mark.parametrize("stream", [False, True])
async def test_the_next_response_goes_on_with_the_last(
    router: Router, d: MockEngine, stream: bool
) -> None:
    first = await router.client.post(
        PATH, json={**ASKED, "instructions": "be kind", "stream": stream}
    )
    told = events_of(first.text)[-1]["response"] if stream else first.json()
    for _ in range(2):  # as often as one likes
        more = {"model": "m", "input": "more", "previous_response_id": told["id"]}
        second = (await router.client.post(PATH, json=more)).json()
        assert d.last.json["messages"] == [
            HI,
            {"role": "assistant", "content": "Hello"},
            {"role": "user", "content": "more"},
        ]
        assert second["previous_response_id"] == told["id"]
    third = {"model": "m", "input": "and", "previous_response_id": second["id"]}
    assert (await router.client.post(PATH, json=third)).status_code == 200
    assert len(d.last.json["messages"]) == 5


async def test_calls_are_gone_on_with(router: Router, d: MockEngine) -> None:
    d.scripts = [thinks_and_calls]
    first = (await router.client.post(PATH, json=ASKED)).json()
    output = {"type": "function_call_output", "call_id": "call_a", "output": "1"}
    more = {"model": "m", "input": [output], "previous_response_id": first["id"]}
    assert (await router.client.post(PATH, json=more)).status_code == 200
    said = d.last.json["messages"][1]
    assert (said["content"], [call["id"] for call in said["tool_calls"]]) == (
        "Well",
        ["call_a", "call_b"],
    )


@pytest.mark.slow
async def test_another_router_goes_on_with_it(p: MockEngine, d: MockEngine) -> None:
    with running_redis() as redis:
        shared = {
            "conversation_store": redis.url,
            "conversation_store_password": redis.password,
            "conversation_store_key": "the same key at both routers",
            "conversation_store_timeout": 20.0,
        }
        given = settings_for(p=[p], d=[d], **shared)
        async with running_router(given) as one, running_router(given) as other:
            await eventually(lambda: not one.gateway.fleet.unavailable_roles())
            await eventually(lambda: not other.gateway.fleet.unavailable_roles())
            first = (await one.client.post(PATH, json=ASKED)).json()
            more = {"model": "m", "input": "more", "previous_response_id": first["id"]}
            assert (await other.client.post(PATH, json=more)).status_code == 200
            assert len(d.last.json["messages"]) == 3
            assert (await other.client.get(f"{PATH}/{first['id']}")).json() == first


async def test_a_page_may_read_it(start_router: StartRouter) -> None:
    router = await start_router(cors_origins="https://chat.example")
    headers = {"origin": "https://chat.example"}
    for fields in ({}, {"stream": True}, {"input": 7}):
        answer = await router.client.post(PATH, json=ASKED | fields, headers=headers)
        assert answer.headers.get_list("access-control-allow-origin") == [headers["origin"]]


async def test_a_response_belongs_to_who_asked_for_it(router: Router) -> None:
    mine, other = {"authorization": "Bearer mine"}, {"authorization": "Bearer other"}
    name = (await router.client.post(PATH, json=ASKED, headers=mine)).json()["id"]
    more = {"model": "m", "input": "more", "previous_response_id": name}
    for headers in (other, {}):
        answer = await router.client.post(PATH, json=more, headers=headers)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "previous_response_id"
        assert (await router.client.get(f"{PATH}/{name}", headers=headers)).status_code == 404
        assert (await router.client.delete(f"{PATH}/{name}", headers=headers)).status_code == 404
    assert (await router.client.post(PATH, json=more, headers=mine)).status_code == 200
    assert (await router.client.get(f"{PATH}/{name}", headers=mine)).json()["id"] == name
    assert (await router.client.delete(f"{PATH}/{name}", headers=mine)).json()["deleted"] is True
    assert (await router.client.get(f"{PATH}/{name}", headers=mine)).status_code == 404


async def test_what_is_not_to_be_kept_is_not(router: Router) -> None:
    told = (await router.client.post(PATH, json={**ASKED, "store": False})).json()
    assert told["store"] is False
    assert (await router.client.get(f"{PATH}/{told['id']}")).status_code == 404


async def test_without_a_store_nothing_is_gone_on_with(start_router: StartRouter) -> None:
    router = await start_router(conversation_store="off")
    told = (await router.client.post(PATH, json=ASKED)).json()
    more = {**ASKED, "previous_response_id": told["id"]}
    answer = await router.client.post(PATH, json=more)
    assert answer.status_code == 400
    assert "--conversation-store" in answer.json()["error"]["message"]


@pytest.mark.parametrize("previous", [7, "", "resp_x", "a" * 100_000, "\x00"])
async def test_an_absurd_id_is_a_400(router: Router, p: MockEngine, previous: object) -> None:
    answer = await router.client.post(PATH, json={**ASKED, "previous_response_id": previous})
    assert answer.status_code == 400
    assert len(answer.text) < 1000
    assert not p.requests


async def test_a_wrong_limit_is_named_as_the_client_knows_it(
    start_router: StartRouter, d: MockEngine, p: MockEngine
) -> None:
    router = await start_router()
    answer = await router.client.post(PATH, json={**ASKED, "max_output_tokens": "abc"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "max_output_tokens")
    assert "max_completion_tokens" not in error["message"]
    assert not p.requests


async def test_a_stream_that_breaks_has_failed(router: Router, d: MockEngine) -> None:
    async def breaks(_: Received, peer: Peer) -> None:
        await peer.send(STREAM_HEAD + framed(b"".join(HELLO[:2])))
        peer.close()

    d.scripts = [breaks]
    answer = await router.client.post(PATH, json={**ASKED, "stream": True})
    events = events_of(answer.text)
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    failed = events[-1]["response"]
    assert failed["status"] == "failed"
    assert (await router.client.get(f"{PATH}/{failed['id']}")).status_code == 404


async def test_what_cannot_be_said_back_is_refused(router: Router, p: MockEngine) -> None:
    deep = b"[" * 253 + b"]" * 253
    body = b'{"model": "m", "input": "hi", "metadata": %b}' % deep
    answer = await router.client.post(PATH, content=body)
    assert answer.status_code == 400
    assert not p.requests


# What is kept.

KEPT = StoredResponse("resp_root", [HI], {"id": "resp_1"})


async def test_memory_is_bounded() -> None:
    kept = ResponseStore(MemoryStore(2, 10_000), "authorization", 100)
    for name in "abc":
        await kept.keep("t", name, KEPT)
    with pytest.raises(UnknownResponseError):
        await kept.find("t", "a")
    assert await kept.find("t", "c") == KEPT


@pytest.mark.parametrize(
    "strange", [b"", b"{", b"[]", b"{}", b'{"v":1}', b'{"v":2,"root":"a"}', b"[" * 9999]
)
async def test_what_lies_there_that_is_none_is_not_found(strange: bytes) -> None:
    class Strange(StoreWrapper):
        async def read(self, key: str) -> bytes | None:
            return strange

    with pytest.raises(UnknownResponseError):
        await ResponseStore(Strange(MemoryStore(1, 1)), "authorization", 1).find("t", "a")


async def test_a_store_that_fails_costs_what_was_said_before_and_no_request() -> None:
    class Failing(StoreWrapper):
        async def read(self, key: str) -> bytes | None:
            raise StoreError("no connection")

        async def put(self, key: str, value: bytes, seconds: float) -> list[bytes]:
            raise StoreError("no connection")

    kept = ResponseStore(Failing(MemoryStore(1, 1)), "authorization", 1)
    await kept.keep("t", "a", KEPT)
    with pytest.raises(ResponseStoreError):
        await kept.find("t", "a")


async def test_two_tenants_with_one_id_are_two() -> None:
    kept = ResponseStore(MemoryStore(9, 10_000), "authorization", 100)
    await kept.keep("t", "a:b", KEPT)
    for tenant, name in (("t:a", "b"), ("", "a:b"), ("t2", "a:b")):
        with pytest.raises(UnknownResponseError):
            await kept.find(tenant, name)
    assert json.dumps(KEPT.messages)
