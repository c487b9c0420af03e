"""OpenAI's own Python client."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests.clients.conftest import LASTING, MODEL, Acted, Stack
from tests.integration.processes import metric

HI = [{"role": "user", "content": "Say something."}]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "f",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "integer"}},
            "required": ["x"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[Any]:
    async with openai.AsyncOpenAI(base_url=stack.openai, api_key="k", max_retries=0) as made:
        yield made


@pytest.fixture
async def actor(acted: Acted) -> AsyncIterator[Any]:
    url = f"{acted.router.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="k", max_retries=0) as made:
        yield made


async def test_models(client: Any) -> None:
    assert [model.id async for model in client.models.list()] == [MODEL]
    assert (await client.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("none")


async def test_chat_with_logprobs(client: Any, stack: Stack) -> None:
    before = stack.count("/v1/chat/completions")
    answer = await client.chat.completions.create(
        model=MODEL, messages=HI, max_tokens=6, logprobs=True, top_logprobs=2, temperature=0
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "length"
    assert len(choice.logprobs.content) == 6
    assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
    assert answer.usage.completion_tokens == 6
    assert stack.count("/v1/chat/completions") == before + 1


async def test_streamed_chat_says_the_same(client: Any) -> None:
    whole = await client.chat.completions.create(
        model=MODEL, messages=HI, max_completion_tokens=8, temperature=0
    )
    stream = await client.chat.completions.create(
        model=MODEL, messages=HI, max_completion_tokens=8, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = [chunk async for chunk in stream]
    said = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert said == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage or chunks[-1].usage.completion_tokens == 8


async def test_completions(client: Any) -> None:
    answer = await client.completions.create(
        model=MODEL, prompt="Once upon", max_tokens=4, temperature=0, logprobs=1
    )
    assert len(answer.choices[0].logprobs.tokens) == 4


async def test_structured_answers(client: Any) -> None:
    schema = {"name": "s", "schema": SCHEMA, "strict": True}
    answer = await client.chat.completions.create(
        model=MODEL, messages=HI, max_tokens=60, temperature=0,
        response_format={"type": "json_schema", "json_schema": schema},
    )  # fmt: skip
    assert set(json.loads(answer.choices[0].message.content)) == {"ok"}


async def test_tools(actor: Any) -> None:
    answer = await actor.chat.completions.create(model="m", messages=HI, tools=[TOOL])
    assert [c.function.name for c in answer.choices[0].message.tool_calls] == ["f", "g"]
    stream = await actor.chat.completions.create(model="m", messages=HI, tools=[TOOL], stream=True)
    deltas = [chunk.choices[0].delta async for chunk in stream if chunk.choices]
    arguments = [call.function.arguments for delta in deltas for call in delta.tool_calls or ()]
    assert "".join(part or "" for part in arguments) == '{"x": 1}{}'


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"model": "none"}, openai.NotFoundError),
        ({"max_tokens": "abc"}, openai.BadRequestError),
        ({"max_tokens": 0}, openai.BadRequestError),
        ({"max_tokens": 10**7}, openai.BadRequestError),
        ({"temperature": 9}, openai.BadRequestError),
        ({"stream_options": {"include_usage": True}}, openai.BadRequestError),
    ],
)
async def test_errors_cost_no_prefill(
    client: Any, stack: Stack, fields: dict[str, Any], kind: Any
) -> None:
    def computed() -> float:
        return metric(stack.prefiller, r"disagg_engine_prompt_tokens_total.*")

    before = computed()
    with pytest.raises(kind) as refused:
        await client.chat.completions.create(
            model=MODEL, messages=HI, extra_body={"temperature": 0, **fields}
        )
    error = refused.value
    assert error.body["message"]
    assert error.request_id
    assert computed() == before


async def test_what_an_engine_lacks_is_its_own_404(client: Any) -> None:
    with pytest.raises(openai.NotFoundError):
        await client.embeddings.create(model=MODEL, input="a")


async def test_a_client_that_leaves_ends_its_request(client: Any, stack: Stack) -> None:
    left = stack.left()
    stream = await client.chat.completions.create(
        model=MODEL, messages=HI, max_tokens=LASTING, stream=True, extra_body={"ignore_eos": True}
    )
    async for _ in stream:
        break
    await stream.close()
    await asyncio.to_thread(stack.wait_for_one_to_leave, left)


# Responses.


async def test_a_response(client: Any, stack: Stack) -> None:
    before = stack.count("/v1/responses")
    answer = await client.responses.create(
        model=MODEL, instructions="Be brief.", input="Say something.", max_output_tokens=16,
        temperature=0,
    )  # fmt: skip
    assert answer.status in ("completed", "incomplete")
    assert answer.output_text == answer.output[0].content[0].text
    assert answer.usage.output_tokens == 16 or answer.status == "completed"
    assert stack.count("/v1/responses") == before + 1


async def test_a_streamed_response_says_the_same(client: Any) -> None:
    asked = {"model": MODEL, "input": "Say something.", "max_output_tokens": 16, "temperature": 0}
    whole = await client.responses.create(**asked)
    async with client.responses.stream(**asked) as stream:
        said = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        final = await stream.get_final_response() if whole.status == "completed" else None
    assert "".join(said) == whole.output_text
    assert final is None or final.output_text == whole.output_text


async def test_a_response_goes_on_with_another(client: Any) -> None:
    first = await client.responses.create(model=MODEL, input="One.", max_output_tokens=16)
    second = await client.responses.create(
        model=MODEL, input="Two.", previous_response_id=first.id, max_output_tokens=16
    )
    assert second.usage.input_tokens > first.usage.input_tokens + 16
    assert (await client.responses.retrieve(first.id)).output_text == first.output_text
    await client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError):
        await client.responses.create(model=MODEL, input="x", previous_response_id=first.id)


async def test_a_conversation_of_responses_reuses_kv(client: Any, stack: Stack) -> None:
    def reused() -> float:
        return metric(stack.router, "disagg_router_conversation_tokens_offered.*")

    before, name = reused(), None
    for said in ("One. " * 30, "Two. " * 10, "Three."):
        answer = await client.responses.create(
            model=MODEL, input=said, previous_response_id=name, max_output_tokens=16, temperature=0
        )
        name = answer.id
    assert reused() > before


async def test_a_structured_response(client: Any) -> None:
    answer = await client.responses.create(
        model=MODEL, input="x", max_output_tokens=60, temperature=0,
        text={"format": {"type": "json_schema", "name": "s", "schema": SCHEMA, "strict": True}},
    )  # fmt: skip
    assert set(json.loads(answer.output_text)) == {"ok"}


async def test_tools_of_a_response(actor: Any, acted: Acted) -> None:
    tool = {"type": "function", **TOOL["function"]}
    answer = await actor.responses.create(model="m", input="hi", tools=[tool])
    assert [item.type for item in answer.output] == [
        "reasoning", "message", "function_call", "function_call",
    ]  # fmt: skip
    async with actor.responses.stream(model="m", input="hi", tools=[tool]) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    assert [item.type for item in final.output] == [item.type for item in answer.output]
    assert events[0].type == "response.created"
    output = {"type": "function_call_output", "call_id": "call_a", "output": "1"}
    await actor.responses.create(model="m", input=[output], previous_response_id=answer.id)
    kept = acted.decoder.last.json["messages"]
    assert [message["role"] for message in kept] == ["user", "assistant", "tool"]
    assert kept[1]["reasoning"] == "hmm"
    # Many clients send everything again, or refer to the items of the stored response.
    hi = {"role": "user", "content": "hi"}
    items = [item.model_dump() for item in answer.output]
    references = [{"type": "item_reference", "id": item["id"]} for item in items]
    for again in (items, references):
        await actor.responses.create(model="m", input=[hi, *again, output])
        assert acted.decoder.last.json["messages"] == kept


async def test_tools_of_openai_beside_functions(actor: Any, acted: Acted) -> None:
    others = [{"type": "web_search"}, {"type": "custom", "name": "c"}]
    tools = [{"type": "function", **TOOL["function"]}, *others]
    names = [{"type": "function", "name": "f"}, {"type": "custom", "name": "c"}]
    for choice in ("auto", {"type": "allowed_tools", "mode": "auto", "tools": names}):
        await actor.responses.create(
            model="m", input="hi", tools=tools, tool_choice=choice, truncation="auto"
        )
        asked = acted.decoder.last.json
        assert [tool["function"]["name"] for tool in asked["tools"]] == ["f"]
        assert asked["tool_choice"] == "auto"


async def test_logprobs_of_a_response(client: Any) -> None:
    asked = {
        "model": MODEL, "input": "x", "max_output_tokens": 16, "temperature": 0, "top_logprobs": 2,
        "include": ["message.output_text.logprobs"],
    }  # fmt: skip
    whole = await client.responses.create(**asked)
    stream = await client.responses.create(**asked, stream=True)
    events = [event async for event in stream]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    logprobs = [entry for event in deltas for entry in event.logprobs]
    assert len(logprobs) == 16
    assert all(len(entry.top_logprobs) == 2 for entry in logprobs)
    given = whole.output[0].content[0].logprobs
    assert [entry.token for entry in given] == [entry.token for entry in logprobs]


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"model": "none"}, openai.NotFoundError),
        ({"input": [{"type": "computer_call"}]}, openai.BadRequestError),
        ({"max_output_tokens": "abc"}, openai.BadRequestError),
        ({"background": True}, openai.BadRequestError),
    ],
)
async def test_errors_of_a_response(client: Any, fields: dict[str, Any], kind: Any) -> None:
    with pytest.raises(kind) as refused:
        await client.responses.create(model=MODEL, input="x", extra_body=fields)
    assert refused.value.body["message"]


async def test_a_client_that_leaves_ends_its_response(client: Any, stack: Stack) -> None:
    left = stack.left()
    stream = await client.responses.create(
        model=MODEL,
        input="x",
        max_output_tokens=LASTING,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    async for event in stream:
        if event.type == "response.output_text.delta":
            break
    await stream.close()
    await asyncio.to_thread(stack.wait_for_one_to_leave, left)
