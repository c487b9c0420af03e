"""No part of an answer is lost in translation: odd events are read, and unreadable ones fail."""

import asyncio
import json
from typing import Any

import pytest

from scripts.mock_engine import DONE, STREAM_HEAD, MockEngine, Peer, Received, chunk
from tests.unit.router.conftest import StartRouter
from tests.unit.router.engine_scripts import answering, streaming
from tests.unit.router.harness import Router
from tests.unit.router.openai.chats import events_of

HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/messages": {"model": "m", "messages": HI, "max_tokens": 7},
    "/v1/responses": {"model": "m", "input": "hi", "include": ["message.output_text.logprobs"]},
}
PATHS = pytest.mark.parametrize("path", BODIES)
CHOICE = b'{"choices": [{"index": 0, "delta": {"content": "%b"}%b}]%b}'


def an_event(text: bytes = b" brave", choice: bytes = b"", head: bytes = b"") -> bytes:
    return CHOICE % (text, choice, head)


LOGPROBS = b', "logprobs": {"content": [{"token": " brave", "logprob": %b, "top_logprobs": []}]}'
ODD: dict[str, tuple[bytes, str]] = {
    "NaN": (an_event(choice=LOGPROBS % b"NaN"), " brave"),
    "an infinite number": (an_event(choice=LOGPROBS % b"-Infinity"), " brave"),
    "half a surrogate pair": (an_event(rb" br\ud83dave"), " br\ufffdave"),
    "the other half": (an_event(rb" br\\\udc00ave"), " br\\\ufffdave"),
    "an escaped backslash": (an_event(rb" \\ud83d\ud83d\ude00", b', "x": NaN'), r" \ud83d😀"),
    "no UTF-8": (an_event(b" br\xff\xc3ave"), " br\ufffd\ufffdave"),
    "a control character": (an_event(b" br\tave"), " br\tave"),
    "large numbers": (
        an_event(head=b', "created": 1e999, "x": [%b, NaN]' % (b"7" * 5000)), " brave"
    ),
    "a key twice": (b'{"choices": [], %b' % an_event()[1:], " brave"),
    "no index": (b'{"choices": [{"delta": {"content": " brave"}}]}', " brave"),
    "a null index": (b'{"choices": [null, {"index": null, "delta": {"content": "x"}}]}', "x"),
}  # fmt: skip
UNREADABLE: dict[str, bytes] = {
    "null": b"null",
    "a list": b'["brave"]',
    "a text": b'" brave"',
    "a number": b"7",
    "no JSON": b"brave",
    "cut JSON": an_event()[:-4],
    "choices that are an object": b'{"choices": {"0": {"delta": {"content": "brave"}}}}',
    "choices that are texts": b'{"choices": ["brave"]}',
    "a delta that is a text": b'{"choices": [{"delta": "brave"}]}',
    "content that is no text": b'{"choices": [{"delta": {"content": ["brave"]}}]}',
    "a call that is a text": b'{"choices": [{"delta": {"tool_calls": ["brave"]}}]}',
}


def sse(data: bytes) -> bytes:
    return b"data: %b\n\n" % data


FIRST, LAST = sse(an_event(b"Hello")), sse(an_event(b" world", b', "finish_reason": "stop"'))


def text_in(events: list[dict[str, Any]]) -> str:
    deltas = [one["delta"] for one in events if one["type"].endswith("delta")]
    return "".join(
        delta if isinstance(delta, str) else delta.get("text", "")
        for delta in deltas
    )  # fmt: skip


@PATHS
@pytest.mark.parametrize(("data", "text"), ODD.values(), ids=ODD)
async def test_odd_event_is_read_whole_and_streamed(
    router: Router, d: MockEngine, path: str, data: bytes, text: str
) -> None:
    d.usual = streaming(FIRST, sse(data), LAST, DONE)
    answer = await router.client.post(path, json={**BODIES[path], "stream": True})
    events = events_of(answer.text)
    assert text_in(events) == f"Hello{text} world"
    assert events[-1]["type"] in ("message_stop", "response.completed")

    async def whole(request: Received, peer: Peer) -> None:
        body = data.replace(b'"delta"', b'"finish_reason": "stop", "message"')
        await peer.answer(body)

    d.usual = whole
    content = (await router.client.post(path, json=BODIES[path])).json()
    output = content["content"] if path == "/v1/messages" else content["output"][0]["content"]
    assert output[0]["text"] == text


@PATHS
@pytest.mark.parametrize("data", UNREADABLE.values(), ids=UNREADABLE)
async def test_unreadable_event_is_retried_before_the_first_byte(
    start_router: StartRouter, d: MockEngine, d2: MockEngine, path: str, data: bytes
) -> None:
    router = await start_router(ds=[d, d2])
    d.usual = streaming(FIRST + sse(data) + LAST + DONE)
    answer = await router.client.post(path, json={**BODIES[path], "stream": True})
    events = events_of(answer.text)
    assert text_in(events) == "Hello"
    assert events[-1]["type"] in ("message_stop", "response.completed")
    assert [one.get("sequence_number", place) for place, one in enumerate(events)] == [
        *range(len(events))
    ]
    await router.settled()
    assert router.engine(d).breaker.failures == 1


@PATHS
@pytest.mark.parametrize("heartbeat", [0, 60])
@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("data", [b"null", b"brave", UNREADABLE["a delta that is a text"]])
async def test_unreadable_event_ends_a_stream_that_has_begun_with_an_error(
    start_router: StartRouter,
    d: MockEngine,
    path: str,
    data: bytes,
    is_last: bool,
    heartbeat: float,
) -> None:
    """`is_last`: it comes with the end of the stream."""
    router = await start_router(stream_heartbeat=heartbeat)
    is_seen = asyncio.Event()

    async def breaks(request: Received, peer: Peer) -> None:
        await peer.send(STREAM_HEAD + chunk(FIRST))
        await is_seen.wait()
        rest = sse(an_event(b" dear")) + sse(data)
        await peer.send(chunk(rest + LAST + DONE if is_last else rest))
        if not is_last:
            await peer.wait_left()
        else:
            await peer.send(b"0\r\n\r\n")

    d.usual = breaks
    seen = b""
    async with router.client.stream("POST", path, json={**BODIES[path], "stream": True}) as answer:
        async for block in answer.aiter_bytes():
            seen += block
            if b"Hello" in seen:
                is_seen.set()
    events = events_of(seen.decode())
    assert text_in(events) == "Hello dear"
    assert "error" in json.dumps(events[-1])
    assert events[-1]["type"] in ("error", "response.failed")
    await router.settled()
    assert router.engine(d).breaker.failures == 1


@PATHS
@pytest.mark.parametrize("data", UNREADABLE.values(), ids=UNREADABLE)
async def test_unreadable_answer_is_retried(
    start_router: StartRouter, d: MockEngine, d2: MockEngine, path: str, data: bytes
) -> None:
    whole = answering(200, data.replace(b'"delta"', b'"finish_reason": "stop", "message"'))
    router = await start_router(ds=[d, d2])
    d.usual = whole
    answer = await router.client.post(path, json=BODIES[path])
    assert answer.status_code == 200
    assert "Hello" in answer.text
