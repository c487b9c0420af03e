"""Answers that are held whole share one limit on memory."""

import asyncio
import contextlib
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import pytest

from router.http_client.answer_limits import Reservation
from scripts.mock_engine import DONE, MockEngine, Peer, Received, Script, chunk
from tests.unit.router.conftest import StartRouter
from tests.unit.router.engine_scripts import answer_after, answering, usual_decode, usual_prefill
from tests.unit.router.harness import Router, eventually, post, settings_for
from tests.unit.router.mock_engine import PARAMS, USUAL
from tests.unit.router.processes import serving_router
from tests.unit.router.proxy.test_push import IDENTITY
from tests.unit.router.test_stalled_clients import _peak, _stalled

KIB, MIB = 1024, 1024 * 1024
TEXT = "x" * MIB
MESSAGES = [{"role": "user", "content": "x"}]
LIMITS: dict[str, Any] = {"max_answer_size": 3 * MIB, "max_held_answers": 5 * MIB}


def chat_answer(text: str = TEXT) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return {"id": "c", "object": "chat.completion", "model": "m", "choices": [choice]}


def events(text: str = TEXT) -> Iterator[bytes]:
    """A stream that says `text` in pieces of 8 KiB."""
    for start in range(0, len(text), 8 * KIB):
        delta = {"content": text[start : start + 8 * KIB]}
        content = {"id": "c", "choices": [{"index": 0, "delta": delta}]}
        yield b"data: %b\n\n" % json.dumps(content).encode()
    yield b'data: {"id": "c", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\n\n'
    yield DONE


async def large(request: Received, peer: Peer) -> None:
    if request.json.get("stream"):
        await peer.stream(*events())
    elif "messages" in request.json:
        await peer.answer(chat_answer())
    else:
        await peer.answer({**USUAL, "choices": [{"index": 0, "text": TEXT}]})


async def large_chunked(request: Received, peer: Peer) -> None:
    """It does not announce its length."""
    raw = json.dumps(chat_answer()).encode()
    head = (
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    pieces = [chunk(raw[start : start + 64 * KIB]) for start in range(0, len(raw), 64 * KIB)]
    await peer.send(head + b"".join(pieces) + b"0\r\n\r\n")


async def large_prefill(request: Received, peer: Peer) -> None:
    params = {**PARAMS, "x": TEXT}
    await peer.answer({**USUAL, "kv_transfer_params": params})


def failing(status: int, **headers: str) -> Script:
    async def script(request: Received, peer: Peer) -> None:
        await peer.answer({"error": {"message": TEXT}}, status, headers)

    return script


class Case(NamedTuple):
    """A request whose answer is held whole, and which engine answers how."""

    path: str
    body: dict[str, Any]
    prefiller: Script
    decoder: Script
    status: int = 200


CHAT: dict[str, Any] = {"model": "m", "messages": MESSAGES}
CASES = {
    "prefill": Case("/v1/chat/completions", CHAT, large_prefill, usual_decode),
    "prefill error": Case("/v1/chat/completions", CHAT, failing(400), large, 400),
    "prefill overload": Case("/v1/completions", {"prompt": "x"}, failing(429), large, 429),
    "decode error": Case("/v1/completions", {"prompt": "x"}, usual_prefill, failing(404), 404),
    "conversation": Case(
        "/v1/chat/completions", {**CHAT, "conversation_id": "c"}, usual_prefill, large
    ),
    "exact stream": Case(
        "/v1/chat/completions",
        {**CHAT, "conversation_id": "c", "stream": True, "conversation_stream": "exact"},
        usual_prefill,
        large,
    ),
    "messages": Case("/v1/messages", {**CHAT, "max_tokens": 9}, usual_prefill, large),
    "messages, no length": Case(
        "/v1/messages", {**CHAT, "max_tokens": 9}, usual_prefill, large_chunked
    ),
    "response": Case("/v1/responses", {"model": "m", "input": "x"}, usual_prefill, large),
    "embeddings error": Case("/v1/embeddings", {"model": "m"}, usual_prefill, failing(500), 500),
}


@contextlib.contextmanager
def full(router: Router) -> Iterator[None]:
    """Other answers take all but a little."""
    others = Reservation(router.gateway.memory.answers)
    assert others.resize(LIMITS["max_held_answers"] - 900 * KIB)
    try:
        yield
    finally:
        others.release()


def require_refusal(answer: httpx.Response) -> None:
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert "too many large answers at once" in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", CASES)
async def test_large_answer_is_refused_when_there_is_no_room_and_passed_when_there_is(
    start_router: StartRouter, p: MockEngine, d: MockEngine, name: str
) -> None:
    case = CASES[name]
    router = await start_router(**LIMITS)
    p.usual, d.usual = case.prefiller, case.decoder
    with full(router):
        refused = await router.client.post(case.path, json=case.body)
        require_refusal(refused)
        await router.settled()
        await eventually(
            lambda: router.gateway.memory.answers.size <= LIMITS["max_held_answers"] - 900 * KIB
        )
        # Small ones do not count.
        p.scripts, d.scripts = [usual_prefill], [usual_decode]
        assert (await router.complete()).status_code == 200
    assert router.metric("refusals_total", reason="answers") == 1
    assert not any(engine.breaker.failures for engine in router.gateway.fleet.engines)
    answer = await router.client.post(case.path, json=case.body)
    assert answer.status_code == case.status
    await router.settled()
    await eventually(lambda: not router.gateway.memory.answers.size)


@pytest.mark.parametrize("script", [large_prefill, failing(400)])
async def test_answers_together_go_up_to_the_limit_and_not_beyond(
    start_router: StartRouter, p: MockEngine, d: MockEngine, script: Script
) -> None:
    """Each needs a little more than 1 MiB: four of ten fit, whichever they are."""
    router = await start_router(**LIMITS)
    memory, arrived, most = router.gateway.memory.answers, asyncio.Barrier(10), 0

    async def hold(request: Received, peer: Peer) -> None:
        nonlocal most
        await eventually(lambda: len(p.requests) == 10 and len(answers) >= 6)
        most = max(most, memory.size)
        await usual_decode(request, peer)

    answers: list[httpx.Response] = []

    async def ask() -> None:
        answers.append(await router.complete())

    p.usual, d.usual = answer_after(arrived, script), hold
    async with asyncio.TaskGroup() as group:
        for _ in range(10):
            group.create_task(ask())
    statuses = sorted(answer.status_code for answer in answers)
    if script is large_prefill:
        assert statuses == [200] * 4 + [503] * 6
        assert 4 * MIB < most <= LIMITS["max_held_answers"]
        assert router.metric("refusals_total", reason="answers") == 6
    else:
        assert set(statuses) <= {400, 503}
    await router.settled()
    await eventually(lambda: not memory.size)


@pytest.mark.parametrize("heartbeat", [0.0, 5.0])
async def test_response_stream_ends_with_an_error_when_there_is_no_room_for_its_text(
    start_router: StartRouter, d: MockEngine, heartbeat: float
) -> None:
    router = await start_router(**LIMITS, stream_heartbeat=heartbeat)
    d.usual = large
    asked = {"model": "m", "input": "x", "stream": True}
    with full(router):
        told = await router.client.post("/v1/responses", json=asked)
        assert "event: response.failed" in told.text
        assert "too many large answers at once" in told.text
        assert "event: response.completed" not in told.text
        await router.settled()
        assert router.metric("refusals_total", reason="answers") == 1
    told = await router.client.post("/v1/responses", json=asked)
    assert "event: response.completed" in told.text
    assert TEXT in told.text
    await router.settled()


async def test_conversation_stream_without_room_for_its_copy_is_passed_on_whole(
    start_router: StartRouter, d: MockEngine
) -> None:
    async def kept(request: Received, peer: Peer) -> None:
        *told, last = events()
        params = (
            b'data: {"choices": [], "kv_transfer_params": %b}\n\n' % json.dumps(PARAMS).encode()
        )
        await peer.stream(*told, params, last)

    router = await start_router(**LIMITS)
    d.usual = kept
    with full(router):
        asked = {**CHAT, "conversation_id": "c", "stream": True}
        answer = await router.client.post("/v1/chat/completions", json=asked)
        assert answer.text.count("x" * 8 * KIB) == len(TEXT) // (8 * KIB)
        assert answer.text.endswith("data: [DONE]\n\n")
        await router.settled()
    assert router.metric("conversation_kept_total", outcome="kept") == 1
    assert router.metric("refusals_total", reason="answers") == 0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_what_a_client_does_not_read_of_a_whole_answer_counts_until_it_leaves(
    start_router: StartRouter, d: MockEngine, path: str
) -> None:
    """As far as the kernel does not take it."""
    size = 12 * MIB
    router = await start_router(max_answer_size=13 * MIB, max_held_answers=14 * MIB)
    d.usual = answering(200, chat_answer("x" * size))
    asked = post(json.dumps({**CHAT, "conversation_id": "c", "max_tokens": 9}).encode(), path)
    client = await _stalled(router.port, asked)
    await eventually(lambda: d.requests)
    await router.settled()
    assert size / 4 < router.gateway.memory.answers.size < 2 * size
    assert router.metric("held_answer_bytes") == router.gateway.memory.answers.size
    other = await router.client.post("/v1/chat/completions", json={**CHAT, "conversation_id": "d"})
    require_refusal(other)
    client.close()
    await eventually(lambda: not router.gateway.memory.answers.size)


@pytest.mark.parametrize("name", CASES)
async def test_nothing_stays_reserved_when_a_client_leaves_in_the_middle(
    start_router: StartRouter, p: MockEngine, d: MockEngine, name: str
) -> None:
    case, half = CASES[name], asyncio.Event()

    def halting(script: Script) -> Script:
        async def half_of_it(request: Received, peer: Peer) -> None:
            class Half(Peer):
                async def send(self, data: bytes) -> None:
                    if len(data) < MIB:
                        return await super().send(data)
                    await super().send(data[: 700 * KIB])
                    half.set()
                    await self.wait_left()

            await script(request, Half(peer.connection))

        return half_of_it

    router = await start_router(**LIMITS)
    p.scripts, d.scripts = [halting(case.prefiller)], [halting(case.decoder)]
    async with router.socket() as client:
        await client.send(post(json.dumps(case.body).encode(), case.path))
        await asyncio.wait_for(half.wait(), 5)
        await eventually(lambda: router.gateway.memory.answers.size > 600 * KIB)
    await router.settled()
    await eventually(lambda: not router.gateway.memory.answers.size)


async def test_prefill_answer_that_comes_after_the_end_of_its_request_stays_not_reserved(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    """In push mode a decoder may have answered by then."""
    answered = asyncio.Event()
    p.identity, d.identity = IDENTITY, {"transfer_modes": ["push"], "capabilities": []}
    router = await start_router(**LIMITS, identified=True)
    p.scripts = [answer_after(answered, large_prefill)]
    assert (await router.complete()).status_code == 200
    answered.set()
    await router.settled()
    assert [leg.path for leg in p.requests] == ["/v1/completions"]
    assert not router.gateway.memory.answers.size


async def test_limit_of_all_answers_is_not_below_that_of_one(p: MockEngine, d: MockEngine) -> None:
    with pytest.raises(ValueError, match="--max-held-answers is less than --max-answer-size"):
        settings_for(p=[p], d=[d], max_held_answers=MIB)
    assert settings_for(p=[p], d=[d], max_held_answers=0).max_held_answers == 0


@pytest.mark.slow
async def test_forty_answers_of_60_mib_take_a_bounded_amount_of_memory(
    p: MockEngine, d: MockEngine
) -> None:
    text = b"x" * (60 * MIB)

    async def huge(request: Received, peer: Peer) -> None:
        head = b'{"choices":[{"index":0,"text":"'
        length = len(head) + len(text) + len(b'"}]}')
        await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (length, head))
        await peer.send(text)
        await peer.send(b'"}]}')

    d.usual = huge
    async with serving_router(p, d, "--no-access-log") as router:
        before = _peak(router.process.pid)
        async with httpx.AsyncClient(base_url=router.url, timeout=60) as client:

            async def ask(number: int) -> int:
                body = {"prompt": "x", "conversation_id": f"c{number}"}
                async with client.stream("POST", "/v1/completions", json=body) as answer:
                    async for _ in answer.aiter_raw():
                        pass
                return answer.status_code

            statuses = await asyncio.gather(*map(ask, range(40)))
        assert set(statuses) == {200, 503}
        assert _peak(router.process.pid) - before < 1024 * MIB
