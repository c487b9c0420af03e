"""Many clients that do not read, and sockets that are half closed."""

import asyncio
import resource
import socket
from pathlib import Path

import httpx
import pytest

from scripts.mock_engine import STREAM_HEAD, MockEngine, Peer, Received, Script, chunk
from tests.unit.router.conftest import StartRouter
from tests.unit.router.engine_scripts import answering, usual_decode
from tests.unit.router.harness import Router, eventually, post
from tests.unit.router.mock_engine import event
from tests.unit.router.processes import serving_router

STALLED, BATCH = 1000, 50
MOST = 256 * 1024 * 1024
PIECE = chunk(event("x" * 4000)) * 16
STREAM = post(b'{"prompt": "x", "stream": true}')
WHOLE = post(b'{"prompt": "x"}')
LARGE = 1024 * 1024


async def endless(request: Received, peer: Peer) -> None:
    sock = peer.transport.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)  # or the kernel takes megabytes
    await peer.send(STREAM_HEAD)
    while True:
        await peer.send(PIECE)
        await asyncio.sleep(0)  # a send that need not wait would let nobody else run


async def endless_whole(request: Received, peer: Peer) -> None:
    sock = peer.transport.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)
    await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n{" % 2**40)
    while True:
        await peer.send(b"x" * 65536)
        await asyncio.sleep(0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "script"), [(STREAM, endless), (WHOLE, endless_whole)], ids=["stream", "whole"]
)
async def test_a_thousand_stalled_readers_of_endless_answers_fit_in_256_mib(
    p: MockEngine, d: MockEngine, asked: bytes, script: Script
) -> None:
    _allow_many_files()
    d.usual = script
    async with serving_router(p, d, "--no-access-log") as router:
        port = int(router.url.rpartition(":")[2])
        clients: list[socket.socket] = []

        def all_asked() -> bool:
            return len(d.requests) == len(clients)

        while len(clients) < STALLED:  # no more at once than an engine's backlog takes
            clients += [await _stalled(port, asked) for _ in range(BATCH)]
            await eventually(all_asked, 120)
        await _until_quiet(router.process.pid)
        peak = _peak(router.process.pid)
        router.process.kill()
        for client in clients:
            client.close()
    assert peak < MOST, f"{peak / 2**20:.0f} MiB"


async def test_a_prefill_answer_without_an_end_is_held_no_further_than_its_limit(
    p: MockEngine, d: MockEngine
) -> None:
    p.usual = endless_whole
    async with serving_router(p, d, "--no-access-log", f"--max-answer-size={LARGE}") as router:
        before = _peak(router.process.pid)
        async with httpx.AsyncClient(base_url=router.url, timeout=60) as client:
            asked = [client.post("/v1/completions", json={"prompt": "x"}) for _ in range(BATCH)]
            answers = await asyncio.gather(*asked)
        assert {answer.status_code for answer in answers} == {502}
        assert _peak(router.process.pid) - before < 3 * BATCH * LARGE
    assert not d.requests


@pytest.mark.slow
@pytest.mark.parametrize("fields", [b"", b', "conversation_id": "c"'])
async def test_whole_answers_that_nobody_reads_are_held_a_few_times_at_most_and_not_for_ever(
    p: MockEngine, d: MockEngine, fields: bytes
) -> None:
    """That of a conversation is read whole, for its end comes after it is kept."""
    script = answering(200, {"choices": [{"index": 0, "text": "x" * LARGE}]})
    d.usual = script
    asked = post(b'{"prompt": "x"%b}' % fields)
    # What the kernel took whole is, to the router, a connection without anything to do.
    limits = ("--shutdown-delay=0", "--stream-idle-timeout=2", "--keep-alive-timeout=2")
    async with serving_router(p, d, *limits) as router:
        before = _peak(router.process.pid)
        clients = [await _stalled(int(router.url.rpartition(":")[2]), asked) for _ in range(BATCH)]
        await eventually(lambda: len(d.requests) == BATCH, 30)
        await _until_quiet(router.process.pid)
        peak = _peak(router.process.pid)
        async with httpx.AsyncClient(base_url=router.url) as client:
            await _until_connections(client, 1)
        for stalled in clients:
            assert await _was_cut(stalled)
            stalled.close()
        router.process.terminate()
        assert await router.ended() == 0
    assert peak - before < 5 * BATCH * LARGE, f"{(peak - before) / 2**20:.0f} MiB"


@pytest.mark.parametrize("asked", [WHOLE, b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n"])
async def test_answers_to_many_requests_do_not_pile_up_before_a_client_that_reads_none(
    start_router: StartRouter, d: MockEngine, asked: bytes
) -> None:
    """Whether a flow answers or FastAPI; and the connection is ended."""
    script = answering(200, {"choices": [{"index": 0, "text": "x" * LARGE}]})
    d.usual = script
    router = await start_router(stream_idle_timeout=0.5)
    client = await _stalled(router.port, asked * 500)
    await eventually(lambda: router.metric("client_connections") == 0, 10)
    assert len(d.requests) < 20
    assert await _was_cut(client)
    client.close()


@pytest.mark.slow
@pytest.mark.parametrize("close", [b"", b"connection: close\r\n"])
async def test_a_client_that_reads_slowly_has_all_of_its_answer_and_the_next(
    start_router: StartRouter, d: MockEngine, close: bytes
) -> None:
    text = "x" * 8 * LARGE
    d.usual = answering(200, {"choices": [{"index": 0, "text": text}]})
    router = await start_router(stream_idle_timeout=2, keep_alive_timeout=2)
    client = await _stalled(router.port, post(b'{"prompt": "x"}', headers=close) * 2, 2**18)
    expected, got = (1 if close else 2) * len(text), 0
    loop = asyncio.get_running_loop()
    started = loop.time()
    while got < expected:
        piece = await loop.sock_recv(client, 300_000)
        assert piece, "cut although it read all the while"
        got += piece.count(b"x")
        await asyncio.sleep(0.1)  # how slow it is; all of it takes longer than it may be silent
    assert loop.time() - started > 2
    client.close()
    await eventually(lambda: router.metric("client_connections") == 0)


async def _until_connections(client: httpx.AsyncClient, count: int) -> None:
    line = f"disagg_router_client_connections {count}.0"
    async with asyncio.timeout(10):
        while line not in (await client.get("/metrics")).text:
            pass


async def _was_cut(client: socket.socket) -> bool:
    """What the kernel still had is read first."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(5):
        try:
            while await loop.sock_recv(client, 2**20):
                pass
        except ConnectionError:
            pass
    return True


async def _until_quiet(pid: int) -> None:
    """Until a second goes by in which the process hardly takes in more, or five have."""
    before = 0
    for _ in range(5):
        if (now := _peak(pid)) - before < 2**20:
            return
        before = now
        await asyncio.sleep(1)  # what is waited for is that nothing happens


async def _stalled(port: int, asked: bytes, buffer: int = 4096) -> socket.socket:
    loop = asyncio.get_running_loop()
    client = socket.socket()
    client.setblocking(False)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    await loop.sock_connect(client, ("127.0.0.1", port))
    await loop.sock_sendall(client, asked)
    return client


def _peak(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def _allow_many_files() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def test_an_engine_that_half_closes_after_its_answer_is_not_asked_there_again(
    router: Router, d: MockEngine
) -> None:
    async def script(request: Received, peer: Peer) -> None:
        await usual_decode(request, peer)
        peer.transport.write_eof()
        await peer.wait_left()

    d.scripts = [script]
    assert (await router.complete()).status_code == 200
    used = d.last.connection
    assert (await router.complete()).status_code == 200
    assert d.last.connection != used


async def test_a_client_that_half_closes_is_taken_for_gone(router: Router, d: MockEngine) -> None:
    """As uvicorn has it: a client that will read its answer keeps its side open."""
    left = asyncio.Event()

    async def script(request: Received, peer: Peer) -> None:
        await peer.send(STREAM_HEAD)
        await peer.wait_left()
        left.set()

    d.scripts = [script]
    async with router.socket() as client:
        await client.send(STREAM)
        await eventually(lambda: d.requests)
        client.writer.write_eof()
        await asyncio.wait_for(left.wait(), 5)
