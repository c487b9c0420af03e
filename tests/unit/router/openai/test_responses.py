"""OpenAI's Responses, translated to chats and back, and gone on with."""

import asyncio
import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.conversations.store import MemoryStore, StoreError
from router.conversations.stored_responses import (
    MAX_REFERENCED_RESPONSES,
    ResponseStore,
    StoredResponse,
    UnknownItemError,
    UnknownResponseError,
)
from router.openai.dialects import AnswerBlocks, BlockStep
from router.openai.errors import BadRequestError, ResponseStoreError
from router.openai.responses import ResponseOutput, chat_from_response
from scripts.mock_engine import DONE, STREAM_HEAD, MockEngine, Peer, Received
from scripts.mock_engine import chunk as framed
from tests.redis_server import running_redis
from tests.unit.router.conftest import StartRouter
from tests.unit.router.conversations.store_wrapper import StoreWrapper
from tests.unit.router.engine_scripts import answer_late, answering, raw, streaming
from tests.unit.router.harness import Router, eventually, running_router, settings_for
from tests.unit.router.openai.chats import HELLO, chunk, events_of, thinks_and_calls, whole

PATH = "/v1/responses"
ASKED = {"model": "m", "input": "hi"}
HI = {"role": "user", "content": "hi"}


FUNCTION: dict[str, Any] = {"type": "function", "name": "f", "parameters": {"type": "object"}}
# What else Codex sends.
CODEX_TOOLS: list[dict[str, Any]] = [
    {"type": "custom", "name": "apply_patch", "format": {"type": "text"}},
    {"type": "namespace", "name": "agents", "description": "", "tools": [FUNCTION]},
    {"type": "local_shell"},
    {"type": "web_search", "external_web_access": False},
]


def allowing(*names: str, mode: str = "auto") -> dict[str, Any]:
    """Fields of a request with the tool f, whose choice allows the tools with these names."""
    allowed = [{"type": "function", "name": name} for name in names]
    choice = {"type": "allowed_tools", "mode": mode, "tools": allowed}
    return {"tools": [FUNCTION], "tool_choice": choice}


def calling(*names: str, **fields: Any) -> dict[str, Any]:
    """A chat's message with calls of f."""
    function = {"name": "f", "arguments": "{}"}
    calls = [{"id": name, "type": "function", "function": function} for name in names]
    return {"role": "assistant", "content": None, **fields, "tool_calls": calls}


def chat_of(**fields: Any) -> dict[str, Any]:
    return chat_from_response(ASKED | fields, [], set()).chat


def test_a_text_is_a_users_message() -> None:
    assert chat_of() == {"model": "m", "messages": [HI]}


def test_what_a_response_asks_for_a_chat_asks_for() -> None:
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}
    given = chat_of(
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
    assert chat_of(input=items)["messages"] == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "what?"}, image]},
        {"role": "assistant", "content": "I look", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "c2", "content": "windy"},
    ]


def test_tools_that_no_engine_can_call_are_left_out_beside_functions() -> None:
    left_out: set[str] = set()
    given = chat_from_response(ASKED | {"tools": [*CODEX_TOOLS, FUNCTION]}, [], left_out)
    assert [tool["function"]["name"] for tool in given.chat["tools"]] == ["agents__f", "f"]
    assert left_out == {"tools of type 'custom', 'local_shell', 'web_search'"}


NAMESPACES = [
    {"type": "namespace", "name": name, "tools": [FUNCTION, {**FUNCTION, "name": f"of_{name}"}]}
    for name in ("a", "b")
]


@pytest.mark.parametrize(
    ("reference", "name"),
    [({"name": "a__f"}, "a__f"), ({"name": "of_b"}, "b__of_b"), ({"name": "f"}, "f"),
     ({"namespace": "b", "name": "f"}, "b__f")],
)  # fmt: skip
def test_tool_of_a_namespace_can_be_chosen(reference: dict[str, Any], name: str) -> None:
    tools = [*NAMESPACES, FUNCTION]
    given = chat_of(tools=tools, tool_choice={"type": "function", **reference})
    assert given["tool_choice"]["function"]["name"] == name
    allowed = {"type": "function", **reference}
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [allowed]}
    given = chat_of(tools=tools, tool_choice=choice)
    assert [tool["function"]["name"] for tool in given["tools"]] == [name]


@pytest.mark.parametrize("stream", [False, True])
async def test_call_of_a_tool_in_a_namespace_names_both(
    router: Router, d: MockEngine, stream: bool
) -> None:
    function = {"name": "a__f", "arguments": "{}"}
    call = {"index": 0, "id": "c1", "type": "function", "function": function}

    async def calls(request: Received, peer: Peer) -> None:
        if stream:
            await peer.stream(chunk({"tool_calls": [call]}), chunk({}, "tool_calls"), DONE)
        else:
            await peer.answer(whole({"tool_calls": [call]}, "tool_calls"))

    d.scripts = [calls]
    body = {**ASKED, "tools": NAMESPACES, "stream": stream}
    answer = await router.client.post(PATH, json=body)
    content = events_of(answer.text)[-1]["response"] if stream else answer.json()
    (item,) = content["output"]
    assert (item["namespace"], item["name"]) == ("a", "f")
    again = {**ASKED, "previous_response_id": content["id"], "tools": NAMESPACES}
    output = {"type": "function_call_output", "call_id": "c1", "output": "done"}
    await router.client.post(PATH, json={**again, "input": [output]})
    (called,) = d.last.json["messages"][1]["tool_calls"]
    assert called["function"]["name"] == "a__f"


TOO_LONG = (
    "This model's maximum context length is 50 tokens. However, you requested 5 output tokens and "
    "your prompt contains at least 46 input tokens, for a total of at least 51 tokens."
)


@pytest.mark.parametrize("heartbeat", [0, 0.1])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
async def test_full_context_has_openais_code(
    start_router: StartRouter, p: MockEngine, path: str, stream: bool, heartbeat: float
) -> None:
    router = await start_router(stream_heartbeat=heartbeat)

    async def refuses(_: Received, peer: Peer) -> None:
        if heartbeat and stream:
            await asyncio.sleep(0.15)
        error = {"message": TOO_LONG, "type": "BadRequestError", "code": 400}
        await peer.answer({"error": error}, 400)

    p.usual = refuses
    body = ASKED if path == PATH else {"model": "m", "messages": [HI]}
    answer = await router.client.post(path, json={**body, "stream": stream})
    if answer.status_code == 400:
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert answer.json()["error"]["message"] == TOO_LONG
    elif path == PATH:
        failed = events_of(answer.text)[-1]
        assert failed["type"] == "response.failed"
        assert failed["response"]["error"]["code"] == "context_length_exceeded"
    else:
        assert '"code":"context_length_exceeded"' in answer.text


async def test_own_check_of_the_context_has_openais_code(
    start_router: StartRouter, d: MockEngine
) -> None:
    d.contexts = {"m": 50}
    router = await start_router()
    await eventually(lambda: router.gateway.fleet.snapshot.context_lengths == {"m": 50})
    answer = await router.complete(prompt=[1] * 51)
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert (await router.client.post(PATH, json=ASKED | {"max_output_tokens": 99})).is_success
    assert d.last.json["max_completion_tokens"] == 50


async def test_heartbeats_are_events_with_continuous_numbers(
    start_router: StartRouter, p: MockEngine
) -> None:
    p.scripts = [answer_late(0.35, p.usual)]  # longer than three heartbeats
    router = await start_router(stream_heartbeat=0.1)
    answer = await router.client.post(PATH, json={**ASKED, "stream": True})
    events = events_of(answer.text)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", *["in_progress"] * 3]
    assert kinds.count("created") == 1
    assert kinds[-1] == "completed"
    assert [event["sequence_number"] for event in events] == [*range(len(events))]


def test_tools_that_items_add_are_tools_of_the_chat() -> None:
    other = {**FUNCTION, "name": "g"}
    added = {"type": "additional_tools", "role": "developer", "tools": [other, CODEX_TOOLS[0]]}
    items = [{"role": "user", "content": "hi"}, added]
    for tools in ([FUNCTION], [], None):
        given = chat_of(input=items, tools=tools)
        names = [tool["function"]["name"] for tool in given["tools"]]
        assert names == (["f", "g"] if tools else ["g"])
        assert given["messages"] == [HI]


def test_only_allowed_tools_reach_the_engine() -> None:
    other = {**FUNCTION, "name": "g"}
    given = chat_of(**allowing("g", mode="required") | {"tools": [FUNCTION, other, *CODEX_TOOLS]})
    assert [tool["function"]["name"] for tool in given["tools"]] == ["g"]
    assert given["tool_choice"] == "required"
    none_left = chat_of(**allowing())
    assert "tools" not in none_left
    assert "tool_choice" not in none_left


def test_a_prompt_may_be_shortened_but_is_not() -> None:
    assert chat_of(truncation="auto") == chat_of()


def test_fields_that_are_for_openai_do_not_reach_engines() -> None:
    given = chat_of(client_metadata={"a": "b"}, context_management=[], moderation={}, store=False)
    assert given == chat_of()


def test_calls_of_other_tools_in_the_history_become_calls_of_functions() -> None:
    shell = {"type": "exec", "command": ["ls"], "env": {}}
    items = [
        {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** Begin"},
        {"type": "local_shell_call", "id": "c2", "call_id": None, "action": shell},
        {"type": "function_call", "call_id": "c3", "namespace": "n", "name": "f", "arguments": ""},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "Done"},
        {"type": "local_shell_call_output", "id": "c2", "output": "a.txt"},
        {"type": "function_call_output", "call_id": "c3", "output": "3"},
    ]
    left_out: set[str] = set()
    given = chat_from_response(ASKED | {"input": items}, [], left_out)
    called, *results = given.chat["messages"]
    assert [tuple(call["function"].values()) for call in called["tool_calls"]] == [
        ("apply_patch", '{"input":"*** Begin"}'),
        ("local_shell", '{"type":"exec","command":["ls"],"env":{}}'),
        ("n__f", "{}"),
    ]
    assert [(one["tool_call_id"], one["content"]) for one in results] == [
        ("c1", "Done"),
        ("c2", "a.txt"),
        ("c3", "3"),
    ]
    assert left_out == {"items of type 'web_search_call'"}


def test_instructions_and_developer_items_become_one_system_message() -> None:
    items = [
        {"role": "developer", "content": "be short"},
        {"role": "developer", "content": "be honest"},
        {"role": "user", "content": "context"},
        {"role": "user", "content": "hi"},
        {"role": "developer", "content": "be quick"},
    ]
    assert chat_of(instructions="be kind", input=items)["messages"] == [
        {"role": "system", "content": "be kind\n\nbe short\n\nbe honest"},
        {"role": "user", "content": "context\n\nhi\n\nbe quick"},
    ]


def test_items_of_one_answer_in_any_order_become_one_message_with_the_calls_last() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    text = {"role": "assistant", "content": [{"type": "output_text", "text": "I look"}]}
    trace = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
    output = {"type": "function_call_output", "call_id": "c1", "output": "1"}
    said = calling("c1", content="I look", reasoning="hm")
    for items in ([trace, call, text], [trace, text, call], [text, trace, call]):
        messages = chat_of(input=[*items, output])["messages"]
        assert messages == [said, {"role": "tool", "tool_call_id": "c1", "content": "1"}]


@pytest.mark.parametrize(
    ("trace", "text"),
    [
        ({"content": [{"type": "reasoning_text", "text": "hm"}], "summary": []}, "hm"),
        ({"summary": [{"type": "summary_text", "text": "so"}], "content": None}, "so"),
        ({"summary": [], "encrypted_content": "gAAAA"}, None),
    ],
)
def test_reasoning_goes_along(trace: dict[str, Any], text: str | None) -> None:
    answer = {"role": "assistant", "content": "yes"}
    items = [{"role": "user", "content": "hi"}, {"type": "reasoning", **trace}, answer]
    _, said = chat_of(input=items)["messages"]
    assert said == (answer if text is None else answer | {"reasoning": text})


def test_images_of_a_result_become_the_users() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA"}
    output = [{"type": "input_text", "text": "one"}, image]
    items = [
        {"type": "function_call", "call_id": name, "name": "f", "arguments": "{}"}
        for name in ("c1", "c2")
    ] + [
        {"type": "function_call_output", "call_id": "c1", "output": output},
        {"type": "function_call_output", "call_id": "c2", "output": "two"},
    ]
    assert chat_of(input=items)["messages"] == [
        calling("c1", "c2"),
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "tool", "tool_call_id": "c2", "content": "two"},
        {"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
        ]},
    ]  # fmt: skip


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
        ({"truncation": "all"}, "truncation", "disabled"),
        (
            {"tools": 7, "input": [{"type": "additional_tools", "tools": [FUNCTION]}]},
            "tools",
            "list",
        ),
        ({"tools": [FUNCTION, {"type": 7}]}, "tools[1].type", "string"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "custom"}}, "tool_choice", "custom"),
        (allowing("f", mode="maybe"), "tool_choice.mode", "required"),
        (allowing("g"), "tool_choice.tools[0]", "among the tools"),
        (allowing(mode="required"), "tool_choice.tools", "can be called"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]", "item_reference"),
        ({"input": [{"type": "function_call_output", "output": "a"}]}, "input[0].call_id", "str"),
        (
            {"input": [{"type": "reasoning", "content": [{"text": 7}]}]},
            "input[0].content[0].text",
            "string",
        ),
        ({"instructions": ["a"]}, "instructions", "string"),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    fields: dict[str, Any], where: str, what: str
) -> None:
    with pytest.raises(BadRequestError, match=what) as refused:
        chat_of(**fields)
    assert refused.value.param == where


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4)
    | st.sampled_from(
        ["message", "function_call", "function_call_output", "input_text", "user", "reasoning",
         "additional_tools", "custom_tool_call", "local_shell_call", "web_search_call",
         "allowed_tools", "function"]
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(
            ["type", "role", "content", "text", "call_id", "name", "arguments", "output", "format",
             "schema", "image_url", "effort", "id", "input", "action", "summary", "tools", "mode"]
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
        chat_of(**fields)


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
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
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
    d.scripts = [answering(200, whole({"content": "x"}, "length"))]
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
    assert (said["content"], said["reasoning"]) == ("Well", "hmm")
    assert [call["id"] for call in said["tool_calls"]] == ["call_a", "call_b"]


async def test_references_to_items_of_a_stored_response_are_replaced(
    router: Router, d: MockEngine
) -> None:
    d.scripts = [thinks_and_calls]
    first = (await router.client.post(PATH, json=ASKED)).json()
    references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    del references[0]["type"]
    output = {"type": "function_call_output", "call_id": "call_a", "output": "1"}
    for items in (references, first["output"]):
        again = {"model": "m", "input": [{"role": "user", "content": "hi"}, *items, output]}
        assert (await router.client.post(PATH, json=again)).status_code == 200
        _, said, result = d.last.json["messages"]
        assert (said["content"], said["reasoning"]) == ("Well", "hmm")
        assert [call["id"] for call in said["tool_calls"]] == ["call_a", "call_b"]
        assert result["tool_call_id"] == "call_a"


@pytest.mark.parametrize("other", ["msg_x", "", "rs_1_2", "__", "twice"])
async def test_references_to_unknown_items_are_a_404(router: Router, other: str) -> None:
    first = (await router.client.post(PATH, json=ASKED)).json()
    known = first["output"][0]["id"]
    items = [{"type": "item_reference", "id": id} for id in (known, other)]
    if other == "twice":
        items[1]["id"] = known
    answer = await router.client.post(PATH, content=json.dumps({**ASKED, "input": items}))
    assert answer.status_code == 404
    assert answer.json()["error"]["param"] == "input"
    foreign = {"authorization": "Bearer other"}
    answer = await router.client.post(PATH, json={**ASKED, "input": items[:1]}, headers=foreign)
    assert answer.status_code == 404


async def test_what_is_left_out_is_logged_once(
    router: Router, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "disagg_router.proxy")
    tools = [FUNCTION, {"type": "web_search"}, {"type": "a" * 999}]
    for _ in range(3):
        answer = await router.client.post(PATH, json={**ASKED, "tools": tools})
        assert answer.status_code == 200
        assert answer.json()["tools"] == tools
    (line,) = [line for line in caplog.messages if "left out" in line]
    assert PATH in line
    assert "'web_search'" in line
    assert "'aaa" in line
    assert len(line) < 300


@pytest.mark.slow
async def test_another_router_goes_on_with_it(p: MockEngine, d: MockEngine) -> None:
    with running_redis() as redis:
        given = settings_for(p=[p], d=[d], **redis.settings)
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


async def test_response_that_was_not_made_in_the_background_is_not_cancelled(
    router: Router,
) -> None:
    mine, other = {"authorization": "Bearer mine"}, {"authorization": "Bearer other"}
    name = (await router.client.post(PATH, json=ASKED, headers=mine)).json()["id"]
    answer = await router.client.post(f"{PATH}/{name}/cancel", headers=mine)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"] == "Cannot cancel a synchronous response."
    assert error["param"] == "response_id"
    for unknown, headers in ((name, other), ("resp_unknown", mine)):
        answer = await router.client.post(f"{PATH}/{unknown}/cancel", headers=headers)
        assert answer.status_code == 404
        assert f"'{unknown}' not found" in answer.json()["error"]["message"]
    assert (await router.client.get(f"{PATH}/{name}", headers=mine)).json()["id"] == name


async def test_what_is_not_to_be_kept_is_not(router: Router) -> None:
    told = (await router.client.post(PATH, json={**ASKED, "store": False})).json()
    assert told["store"] is False
    assert (await router.client.get(f"{PATH}/{told['id']}")).status_code == 404


@pytest.mark.parametrize("limit", [{"conversation_store": "off"}, {"conversation_max_bytes": 100}])
@pytest.mark.parametrize("stream", [False, True])
async def test_response_that_the_store_refuses_is_not_reported_as_stored(
    start_router: StartRouter, limit: dict[str, Any], stream: bool
) -> None:
    router = await start_router(**limit)
    answer = await router.client.post(PATH, json=ASKED | {"stream": stream})
    if stream:
        last = json.loads(answer.text.rpartition("data: ")[2])
        assert (last["type"], last["response"]["store"]) == ("response.completed", False)
    else:
        assert answer.json()["store"] is False


async def test_without_a_store_nothing_is_gone_on_with(start_router: StartRouter) -> None:
    router = await start_router(conversation_store="off")
    told = (await router.client.post(PATH, json=ASKED)).json()
    more = {**ASKED, "previous_response_id": told["id"]}
    cancelled = await router.client.post(f"{PATH}/{told['id']}/cancel")
    for answer in (await router.client.post(PATH, json=more), cancelled):
        assert answer.status_code == 400
        assert "--conversation-store" in answer.json()["error"]["message"]


@pytest.mark.parametrize("previous", [7, "", "resp_x", "a" * 100_000, "\x00"])
async def test_an_absurd_id_is_a_400(router: Router, p: MockEngine, previous: object) -> None:
    answer = await router.client.post(PATH, json={**ASKED, "previous_response_id": previous})
    assert answer.status_code == 400
    assert len(answer.text) < 1000
    assert not p.requests


async def test_a_wrong_limit_is_named_as_the_client_knows_it(router: Router, p: MockEngine) -> None:
    answer = await router.client.post(PATH, json={**ASKED, "max_output_tokens": "abc"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "max_output_tokens")
    assert "max_completion_tokens" not in error["message"]
    assert not p.requests


async def test_a_stream_that_breaks_has_failed(router: Router, d: MockEngine) -> None:
    d.scripts = [raw(STREAM_HEAD + framed(b"".join(HELLO[:2])))]
    answer = await router.client.post(PATH, json={**ASKED, "stream": True})
    events = events_of(answer.text)
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    failed = events[-1]["response"]
    assert failed["status"] == "failed"
    assert (await router.client.get(f"{PATH}/{failed['id']}")).status_code == 404


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ({"code": 400, "type": "BadRequestError"}, "invalid_prompt"),
        ({"code": "400"}, "invalid_prompt"),
        ({"type": "invalid_request_error", "code": None}, "invalid_prompt"),
        ({"code": 429}, "rate_limit_exceeded"),
        ({"code": "rate_limit_exceeded", "type": "requests"}, "rate_limit_exceeded"),
        ({"code": 500, "type": "InternalServerError"}, "server_error"),
        ({"code": [], "type": {}}, "server_error"),
        ({}, "server_error"),
    ],
)
def test_errors_have_openais_codes(error: dict[str, Any], code: str) -> None:
    answer = AnswerBlocks()
    output = ResponseOutput(answer, {}, "resp_1", 0)
    written = [*output.events(answer.add({"error": {"message": "no", **error}}))]
    events = events_of(b"".join([*written, *output.last_events()]).decode())
    assert [event["type"] for event in events] == [
        "response.created", "response.in_progress", "error", "response.failed"
    ]  # fmt: skip
    for event in events[:2]:  # they tell nothing of what followed
        assert event["response"]["error"] is None
        assert event["response"]["status"] == "in_progress"
    assert (events[2]["code"], events[2]["message"]) == (code, "no")
    assert events[3]["response"]["error"] == {"code": code, "message": "no"}


@pytest.mark.parametrize(("status", "code"), [(400, "invalid_prompt"), (500, "server_error")])
async def test_an_engines_error_in_mid_stream_keeps_its_code(
    router: Router, d: MockEngine, status: int, code: str
) -> None:
    is_seen = asyncio.Event()

    async def fails(_: Received, peer: Peer) -> None:
        await peer.send(STREAM_HEAD + framed(b"".join(HELLO[:2])))
        await is_seen.wait()
        error = json.dumps({"error": {"message": "no", "code": status}}).encode()
        await peer.send(framed(b"data: " + error + b"\n\n") + b"0\r\n\r\n")

    d.usual = fails
    seen = ""
    async with router.client.stream("POST", PATH, json={**ASKED, "stream": True}) as answer:
        async for text in answer.aiter_text():
            seen += text
            is_seen.set()
    error, failed = events_of(seen)[-2:]
    assert (error["type"], error["code"]) == ("error", code)
    assert failed["response"]["error"]["code"] == code
    assert failed["response"]["output"][-1]["status"] == "incomplete"


@pytest.mark.parametrize("finish", ["stop", "length"])
async def test_what_was_cut_has_an_incomplete_last_item(
    router: Router, d: MockEngine, finish: str
) -> None:
    thinks = streaming(
        *(chunk({"reasoning": "hm"}), chunk({"content": "x"}), chunk({}, finish), DONE)
    )
    d.usual = thinks
    answer = await router.client.post(PATH, json={**ASKED, "stream": True})
    events = events_of(answer.text)
    expected = ["completed", "incomplete" if finish == "length" else "completed"]
    for items in (
        [event["item"] for event in events if event["type"] == "response.output_item.done"],
        events[-1]["response"]["output"],
    ):
        assert [item["status"] for item in items] == expected


async def test_what_cannot_be_said_back_is_refused(router: Router, p: MockEngine) -> None:
    deep = b"[" * 253 + b"]" * 253
    body = b'{"model": "m", "input": "hi", "metadata": %b}' % deep
    answer = await router.client.post(PATH, content=body)
    assert answer.status_code == 400
    assert not p.requests


# Log-probabilities.


def entries(*tokens: str) -> dict[str, Any]:
    """Log-probabilities of a chat."""
    return {
        "content": [
            {"token": token, "logprob": -1.5, "bytes": [*token.encode()], "top_logprobs": [
                {"token": token, "logprob": -1.5, "bytes": [*token.encode()]}
            ]}
            for token in tokens
        ]
    }  # fmt: skip


def tokens_of(logprobs: list[dict[str, Any]]) -> list[str]:
    return [entry["token"] for entry in logprobs]


THOUGHTS: list[tuple[dict[str, Any], list[str]]] = [
    ({"role": "assistant", "content": ""}, []),
    ({"reasoning": "hm"}, ["<think>", "hm"]),
    ({}, ["</think>"]),
    ({"reasoning": " so", "content": "A"}, [" so", "</think>", "A"]),
    ({}, ["B"]),
    ({"content": "BC"}, ["C"]),
    ({"content": "A"}, ["A"]),
    ({}, ["<call>"]),
    ({"tool_calls": [{"index": 0, "id": "a", "function": {"name": "f"}}]}, ["f"]),
    ({"tool_calls": [{"index": 0, "function": {"arguments": '{"A": 1}'}}]}, ['{"', "A", '": 1}']),
    ({}, ["</call>"]),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_are_those_of_the_text_alone(
    router: Router, d: MockEngine, stream: bool
) -> None:
    async def thinks(request: Received, peer: Peer) -> None:
        assert request.json["logprobs"] is True
        assert request.json["top_logprobs"] == 1
        if stream:
            chunks = [chunk(delta, logprobs=entries(*tokens)) for delta, tokens in THOUGHTS]
            await peer.stream(*chunks, chunk({}, "tool_calls"), DONE)
            return
        tokens = [token for _, tokens in THOUGHTS for token in tokens]
        call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"A": 1}'}}
        message = {"reasoning": "hm so", "content": "ABCA", "tool_calls": [call]}
        await peer.answer(whole(message, "tool_calls", logprobs=entries(*tokens)))

    d.usual = thinks
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 1, "stream": stream}
    answer = await router.client.post(PATH, json=ASKED | asked)
    if stream:
        events = events_of(answer.text)
        text = [event for event in events if event["type"].startswith("response.output_text.")]
        deltas, done = text[:-1], text[-1]
        assert [(one["delta"], tokens_of(one["logprobs"])) for one in deltas] == [
            ("A", ["A"]), ("BC", ["B", "C"]), ("A", ["A"])
        ]  # fmt: skip
        assert deltas[0]["logprobs"][0] == {
            "token": "A", "logprob": -1.5, "top_logprobs": [{"token": "A", "logprob": -1.5}]
        }  # fmt: skip
        assert tokens_of(done["logprobs"]) == ["A", "B", "C", "A"]
        assert not any("logprobs" in event for event in events if "reasoning" in event["type"])
        parts = [event["part"] for event in events if "content_part" in event["type"]]
        assert [tokens_of(part["logprobs"]) for part in parts if "logprobs" in part] == [
            [], ["A", "B", "C", "A"]
        ]  # fmt: skip
        output = events[-1]["response"]["output"]
    else:
        output = answer.json()["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
    (part,) = output[1]["content"]
    assert part["logprobs"] == entries("A", "B", "C", "A")["content"]
    assert "logprobs" not in output[0]["content"][0]


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([("Hi", ["Hi"]), ("", ["<eos>"])], ["Hi"]),
        ([("", [""]), ("é", ["é"])], ["", "é"]),  # a character of two tokens
        ([("", ["token_id:1"]), ("é", ["token_id:2"])], ["token_id:1", "token_id:2"]),
        ([("a", ["a"]), ("a", ["a"]), ("ab", ["a", "b"])], ["a", "a", "a", "b"]),
    ],
)
def test_every_token_of_a_text_has_its_logprob(
    pieces: list[tuple[str, list[str]]], expected: list[str]
) -> None:
    answer = AnswerBlocks()
    steps: list[BlockStep] = []
    for text, tokens in pieces:
        steps += answer.add(json.loads(chunk({"content": text}, logprobs=entries(*tokens))[6:]))
    found = [entry for step in steps for entry in step.logprobs]
    assert [entry["token"] for entry in found if isinstance(entry, dict)] == expected


@given(st.lists(JSON, max_size=4), st.text(max_size=3), st.text(max_size=3))
def test_strange_logprobs_break_nothing(content: list[Any], text: str, reasoning: str) -> None:
    answer = AnswerBlocks()
    output = ResponseOutput(answer, {}, "resp_1", 0)
    delta = {"content": text, "reasoning": reasoning}
    deltas: list[dict[str, Any]] = [{}, delta, {"content": text}]
    for given_delta in deltas:
        choice = {"delta": given_delta, "logprobs": {"content": content}}
        assert list(output.events(answer.add({"choices": [choice]}))) is not None
    answer.finish_reason = "stop"
    assert list(output.events(answer.close())) is not None
    assert list(output.last_events())


def test_top_logprobs_alone_are_not_asked_of_the_engine() -> None:
    assert chat_of(top_logprobs=2) == chat_of()


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


async def test_a_request_refers_to_a_bounded_number_of_responses() -> None:
    kept = ResponseStore(MemoryStore(999, 10**6), "authorization", 100)
    items: list[object] = []
    for number in range(MAX_REFERENCED_RESPONSES + 1):
        item = {"id": f"msg_{number}_0"}
        items.append(item)
        await kept.keep("t", f"resp_{number}", StoredResponse("", [], {"output": [item]}))
    assert await kept.resolve_references("t", items[:-1]) == items[:-1]
    with pytest.raises(BadRequestError, match="too many"):
        await kept.resolve_references("t", items)


@pytest.mark.parametrize("output", [None, 7, [7, {}, {"id": []}], {"id": "msg_1_0"}])
async def test_a_stored_response_without_items_has_none_to_refer_to(output: object) -> None:
    kept = ResponseStore(MemoryStore(9, 10_000), "authorization", 100)
    await kept.keep("t", "resp_1", StoredResponse("", [], {"output": output}))
    with pytest.raises(UnknownItemError):
        await kept.resolve_references("t", [{"id": "msg_1_0"}])


async def test_two_tenants_with_one_id_are_two() -> None:
    kept = ResponseStore(MemoryStore(9, 10_000), "authorization", 100)
    await kept.keep("t", "a:b", KEPT)
    for tenant, name in (("t:a", "b"), ("", "a:b"), ("t2", "a:b")):
        with pytest.raises(UnknownResponseError):
            await kept.find(tenant, name)
    assert json.dumps(KEPT.messages)
