"""--stream-heartbeat: comments in the silences of an event stream."""

import asyncio
import gc
import json
import re
import socket
from collections.abc import Awaitable

import httpx
import openai
import pytest

from router.http_client.engine_answer import AnswerSink
from router.http_client.errors import UpstreamError
from router.proxy.heartbeat import HeartbeatExchange, HeartbeatStream
from scripts.mock_engine import DONE, STREAM_HEAD, MockEngine, Peer, Received, chunk
from tests.unit.router.conftest import StartRouter
from tests.unit.router.engine_scripts import (
    answer_after,
    answering,
    hanging,
    raw,
    streaming_until,
    usual_prefill,
)
from tests.unit.router.harness import Router, eventually, post
from tests.unit.router.mock_engine import event

INTERVAL = 0.1
COMMENT = b": heartbeat\n\n"
STREAM = b'{"prompt": "x", "stream": true}'
END = b"0\r\n\r\n"


@pytest.fixture
async def router(start_router: StartRouter) -> Router:
    return await start_router(stream_heartbeat=INTERVAL)


async def hang_up(request: Received, peer: Peer) -> None:
    peer.close()


class Stream:
    """A client's stream, read as it comes."""

    def __init__(self, answer: httpx.Response) -> None:
        self.answer = answer
        self.body = b""
        self._blocks = answer.aiter_raw()

    async def until_heard(self, comments: int) -> None:
        """So many comments have come, all in all."""
        async with asyncio.timeout(5):
            while self.body.count(COMMENT) < comments:
                self.body += await anext(self._blocks)

    async def rest(self) -> bytes:
        """All that came but comments, when the stream has ended."""
        async with asyncio.timeout(5):
            async for block in self._blocks:
                self.body += block
        return self.body.replace(COMMENT, b"")


def asking(router: Router, **fields: object) -> Awaitable[httpx.Response]:
    body = {"prompt": "x", "stream": True} | fields
    request = router.client.build_request("POST", "/v1/completions", json=body)
    return router.client.send(request, stream=True)


def nothing_is_left() -> bool:
    """By their types: objects of other tests in this process may warn when they are asked."""
    gc.collect()
    return not any(type(one) in (HeartbeatExchange, HeartbeatStream) for one in gc.get_objects())


def error_in(body: bytes) -> dict[str, object]:
    error: dict[str, object] = json.loads(body.removeprefix(b"data: "))["error"]
    return error


async def test_the_silence_of_a_prefill_is_filled(router: Router, p: MockEngine) -> None:
    gate = asyncio.Event()
    p.scripts = [answer_after(gate, usual_prefill)]
    stream = Stream(await asking(router))
    assert stream.answer.status_code == 200
    assert stream.answer.headers["content-type"].startswith("text/event-stream")
    assert stream.answer.headers["x-request-id"]
    await stream.until_heard(3)
    gate.set()
    assert await stream.rest() == event("a") + event("b") + DONE


async def test_so_is_the_one_between_two_events_but_no_event_is_split(
    router: Router, d: MockEngine
) -> None:
    gates = [asyncio.Event() for _ in range(2)]

    async def script(request: Received, peer: Peer) -> None:
        await peer.send(STREAM_HEAD + chunk(event("a")) + chunk(event("b")[:20]))
        await gates[0].wait()
        await peer.send(chunk(event("b")[20:]))
        await gates[1].wait()
        await peer.send(chunk(DONE) + END)

    d.scripts = [script]
    stream = Stream(await asking(router))
    await stream.until_heard(2)
    gates[0].set()
    await stream.until_heard(4)
    gates[1].set()
    assert await stream.rest() == event("a") + event("b") + DONE
    assert stream.body.startswith(event("a") + COMMENT)
    assert event("b") + COMMENT in stream.body


async def test_comments_stand_before_a_large_event_that_is_under_way(
    router: Router, d: MockEngine
) -> None:
    gate, half = asyncio.Event(), b"data: " + b"x" * 300_000
    d.scripts = [streaming_until(gate, half, b"y\n\n", DONE)]
    stream = Stream(await asking(router))
    await stream.until_heard(2)
    assert stream.body.replace(COMMENT, b"") == b""
    gate.set()
    assert await stream.rest() == half + b"y\n\n" + DONE


@pytest.mark.parametrize("fields", [{}, {"conversation_id": "c"}], ids=["", "turn"])
async def test_there_are_none_before_an_answer_in_time_and_none_in_whole_answers(
    start_router: StartRouter, p: MockEngine, fields: dict[str, str]
) -> None:
    router = await start_router(stream_heartbeat=5)
    assert (await router.stream(**fields)).content == event("a") + event("b") + DONE
    router = await start_router(stream_heartbeat=INTERVAL)
    gate = asyncio.Event()
    p.scripts = [answer_after(gate, usual_prefill)]
    answer = asyncio.create_task(router.complete(**fields))
    await asyncio.sleep(3 * INTERVAL)
    gate.set()
    assert (await answer).json()["choices"][0]["text"] == "x"


async def test_they_are_off_by_default(start_router: StartRouter, p: MockEngine) -> None:
    router, gate = await start_router(), asyncio.Event()
    p.scripts = [answer_after(gate, usual_prefill)]
    answer = asyncio.create_task(router.stream())
    await asyncio.sleep(3 * INTERVAL)
    gate.set()
    assert COMMENT not in (await answer).content


async def test_openais_client_does_not_see_them(router: Router, p: MockEngine) -> None:
    gate = asyncio.Event()
    p.scripts = [answer_after(gate, usual_prefill)]
    async with openai.AsyncOpenAI(api_key="k", base_url=f"{router.url}/v1") as client:
        stream = await client.completions.create(model="m", prompt="x", stream=True)
        gate.set()
        assert [one.choices[0].text async for one in stream] == ["a", "b"]


async def test_openais_client_sees_a_failure_behind_them(router: Router, p: MockEngine) -> None:
    gate = asyncio.Event()
    p.scripts = [
        answer_after(gate, answering(400, {"error": {"message": "too long", "code": 400}}))
    ]
    async with openai.AsyncOpenAI(api_key="k", base_url=f"{router.url}/v1") as client:
        stream = await client.completions.create(model="m", prompt="x", stream=True)
        gate.set()
        with pytest.raises(openai.APIError, match="too long"):
            async for _ in stream:
                pass


@pytest.mark.parametrize(
    ("status", "content", "told"),
    [
        (400, {"error": {"message": "no", "code": 400}}, {"message": "no", "code": 400}),
        (422, {"detail": "no"}, {"detail": "no"}),
        (404, b"<html>\n\n</html>", None),
        (400, b'{"a":' * 300 + b"1" + b"}" * 300, None),
    ],
)
async def test_a_refusal_after_the_first_comment_is_an_event(
    router: Router, p: MockEngine, status: int, content: object, told: dict[str, object] | None
) -> None:
    gate = asyncio.Event()
    p.scripts = [answer_after(gate, answering(status, content))]
    stream = Stream(await asking(router))
    await stream.until_heard(1)
    gate.set()
    body = await stream.rest()
    assert re.fullmatch(rb"data: [^\n]+\n\n", body)
    if told is None:
        assert error_in(body)["code"] == status
    else:
        assert error_in(body) == told


async def test_a_refusal_before_the_first_comment_is_the_answer(
    start_router: StartRouter, p: MockEngine
) -> None:
    router = await start_router(stream_heartbeat=5)
    p.scripts = [answering(400, {"error": {"message": "no"}})]
    answer = await router.stream()
    assert (answer.status_code, answer.json()) == (400, {"error": {"message": "no"}})


async def test_what_could_be_tried_again_still_can_be(
    start_router: StartRouter, p: MockEngine, d: MockEngine, p2: MockEngine, d2: MockEngine
) -> None:
    """A prefiller and a decoder fail after comments; others answer, and the client sees no seam."""
    gates = [asyncio.Event() for _ in range(2)]

    async def breaks(request: Received, peer: Peer) -> None:
        await peer.send(STREAM_HEAD + chunk(event("wrong")[:20]))
        await gates[1].wait()
        peer.close()

    p.scripts = [answer_after(gates[0], hang_up)]
    d.scripts, d2.scripts = [breaks], [breaks]
    router = await start_router(ps=[p, p2], ds=[d, d2], stream_heartbeat=INTERVAL)
    stream = Stream(await asking(router))
    await stream.until_heard(1)
    gates[0].set()
    await eventually(lambda: d.requests or d2.requests)
    heard = stream.body.count(COMMENT)
    await stream.until_heard(heard + 2)
    d.scripts, d2.scripts = [], []
    gates[1].set()
    assert await stream.rest() == event("a") + event("b") + DONE


async def test_the_head_is_that_of_the_decoder_whose_answer_it_is(
    start_router: StartRouter, d: MockEngine, d2: MockEngine
) -> None:
    def head(name: bytes) -> bytes:
        return STREAM_HEAD.replace(b"\r\n\r\n", b"\r\nx-decoder: " + name + b"\r\n\r\n")

    async def answers(request: Received, peer: Peer) -> None:
        await peer.send(head(b"second") + chunk(event("a") + DONE) + END)

    breaks = raw(head(b"first") + chunk(event("wrong")[:20]))
    d.scripts = d2.scripts = [breaks, answers]
    router = await start_router(ds=[d, d2], stream_heartbeat=5)
    answer = await router.stream()
    assert (answer.headers["x-decoder"], answer.content) == ("second", event("a") + DONE)


async def test_nothing_is_left_of_a_request_that_is_over(router: Router, p: MockEngine) -> None:
    gate = asyncio.Event()
    p.scripts = [answer_after(gate, usual_prefill), answering(400, {}), answering(200, b"")]
    stream = Stream(await asking(router))
    await stream.until_heard(1)
    gate.set()
    await stream.rest()
    for _ in range(3):
        await router.stream()
    await router.settled()
    await eventually(nothing_is_left)


async def test_a_stream_that_breaks_ends_with_an_event(router: Router, d: MockEngine) -> None:
    gate = asyncio.Event()

    async def script(request: Received, peer: Peer) -> None:
        await peer.send(STREAM_HEAD + chunk(event("a")) + chunk(b"data: half"))
        await gate.wait()
        peer.close()

    d.scripts = [script]
    stream = Stream(await asking(router))
    await stream.until_heard(1)
    gate.set()
    body = await stream.rest()
    assert body.startswith(event("a"))
    assert error_in(body.removeprefix(event("a")))["code"] == 502


async def test_a_whole_answer_from_a_decoder_becomes_events(router: Router, d: MockEngine) -> None:
    gate = asyncio.Event()
    choice = {"index": 0, "text": "all", "finish_reason": "stop"}
    whole = {"id": "1", "object": "text_completion", "choices": [choice]}
    d.scripts = [answer_after(gate, answering(200, whole))]
    stream = Stream(await asking(router))
    await stream.until_heard(1)
    gate.set()
    first, done, end = (await stream.rest()).split(b"\n\n")
    assert json.loads(first.removeprefix(b"data: "))["choices"] == [choice]
    assert (done + b"\n\n", end) == (DONE, b"")


async def test_a_large_answer_that_is_no_stream_is_an_error(router: Router, d: MockEngine) -> None:
    gate = asyncio.Event()
    d.usual = answer_after(gate, answering(200, b"x" * 1_000_000))
    stream = Stream(await asking(router))
    await stream.until_heard(1)
    gate.set()
    assert error_in(await stream.rest())["code"] == 502


async def test_a_client_that_leaves_between_comments_is_noticed(
    router: Router, p: MockEngine, caplog: pytest.LogCaptureFixture
) -> None:
    left = asyncio.Event()
    p.scripts = [hanging(left=left)]
    stream = Stream(await asking(router))
    await stream.until_heard(1)
    await stream.answer.aclose()
    async with asyncio.timeout(5):
        await left.wait()
    await router.settled()
    await eventually(nothing_is_left)
    assert "pending" not in caplog.text, "a task was left to the garbage collector"


async def test_a_shutdown_in_the_silence_is_told_as_an_event(router: Router, p: MockEngine) -> None:
    gate = asyncio.Event()
    p.scripts = [answer_after(gate, usual_prefill)]
    stream = Stream(await asking(router))
    await stream.until_heard(1)
    router.gateway.tasks.interrupt()
    assert error_in(await stream.rest())["code"] == 503
    gate.set()


async def test_none_comes_behind_the_end_of_a_stream(router: Router, p: MockEngine) -> None:
    """On a connection that is kept, it would be the beginning of the next answer."""
    gate = asyncio.Event()
    p.scripts = [answer_after(gate, usual_prefill)]
    async with router.socket() as client:
        await client.send(post(STREAM))
        async with asyncio.timeout(5):
            assert COMMENT in await client.reader.readuntil(COMMENT)
            gate.set()
            await client.reader.readuntil(END)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3 * INTERVAL):
                await client.reader.read(1)
        await client.send(post(b'{"prompt": "x"}'))
        assert (await client.answer())[0].startswith(b"HTTP/1.1 200")


async def test_http_1_0_is_told_in_the_open(router: Router, p: MockEngine) -> None:
    gate = asyncio.Event()
    p.scripts = [answer_after(gate, usual_prefill)]
    async with router.socket() as client:
        await client.send(post(STREAM).replace(b"HTTP/1.1", b"HTTP/1.0"))
        async with asyncio.timeout(5):
            await client.reader.readuntil(COMMENT)
        gate.set()
        assert event("b") + DONE in await client.until_closed()


async def test_they_do_not_pile_up_before_a_client_that_does_not_read(
    start_router: StartRouter, d: MockEngine
) -> None:
    events = 2000
    all_sent = asyncio.Event()

    async def script(request: Received, peer: Peer) -> None:
        await peer.send(STREAM_HEAD)
        for number in range(events):
            await peer.send(chunk(event(f"{number} " + "x" * 4000)))
        all_sent.set()
        await peer.send(chunk(DONE) + END)

    d.scripts = [script]
    router = await start_router(stream_heartbeat=INTERVAL)
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setblocking(False)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await loop.sock_connect(client, ("127.0.0.1", router.port))
        await loop.sock_sendall(client, post(STREAM))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(10 * INTERVAL):
                await all_sent.wait()
        body = bytearray()
        async with asyncio.timeout(20):
            while not body.endswith(END):
                body += await loop.sock_recv(client, 2**20)
    assert body.count(b"data: ") == events + 1
    assert body.count(COMMENT) <= 2


class Carried:
    is_event_stream, length = True, None

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def relay(self, sink: AnswerSink, idle: float, latest: float) -> None: ...

    def pause(self) -> None:
        self.calls.append("pause")

    def resume(self) -> None:
        self.calls.append("resume")

    def fail(self, error: UpstreamError) -> None: ...


async def test_an_answer_that_comes_while_the_client_does_not_read_waits() -> None:
    line, answer = HeartbeatStream(asyncio.get_running_loop()), Carried()
    line.pause()
    line.carry(answer)
    line.resume()
    line.carry(None)
    line.pause()
    assert answer.calls == ["pause", "resume"]


@pytest.mark.parametrize("mode", ["auto", "exact"])
async def test_a_turn_hears_them_too(
    start_router: StartRouter, p: MockEngine, d: MockEngine, mode: str
) -> None:
    gates = [asyncio.Event() for _ in range(2)]

    async def script(request: Received, peer: Peer) -> None:
        await gates[1].wait()
        if request.json.get("stream"):
            await peer.stream(event("a"), event("b"), DONE)
        else:
            choice = {"index": 0, "text": "a", "finish_reason": "stop"}
            await peer.answer({"id": "1", "object": "text_completion", "choices": [choice]})

    p.scripts, d.scripts = [answer_after(gates[0], usual_prefill)], [script]
    router = await start_router(stream_heartbeat=INTERVAL)
    stream = Stream(await asking(router, conversation_id="c", conversation_stream=mode))
    await stream.until_heard(1)
    gates[0].set()
    await stream.until_heard(3)
    gates[1].set()
    body = await stream.rest()
    assert json.loads(body.split(b"\n\n")[0].removeprefix(b"data: "))["choices"][0]["text"] == "a"
    assert body.endswith(DONE)
