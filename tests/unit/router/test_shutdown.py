"""Starting and stopping the real process."""

import asyncio
import json
import signal
import socket

import httpx
import pytest

from scripts.mock_engine import DONE, STREAM_HEAD, MockEngine, Peer, Received, chunk
from tests.unit.router.engine_scripts import answer_after, hang, usual_prefill
from tests.unit.router.harness import Router, eventually, post
from tests.unit.router.mock_engine import event
from tests.unit.router.processes import router_process, serving_router, until_refused

STREAM = {"model": "m", "prompt": "x", "stream": True}


class PausedStream:
    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.left = asyncio.Event()

    async def __call__(self, request: Received, peer: Peer) -> None:
        await peer.send(STREAM_HEAD + chunk(event("a")))
        await self.go_on.wait()
        await peer.send(chunk(event("b")) + chunk(DONE) + b"0\r\n\r\n")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_lets_running_streams_end(
    p: MockEngine, d: MockEngine, number: signal.Signals
) -> None:
    script = PausedStream()
    d.scripts = [script]
    async with (
        serving_router(p, d, "--shutdown-delay=3") as router,
        httpx.AsyncClient(base_url=router.url) as client,
        client.stream("POST", "/v1/completions", json=STREAM) as answer,
    ):
        blocks = answer.aiter_bytes()
        assert await anext(blocks) == event("a")
        router.process.send_signal(number)
        await router.until("shutting down")
        ready = await client.get("/ready")
        assert ready.status_code == 503, "new connections are taken, but not wanted"
        assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200
        await until_refused(router.url)
        script.go_on.set()
        assert b"".join([block async for block in blocks]) == event("b") + DONE
        assert await router.ended() == 0


@pytest.mark.slow
async def test_a_draining_router_keeps_no_connection(p: MockEngine, d: MockEngine) -> None:
    """A client that stays on one would be cut off when the router ends."""
    async with (
        serving_router(p, d, "--shutdown-delay=60") as router,
        httpx.AsyncClient(base_url=router.url) as client,
    ):
        kept = await client.post("/v1/completions", json={"prompt": "x"})
        assert "connection" not in kept.headers
        router.process.terminate()
        await router.until("shutting down")
        for body in ({"prompt": "x"}, STREAM):
            answer = await client.post("/v1/completions", json=body)
            assert (answer.status_code, answer.headers["connection"]) == (200, "close")
        router.process.terminate()
        assert await router.ended() == 128 + signal.SIGTERM


async def test_what_was_asked_ahead_on_a_connection_is_answered_before_it_ends(
    router: Router, p: MockEngine
) -> None:
    gate = asyncio.Event()
    p.scripts = [answer_after(gate, usual_prefill)]
    async with router.socket() as client:
        await client.send(post(b'{"prompt": "x"}') * 2)
        await eventually(lambda: p.requests)
        router.gateway.tasks.is_draining = True
        gate.set()
        first, _ = await client.answer()
        second, _ = await client.answer()
        assert b"connection: close" not in first
        assert b"connection: close" in second
        assert await client.until_closed() == b""


async def test_a_stream_that_does_not_end_is_ended_with_an_event(
    p: MockEngine, d: MockEngine
) -> None:
    d.scripts = [PausedStream()]
    limits = ("--shutdown-delay=0", "--shutdown-timeout=0.3")
    async with (
        serving_router(p, d, *limits) as router,
        httpx.AsyncClient(base_url=router.url) as client,
        client.stream("POST", "/v1/completions", json=STREAM) as answer,
    ):
        blocks = answer.aiter_bytes()
        assert await anext(blocks) == event("a")
        router.process.terminate()
        rest = b"".join([block async for block in blocks])
        error = json.loads(rest.removeprefix(b"data: "))["error"]
        assert (error["code"], error["message"]) == (503, "the router is shutting down")
        assert await router.ended() == 0
        assert not [line for line in router.lines if "Traceback" in line]


async def test_a_request_without_an_answer_yet_is_ended_with_a_503(
    p: MockEngine, d: MockEngine
) -> None:
    p.scripts = [hang]
    async with (
        serving_router(p, d, "--shutdown-delay=0", "--shutdown-timeout=0.3") as router,
        httpx.AsyncClient(base_url=router.url) as client,
    ):
        asking = asyncio.create_task(client.post("/v1/completions", json=STREAM))
        await eventually(lambda: p.requests)
        router.process.terminate()
        assert (await asking).status_code == 503
        assert await router.ended() == 0


async def test_a_second_signal_exits_at_once(p: MockEngine, d: MockEngine) -> None:
    async with serving_router(p, d, "--shutdown-delay=60") as router:
        router.process.terminate()
        await router.until("shutting down")
        router.process.terminate()
        assert await router.ended() == 128 + signal.SIGTERM


async def test_a_port_in_use_is_one_line_and_exit_code_1(p: MockEngine, d: MockEngine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with router_process(p, d, f"--port={port}") as router:
            assert await router.ended() == 1
    (line,) = router.lines
    assert line.startswith(f"disagg-router: error: cannot listen on 127.0.0.1:{port}: ")


async def test_every_request_has_one_access_line(p: MockEngine, d: MockEngine) -> None:
    async with serving_router(p, d, "--log-format=json") as router:
        async with httpx.AsyncClient(base_url=router.url) as client:
            answer = await client.post("/v1/completions", json={"prompt": "x"})
        found = await router.until('"message":"request"')
        line = json.loads(found.string)
    assert line["request_id"] == answer.headers["x-request-id"]
    assert line["prefiller"] == f"127.0.0.1:{p.port}"
    assert line["decoder"] == f"127.0.0.1:{d.port}"
    assert (line["status"], line["outcome"], line["flow"]) == (200, "ok", "pull")
    assert 0 <= line["prefill_ms"] <= line["first_byte_ms"] <= line["total_ms"]


async def test_access_lines_can_be_left_out(p: MockEngine, d: MockEngine) -> None:
    async with serving_router(p, d, "--no-access-log", "--shutdown-delay=0") as router:
        async with httpx.AsyncClient(base_url=router.url) as client:
            assert (await client.post("/v1/completions", json={"prompt": "x"})).is_success
        router.process.terminate()
        assert await router.ended() == 0
        assert not [line for line in router.lines if "/v1/completions" in line]
