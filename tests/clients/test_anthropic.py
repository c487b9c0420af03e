"""Anthropic's own Python client."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest

from tests.clients.conftest import LASTING, MODEL, Acted, Stack

HI = [{"role": "user", "content": "Say something."}]
# This client knows no temperature any more.
GREEDY = {"temperature": 0}
# What Claude Code looks for before it compacts a conversation.
TOO_LONG = r"prompt is too long: \d+ tokens > \d+ maximum"
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {}}}


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[Any]:
    url = stack.router.url
    async with anthropic.AsyncAnthropic(base_url=url, api_key="k", max_retries=0) as made:
        yield made


@pytest.fixture
async def actor(acted: Acted) -> AsyncIterator[Any]:
    url = acted.router.url
    async with anthropic.AsyncAnthropic(base_url=url, api_key="k", max_retries=0) as made:
        yield made


async def test_a_message(client: Any, stack: Stack) -> None:
    before = stack.count("/v1/messages")
    answer = await client.messages.create(
        model=MODEL, max_tokens=8, system="Be brief.", messages=HI, extra_body=GREEDY
    )
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", MODEL)
    assert answer.content[0].type == "text"
    assert answer.stop_reason in ("max_tokens", "end_turn")
    usage = answer.usage
    assert usage.output_tokens <= 8
    assert usage.input_tokens + usage.cache_read_input_tokens > 10
    assert stack.count("/v1/messages") == before + 1


async def test_a_streamed_message_says_the_same(client: Any) -> None:
    asked = {"model": MODEL, "max_tokens": 8, "messages": HI, "extra_body": GREEDY}
    whole = await client.messages.create(**asked)
    async with client.messages.stream(**asked) as stream:
        said = [text async for text in stream.text_stream]
        final = await stream.get_final_message()
    assert "".join(said) == whole.content[0].text == final.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


async def test_tools_and_their_results(actor: Any, acted: Acted) -> None:
    asked = {"model": "m", "max_tokens": 8, "tools": [TOOL]}
    answer = await actor.messages.create(messages=HI, **asked)
    assert [block.type for block in answer.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert answer.content[2].input == {"x": 1}
    assert answer.stop_reason == "tool_use"
    async with actor.messages.stream(messages=HI, **asked) as stream:
        final = await stream.get_final_message()
    assert [block.type for block in final.content] == [block.type for block in answer.content]
    assert final.content[2].input == {"x": 1}
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "1"}
        for block in final.content[2:]
    ]
    said = [*HI, {"role": "assistant", "content": final.content},
            {"role": "user", "content": results}]  # fmt: skip
    await actor.messages.create(messages=said, **asked)
    roles = [message["role"] for message in acted.decoder.last.json["messages"]]
    assert roles == ["user", "assistant", "tool", "tool"]


async def test_what_only_anthropic_can_act_on_is_left_out(actor: Any, acted: Acted) -> None:
    asked: dict[str, Any] = {
        "model": "m",
        "messages": [*HI, {"role": "system", "content": "Now."}],
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=2;"},
            {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
        ],
        "tools": [{"type": "web_search_20250305", "name": "web_search"}, TOOL],
        "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
        "betas": ["context-management-2025-06-27"],
    }
    await actor.beta.messages.create(max_tokens=8, **asked)
    seen = acted.decoder.last.json
    assert seen["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Say something.\n\nNow."},
    ]
    assert [tool["function"]["name"] for tool in seen["tools"]] == ["f"]
    assert not {"context_management", "betas"} & set(seen)


async def test_more_tokens_than_the_context_are_asked_for(client: Any) -> None:
    """As Claude Code does, which asks for 32000."""
    fields = {**GREEDY, "max_tokens": 10**7}  # its own check refuses that many without a stream
    answer = await client.messages.create(
        model=MODEL, max_tokens=8, messages=HI, stop_sequences=["e"], extra_body=fields
    )
    assert answer.stop_reason in ("end_turn", "stop_sequence", "max_tokens")


async def test_a_long_prompt_is_refused_in_anthropics_words(client: Any) -> None:
    long = [{"role": "user", "content": "word " * 20_000}]
    with pytest.raises(anthropic.BadRequestError, match=TOO_LONG):
        await client.messages.create(model=MODEL, max_tokens=5, messages=long)


async def test_tokens_are_counted(client: Any) -> None:
    few = await client.messages.count_tokens(model=MODEL, messages=HI)
    many = await client.messages.count_tokens(model=MODEL, messages=HI, system="a" * 50)
    assert many.input_tokens > few.input_tokens > 0


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"model": "none"}, anthropic.NotFoundError),
        ({"max_tokens": 0}, anthropic.BadRequestError),
        ({"temperature": 9}, anthropic.BadRequestError),
        ({"messages": []}, anthropic.BadRequestError),
        ({"mcp_servers": [{}]}, anthropic.BadRequestError),
    ],
)
async def test_errors_are_the_clients_own(client: Any, fields: dict[str, Any], kind: Any) -> None:
    with pytest.raises(kind) as refused:
        await client.messages.create(model=MODEL, max_tokens=5, messages=HI, extra_body=fields)
    assert refused.value.body["type"] == "error"
    assert refused.value.body["error"]["message"]


async def test_a_client_that_leaves_ends_its_message(client: Any, stack: Stack) -> None:
    left = stack.left()
    async with client.messages.stream(
        model=MODEL, max_tokens=LASTING, messages=HI, extra_body={"ignore_eos": True}
    ) as stream:
        async for _ in stream.text_stream:
            break
    await asyncio.to_thread(stack.wait_for_one_to_leave, left)
