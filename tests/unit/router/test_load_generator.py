"""The load generator's client: it says of every answer whether it is whole, and when it came."""

import asyncio

import pytest

from router.commands.bench.load import (
    CLOSED,
    MALFORMED,
    REFUSED,
    TIMEOUT,
    Client,
    drive,
    request_bytes,
)
from scripts.mock_engine import MockEngine, Peer, Received, Script, chunk
from tests.unit.router.engine_scripts import hanging
from tests.unit.router.harness import eventually

REQUEST = request_bytes("/v1/completions", b"{}")
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


async def answers_ok(request: Received, peer: Peer) -> None:
    await peer.answer({"text": "x"})


async def closes_in_the_middle(request: Received, peer: Peer) -> None:
    await peer.send(HEAD + chunk(b"a"))
    peer.close()


async def answers_no_http(request: Received, peer: Peer) -> None:
    await peer.send(b"this is not HTTP\r\n\r\n")


async def never_answers(request: Received, peer: Peer) -> None:
    await peer.wait_left()


async def test_a_whole_answer_has_no_problem_and_its_connection_is_kept(p: MockEngine) -> None:
    client = Client("127.0.0.1", p.port)
    p.usual = answers_ok
    first, second = [await client.send(REQUEST, 5) for _ in range(2)]
    client.close()
    assert (first.status, first.problem, bytes(first.body)) == (200, "", b'{"text": "x"}')
    assert first.started <= first.first_byte <= first.ended <= second.started
    assert [request.connection for request in p.requests] == [1, 1]


async def test_the_longest_gap_is_the_pause_between_two_pieces(p: MockEngine) -> None:
    client, pieces, received = Client("127.0.0.1", p.port), list[bytes](), asyncio.Event()

    async def answers_in_two_pieces(request: Received, peer: Peer) -> None:
        await peer.send(HEAD + chunk(b"a"))
        await received.wait()
        await asyncio.sleep(0.1)
        await peer.send(chunk(b"b") + b"0\r\n\r\n")

    def receive(piece: bytes) -> None:
        pieces.append(piece)
        received.set()

    p.usual = answers_in_two_pieces
    exchange = await client.send(REQUEST, 5, receive)
    client.close()
    assert pieces == [b"a", b"b"]
    assert 0.09 < exchange.longest_gap <= exchange.seconds


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        (closes_in_the_middle, CLOSED),
        (answers_no_http, MALFORMED),
        (never_answers, TIMEOUT),
    ],
)
async def test_a_bad_answer_is_named_and_the_next_request_has_a_new_connection(
    p: MockEngine, script: Script, problem: str
) -> None:
    client = Client("127.0.0.1", p.port)
    p.usual, p.scripts = answers_ok, [script]
    assert (await client.send(REQUEST, 0.5 if problem == TIMEOUT else 5)).problem == problem
    assert (await client.send(REQUEST, 5)).problem == ""
    client.close()
    assert [request.connection for request in p.requests] == [1, 2]


async def test_without_a_server_there_is_no_connection(p: MockEngine) -> None:
    await p.stop()
    assert (await Client("127.0.0.1", p.port).send(REQUEST, 5)).problem == REFUSED


async def test_a_cancelled_request_closes_its_connection(p: MockEngine) -> None:
    left = asyncio.Event()
    p.usual = hanging(left=left)
    sending = asyncio.create_task(Client("127.0.0.1", p.port).send(REQUEST, 5))
    await eventually(lambda: p.requests)
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    await asyncio.wait_for(left.wait(), 5)


async def test_each_client_takes_the_next_job_when_it_is_free() -> None:
    done: list[tuple[str, int]] = []

    async def perform(client: str, job: int) -> None:
        if client == "slow":
            await eventually(lambda: len(done) == 5)
        done.append((client, job))

    await drive(["slow", "fast"], range(6), perform)
    assert sorted(job for _, job in done) == list(range(6))
    assert [client for client, _ in done].count("slow") == 1
