"""Libraries that speak to many providers, and OpenAI's client for Node."""

import asyncio
import contextlib
import gc
import shutil
import subprocess
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import litellm
import pytest
from langchain_openai import ChatOpenAI

from tests.clients.conftest import CLIENTS, LASTING, MODEL, Acted, Stack

HI = [{"role": "user", "content": "Say something."}]
NODE = Path(__file__).parent / "node" / "check.mjs"


async def test_litellm_chats(stack: Stack) -> None:
    asked = {"model": f"openai/{MODEL}", "messages": HI, "max_tokens": 8, "temperature": 0}
    there = {"api_base": stack.openai, "api_key": "k"}
    whole = await litellm.acompletion(**asked, **there)
    stream = await litellm.acompletion(**asked, **there, stream=True)
    said = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(said) == whole.choices[0].message.content


async def test_litellm_speaks_messages(stack: Stack) -> None:
    answer = await litellm.acompletion(
        model=f"anthropic/{MODEL}",
        messages=HI,
        max_tokens=8,
        api_base=stack.router.url,
        api_key="k",
    )
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens <= 8


async def test_litellm_tells_errors_apart(stack: Stack) -> None:
    with pytest.raises(litellm.NotFoundError):
        await litellm.acompletion(
            model="openai/none", messages=HI, api_base=stack.openai, api_key="k"
        )


@pytest.mark.parametrize("responses", [False, True])
async def test_langchain_chats(stack: Stack, responses: bool) -> None:
    model = ChatOpenAI(
        base_url=stack.openai, api_key="k", model=MODEL, max_tokens=16, temperature=0,
        use_responses_api=responses,
    )  # fmt: skip
    whole = await model.ainvoke("Say something.")
    said = [chunk async for chunk in model.astream("Say something.")]
    assert whole.text
    assert "".join(chunk.text for chunk in said) == whole.text


async def litellm_pieces(stack: Stack) -> AsyncGenerator[Any]:
    stream = await litellm.acompletion(
        model=f"openai/{MODEL}", messages=HI, max_tokens=LASTING, stream=True,
        extra_body={"ignore_eos": True}, api_base=stack.openai, api_key="k",
    )  # fmt: skip
    async for piece in stream:
        yield piece


async def langchain_pieces(stack: Stack) -> AsyncGenerator[Any]:
    model = ChatOpenAI(
        base_url=stack.openai, api_key="k", model=MODEL, max_tokens=LASTING,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    await model.ainvoke("The first call imports much, and the engine is fast.", max_tokens=8)
    async for piece in model.astream("Say something."):
        yield piece


@pytest.mark.parametrize("pieces", [litellm_pieces, langchain_pieces])
async def test_a_closed_stream_ends_in_the_engines(
    stack: Stack, pieces: Callable[[Stack], AsyncGenerator[Any]]
) -> None:
    """LlamaIndex is missing: it does not close the connection of a stream that its caller left."""
    left = stack.left()

    async def read_one() -> None:
        async with contextlib.aclosing(pieces(stack)) as stream:
            async for _ in stream:
                break

    await asyncio.wait_for(read_one(), 250)
    gc.collect()  # some clients close their connection only when the stream is collected
    await asyncio.to_thread(stack.wait_for_one_to_leave, left)


@pytest.mark.parametrize("responses", [False, True])
async def test_langchain_calls_tools(acted: Acted, responses: bool) -> None:
    def f(x: int) -> int:
        """A tool."""
        return x

    model = ChatOpenAI(
        base_url=f"{acted.router.url}/v1", api_key="k", model="m", use_responses_api=responses
    ).bind_tools([f])
    answer = await model.ainvoke("hi")
    assert [(call["name"], call["args"]) for call in answer.tool_calls] == [
        ("f", {"x": 1}),
        ("g", {}),
    ]


@pytest.mark.skipif(not shutil.which("node"), reason="there is no Node here")
def test_streams_that_javascript_clients_abort_end_in_the_engines(stack: Stack) -> None:
    left = stack.left()
    script = shutil.copy(NODE.parent / "abort.mjs", CLIENTS)
    command = ["node", script, stack.router.url, MODEL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    stack.wait_for_one_to_leave(left + int(done.stdout) - 1)


@pytest.mark.skipif(not shutil.which("node"), reason="there is no Node here")
def test_node(stack: Stack) -> None:
    script = shutil.copy(NODE, CLIENTS / "check.mjs")  # beside node_modules
    command = ["node", script, stack.openai, MODEL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    assert "all is well" in done.stdout
