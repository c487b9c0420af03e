"""Each client through the same turns: two tools called at once, their results, a JSON schema, a
picture, and reasoning."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import anthropic
import litellm
import openai
import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

from tests.clients.conftest import CLIENTS
from tests.clients.scripted_engine import Scripted, calls_one_by_one, scripted

__all__ = ["scripted"]
# As OpenAI's client wants them for strict tools.
STRICT = {"type": "object", "additionalProperties": False}
CITY = {**STRICT, "properties": {"city": {"type": "string"}}, "required": ["city"]}
NOTHING: dict[str, Any] = {**STRICT, "properties": {}, "required": []}
SCHEMAS = {"weather": CITY, "clock": NOTHING}
RESULTS = {"weather": "sunny", "clock": "noon"}
CALLS = [("weather", {"city": "Oslo"}), ("clock", {})]
ANSWER = "The tools say: sunny, noon."
THOUGHT = "Let me see."
PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJ"
    "AAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
PICTURE = f"data:image/png;base64,{PIXEL}"
ASK = {"role": "user", "content": "How is the weather, and how late is it?"}


class Verdict(BaseModel):
    ok: bool


def weather(city: str) -> str:
    """The weather in a city."""
    return RESULTS["weather"]


def clock() -> str:
    """The time."""
    return RESULTS["clock"]


async def test_openai_chat(scripted: Scripted) -> None:
    scripted.decoder.usual = calls_one_by_one
    tools = [{"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
             for name, schema in SCHEMAS.items()]  # fmt: skip
    made: Any = openai.AsyncOpenAI(base_url=scripted.openai, api_key="k")
    async with made as client:
        messages: list[Any] = [ASK]
        async with client.chat.completions.stream(
            model="m", messages=messages, tools=tools
        ) as stream:
            chunks = [event.chunk async for event in stream if event.type == "chunk"]
            message = (await stream.get_final_completion()).choices[0].message
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        assert "".join(getattr(delta, "reasoning", "") or "" for delta in deltas) == THOUGHT
        calls = message.tool_calls
        assert [(c.function.name, json.loads(c.function.arguments or "{}")) for c in calls] == CALLS
        messages.append(message.model_dump(exclude_none=True, exclude={"parsed", "reasoning"}))
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": RESULTS[call.function.name]}
            for call in calls
        ]
        final = await client.chat.completions.create(model="m", messages=messages, tools=tools)
        assert final.choices[0].message.content == ANSWER
        parsed = await client.chat.completions.parse(
            model="m", messages=[ASK], response_format=Verdict
        )
        assert parsed.choices[0].message.parsed == Verdict(ok=True)
        look = [
            {"type": "text", "text": "What is it?"},
            {"type": "image_url", "image_url": {"url": PICTURE}},
        ]
        seen = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": look}]
        )
        assert seen.choices[0].message.content.replace(" ", "") == "1pictures"


@pytest.mark.parametrize("is_stored", [True, False])
async def test_openai_responses(scripted: Scripted, is_stored: bool) -> None:
    tools = [{"type": "function", "name": name, "parameters": schema, "strict": False}
             for name, schema in SCHEMAS.items()]  # fmt: skip
    made: Any = openai.AsyncOpenAI(base_url=scripted.openai, api_key="k")
    async with made as client:
        asked = {"model": "m", "tools": tools, "store": is_stored}
        async with client.responses.stream(input=[ASK], **asked) as stream:
            events = [event async for event in stream]
            response = await stream.get_final_response()
        kinds = [item.type for item in response.output]
        assert kinds == ["reasoning", "message", "function_call", "function_call"]
        done = [event.item for event in events if event.type == "response.output_item.done"]
        assert [item.id for item in done] == [item.id for item in response.output]
        calls = response.output[2:]
        assert [(call.name, json.loads(call.arguments)) for call in calls] == CALLS
        assert response.output[0].content[0].text == THOUGHT
        results = [
            {"type": "function_call_output", "call_id": call.call_id, "output": RESULTS[call.name]}
            for call in calls
        ]
        if is_stored:
            final = await client.responses.create(
                input=results, previous_response_id=response.id, **asked
            )
        else:
            history = [ASK, *(item.model_dump(exclude_none=True) for item in response.output)]
            final = await client.responses.create(input=[*history, *results], **asked)
        assert final.output_text == ANSWER
        scripted.check_last_turn()
        parsed = await client.responses.parse(model="m", input=[ASK], text_format=Verdict)
        assert parsed.output_parsed == Verdict(ok=True)
        look = [
            {"type": "input_text", "text": "What is it?"},
            {"type": "input_image", "image_url": PICTURE, "detail": "auto"},
        ]
        seen = await client.responses.create(model="m", input=[{"role": "user", "content": look}])
        assert seen.output_text.replace(" ", "") == "1pictures"


async def test_anthropic_messages(scripted: Scripted) -> None:
    tools = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
    asked: dict[str, Any] = {"model": "m", "max_tokens": 50, "tools": tools}
    made: Any = anthropic.AsyncAnthropic(base_url=scripted.router.url, api_key="k")
    async with made as client:
        async with client.messages.stream(messages=[ASK], **asked) as stream:
            blocks = [e.content_block async for e in stream if e.type == "content_block_stop"]
            message = await stream.get_final_message()
        assert [block.type for block in message.content] == [
            "thinking", "text", "tool_use", "tool_use",
        ]  # fmt: skip
        assert blocks == message.content
        assert message.content[0].thinking == THOUGHT
        assert [(block.name, block.input) for block in message.content[2:]] == CALLS
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": RESULTS[block.name]}
            for block in message.content[2:]
        ]
        turns = [
            ASK,
            {"role": "assistant", "content": message.content},
            {"role": "user", "content": results},
        ]
        final = await client.messages.create(messages=turns, **asked)
        assert final.content[-1].text == ANSWER
        scripted.check_last_turn()
        look = [
            {"type": "text", "text": "What is it?"},
            {
                "type": "image",
                "source": {"type": "base64", "media_type": "image/png", "data": PIXEL},
            },
        ]
        seen = await client.messages.create(
            model="m", max_tokens=50, messages=[{"role": "user", "content": look}]
        )
        assert seen.content[-1].text.replace(" ", "") == "1pictures"
        schema = {"type": "json_schema", "schema": Verdict.model_json_schema()}
        parsed = await client.messages.create(
            model="m",
            max_tokens=50,
            messages=[ASK],
            extra_body={"output_config": {"format": schema}},
        )
        assert json.loads(parsed.content[-1].text) == {"ok": True}


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
async def test_langchain(scripted: Scripted, api: str) -> None:
    model: Any
    if api == "messages":
        model = ChatAnthropic(base_url=scripted.router.url, api_key="k", model="m", max_tokens=50)
    else:
        model = ChatOpenAI(
            base_url=scripted.openai, api_key="k", model="m", use_responses_api=api == "responses"
        )
    with_tools = model.bind_tools([weather, clock])
    turns: list[Any] = [HumanMessage(ASK["content"])]
    pieces = [piece async for piece in with_tools.astream(turns)]
    message = pieces[0]
    for piece in pieces[1:]:
        message = message + piece
    assert [(call["name"], call["args"]) for call in message.tool_calls] == CALLS
    turns.append(message)
    turns += [
        ToolMessage(RESULTS[call["name"]], tool_call_id=call["id"]) for call in message.tool_calls
    ]
    assert (await with_tools.ainvoke(turns)).text == ANSWER
    scripted.check_last_turn()
    structured = model.with_structured_output(Verdict, method="json_schema")
    assert await structured.ainvoke("Is it?") == Verdict(ok=True)
    thoughts = [block for block in message.content_blocks if block["type"] == "reasoning"]
    if api == "messages":  # ChatOpenAI shows summaries of reasoning only
        assert "".join(block["reasoning"] for block in thoughts) == THOUGHT
    look = [
        {"type": "text", "text": "What is it?"},
        {"type": "image", "base64": PIXEL, "mime_type": "image/png"},
    ]
    assert (await model.ainvoke([HumanMessage(look)])).text.replace(" ", "") == "1pictures"


async def test_llamaindex(scripted: Scripted) -> None:
    scripted.decoder.usual = calls_one_by_one
    llm = OpenAILike(
        api_base=scripted.openai, api_key="k", model="m",
        is_chat_model=True, is_function_calling_model=True,
    )  # fmt: skip
    tools = [FunctionTool.from_defaults(weather), FunctionTool.from_defaults(clock)]
    turns = [ChatMessage(role="user", content=ASK["content"])]
    stream = await llm.astream_chat_with_tools(tools, chat_history=turns)
    pieces = [piece async for piece in stream]
    calls = llm.get_tool_calls_from_response(pieces[-1], error_on_no_tool_call=True)
    assert [(call.tool_name, call.tool_kwargs) for call in calls] == CALLS
    turns.append(pieces[-1].message)
    turns += [
        ChatMessage(
            role="tool",
            content=RESULTS[call.tool_name],
            additional_kwargs={"tool_call_id": call.tool_id},
        )
        for call in calls
    ]
    final = await llm.achat_with_tools(tools, chat_history=turns)
    assert final.message.content == ANSWER
    structured = await llm.as_structured_llm(Verdict).achat(turns[:1])
    assert structured.raw == Verdict(ok=True)
    look = [TextBlock(text="What is it?"), ImageBlock(image=PIXEL.encode())]
    seen = await llm.achat([ChatMessage(role="user", blocks=look)])
    assert seen.message.content.replace(" ", "") == "1pictures"


@pytest.mark.parametrize("api", ["openai", "anthropic"])
async def test_litellm(scripted: Scripted, api: str) -> None:
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}}
             for name, schema in SCHEMAS.items()]  # fmt: skip
    url = scripted.openai if api == "openai" else scripted.router.url
    asked: dict[str, Any] = {"model": f"{api}/m", "api_base": url, "api_key": "k", "tools": tools,
                             "max_tokens": 50}  # fmt: skip
    turns: list[Any] = [ASK]
    stream = await litellm.acompletion(messages=turns, stream=True, **asked)
    built = litellm.stream_chunk_builder([piece async for piece in stream])
    message = built.choices[0].message
    found = [
        (c.function.name, json.loads(c.function.arguments or "{}")) for c in message.tool_calls
    ]
    assert found == CALLS
    turns.append(message.model_dump(exclude_none=True))
    turns += [
        {"role": "tool", "tool_call_id": call.id, "content": RESULTS[call.function.name]}
        for call in message.tool_calls
    ]
    final = await litellm.acompletion(messages=turns, **asked)
    assert final.choices[0].message.content == ANSWER
    assert final.choices[0].message.reasoning_content == THOUGHT
    del asked["tools"]
    parsed = await litellm.acompletion(messages=[ASK], response_format=Verdict, **asked)
    assert Verdict.model_validate_json(parsed.choices[0].message.content) == Verdict(ok=True)
    look = [
        {"type": "text", "text": "What is it?"},
        {"type": "image_url", "image_url": {"url": PICTURE}},
    ]
    seen = await litellm.acompletion(messages=[{"role": "user", "content": look}], **asked)
    assert seen.choices[0].message.content.replace(" ", "") == "1pictures"


@pytest.mark.skipif(not shutil.which("node"), reason="Node is not installed")
async def test_javascript_clients(scripted: Scripted) -> None:
    """OpenAI's and Anthropic's clients, and Vercel's AI SDK."""
    script = shutil.copy(Path(__file__).parent / "node" / "loops.mjs", CLIENTS)
    process = await asyncio.create_subprocess_exec(
        "node",
        str(script),
        scripted.router.url,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await asyncio.wait_for(process.communicate(), 250)
    assert process.returncode == 0, output.decode()
    assert b"all is well" in output
