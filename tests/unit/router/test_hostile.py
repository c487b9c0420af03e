"""Clients that want to do harm: what they can do on a socket, and what it costs the router.

Against the public behaviour alone: bytes in, bytes out, what engines saw, what memory it took.
"""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from scripts.mock_engine import MockEngine, Peer, Received
from tests.unit.router.corpus import HIDDEN, INNER, SMUGGLED
from tests.unit.router.harness import Router, eventually, post, running_router, settings_for
from tests.unit.router.processes import RouterProcess, serving_router
from tests.unit.router.test_fuzz import Answers, talk

MIB = 1024 * 1024
LINE = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
PROMPT = b'{"prompt":"x"}'
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
SPELLINGS = {
    "query": b"/v1/completions?api-version=1",
    "slash": b"/v1/completions/",
    "absolute": b"http://x/v1/completions",
    "other": b"/v1/models",
    "unknown": b"/nowhere",
}
"""Of paths: another spelling may be served by another front."""


@pytest.fixture
async def front(p: MockEngine, d: MockEngine) -> AsyncIterator[Router]:
    """Bounds that are met soon."""
    settings = settings_for(
        p=[p],
        d=[d],
        client_read_timeout=0.3,
        keep_alive_timeout=0.3,
        max_body_size=MIB,
        max_header_size=16 * 1024,
    )
    async with running_router(settings) as router:
        await eventually(lambda: not router.gateway.fleet.unavailable_roles())
        yield router


async def serves(router: Router) -> None:
    """It is none the worse for it. On a machine that stalls, the client here may be as late as the
    hostile ones, and is cut off as they are: then it asks again."""
    status = 0
    async with asyncio.timeout(10):
        while status in (0, 408):
            with contextlib.suppress(httpx.TransportError):
                status = (await router.complete()).status_code
    assert status == 200
    await eventually(lambda: router.gateway.memory.bodies.size == 0)


# Requests within requests.

MORE = {
    "a body with a get": b"GET %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s",
    "a body with a delete": b"DELETE %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s",
    "a body too large": b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: 9999999\r\n\r\n",
    "expects something": b"POST %s HTTP/1.1\r\nhost: x\r\nexpect: 200-ok\r\n"
    b"content-length: %d\r\n\r\n%s",
    "upgrade with a body": b"POST %s HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n"
    b"content-length: %d\r\n\r\n%s",
}


def hidden_in(name: str, path: bytes) -> bytes:
    if name in SMUGGLED:
        return SMUGGLED[name].replace(b"/v1/completions", path, 1)
    form = MORE[name]
    if form.count(b"%") == 1:
        return form % path + INNER
    return form % (path, len(INNER), INNER)


CASES = [f"{name} | {spelling}" for name in (*SMUGGLED, *MORE) for spelling in SPELLINGS]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
async def test_no_request_is_hidden_in_another_however_it_is_spelled(
    front: Router, p: MockEngine, d: MockEngine, case: str
) -> None:
    """One request is one answer at most, and what is inside of it is asked of nobody."""
    name, spelling = case.split(" | ")
    statuses = await asyncio.to_thread(talk, front.port, [hidden_in(name, SPELLINGS[spelling])])
    for engine in (p, d):
        assert all(request.body.find(HIDDEN) != 0 for request in engine.requests)
        assert all(
            HIDDEN not in request.body or b"POST" in request.body for request in engine.requests
        )
    assert len(statuses) <= 1, statuses
    await serves(front)


@pytest.mark.parametrize("hosts", [b"", b"host: a\r\nhost: b\r\n", b"host: a\r\n" * 2])
async def test_who_is_asked_is_said_once(front: Router, p: MockEngine, hosts: bytes) -> None:
    line = b"POST /v1/completions HTTP/1.1\r\n"
    request = b"%b%bcontent-length: %d\r\n\r\n%b" % (line, hosts, len(PROMPT), PROMPT)
    assert await asyncio.to_thread(talk, front.port, [request]) == [400]
    assert not p.requests


# Who is slow.


@pytest.mark.parametrize("where", ["nothing", "head", "blank lines", "body", "chunks", "trailers"])
async def test_who_trickles_is_cut_in_time_however_busy_he_looks(front: Router, where: str) -> None:
    line = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
    begun, piece = {
        "nothing": (b"", b""),
        "head": (line, b"a: b\r\n"),
        "blank lines": (b"", b"\r\n"),
        "body": (line + b"content-length: 100000\r\n\r\n{", b" "),
        "chunks": (line + b"transfer-encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
        "trailers": (line + b"transfer-encoding: chunked\r\n\r\n0\r\n", b"a: b\r\n"),
    }[where]

    def trickle() -> float:
        started = time.monotonic()
        with socket.create_connection(("127.0.0.1", front.port), 5) as client:
            client.sendall(begun)
            client.settimeout(0.02)
            while time.monotonic() - started < 10:
                with contextlib.suppress(TimeoutError):
                    try:
                        client.sendall(piece)
                        if not client.recv(65536):
                            break
                    except ConnectionError:
                        break
        return time.monotonic() - started

    assert await asyncio.to_thread(trickle) < 8  # the deadline, and what a refusal lingers
    await serves(front)


# Bombs: more of everything than there may be.

BOMBS = {
    "a long value": LINE + b"a: " + b"b" * 10 * MIB,
    "a long name": LINE + b"a" * 10 * MIB,
    "a long url": b"POST /" + b"a" * 10 * MIB,
    "a long method": b"P" * 10 * MIB,
    "many headers": LINE + b"a: b\r\n" * MIB,
    "many names": LINE + b"".join(b"n%d: v\r\n" % n for n in range(500_000)),
    "many empty values": LINE + b"a:\r\n" * MIB,
    "a long chunk extension": LINE + b"transfer-encoding: chunked\r\n\r\n1;" + b"e" * 10 * MIB,
    "many chunk extensions": LINE + b"transfer-encoding: chunked\r\n\r\n" + b"1;a=b\r\n \r\n" * MIB,
    "many trailers": LINE + b"transfer-encoding: chunked\r\n\r\n0\r\n" + b"a: b\r\n" * MIB,
    "a chunked body without an end": LINE
    + b"transfer-encoding: chunked\r\n\r\n"
    + (b"%x\r\n" % MIB + b" " * MIB + b"\r\n") * 10,
    "many requests at once": post(PROMPT) * 20_000,
    "many requests for nothing": HEALTH * 20_000,
    "many blank lines": b"\r\n" * 5 * MIB,
}


def throw(port: int, data: bytes) -> list[int]:
    """Sends it all, or as much as is taken, without reading; then reads what there is."""
    answers = Answers()
    with socket.create_connection(("127.0.0.1", port), 5) as client:
        client.settimeout(0.5)
        with contextlib.suppress(OSError):
            client.sendall(data)
        client.settimeout(8)
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_WR)
            while block := client.recv(65536):
                answers.take(block)
    return answers.statuses


@pytest.mark.slow
@pytest.mark.parametrize("name", [f"bomb: {name}" for name in BOMBS])
async def test_a_bomb_is_refused_or_taken_a_little_at_a_time(
    bombed: RouterProcess, name: str
) -> None:
    before = peak_of(bombed)
    statuses = await asyncio.to_thread(throw, port_of(bombed), BOMBS[name.removeprefix("bomb: ")])
    assert all(status in (200, 400, 408, 413, 431, 503) for status in set(statuses))
    assert peak_of(bombed) - before < 32 * MIB
    async with httpx.AsyncClient(base_url=bombed.url) as client:
        assert (await client.get("/health")).status_code == 200


@pytest.fixture
async def bombed(p: MockEngine, d: MockEngine) -> AsyncIterator[RouterProcess]:
    options = ["--max-body-size=1MiB", "--max-header-size=16KiB", "--client-read-timeout=2",
               "--keep-alive-timeout=2", "--no-access-log"]  # fmt: skip
    async with serving_router(p, d, *options) as router:
        async with httpx.AsyncClient(base_url=router.url) as client:
            for _ in range(3):  # what is made on first use is made
                await client.post("/v1/completions", json={"prompt": "x"})
        yield router


def port_of(router: RouterProcess) -> int:
    return int(router.url.rpartition(":")[2])


def peak_of(router: RouterProcess) -> int:
    """The most memory that it ever had."""
    return _status_of(router, "VmHWM")


def memory_of(router: RouterProcess) -> int:
    return _status_of(router, "VmRSS")


def _status_of(router: RouterProcess, field: str) -> int:
    status = Path(f"/proc/{router.process.pid}/status").read_text()
    return int(next(x.split()[1] for x in status.splitlines() if x.startswith(field))) * 1024


# Crowds.

MAX_EXCESS_CONNECTIONS = 10_000


@contextlib.contextmanager
def crowd(port: int, count: int, says: bytes) -> Iterator[list[socket.socket]]:
    clients: list[socket.socket] = []
    try:
        for _ in range(count):
            client = socket.create_connection(("127.0.0.1", port), 20)
            clients.append(client)
            if says:
                client.sendall(says)
        yield clients
    finally:
        for client in clients:
            client.close()


def gone(clients: list[socket.socket], seconds: float) -> int:
    """How many were closed within that time."""
    left, latest = set(clients), time.monotonic() + seconds
    for client in clients:
        client.settimeout(max(0.001, latest - time.monotonic()))
        with contextlib.suppress(TimeoutError):
            try:
                while client.recv(65536):
                    pass
            except ConnectionError:
                pass
            left.discard(client)
    return len(clients) - len(left)


@pytest.mark.slow
@pytest.mark.parametrize("says", [b"", LINE, LINE + b"content-length: 1000\r\n\r\n{"])
async def test_ten_thousand_connections_that_do_nothing_cost_little_and_end(
    p: MockEngine, d: MockEngine, says: bytes
) -> None:
    options = ["--client-read-timeout=8", "--no-access-log", "--health-timeout=5"]
    async with serving_router(p, d, *options) as router:
        before = memory_of(router)

        def come_and_wait() -> tuple[int, int]:
            with crowd(port_of(router), MAX_EXCESS_CONNECTIONS, says) as clients:
                most = memory_of(router)
                answer = httpx.post(
                    f"{router.url}/v1/completions", json={"prompt": "x"}, timeout=60
                )
                assert answer.status_code == 200, "who asks for something is served meanwhile"
                return most - before, gone(clients, 120)

        grown, ended = await asyncio.to_thread(come_and_wait)
        assert ended == MAX_EXCESS_CONNECTIONS
        assert grown < MAX_EXCESS_CONNECTIONS * 8 * 1024, (
            f"{grown / MAX_EXCESS_CONNECTIONS:.0f} bytes each"
        )


@pytest.mark.slow
async def test_bodies_that_never_end_are_held_no_further_than_all_may_be_together(
    p: MockEngine, d: MockEngine
) -> None:
    options = ["--max-body-size=4MiB", "--max-held-bodies=16MiB", "--client-read-timeout=3"]
    async with serving_router(p, d, *options) as router:
        before = memory_of(router)
        head = LINE + b"content-length: %d\r\n\r\n" % (3 * MIB)

        def push() -> list[int]:
            with crowd(port_of(router), 64, head) as clients:
                for client in clients:
                    client.settimeout(0.2)
                    with contextlib.suppress(OSError):
                        client.sendall(b" " * (3 * MIB - 1))
                grown = peak_of(router) - before
                return [grown, gone(clients, 20)]

        grown, ended = await asyncio.to_thread(push)
        assert ended == 64
        assert grown < (16 + 24) * MIB


# Answers that nobody reads.


async def large(_: Received, peer: Peer) -> None:
    with contextlib.suppress(ConnectionError):
        await peer.answer(b'{"x":"' + b"y" * 12 * MIB + b'"}')


@pytest.mark.parametrize("case", ["unread: keep-alive", "unread: close"])
async def test_a_whole_answer_that_nobody_reads_is_not_held_for_ever(
    p: MockEngine, d: MockEngine, case: str
) -> None:
    d.usual = large
    headers = b"connection: close\r\n" if case.endswith("close") else b""
    settings = settings_for(p=[p], d=[d], stream_idle_timeout=0.5, keep_alive_timeout=0.5)
    async with running_router(settings) as router:
        await eventually(lambda: not router.gateway.fleet.unavailable_roles())
        open_before = router.metric("client_connections")
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, ("127.0.0.1", router.port))
            await loop.sock_sendall(client, post(PROMPT, headers=headers))
            await eventually(lambda: len(d.requests) == 1)
            await eventually(lambda: router.metric("client_connections") == open_before, 8)


async def test_clients_that_reset_at_every_moment_leave_nothing_behind(front: Router) -> None:
    request = post(b'{"prompt":"x","stream":true}')
    for length in (*range(0, len(request), 7), len(request)):
        client = socket.create_connection(("127.0.0.1", front.port), 5)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        client.sendall(request[:length])
        client.close()
    await front.settled()
    await eventually(lambda: front.metric("client_connections") == 0)
    await serves(front)
