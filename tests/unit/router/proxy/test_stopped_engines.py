"""An engine that is being stopped answers 200 with the finish reason "abort": no client sees it, as
long as another engine can answer."""

import asyncio
import json
from typing import Any

import pytest

from scripts.mock_engine import (
    DONE,
    STREAM_HEAD,
    MockEngine,
    Peer,
    Received,
    Script,
    chunk,
    is_release,
)
from tests.unit.router.conftest import StartRouter
from tests.unit.router.engine_scripts import streaming_until
from tests.unit.router.harness import Router
from tests.unit.router.mock_engine import PARAMS, USUAL, event, running_engine

ABORTED = {"index": 0, "text": "", "finish_reason": "abort"}


def choice_of(**choice: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, **choice}]}).encode() + b"\n\n"


ROLE = choice_of(delta={"role": "assistant", "content": ""}, finish_reason=None)
CHAT_END = choice_of(delta={}, finish_reason="abort") + DONE
TEXT_END = choice_of(text="", finish_reason="abort") + DONE


def answers_with(*choices: dict[str, Any]) -> Script:
    async def script(request: Received, peer: Peer) -> None:
        content = json.dumps(USUAL | {"choices": list(choices)}, separators=(",", ":"))
        await peer.answer(content.encode())

    return script


def streaming(*blocks: bytes) -> Script:
    """Each block is read before the next one is written."""

    async def script(request: Received, peer: Peer) -> None:
        await peer.send(STREAM_HEAD)
        for block in blocks:
            await peer.send(chunk(block))
        await peer.send(b"0\r\n\r\n")

    return script


async def test_a_decoder_that_ends_an_answer_is_not_believed(
    start_router: StartRouter, p: MockEngine, d: MockEngine, d2: MockEngine
) -> None:
    router = await start_router(ds=[d, d2])
    d.usual = answers_with({**ABORTED, "text": "the beginning"})
    answers = [await router.complete() for _ in range(4)]
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.json()["choices"][0]["text"] for answer in answers} == {"x"}
    assert d.requests
    assert router.metric("upstream_errors_total", role="decode", kind="status_5xx") >= 1


@pytest.mark.parametrize(
    ("path", "blocks"),
    [
        ("/v1/completions", (TEXT_END,)),
        ("/v1/chat/completions", (ROLE + CHAT_END,)),
        ("/v1/chat/completions", (ROLE, CHAT_END)),
        ("/v1/chat/completions", (ROLE[:20], ROLE[20:], CHAT_END[:30], CHAT_END[30:])),
    ],
)
async def test_nor_one_that_ends_a_stream_before_its_first_text(
    start_router: StartRouter, p: MockEngine, d: MockEngine, path: str, blocks: tuple[bytes, ...]
) -> None:
    async with running_engine(streaming(event("whole"), DONE)) as other:
        router = await start_router(ds=[d, other])
        d.usual = streaming(*blocks)
        body = {"model": "m", "prompt": "a", "messages": [], "stream": True}
        for _ in range(3):
            answer = await router.client.post(path, json=body)
            assert answer.status_code == 200
            assert "whole" in answer.text
            assert "abort" not in answer.text
        assert d.requests


async def test_a_prefiller_that_ends_a_request_is_left_for_another_one(
    start_router: StartRouter, p: MockEngine, d: MockEngine, p2: MockEngine
) -> None:
    router = await start_router(ps=[p, p2])
    p.usual = answers_with(ABORTED)
    for _ in range(3):
        assert (await router.complete()).status_code == 200
        assert d.last.json["kv_transfer_params"]["remote_host"] == PARAMS["remote_host"]
    assert p.requests
    assert router.metric("upstream_errors_total", role="prefill", kind="status_5xx") >= 1


async def test_without_another_engine_it_is_no_answer(
    router: Router, p: MockEngine, d: MockEngine
) -> None:
    d.usual = answers_with(ABORTED)
    answer = await router.complete()
    assert answer.status_code == 503
    assert "is being stopped" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "script",
    [
        answers_with({"index": 0, "text": '{"finish_reason":"abort"}', "finish_reason": "stop"}),
        answers_with(
            {"index": 0, "text": "abort", "finish_reason": "stop", "stop_reason": "abort"}
        ),
        streaming(choice_of(text='"abort"'), choice_of(text='"finish_reason":"abort"'), DONE),
    ],
)
async def test_a_text_that_speaks_of_it_is_a_text(
    router: Router, p: MockEngine, d: MockEngine, script: Script
) -> None:
    d.usual = script
    answer = await router.complete(stream=script.__qualname__.startswith("streaming"))
    assert answer.status_code == 200
    assert "abort" in answer.text


async def test_what_the_client_has_some_of_ends_with_an_error(
    router: Router, p: MockEngine, d: MockEngine
) -> None:
    has_some = asyncio.Event()
    d.usual = streaming_until(has_some, event("some"), TEXT_END)
    body = {"model": "m", "prompt": "a", "stream": True}
    async with router.client.stream("POST", "/v1/completions", json=body) as answer:
        seen = []
        async for block in answer.aiter_bytes():
            seen.append(block)
            has_some.set()
    assert seen[0] == event("some")
    assert b"abort" not in seen[1]
    assert b"is being stopped" in seen[1]
    await router.settled()
    assert len([leg for leg in d.requests if not is_release(leg)]) == 1
