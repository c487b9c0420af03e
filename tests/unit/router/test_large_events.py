"""Events of a stream stay whole up to a limit, above which the leg fails."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from router.http_client.sse import MAX_EVENT_BYTES
from scripts.mock_engine import DONE, STREAM_HEAD, MockEngine, Peer, Received, Script, chunk
from tests.unit.router.conftest import StartRouter
from tests.unit.router.conversations.engines import KEPT, delta, prefilling, sse
from tests.unit.router.engine_scripts import usual_decode
from tests.unit.router.harness import Router
from tests.unit.router.mock_engine import event

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
HI = [{"role": "user", "content": "hi"}]
LARGE = "0123456789" * 100_000
BLOCK = 50_000


def in_blocks(*events: bytes) -> Script:
    """A stream that is cut without regard to its events."""

    async def script(request: Received, peer: Peer) -> None:
        if not request.json.get("stream"):
            return await usual_decode(request, peer)
        stream = b"".join(events)
        await peer.send(STREAM_HEAD)
        for at in range(0, len(stream), BLOCK):
            await peer.send(chunk(stream[at : at + BLOCK]))
        await peer.send(b"0\r\n\r\n")

    return script


ROLE = sse(delta({"role": "assistant", "content": ""}))
END = sse(delta({}, "stop"))


@pytest.mark.parametrize("opening", [[], [ROLE], [b": comment\n\n", ROLE]])
@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_large_events_lose_nothing(
    router: Router, d: MockEngine, path: str, opening: list[bytes]
) -> None:
    large = sse(delta({"content": LARGE}))
    d.usual = in_blocks(*opening, large, large, END, DONE)
    asked = {"messages": HI} if path != RESPONSES else {"input": "hi"}
    body = {"model": "m", "max_tokens": 5, "stream": True, **asked}
    answer = await router.client.post(path, json=body)
    assert _text_in(answer.text) == LARGE * 2
    if path == CHAT:
        assert answer.content == b"".join([*opening, large, large, END, DONE])


def _text_in(raw: str) -> str:
    """What the events of a stream say, in whichever dialect."""
    texts: list[str] = []
    for line in raw.split("\n"):
        if line.startswith("data: {"):
            content = json.loads(line[6:])
            for choice in content.get("choices", ()):
                texts.append(choice["delta"].get("content", ""))
            if isinstance(content.get("delta"), str):
                texts.append(content["delta"])
            elif "text" in content.get("delta", ()):
                texts.append(content["delta"]["text"])
    return "".join(texts)


async def test_large_params_of_a_turn_are_kept_and_not_shown(
    router: Router, p: MockEngine, d: MockEngine
) -> None:
    params = {**KEPT, "remote_block_ids": [list(range(200_000))]}
    last = sse(delta({}, "stop", kv_transfer_params=params))
    p.usual = prefilling()
    d.usual = in_blocks(ROLE, sse(delta({"content": "fine"})), last, DONE)
    body: dict[str, Any] = {"model": "m", "messages": HI, "conversation_id": "c", "stream": True}
    answer = await router.client.post(CHAT, json=body)
    assert "kv_transfer_params" not in answer.text
    assert "remote_block_ids" not in answer.text
    assert answer.text.endswith("data: [DONE]\n\n")
    said = [*HI, {"role": "assistant", "content": "fine"}, *HI]
    await router.client.post(CHAT, json={**body, "messages": said})
    assert p.last.json["kv_transfer_params"]["remote_block_ids"] == params["remote_block_ids"]


TOO_LARGE = b"data: " + b"x" * MAX_EVENT_BYTES


@pytest.mark.parametrize("opening", [[], [ROLE]])
@pytest.mark.parametrize("fields", [{}, {"cache_hit_threshold": 0.5}])
async def test_a_leg_with_too_large_an_event_is_tried_elsewhere(
    start_router: StartRouter,
    d: MockEngine,
    d2: MockEngine,
    opening: list[bytes],
    fields: dict[str, Any],
) -> None:
    d.scripts = [in_blocks(*opening, TOO_LARGE, b"\n\n", DONE)] * 2
    router = await start_router(ds=[d, d2])
    for _ in range(2):  # each decoder is the first once
        body = {"model": "m", "messages": HI, "stream": True, **fields}
        answer = await router.client.post(CHAT, json=body)
        assert answer.content == event("a") + event("b") + DONE
    assert len(d.scripts) == 1
    assert router.metric("retries_total", role="decode", kind="broken_answer") == 1


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
@pytest.mark.parametrize("ends", [True, False])
async def test_too_large_an_event_behind_others_ends_the_stream_with_an_error(
    router: Router, d: MockEngine, path: str, ends: bool
) -> None:
    """Whether the event has an end, and so the stream, or not."""
    left = asyncio.Event()
    stream = in_blocks(ROLE, sse(delta({"content": "begun"})), TOO_LARGE, *[b"\n\n", DONE] * ends)

    async def decodes(request: Received, peer: Peer) -> None:
        try:
            await stream(request, peer)
        finally:
            left.set()

    d.usual = decodes
    asked = {"messages": HI} if path != RESPONSES else {"input": "hi"}
    body = {"model": "m", "max_tokens": 5, "stream": True, **asked}
    answer = await router.client.post(path, json=body)
    assert _text_in(answer.text) == "begun"
    assert "the decode engine sent too large an event" in answer.text
    assert "xxx" not in answer.text
    await left.wait()
    assert _outcomes(router) == ["broken_stream"]


def _outcomes(router: Router) -> Sequence[str]:
    router.gateway.records.flush()
    return [str(outcome) for *_, outcome in router.gateway.metrics.requests.by_outcome.counts()]
