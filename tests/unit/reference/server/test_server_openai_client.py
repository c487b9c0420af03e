"""The official client sees no difference."""

from collections.abc import AsyncIterator

import openai
import pytest

from tests.unit.reference.server.fake_engine import RunningServer


@pytest.fixture
async def client(real_server: RunningServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{real_server.url}/v1", api_key="none", max_retries=0
    ) as client:
        yield client


async def test_chat_completions(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        logprobs=True,
        top_logprobs=2,
        max_completion_tokens=4,
    )
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "Hél")
    assert choice.finish_reason == "length"
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [entry.logprob for entry in choice.logprobs.content] == [-0.5] * 4
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


async def test_streamed_chat_completions(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"kv_transfer_params": {"a": 1}},
    )
    chunks = [chunk async for chunk in stream]
    text = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(text) == "Héllo"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 6
    assert chunks[-1].model_extra == {"kv_transfer_params": {"answer_to": {"a": 1}}}


async def test_completions_and_their_logprobs(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="tiny", prompt="a", logprobs=2)
    assert [choice.text for choice in answer.choices] == ["Héllo"]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.text_offset == [0, 1, 2, 3, 4, 5]


async def test_streamed_completions(client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(model="tiny", prompt="a", stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "Héllo"


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["tiny", "alias"]


async def test_errors_become_the_clients_own_exceptions(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await client.completions.create(model="gpt-7", prompt="a")
    assert (missing.value.type, missing.value.param) == ("NotFoundError", "model")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        await client.completions.create(model="tiny", prompt="a", temperature=-1)
