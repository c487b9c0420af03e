"""A status 200 is not yet an answer: what a decoder says in one that means that it has failed is
retried while nothing was sent, is an error afterwards, and counts against the engine."""

import asyncio
import json
from typing import Any

import httpx
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
from tests.unit.router.engine_scripts import answer_late, answering, streaming_until
from tests.unit.router.harness import Router
from tests.unit.router.mock_engine import running_engine

PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses")
BODY: dict[str, Any] = {
    "model": "m",
    "prompt": "a",
    "messages": [{"role": "user", "content": "a"}],
    "input": "a",
    "max_tokens": 7,
}
END = b"0\r\n\r\n"


def sse(content: object) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def event_with(text: str, finish: str | None = None) -> bytes:
    """An event that both a chat and a completion can have."""
    choice = {"index": 0, "text": text, "delta": {"content": text}, "finish_reason": finish}
    return sse({"id": "1", "object": "chunk", "choices": [choice]})


def answer_with(text: str, finish: str = "stop", **more: object) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "text": text, "message": message, "finish_reason": finish, **more}
    return {"id": "1", "object": "answer", "choices": [choice]}


ROLE = sse({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
FAILED = {"error": {"message": "CUDA died", "type": "InternalServerError", "code": 500}}
# Beside a choice that says nothing.
BESIDE = {**FAILED, "choices": [{"index": 0, "delta": {}, "finish_reason": None}]}
GOOD = (ROLE, event_with("good"), event_with("", "stop"), DONE)

NO_WHOLE: dict[str, bytes] = {
    "empty": b"",
    "html": b"<html>nginx</html>",
    "null": b"null",
    "a list": b"[]",
    "a number": b"1",
    "an empty object": b"{}",
    "half": b'{"choices": [{"text": "a',
    "an error": json.dumps(FAILED).encode(),
    "an error as text": b'{"error": "CUDA died"}',
    "an error beside a choice": json.dumps(BESIDE).encode(),
    "an error of vLLM before 0.10": b'{"object": "error", "message": "no", "code": 500}',
    "no choices": b'{"choices": []}',
    "choices that are none": b'{"choices": [null]}',
    "aborted": json.dumps(answer_with("a", "abort")).encode(),
    "failed": json.dumps(answer_with("a", "error")).encode(),
    "rejected": json.dumps(answer_with("", "cache_threshold")).encode(),
    "rejected as an abort": json.dumps(
        answer_with("", "abort", stop_reason="cache_threshold")
    ).encode(),
}
NO_STREAM: dict[str, bytes] = {
    "empty": b"",
    "a role": ROLE,
    "done": DONE,
    "a role, and done": ROLE + DONE,
    "a comment": b": ping\n\n",
    "an error": sse(FAILED),
    "a role, and an error": ROLE + sse(FAILED),
    "an error beside a choice": ROLE + sse(BESIDE) + DONE,
    "a role, and an error, and done": ROLE + sse(FAILED) + DONE,
    "an error with CRLF": sse(FAILED).replace(b"\n", b"\r\n"),
    "an error event": b"event: error\n" + sse({"message": "no", "type": "error"}),
    "half an event": event_with("good")[:30],
    "no JSON": b"data: CUDA died\n\n",
    "aborted": ROLE + event_with("", "abort") + DONE,
    "failed": ROLE + event_with("", "error") + DONE,
    "rejected": ROLE + event_with("", "cache_threshold") + DONE,
    "html": b"<html>nginx</html>",
}


def streaming(*events: bytes) -> Script:
    async def script(request: Received, peer: Peer) -> None:
        await peer.stream(*filter(None, events))

    return script


async def good(request: Received, peer: Peer) -> None:
    if request.json.get("stream"):
        await peer.stream(*GOOD)
    else:
        await peer.answer(answer_with("good"))


async def post_to(router: Router, path: str, stream: bool) -> httpx.Response:
    unused = {"prompt", "messages", "input", "max_tokens"}
    used = {
        "/v1/completions": {"prompt", "max_tokens"},
        "/v1/chat/completions": {"messages", "max_tokens"},
        "/v1/messages": {"messages", "max_tokens"},
        "/v1/responses": {"input"},
    }[path]
    body = {name: value for name, value in BODY.items() if name not in unused - used}
    return await router.client.post(path, json={**body, "stream": stream})


CASES = [
    *((name, False, answering(200, body)) for name, body in NO_WHOLE.items()),
    *((name, True, streaming(events)) for name, events in NO_STREAM.items()),
    *((f"not streamed: {name}", True, answering(200, body)) for name, body in NO_WHOLE.items()),
]


FEW = {"an error", "half", "half an event", "aborted", "rejected", "not streamed: html"}
"""The bad answers that are tried on the second path, which shares its code with the first one."""


@pytest.mark.parametrize(
    ("path", "stream", "script"),
    [
        pytest.param(path, stream, script, id=f"{path} {name}")
        for path in PATHS
        for name, stream, script in CASES
        if path in ("/v1/chat/completions", "/v1/messages") or name in FEW
    ],
)
async def test_another_decoder_answers(
    start_router: StartRouter, d: MockEngine, path: str, stream: bool, script: Script
) -> None:
    async with running_engine(good) as other:
        router = await start_router(ds=[d, other])
        d.usual = script
        for _ in range(2):
            answer = await post_to(router, path, stream)
            assert answer.status_code == 200
            assert "good" in answer.text
            assert "error" not in answer.text.replace('"error":null', "")
        assert len([leg for leg in d.requests if not is_release(leg)]) == 1
        await router.settled()
        assert router.engine(d).breaker.failures == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_where_there_is_no_other_it_is_an_error(
    router: Router, d: MockEngine, path: str, stream: bool
) -> None:
    d.usual = streaming(ROLE, sse(FAILED), DONE) if stream else answering(200, NO_WHOLE["an error"])
    answer = await post_to(router, path, stream)
    assert answer.status_code == 502
    assert "CUDA died" in answer.json()["error"]["message"]


@pytest.mark.parametrize("finish", ["abort", "error", "cache_threshold"])
@pytest.mark.parametrize("path", PATHS)
async def test_a_long_answer_that_is_broken_off_is_none(
    start_router: StartRouter, d: MockEngine, path: str, finish: str
) -> None:
    """It passes as it comes, so its end is missing; where it is translated first, another answers
    and only the one that failed is blamed."""
    async with running_engine(good) as other:
        router = await start_router(ds=[d, other])
        d.usual = answering(200, json.dumps(answer_with("x" * 300_000, finish)).encode())
        if path in PATHS[:2]:
            with pytest.raises(httpx.RemoteProtocolError):
                await post_to(router, path, False)
        else:
            answer = await post_to(router, path, False)
            assert answer.status_code == 200
            assert "good" in answer.text
        await router.settled()
        assert router.engine(d).breaker.failures == 1
        assert router.engine(other).breaker.failures == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS[2:])
async def test_an_answer_that_cannot_be_told_does_not_spoil_the_next(
    start_router: StartRouter, d: MockEngine, path: str, stream: bool
) -> None:
    """The content of the first answer is discarded."""
    async with running_engine(good) as other:
        router = await start_router(ds=[d, other])
        no_end = answer_with("wrong")
        no_end["choices"][0]["finish_reason"] = None
        d.usual = answering(200, json.dumps(no_end).encode())
        answer = await post_to(router, path, stream)
        assert answer.status_code == 200
        assert "good" in answer.text
        assert "wrong" not in answer.text
        await router.settled()
        assert router.engine(other).breaker.failures == 0


LATER = {
    "an error": sse(FAILED) + DONE,
    "an error beside a choice": sse(BESIDE) + DONE,
    "a finish that is none": event_with("", ""),
    "aborted": event_with("", "abort") + DONE,
    "failed": event_with("", "error") + DONE,
    "rejected": event_with("", "cache_threshold") + DONE,
    "nothing": b"",
    "half an event": event_with("more")[:30],
    "a comment": b": ping\n\n",
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("later", LATER.values(), ids=LATER)
async def test_once_something_was_sent_the_stream_ends_with_an_error(
    router: Router, d: MockEngine, path: str, later: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    is_seen = asyncio.Event()

    async def breaks(request: Received, peer: Peer) -> None:
        await peer.send(STREAM_HEAD + chunk(ROLE + event_with("some")))
        await is_seen.wait()
        await peer.send((chunk(later) if later else b"") + END)

    d.usual = breaks
    body = {**BODY, "stream": True}
    for name in ("prompt", "messages", "input"):
        is_used = {"prompt": PATHS[0], "messages": PATHS[1] + PATHS[2], "input": PATHS[3]}
        if path not in is_used[name]:
            del body[name]
    if path == "/v1/responses":
        del body["max_tokens"]
    seen = b""
    async with router.client.stream("POST", path, json=body) as answer:
        async for block in answer.aiter_bytes():
            seen += block
            if b"some" in seen:
                is_seen.set()
    assert seen.count(b"some") >= 1
    assert b"error" in seen
    assert b"more" not in seen
    for reason in (b"abort", b"cache_threshold", b"end_turn", b"response.completed", b"[DONE]"):
        assert reason not in seen
    await router.settled()
    assert router.engine(d).breaker.failures == 1
    router.gateway.records.flush()
    assert (
        router.gateway.metrics.registry.get_sample_value(
            "disagg_router_requests_total",
            {"flow": "pull", "endpoint": path, "outcome": "broken_stream", "status": "200"},
        )
        == 1
    )


@pytest.mark.parametrize("finish", ["a reason of next year"])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_end_that_a_dialect_cannot_tell_is_no_success(
    router: Router, d: MockEngine, stream: bool, finish: str
) -> None:
    """Every engine would end it so: nobody is blamed, and no other one is asked."""
    events = (ROLE, event_with("some"), event_with("text", finish), DONE)
    d.usual = (
        streaming(*events)
        if stream
        else answering(200, json.dumps(answer_with("some", finish)).encode())
    )
    chat = await post_to(router, "/v1/chat/completions", stream)
    assert finish in chat.text, "as it came"

    message = await post_to(router, "/v1/messages", stream)
    assert message.status_code == 502, "nothing was sent"
    assert message.json()["error"]["message"] == f"the answer ended for the reason '{finish}'"

    response = await post_to(router, "/v1/responses", stream)
    content = response.text if not stream else response.text.split("data: ")[-1]
    told = json.loads(content)
    told = told["response"] if stream else told
    assert told["status"] == "incomplete"
    assert told["incomplete_details"] == {"reason": finish}
    again = {"model": "m", "input": "b", "previous_response_id": told["id"]}
    assert (await router.client.post("/v1/responses", json=again)).status_code == 400
    assert router.engine(d).breaker.failures == 0
    assert len([leg for leg in d.requests if not is_release(leg)]) == 3


@pytest.mark.parametrize("heartbeat", [0, 60])
@pytest.mark.parametrize("finish", ["another", None])
async def test_nor_in_a_stream_of_which_some_was_sent(
    start_router: StartRouter, d: MockEngine, heartbeat: float, finish: str | None
) -> None:
    """None: [DONE] alone is an end that a chat may have, and a message may not."""
    router = await start_router(stream_heartbeat=heartbeat)
    is_seen = asyncio.Event()
    stops = streaming_until(is_seen, ROLE + event_with("some"), event_with("more", finish) + DONE)
    d.usual = stops
    body = {"model": "m", "messages": BODY["messages"], "max_tokens": 7, "stream": True}
    seen = b""
    async with router.client.stream("POST", "/v1/messages", json=body) as answer:
        async for block in answer.aiter_bytes():
            seen += block
            is_seen.set()
    assert seen.count(b"text_delta") == 2
    assert (b"for the reason 'another'" if finish else b"without a finish reason") in seen
    assert seen.count(b"event: error") == 1
    assert b"message_stop" not in seen
    await router.settled()
    router.gateway.records.flush()
    ended = {"flow": "pull", "endpoint": "/v1/messages", "outcome": "broken_stream"}
    assert router.metric("requests_total", status="200", **ended) == 1


@pytest.mark.parametrize("code", [400, "400"])
async def test_a_request_that_is_wrong_is_no_fault_of_the_engine(
    start_router: StartRouter, d: MockEngine, code: object
) -> None:
    """vLLM tells of what it finds wrong while it generates in a stream with status 200."""
    async with running_engine(good) as other:
        router = await start_router(ds=[d, other])
        wrong = {"message": "no such grammar", "type": "BadRequestError", "code": code}
        d.usual = other.usual = streaming(ROLE, sse({"error": wrong}), DONE)
        answer = await post_to(router, "/v1/chat/completions", True)
        assert answer.status_code == 400
        assert answer.json()["error"] == wrong
        assert len(d.requests) + len([r for r in other.requests if not is_release(r)]) <= 2
        assert router.engine(d).breaker.failures == router.engine(other).breaker.failures == 0


@pytest.mark.parametrize("n", [1, 2])
async def test_a_leg_that_must_answer_says_so(router: Router, d: MockEngine, n: int) -> None:
    """Whatever threshold an engine has of its own, or the client hides for it."""
    d.usual = good
    xargs = {"cache_hit_threshold": 0.9, "mine": 1}
    assert (await router.complete(n=n, vllm_xargs=xargs)).status_code == 200
    assert d.last.json["cache_hit_threshold"] == 0
    assert d.last.json["vllm_xargs"] == {"mine": 1}


@pytest.mark.parametrize(
    ("path", "body", "answer", "status"),
    [
        ("/v1/embeddings", {"input": "a"}, b"", 502),
        ("/v1/embeddings", {"input": "a"}, b"<html>", 502),
        ("/v1/embeddings", {"input": "a"}, b"null", 502),
        ("/v1/embeddings", {"input": "a"}, json.dumps(FAILED).encode(), 502),
        ("/v1/embeddings", {"input": "a"}, b'{"data": []}', 200),
        ("/rerank", {"query": "a"}, b"[]", 200),
        ("/classify", {"input": "a"}, b'{"data": [{"label": "error"}]}', 200),
        ("/v1/messages/count_tokens", {"messages": BODY["messages"]}, b"null", 502),
    ],
)
async def test_endpoints_that_one_engine_answers(
    router: Router, d: MockEngine, path: str, body: dict[str, Any], answer: bytes, status: int
) -> None:
    d.usual = answering(200, answer)
    told = await router.client.post(path, json={"model": "m", **body})
    assert told.status_code == status
    assert told.content == answer or status != 200


@pytest.mark.parametrize("policy", ["least_loaded", "power_of_two", "prefix"])
async def test_an_engine_that_fails_fast_draws_no_load(
    start_router: StartRouter, d: MockEngine, policy: str
) -> None:
    """Two of its answers in five are none, too few for its circuit to open. They come at once, so
    it always looks idle."""
    slow = answer_late(0.01, good)
    async with running_engine(slow) as d2, running_engine(slow) as d3:
        router = await start_router(ds=[d, d2, d3], decode_policy=policy)
        d.scripts = [slow, answering(200, b""), slow, answering(200, b""), slow] * 100
        queue = iter(range(240))

        async def client() -> None:
            for number in queue:
                answer = await router.complete(prompt=f"{number}", user=f"{number}")
                assert answer.status_code == 200

        await asyncio.gather(*[client() for _ in range(8)])
        drawn = len([leg for leg in d.requests if not is_release(leg)])
        assert drawn <= 240 / 3
