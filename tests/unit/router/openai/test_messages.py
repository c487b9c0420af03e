"""Anthropic's Messages, translated to chats and back."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.openai.anthropic_messages import chat_from_messages, count_request_from_messages
from router.openai.dialects import AnswerBlocks, UntranslatableError
from router.openai.errors import BadRequestError
from scripts.mock_engine import DONE, STREAM_HEAD, MockEngine, Peer, Received
from scripts.mock_engine import chunk as framed
from tests.unit.router.conftest import StartRouter
from tests.unit.router.engine_scripts import answer_late, answering, raw, streaming
from tests.unit.router.harness import Router, eventually, post
from tests.unit.router.openai.chats import (
    HELLO,
    chunk,
    events_of,
    says_hello,
    thinks_and_calls,
    whole,
)

PATH = "/v1/messages"
HI = {"role": "user", "content": "hi"}
ASKED = {"model": "m", "max_tokens": 5, "messages": [HI]}
WEATHER = {"name": "weather", "description": "d", "input_schema": {"type": "object"}}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
USE = {"type": "tool_use", "id": "t1", "name": "weather", "input": {}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf"}}


def chat_of(**fields: Any) -> dict[str, Any]:
    return chat_from_messages(ASKED | fields, set(), ())


def test_a_plain_message_is_a_plain_chat() -> None:
    assert chat_of() == ASKED
    assert chat_of(temperature=0.5, top_p=0.9, top_k=3, stop_sequences=["a"], stream=True) == {
        **ASKED,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "stop": ["a"],
        "stream": True,
        "stream_options": {"include_usage": True},
    }


@pytest.mark.parametrize("system", ["be kind", [{"type": "text", "text": "be kind"}]])
def test_a_system_prompt_comes_first(system: object) -> None:
    assert chat_of(system=system)["messages"] == [{"role": "system", "content": "be kind"}, HI]


def test_tools_and_what_they_said_are_told() -> None:
    said = [
        HI,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "I look"},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"at": "Rome"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "and then?"},
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "content": [
                        {"type": "text", "text": "sunny"},
                        {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}},
                    ],
                },
            ],
        },
    ]
    given = chat_of(messages=said, tools=[WEATHER], tool_choice={"type": "tool", "name": "weather"})
    call = {
        "id": "t1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"at":"Rome"}'},
    }
    assert given["messages"][1:] == [
        {"role": "assistant", "content": "I look", "reasoning": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": "sunny"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "and then?"},
                {"type": "image_url", "image_url": {"url": "http://x/y.png"}},
            ],
        },
    ]
    function = {"name": "weather", "description": "d", "parameters": {"type": "object"}}
    assert given["tools"] == [{"type": "function", "function": function}]
    assert given["tool_choice"] == {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize(
    ("traces", "expected"),
    [
        ([{"type": "thinking", "thinking": "hm"}, {"type": "thinking", "thinking": "so"}],
         {"reasoning": "hm\n\nso"}),
        ([{"type": "redacted_thinking", "data": "gAAA"}], {}),
        ([{"type": "thinking", "thinking": "", "signature": "s"}, {"type": "thinking"}], {}),
    ],
)  # fmt: skip
def test_thinking_goes_along_as_reasoning(
    traces: list[dict[str, Any]], expected: dict[str, str]
) -> None:
    content = [*traces, {"type": "text", "text": "yes"}]
    given = chat_of(messages=[HI, {"role": "assistant", "content": content}, HI])
    assert given["messages"][1] == {"role": "assistant", "content": "yes", **expected}


@pytest.mark.parametrize(
    ("choice", "expected"), [("auto", "auto"), ("any", "required"), ("none", "none")]
)
def test_a_choice_of_tools_has_another_name(choice: str, expected: str) -> None:
    given = chat_of(
        tools=[WEATHER], tool_choice={"type": choice, "disable_parallel_tool_use": True}
    )
    assert (given["tool_choice"], given["parallel_tool_calls"]) == (expected, False)


def test_an_image_is_passed_as_chats_have_it() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    content = [{"type": "text", "text": "what?"}, {"type": "image", "source": source}]
    assert chat_of(messages=[{"role": "user", "content": content}])["messages"][0]["content"] == [
        {"type": "text", "text": "what?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
    ]


@pytest.mark.parametrize(
    ("fields", "where", "what"),
    [
        ({"messages": []}, "messages", "at least one"),
        ({"messages": "hi"}, "messages", "list"),
        ({"messages": [7]}, "messages[0]", "object"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "must be"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content", "list"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "at least one"),
        (
            {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
            "messages[0].content[0]",
            "'document'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "no"}]}]},
            "messages[0].content[0]",
            "'no'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "?"}, PDF]}]},
            "messages[0].content[1].source",
            "'base64'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "container_upload"}]}]},
            "messages[0].content[0]",
            "'container_upload'",
        ),
        ({"output_format": {"type": "xml"}}, "output_format", "'xml'"),
        ({"output_config": {"format": {"type": "xml"}}}, "format", "'xml'"),
        ({"tools": [SEARCH]}, "tools[0]", "'web_search_20250305'"),
        (
            {"tools": [SEARCH, WEATHER], "tool_choice": {"type": "tool", "name": "web_search"}},
            "tool_choice.name",
            "tool",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{**USE, "input": "x"}]}]},
            "messages[0].content[0].input",
            "object",
        ),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema", "object"),
        ({"tools": [WEATHER], "tool_choice": {"type": "no"}}, "tool_choice", "'no'"),
        ({"system": 7}, "system", "list"),
        ({"mcp_servers": [{}]}, "mcp_servers", "not supported"),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    fields: dict[str, Any], where: str, what: str
) -> None:
    with pytest.raises(BadRequestError, match=what.strip("'")) as refused:
        chat_of(**fields)
    assert refused.value.param == where


# What only Anthropic can act on.


HINTS = {
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "client_metadata": {"a": 1},
    "betas": ["a"],
    "speed": "fast",
    "service_tier": "auto",
    "inference_geo": "us",
}


def test_hints_to_anthropic_do_not_reach_engines() -> None:
    assert chat_of(**HINTS) == ASKED
    count = count_request_from_messages({**HINTS, "model": "m", "messages": [HI]}, set(), ())
    assert count == {"model": "m", "messages": [HI]}


@pytest.mark.parametrize("role", ["ctx", "msg"])
def test_other_roles_of_vllm_are_the_users(role: str) -> None:
    assert chat_of(messages=[{"role": role, "content": "hi"}])["messages"] == [HI]


@pytest.mark.parametrize("given", [{}, None])
def test_a_call_without_input_has_an_empty_object(given: object) -> None:
    said = [HI, {"role": "assistant", "content": [{**USE, "input": given}]}]
    message = chat_of(messages=said)["messages"][1]
    assert message["tool_calls"][0]["function"]["arguments"] == "{}"


def test_tools_of_anthropic_are_left_out_beside_others() -> None:
    left_out: set[str] = set()
    bash = {"type": "bash_20250124", "name": "bash"}
    told = chat_from_messages({**ASKED, "tools": [SEARCH, WEATHER, bash]}, left_out, ())
    assert [tool["function"]["name"] for tool in told["tools"]] == ["weather"]
    assert left_out == {"tools of type 'bash_20250124', 'web_search_20250305'"}


def test_system_messages_may_add_and_remove_tools() -> None:
    other = {**WEATHER, "name": "other"}

    def change(kind: str, tool: dict[str, Any]) -> dict[str, Any]:
        return {"role": "system", "content": [{"type": f"tool_{kind}", "tool": tool}]}

    added = change("addition", {"type": "tool_definition", "definition": other})
    removed = change("removal", {"type": "tool_reference", "name": "weather"})
    again = change("addition", {"type": "tool_reference", "name": "weather"})
    for changes, expected in (
        ([added], ["weather", "other"]),
        ([removed], []),
        ([added, removed], ["other"]),
        ([removed, again], ["weather"]),
    ):
        left_out: set[str] = set()
        asked = {**ASKED, "messages": [HI, *changes], "tools": [WEATHER]}
        told = chat_from_messages(asked, left_out, ())
        assert [tool["function"]["name"] for tool in told.get("tools", ())] == expected
        assert told["messages"] == [HI]
        assert not left_out
    for wrong in ({}, {"type": "tool_definition"}, {"name": 7}):
        with pytest.raises(BadRequestError):
            chat_of(messages=[HI, change("addition", wrong)])


def test_unknown_blocks_are_left_out_of_the_history() -> None:
    left_out: set[str] = set()
    said = [
        {"role": "user", "content": [{"type": "mystery"}]},
        {"role": "user", "content": [{"type": "text", "text": "find"}, {"type": "mystery"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
                {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
                {"type": "text", "text": "found"},
                {"type": ["no"]},
            ],
        },
        HI,
    ]
    told = chat_from_messages({**ASKED, "messages": said}, left_out, ())
    assert told["messages"] == [
        {"role": "user", "content": "find"}, {"role": "assistant", "content": "found"}, HI
    ]  # fmt: skip
    kinds = ("'mystery'", "'server_tool_use'", "'web_search_tool_result'", "none")
    assert left_out == {f"blocks of type {kind}" for kind in kinds}


def test_blocks_with_texts_become_texts() -> None:
    text = {"type": "text", "text": "b"}
    blocks = [
        {"type": "document", "title": "t", "source": {"type": "text", "data": "a"}},
        {"type": "document", "source": {"type": "content", "content": [text]}},
        {"type": "search_result", "title": "c", "source": "http://x", "content": [text]},
    ]
    told = chat_of(messages=[{"role": "user", "content": blocks}])["messages"]
    assert told == [{"role": "user", "content": "t\na\nb\nc\nhttp://x\nb"}]
    summary = [HI, {"role": "assistant", "content": [{"type": "compaction", "content": "so far"}]}]
    assert chat_of(messages=summary)["messages"][1]["content"] == "so far"


def test_a_tool_result_says_what_the_model_cannot_see() -> None:
    parts = [
        {"type": "tool_reference", "tool_name": "weather"},
        {"type": "text", "text": "a"},
        PDF,
        {"type": "image", "source": {"type": "file", "file_id": "f"}},
        {"type": ["no"], "source": {"type": {}}},
    ]
    result = {"type": "tool_result", "tool_use_id": "t1", "content": parts}
    said = [HI, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [result]}]
    assert chat_of(messages=said)["messages"][2]["content"].splitlines() == [
        "The tool weather is available.",
        "a",
        "[content of type 'document' cannot be shown]",
        "[content of type 'image' cannot be shown]",
        "[content of type none cannot be shown]",
    ]


def test_system_messages_come_first_and_turns_are_merged() -> None:
    inline = {"role": "system", "content": [{"type": "text", "text": "now"}]}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "sunny"}
    said = [
        {"role": "system", "content": "first"}, HI, HI,
        {"role": "assistant", "content": [USE]}, inline,
        {"role": "user", "content": [result, {"type": "text", "text": "go"}]},
    ]  # fmt: skip
    told = chat_of(system="be kind", messages=said)["messages"]
    assert [message["role"] for message in told] == ["system", "user", "assistant", "tool", "user"]
    assert [told[at]["content"] for at in (0, 1, 3, 4)] == [
        "be kind\n\nfirst", "hi\n\nhi", "sunny", "now\n\ngo"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "fields",
    [
        {"output_format": {"type": "json_schema", "schema": {"type": "object"}}},
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
    ],
)
def test_an_output_schema_is_passed_as_chats_have_it(fields: dict[str, Any]) -> None:
    schema = {"name": "output", "schema": {"type": "object"}}
    assert chat_of(**fields)["response_format"] == {"type": "json_schema", "json_schema": schema}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4)
    | st.sampled_from(["text", "image", "tool_use", "tool_result", "user", "assistant", "base64",
                       "document", "content", "search_result", "tool_reference", "system",
                       "tool_addition", "tool_removal", "tool_definition"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(
            ["type", "role", "content", "text", "source", "id", "name", "input", "tool_use_id",
             "input_schema", "url", "data", "media_type", "format", "effort", "tool", "definition"]
        ), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip
FIELDS = st.sampled_from(
    [
        "messages",
        "system",
        "tools",
        "tool_choice",
        "output_config",
        "output_format",
        "stop_sequences",
        "metadata",
    ]
)


@settings(max_examples=200)
@given(st.dictionaries(FIELDS, JSON))
def test_any_json_is_translated_or_refused(fields: dict[str, Any]) -> None:
    for translate in (chat_from_messages, count_request_from_messages):
        with contextlib.suppress(BadRequestError):
            translate(ASKED | fields, set(), ())


@given(JSON, JSON, JSON)
def test_any_answer_is_heard(choices: object, usage: object, error: object) -> None:
    answer = AnswerBlocks()
    choice = {"delta": choices, "message": usage, "logprobs": error}
    chunks: list[dict[str, Any]] = [
        {"choices": choices, "usage": usage},
        {"choices": [choice]},
        {"error": error},
    ]
    for one in chunks:
        with contextlib.suppress(UntranslatableError):
            list(answer.add(one))
    list(answer.close())


# The prompt's changing parts.

BILLING = "x-anthropic-billing-header: cc_version=2.1.197.a1b; cc_entrypoint=cli; cch="
CLAUDE_CODE = ("x-anthropic-billing-header*",)


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


@pytest.mark.parametrize(
    "fields",
    [
        {"system": [text(f"{BILLING}1;"), text("be kind")]},
        {"system": [text(f"{BILLING}1;\nbe kind")]},
        {"system": f"{BILLING}1;\r\n\r\nbe kind"},
        {"system": f" {BILLING}1; \nbe kind"},
        {"messages": [{"role": "system", "content": f"{BILLING}1;"},
                      {"role": "system", "content": "be kind"}, HI]},
        {"messages": [{"role": "system", "content": [text(f"{BILLING}1;"), text("be kind")]}, HI]},
    ],
)  # fmt: skip
def test_a_line_that_changes_with_each_request_is_removed(fields: dict[str, Any]) -> None:
    for translate in (chat_from_messages, count_request_from_messages):
        told = translate(ASKED | fields, set(), CLAUDE_CODE)["messages"]
        assert told == [{"role": "system", "content": "be kind"}, HI]


@pytest.mark.parametrize("system", [f"{BILLING}1;", [text(f"{BILLING}1;")], [], "", [text("")]])
def test_an_empty_system_prompt_is_no_message(system: object) -> None:
    told = chat_from_messages({**ASKED, "system": system}, set(), CLAUDE_CODE)
    assert told["messages"] == [HI]


def test_the_users_text_and_later_lines_are_kept() -> None:
    asked = {**ASKED, "system": f"be kind\n{BILLING}1;"}
    asked["messages"] = [{"role": "user", "content": f"{BILLING}1;"}]
    told = chat_from_messages(asked, set(), CLAUDE_CODE)["messages"]
    assert [message["content"] for message in told] == [asked["system"], f"{BILLING}1;"]


async def test_engines_see_one_prompt_whatever_the_billing_line(
    start_router: StartRouter, d: MockEngine
) -> None:
    router = await start_router()
    for number in range(2):
        asked = {**ASKED, "system": [text(f"{BILLING}{number};"), text("be kind")]}
        assert (await router.client.post(PATH, json=asked)).status_code == 200
    assert [request.json["messages"] for request in d.requests] == [
        [{"role": "system", "content": "be kind"}, HI]
    ] * 2
    router = await start_router(changing_prompt_lines=["Today is *."])
    asked = {**ASKED, "system": f"Today is Monday.\n{BILLING}1;"}
    assert (await router.client.post(PATH, json=asked)).status_code == 200
    assert d.last.json["messages"][0]["content"] == f"{BILLING}1;"


# Through the router.


async def test_each_kind_that_is_left_out_is_logged_once(
    router: Router, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "disagg_router.proxy")
    for _ in range(2):
        asked = {**ASKED, "tools": [SEARCH, WEATHER], **HINTS}
        assert (await router.client.post(PATH, json=asked)).status_code == 200
    lines = [line for line in caplog.messages if "left out" in line]
    assert lines == [f"requests to {PATH}: tools of type 'web_search_20250305' are left out"]


async def test_a_message_goes_along_both_legs(router: Router, p: MockEngine, d: MockEngine) -> None:
    answer = await router.client.post(PATH, json=ASKED)
    assert answer.status_code == 200
    told = answer.json()
    assert told.pop("id").startswith("msg_")
    assert told == {
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [{"type": "text", "text": "Hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 6,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 4,
            "output_tokens": 3,
        },
    }
    assert p.last.path == d.last.path == "/v1/chat/completions"
    assert p.last.json["max_tokens"] == 1
    assert d.last.json["max_tokens"] == 5
    assert "remote_host" in d.last.json["kv_transfer_params"]
    labels = {"endpoint": PATH, "flow": "pull", "status": "200", "outcome": "ok"}
    assert router.metric("requests_total", **labels) == 1


async def test_thoughts_text_and_calls_are_blocks_whole_and_streamed(
    router: Router, d: MockEngine
) -> None:
    d.scripts = [thinks_and_calls, thinks_and_calls]
    whole_one = (await router.client.post(PATH, json=ASKED)).json()
    assert whole_one["content"] == [
        {"type": "thinking", "thinking": "hmm", "signature": ""},
        {"type": "text", "text": "Well"},
        {"type": "tool_use", "id": "call_a", "name": "f", "input": {"x": 1}},
        {"type": "tool_use", "id": "call_b", "name": "g", "input": {}},
    ]
    assert whole_one["stop_reason"] == "tool_use"
    answer = await router.client.post(PATH, json={**ASKED, "stream": True})
    events = events_of(answer.text)
    assert events[0]["type"] == "message_start"
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    assert events[-2]["usage"] == whole_one["usage"]
    starts = [e["content_block"]["type"] for e in events if e["type"] == "content_block_start"]
    assert starts == ["thinking", "text", "tool_use", "tool_use"]
    stops = [event["index"] for event in events if event["type"] == "content_block_stop"]
    assert stops == [0, 1, 2, 3]
    arguments = [e["delta"].get("partial_json", "") for e in events if "delta" in e]
    assert json.loads("".join(arguments)[:-2]) == {"x": 1}


@pytest.mark.parametrize(
    ("finish", "stop", "reason", "sequence"),
    [
        ("stop", None, "end_turn", None),
        ("stop", 128001, "end_turn", None),
        ("stop", "END", "stop_sequence", "END"),
        ("length", None, "max_tokens", None),
        ("content_filter", None, "refusal", None),
    ],
)
async def test_why_it_ended_is_told(
    router: Router, d: MockEngine, finish: str, stop: object, reason: str, sequence: str | None
) -> None:
    ends = answering(200, whole({"content": "x"}, finish, stop_reason=stop))
    d.scripts = [ends]
    told = (await router.client.post(PATH, json=ASKED)).json()
    assert (told["stop_reason"], told["stop_sequence"]) == (reason, sequence)


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        (b"{", 400, "invalid_request_error"),
        (json.dumps({"messages": [HI]}).encode(), 400, "invalid_request_error"),
        (json.dumps(ASKED | {"max_tokens": "abc"}).encode(), 400, "invalid_request_error"),
        (json.dumps(ASKED | {"model": "none"}).encode(), 404, "not_found_error"),
        (b" " * 3000, 413, "request_too_large"),
    ],
)
async def test_errors_have_the_dialects_own_shape(
    start_router: StartRouter, body: bytes, status: int, kind: str
) -> None:
    router = await start_router(max_body_size=2000)
    answer = await router.client.post(PATH, content=body)
    told = answer.json()
    assert (answer.status_code, told["type"], told["error"]["type"]) == (status, "error", kind)
    assert told["error"]["message"]


async def test_an_engines_refusal_is_told_in_this_dialect(router: Router, d: MockEngine) -> None:
    d.scripts = [answering(422, {"detail": "no such thing"})]
    answer = await router.client.post(PATH, json=ASKED)
    assert answer.status_code == 422
    assert answer.json()["error"] == {"type": "invalid_request_error", "message": "no such thing"}


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("path", [PATH, f"{PATH}/count_tokens"])
async def test_a_prompt_that_is_too_long_is_refused_in_anthropics_words(
    router: Router, p: MockEngine, d: MockEngine, path: str, is_streamed: bool
) -> None:
    async def refuses(_: Received, peer: Peer) -> None:
        message = (
            "This model's maximum context length is 100 tokens. However, your prompt contains 120 "
            "input tokens, which exceeds this limit even without any output tokens."
        )
        await peer.answer({"error": {"message": message, "type": "BadRequestError"}}, 400)

    p.usual = d.usual = refuses
    answer = await router.client.post(path, json={**ASKED, "stream": is_streamed})
    assert answer.status_code == 400
    assert answer.json()["error"] == {
        "type": "invalid_request_error",
        "message": "prompt is too long: 120 tokens > 100 maximum",
    }


async def test_max_tokens_above_the_context_is_lowered_to_it(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    d.contexts = {"m": 50}
    router = await start_router(model_alias=["claude-*=m"])
    await eventually(lambda: router.gateway.fleet.snapshot.context_lengths == {"m": 50})
    for model in ("m", "claude-opus"):
        asked = {**ASKED, "model": model, "max_tokens": 32000}
        assert (await router.client.post(PATH, json=asked)).status_code == 200
        assert (p.last.json["max_tokens"], d.last.json["max_tokens"]) == (1, 50)
    for wrong in (0, -1, "x", True, 51.5, None):
        asked = {**ASKED, "max_tokens": wrong}
        answer = await router.client.post(PATH, json=asked)
        assert answer.status_code == (200 if wrong in (True, None) else 400), wrong
    assert (await router.client.post(PATH, json={**ASKED, "max_tokens": 7})).status_code == 200
    assert d.last.json["max_tokens"] == 7


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", PATH, 405, "invalid_request_error"),
        ("POST", f"{PATH}/batches", 404, "not_found_error"),
        ("GET", f"{PATH}/batches/x/results", 404, "not_found_error"),
    ],
)
async def test_endpoints_that_do_not_exist_have_anthropics_errors(
    router: Router, method: str, path: str, status: int, kind: str
) -> None:
    answer = await router.client.request(method, path)
    assert answer.status_code == status
    assert (answer.json()["type"], answer.json()["error"]["type"]) == ("error", kind)


@pytest.mark.parametrize("path", [PATH, f"{PATH}/count_tokens"])
@pytest.mark.parametrize(
    ("status", "body"),
    [(200, b"<html>"), (200, b"[]"), (200, b"{}"), (204, b""), (301, b""), (404, b"<html>"),
     (429, b'{"error": 7}'), (400, b'{"error": {"message": 7}}'), (422, b'{"detail": [{}]}')],
)  # fmt: skip
async def test_whatever_an_engine_answers_is_told_in_this_dialect(
    router: Router, d: MockEngine, path: str, status: int, body: bytes
) -> None:
    d.scripts = [answering(status, body)] * 4
    answer = await router.client.post(path, json=ASKED)
    assert answer.status_code == (status if status >= 400 else 502)
    told = answer.json()
    assert (told["type"], type(told["error"]["message"])) == ("error", str)


async def test_a_stream_that_breaks_ends_with_an_error_event(router: Router, d: MockEngine) -> None:
    d.scripts = [raw(STREAM_HEAD + framed(b"".join(HELLO[:2])))]
    answer = await router.client.post(PATH, json={**ASKED, "stream": True})
    events = events_of(answer.text)
    assert events[0]["type"] == "message_start"
    assert events[-1]["type"] == "error"
    assert events[-1]["error"]["type"] == "api_error"


async def test_a_stream_without_a_finish_is_no_whole_one(router: Router, d: MockEngine) -> None:
    d.scripts = [streaming(*HELLO[:2])]
    answer = await router.client.post(PATH, json={**ASKED, "stream": True})
    assert events_of(answer.text)[-1]["type"] == "error"


@pytest.mark.parametrize("stream", [False, True])
async def test_answer_that_ends_for_a_repetition_is_one(
    router: Router, d: MockEngine, stream: bool
) -> None:
    async def repeats(_: Received, peer: Peer) -> None:
        if stream:
            await peer.stream(HELLO[1], chunk({"content": "lo"}, "repetition"), DONE)
        else:
            await peer.answer(whole({"content": "Hello"}, "repetition"))

    d.scripts = [repeats]
    answer = await router.client.post(PATH, json={**ASKED, "stream": stream})
    assert answer.status_code == 200
    assert '"stop_reason":"end_turn"' in answer.text


@pytest.mark.parametrize(
    ("thinking", "sent"),
    [
        ({"type": "enabled", "budget_tokens": "5", "display": "omitted"},
         {"thinking_token_budget": 5}),
        ({"type": "disabled"}, {"reasoning_effort": "none"}),
        ({"type": "adaptive"}, {}),
    ],
)  # fmt: skip
def test_thinking_is_configured_as_vllm_does(
    thinking: dict[str, Any], sent: dict[str, Any]
) -> None:
    given = chat_of(thinking=thinking, max_tokens=6)
    assert {name: given[name] for name in given if "think" in name or "effort" in name} == sent


@pytest.mark.parametrize(
    "thinking",
    [
        7,
        {"type": "enabled"},
        {"type": "enabled", "budget_tokens": "x"},
        {"type": "enabled", "budget_tokens": 6},
        {"type": "other"},
    ],
)
def test_invalid_configuration_of_thinking_is_refused(thinking: object) -> None:
    with pytest.raises(BadRequestError, match="thinking"):
        chat_of(thinking=thinking, max_tokens=6)


async def test_tokens_that_an_engine_has_cached_are_reported(router: Router, d: MockEngine) -> None:
    async def caches(_: Received, peer: Peer) -> None:
        details = {"cached_tokens": 4, "created_cache_tokens": 5}
        usage = {"prompt_tokens": 10, "completion_tokens": 3, "prompt_tokens_details": details}
        await peer.answer({**whole({"content": "Hello"}), "usage": usage})

    d.scripts = [caches]
    assert (await router.client.post(PATH, json=ASKED)).json()["usage"] == {
        "input_tokens": 1,
        "cache_creation_input_tokens": 5,
        "cache_read_input_tokens": 4,
        "output_tokens": 3,
    }


async def test_models_are_anthropics_for_its_clients(router: Router) -> None:
    headers = {"anthropic-version": "2023-06-01"}
    listed = (await router.client.get("/v1/models", headers=headers)).json()
    first = listed["data"][0]
    assert (listed["has_more"], listed["first_id"]) == (False, first["id"])
    one = (await router.client.get(f"/v1/models/{first['id']}", headers=headers)).json()
    assert one == first
    assert {name: one[name] for name in ("type", "display_name")} == {
        "type": "model",
        "display_name": one["id"],
    }
    assert one["created_at"].endswith("+00:00")
    unknown = await router.client.get("/v1/models/none", headers=headers)
    assert (unknown.status_code, unknown.json()["type"]) == (404, "error")
    assert unknown.json()["error"]["type"] == "not_found_error"
    assert "display_name" not in (await router.client.get(f"/v1/models/{first['id']}")).json()


async def test_heartbeats_pass_between_events(start_router: StartRouter, p: MockEngine) -> None:
    p.scripts = [answer_late(0.35, p.usual)]  # longer than three heartbeats
    router = await start_router(stream_heartbeat=0.1)
    answer = await router.client.post(PATH, json={**ASKED, "stream": True})
    events = events_of(answer.text)
    assert events[:3] == [{"type": "ping"}] * 3
    assert events_of(answer.text)[-1]["type"] == "message_stop"


async def test_a_key_by_anthropics_name_is_the_one_that_engines_know(
    router: Router, d: MockEngine
) -> None:
    await router.client.post(PATH, json=ASKED, headers={"x-api-key": "secret"})
    assert d.last.header("authorization") == "Bearer secret"
    assert d.last.header("x-api-key") is None


async def test_a_client_that_leaves_ends_the_leg(router: Router, d: MockEngine) -> None:
    left: list[bool] = []

    async def waits(_: Received, peer: Peer) -> None:
        await peer.send(STREAM_HEAD + framed(chunk({"content": "a"})))
        await peer.wait_left()
        left.append(True)

    d.scripts = [waits]
    async with router.socket() as client:
        await client.send(post(json.dumps({**ASKED, "stream": True}).encode(), PATH))
        await client.head()
    await eventually(lambda: left)


async def test_an_exact_turn_is_streamed_from_its_whole_answer(
    start_router: StartRouter, d: MockEngine
) -> None:
    router = await start_router(conversation_stream="exact")
    d.usual = says_hello
    asked = {**ASKED, "stream": True, "conversation_id": "c"}
    events = events_of((await router.client.post(PATH, json=asked)).text)
    assert d.last.json["stream"] is False
    assert events[-1]["type"] == "message_stop"


async def test_tokens_are_counted_by_an_engine(
    router: Router, p: MockEngine, d: MockEngine
) -> None:
    counts = answering(200, {"count": 12, "tokens": [1] * 12, "max_model_len": 100})
    d.scripts = [counts]
    asked = {"model": "m", "system": "s", "messages": [HI]}
    answer = await router.client.post(f"{PATH}/count_tokens", json=asked)
    assert answer.json() == {"input_tokens": 12}
    assert d.last.path == "/tokenize"
    assert d.last.json["messages"] == [{"role": "system", "content": "s"}, HI]
    assert not p.requests
