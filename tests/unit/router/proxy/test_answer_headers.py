"""The headers of answers: for proxies in front of the router, and about the bytes of a body."""

import asyncio
import json
from typing import Any

import pytest

from scripts.mock_engine import DONE, MockEngine, Peer, Received, chunk
from tests.unit.router.conftest import StartRouter
from tests.unit.router.engine_scripts import answer_after, usual_decode
from tests.unit.router.harness import Router
from tests.unit.router.mock_engine import PARAMS, event

ABOUT_BODY = {
    "etag": '"a"',
    "last-modified": "Sat, 28 Nov 2026 10:00:00 GMT",
    "accept-ranges": "bytes",
    "content-range": "bytes 0-1/2",
    "content-md5": "Q2hlY2sgSW50ZWdyaXR5IQ==",
    "digest": "sha-256=a",
    "content-digest": "sha-256=:a:",
    "repr-digest": "sha-256=:a:",
}
CHAT_EVENT = (
    b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":'
    b'[{"index":0,"delta":{"content":"a"},"finish_reason":"stop"}]}\n\n'
)
CHAT = {"id": "c", "object": "chat.completion", "created": 1, "model": "m"}
CHOICE = {"index": 0, "message": {"role": "assistant", "content": "a"}, "finish_reason": "stop"}


def streams(*events: bytes, **headers: str) -> Any:
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())

    async def answer(_: Received, peer: Peer) -> None:
        head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked"
        sent = f"{head}\r\n{lines}\r\n".encode() + b"".join(map(chunk, events))
        await peer.send(sent + b"0\r\n\r\n")

    return answer


def answers(content: object, status: int = 200, **more: str) -> Any:
    async def answer(_: Received, peer: Peer) -> None:
        await peer.answer(content, status, ABOUT_BODY | more)

    return answer


def assert_passes_proxies(headers: Any) -> None:
    assert headers["content-type"].startswith("text/event-stream")
    assert headers.get_list("cache-control") == ["no-cache"]
    assert headers.get_list("x-accel-buffering") == ["no"]


# Streams.


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"]
)
@pytest.mark.parametrize("is_whole", [False, True], ids=["stream", "whole"])
async def test_stream_tells_proxies_to_pass_it_on_at_once(
    router: Router, d: MockEngine, path: str, is_whole: bool
) -> None:
    d.usual = streams(CHAT_EVENT, DONE, cache_control="max-age=9", x_accel_buffering="yes")
    if is_whole and path in ("/v1/responses", "/v1/messages"):
        d.usual = answers({**CHAT, "choices": [CHOICE]})
    asked = [{"role": "user", "content": "hello"}]
    prompt = {"input": "a"} if path == "/v1/responses" else {"prompt": "a", "messages": asked}
    body = {"model": "m", "stream": True, "max_tokens": 7, **prompt}
    answer = await router.client.post(path, json=body)
    assert answer.status_code == 200
    assert_passes_proxies(answer.headers)


async def test_stream_that_begins_with_a_heartbeat_tells_proxies_too(
    start_router: StartRouter, d: MockEngine
) -> None:
    router = await start_router(stream_heartbeat=0.1)
    may_answer = asyncio.Event()
    d.usual = answer_after(may_answer, usual_decode)
    body = {"model": "m", "prompt": "a", "stream": True}
    async with router.client.stream("POST", "/v1/completions", json=body) as answer:
        assert_passes_proxies(answer.headers)
        may_answer.set()
        assert b"[DONE]" in await answer.aread()


async def test_answers_that_are_no_streams_may_be_buffered(router: Router) -> None:
    answer = await router.complete()
    assert "x-accel-buffering" not in answer.headers
    assert "cache-control" not in answer.headers


# Headers about the bytes of a body.


@pytest.mark.parametrize(
    ("path", "content", "is_as_sent"),
    [
        ("/v1/embeddings", {"data": []}, True),
        ("/v1/embeddings", {"data": [], "kv_transfer_params": PARAMS}, False),
        ("/v1/chat/completions", {**CHAT, "choices": [CHOICE]}, False),
        ("/v1/responses", {**CHAT, "choices": [CHOICE]}, False),
        ("/v1/messages", {**CHAT, "choices": [CHOICE]}, False),
        ("/v1/messages/count_tokens", {"count": 3}, False),
    ],
)
async def test_headers_about_an_engines_bytes_go_only_with_these_bytes(
    router: Router, d: MockEngine, path: str, content: object, is_as_sent: bool
) -> None:
    d.usual = answers(content)
    asked = [{"role": "user", "content": "hello"}]
    body = {"model": "m", "max_tokens": 7, "input": "a", "messages": asked}
    answer = await router.client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.content == json.dumps(content).encode() or not is_as_sent
    assert b"kv_transfer_params" not in answer.content
    shown = {name for name in ABOUT_BODY if name in answer.headers}
    assert shown == (ABOUT_BODY.keys() if is_as_sent else set())


async def test_stream_has_no_headers_about_an_engines_bytes(router: Router, d: MockEngine) -> None:
    d.usual = streams(event("a"), DONE, etag='"a"', content_md5="x", accept_ranges="bytes")
    answer = await router.stream()
    assert not {"etag", "content-md5", "accept-ranges"} & answer.headers.keys()


async def test_rewritten_error_has_no_headers_about_an_engines_bytes(
    router: Router, d: MockEngine
) -> None:
    d.usual = answers({"error": {"message": "no"}, "kv_transfer_params": PARAMS}, 400)
    answer = await router.complete()
    assert answer.status_code == 400
    assert not ABOUT_BODY.keys() & answer.headers.keys()


async def test_engines_get_no_headers_about_the_clients_bytes(
    router: Router, p: MockEngine, d: MockEngine
) -> None:
    given = {"content-md5": "x", "content-digest": "x", "digest": "x", "x-other": "1"}
    body = b'{"model":"m","prompt":"a"}'
    await router.client.post("/v1/completions", content=body, headers=given)
    for engine in (p, d):
        shown = [name for name in given if engine.last.header(name) is not None]
        assert shown == ["x-other"]
