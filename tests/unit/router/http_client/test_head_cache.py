"""What is taken for a head that came before is what the parser would have found."""

import random
from typing import Any

import pytest

from router.http_client.head_cache import MAX_HEAD_BYTES, MAX_MISSES, HeadCache
from router.http_client.pool import EnginePool
from router.server.request_reader import RequestReader
from scripts.mock_engine import MockEngine, Peer, Received
from tests.unit.router.corpus import SMUGGLED
from tests.unit.router.http_client.asking import OK, ask, body_of
from tests.unit.router.server.test_request_reader import Bounded

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: r\r\nContent-Length: %d\r\nx: y\r\n\r\n"
HEADERS = [(b"host", b"r"), (b"x", b"y")]
FIRST = HEAD % 2 + b"{}"
# What may be between any two bytes of a message, and be read in two ways.
STRANGE = (b"", b"\r\n", b"\n", b"\r", b"\n\n", b"\r\n\r\n", b" ", b"\t", b"0", b"9", b"+", b"\0",
           b"content-length: 2\r\n", b"transfer-encoding: chunked\r\n", b"connection: close\r\n",
           b"expect: 100-continue\r\n", b"upgrade: h2c\r\nconnection: upgrade\r\n", b"x: y\r\n",
           b"content-length: 4\r\nx: y\n\n")  # fmt: skip


def noted() -> HeadCache[int]:
    repeated = HeadCache(0)
    repeated.store(FIRST, 1, HEADERS, 2)
    return repeated


@pytest.mark.parametrize("size", [0, 1, 9, 10, 11, 99, 100, 101, 999, 1000, 9999, 10_000, 99_999])
def test_a_cached_head_matches_with_any_length_and_body(size: int) -> None:
    body = b"x" * size
    assert noted().match(HEAD % size + body) == (1, HEADERS, body)


@pytest.mark.parametrize(
    "data",
    [
        FIRST[:-1],
        FIRST + b"\r\n",
        FIRST + FIRST,
        FIRST.replace(b"x: y", b"x: z"),
        FIRST.replace(b"x: y", b"x:  y"),
        FIRST.replace(b": 2", b": +2"),
        FIRST.replace(b": 2", b": 2 "),
        FIRST.replace(b": 2", b": \xb2"),
        FIRST.replace(b": 2", b": 02"),
        FIRST.replace(b": 2", b": "),
        FIRST[: FIRST.index(b"2")],
        b"",
    ],
)
def test_other_messages_do_not_match(data: bytes) -> None:
    assert noted().match(data) is None


@pytest.mark.parametrize(
    "data", [b"", b"1", b"\x001", b"\x000", b"\x0010" + b"x" * 9, b"\0", FIRST]
)
def test_an_empty_cache_matches_nothing(data: bytes) -> None:
    assert HeadCache(0).match(data) is None
    assert HeadCache(0).match(data[:-1]) is None


@pytest.mark.parametrize(
    ("data", "size"),
    [
        (FIRST, 1),
        (FIRST.replace(b"Content-Length", b"Content-Size"), 2),
        (FIRST + b"\r\n", 2),
        (b"\r\n\r\n" + FIRST, 2),
        (FIRST.replace(b"x: y\r\n\r\n", b"x: y\n\n") + b"\r\n\r\n{}", 2),
        (FIRST.replace(b"x: y", b"x: " + b"y" * MAX_HEAD_BYTES), 2),
    ],
)
def test_ambiguous_or_large_heads_are_not_cached(data: bytes, size: int) -> None:
    repeated = HeadCache(0)
    repeated.store(data, 1, HEADERS, size)
    assert repeated.match(data) is None


def test_caching_stops_after_many_different_heads() -> None:
    repeated = HeadCache(0)
    said = [FIRST.replace(b"x: y", b"x: %d" % number) for number in range(MAX_MISSES + 1)]
    for data in said:
        repeated.store(data, 1, HEADERS, 2)
    assert repeated.match(said[-1]) is None
    assert repeated.match(said[-2]) is not None


def what_is_found(sent: list[bytes], remembers: bool) -> list[object]:
    bounds: Any = Bounded()
    reader = RequestReader(bounds)
    for piece in sent:
        if not remembers:
            reader._head_cache = HeadCache(("", b""))
        if not reader.is_closed:
            reader.feed(piece)
    state = reader.is_closed, reader.is_receiving, bounds.memory.bodies.size
    requests = [
        (r.endpoint, r.method, r.target, r.headers, r.http_1_1, r.keep_alive, r.body, r.size,
         r.is_complete, str(r.refusal))
        for r in reader.requests
    ]  # fmt: skip
    return [state, *requests]


def mutated(data: bytes, chance: random.Random) -> bytes:
    for _ in range(chance.choice((0, 0, 1, 1, 2))):
        at = chance.choice((0, len(data), chance.randrange(len(data) + 1)))
        data = data[:at] + chance.choice(STRANGE) + data[at + chance.choice((0, 0, 1, 2)) :]
    return data


@pytest.mark.parametrize("seed", range(20))
def test_requests_are_parsed_alike_with_and_without_the_cache(seed: int) -> None:
    chance = random.Random(seed)
    plain = [HEAD % size + b"a" * size for size in (0, 2, 10, 19, 101)]
    corpus = [*SMUGGLED.values(), *plain]
    for _ in range(300):
        one = mutated(chance.choice((chance.choice(plain), chance.choice(corpus))), chance)
        two = chance.choice((one, one, mutated(one, chance), chance.choice(corpus)))
        cut = chance.choice((0, 0, 0, chance.randrange(len(two) + 1)))
        sent = [one, one, *filter(None, (two[:cut], two[cut:])), one]
        assert what_is_found(sent, True) == what_is_found(sent, False), sent


async def test_answers_are_parsed_alike_with_and_without_the_cache(
    pool: EnginePool, engine: MockEngine
) -> None:
    bodies = [b"{}", b"{ }", b"", b'{"a":1}', b"x" * 100000, b"{}"]

    async def script(request: Received, peer: Peer) -> None:
        body = bodies[len(engine.requests) - 1]
        await peer.send(OK + b"content-length: %d\r\nDate: now\r\n\r\n%s" % (len(body), body))

    engine.scripts = [script] * len(bodies)
    for body in bodies:
        answer = await ask(pool)
        assert answer.headers == [(b"date", b"now")]
        assert (answer.status, answer.length) == (200, len(body))
        assert await answer.read(len(body)) == body
        answer.close()
    assert engine.connections == 1


async def test_a_connection_with_bytes_beyond_the_length_is_not_reused(
    pool: EnginePool, engine: MockEngine
) -> None:
    await body_of(pool)

    async def script(request: Received, peer: Peer) -> None:
        await peer.send(OK + b"content-length: 2\r\n\r\n{}{}")

    engine.scripts = [script]
    await body_of(pool)
    assert pool.idle_count == 0
