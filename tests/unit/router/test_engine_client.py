"""The HTTP/1.1 client without sockets: engines whose bytes are cut or malformed."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.common.deadlines import NEVER, Deadlines
from router.http_client.engine_answer import HIGH_WATER
from router.http_client.errors import BrokenAnswerError, UpstreamError
from router.http_client.pool import EngineConnection

LIMIT = 4096
EVENTS = b'data: {"a": 1}\n\n' + "data: é\n\n".encode() + b": comment\r\n\r\ndata: [DONE]\n\n"


def chunked(body: bytes, size: int) -> bytes:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x;ext=1\r\n%s\r\n" % (len(piece), piece) for piece in pieces)


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
WHOLE = {
    "chunked": HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunked(EVENTS, 7) + b"0\r\n\r\n",
    "with trailers": HEAD
    + b"trailer: x-sum\r\ntransfer-encoding: chunked\r\n\r\n"
    + chunked(EVENTS, 1000)
    + b"0\r\nx-sum: 1\r\n\r\n",
    "by length": HEAD + b"content-length: %d\r\n\r\n" % len(EVENTS) + EVENTS,
    "after interim answers": b"HTTP/1.1 100 Continue\r\n\r\n"
    b"HTTP/1.1 103 Early Hints\r\ncontent-length: 7\r\nlink: </x>\r\n\r\n"
    + HEAD
    + b"Content-Length: %d\r\n\r\n" % len(EVENTS)
    + EVENTS,
}


@dataclass
class FakeTransport:
    unsent: int = 0
    reading: bool = True
    closed: bool = False

    def write(self, data: bytes) -> None: ...

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def is_closing(self) -> bool:
        return self.closed

    def is_reading(self) -> bool:
        return self.reading

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def close(self) -> None:
        self.closed = True

    abort = close


@dataclass
class FakePool:
    reads: int = 0
    deadlines: Deadlines = field(default_factory=Deadlines)
    kept: list[EngineConnection] = field(default_factory=list)

    def released(self, connection: EngineConnection) -> None:
        self.kept.append(connection)

    def lost(self, connection: EngineConnection) -> None: ...


@dataclass
class Gathered:
    body: bytes = b""
    ended: bool = False

    def write(self, block: bytes, last: bool) -> None:
        assert not self.ended
        self.body += block
        self.ended = last


class Leg:
    """One connection that has asked, its answer, and where it goes back to."""

    def __init__(self) -> None:
        self.pool, self.transport = FakePool(), FakeTransport()
        loop = asyncio.get_running_loop()
        self.connection = EngineConnection(self.pool, LIMIT, loop)
        self.connection.connection_made(cast(Any, self.transport))
        self.ask()

    def ask(self) -> None:
        request = b"POST / HTTP/1.1\r\n\r\n"
        self.answer = self.connection.send(request, NEVER, Deadlines(), None)

    def receive(self, *pieces: bytes) -> None:
        for piece in pieces:
            if not self.transport.closed:
                self.connection.data_received(piece)

    async def relayed(self) -> bytes:
        """What a client would get. Raises UpstreamError."""
        sink = Gathered()
        async with asyncio.timeout(30):
            await self.answer.ready()
            self.answer.raise_if_failed()
            await self.answer.relay(sink, 60, NEVER)
        assert sink.ended
        return sink.body


@pytest.fixture
async def leg() -> AsyncIterator[Leg]:
    made = Leg()
    yield made
    made.answer.close()


@pytest.mark.parametrize("what", WHOLE)
async def test_an_answer_split_at_any_byte_is_the_same(what: str) -> None:
    data = WHOLE[what]
    for at in range(1, len(data)):
        leg = Leg()
        leg.receive(data[:at], data[at:])
        assert await leg.relayed() == EVENTS, at
        assert leg.pool.kept == [leg.connection], "its end was seen, so it is kept"


@pytest.mark.parametrize("what", ["chunked", "with trailers", "by length"])
async def test_an_answer_cut_off_at_any_byte_never_looks_complete(what: str) -> None:
    data = WHOLE[what]
    for at in range(len(data)):
        leg = Leg()
        leg.receive(data[:at])
        leg.connection.connection_lost(None)
        with pytest.raises(UpstreamError):
            await leg.relayed()
        assert not leg.pool.kept


async def test_a_connection_serves_one_answer_after_the_other(leg: Leg) -> None:
    for what in [*WHOLE, *WHOLE]:
        leg.receive(WHOLE[what])
        assert await leg.relayed() == EVENTS
        leg.ask()


@pytest.mark.parametrize("tail", [b"H", b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", b"\0"])
async def test_what_follows_an_answer_unasked_costs_the_connection(leg: Leg, tail: bytes) -> None:
    leg.receive(WHOLE["by length"] + tail)
    assert await leg.relayed() == EVENTS
    assert not leg.pool.kept
    assert leg.transport.closed


async def test_bytes_on_an_idle_connection_close_it(leg: Leg) -> None:
    leg.receive(WHOLE["chunked"])
    leg.receive(b"HTTP/1.1 200 OK\r\n")
    assert leg.transport.closed


async def test_an_answer_that_comes_before_its_request_was_sent_is_taken(leg: Leg) -> None:
    leg.transport.unsent = 1_000_000
    leg.receive(WHOLE["by length"])
    assert await leg.relayed() == EVENTS
    assert not leg.pool.kept, "the rest of the request would be taken for the next one"


REFUSED = {
    "length and chunked": b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked and length": b"transfer-encoding: chunked\r\ncontent-length: 2\r\n\r\n0\r\n\r\n",
    "two lengths": b"content-length: 2\r\ncontent-length: 3\r\n\r\n{} ",
    "a negative length": b"content-length: -1\r\n\r\n",
    "a length in words": b"content-length: two\r\n\r\n",
    "chunked twice": b"transfer-encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
    "gzip": b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "a folded header": b"x: a\r\n b\r\ncontent-length: 0\r\n\r\n",
    "a space before the colon": b"content-length : 0\r\n\r\n",
    "a chunk size too large": b"transfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
    "a chunk longer than its size": b"transfer-encoding: chunked\r\n\r\n1\r\nabc\r\n0\r\n\r\n",
    "a large header": b"x: " + b"y" * LIMIT + b"\r\ncontent-length: 0\r\n\r\n",
    "large trailers": b"transfer-encoding: chunked\r\n\r\n0\r\n" + b"x: y\r\n" * LIMIT,
}


@pytest.mark.parametrize("size", [1, 10_000_000])
@pytest.mark.parametrize("what", REFUSED)
async def test_what_contradicts_itself_or_has_no_end_is_refused(
    leg: Leg, what: str, size: int
) -> None:
    data = b"HTTP/1.1 200 OK\r\n" + REFUSED[what]
    leg.receive(*(data[at : at + size] for at in range(0, len(data), size)))
    with pytest.raises(BrokenAnswerError):
        await leg.relayed()
    assert not leg.pool.kept
    assert leg.transport.closed


async def test_an_answer_that_nobody_takes_stops_the_engine(leg: Leg) -> None:
    leg.receive(HEAD + b"\r\n")
    while leg.transport.reading:
        leg.receive(b"x" * 65536)
        assert leg.answer._held_size <= HIGH_WATER + 65536
    assert not leg.transport.closed


def _cuts(data: bytes, places: list[int]) -> Iterator[bytes]:
    for start, end in pairwise(sorted({0, len(data), *(at % len(data) for at in places)})):
        yield data[start:end]


@given(
    what=st.sampled_from(sorted(WHOLE)),
    places=st.lists(st.integers(0, 1000), max_size=12),
    flips=st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 255)), max_size=4),
)
@settings(max_examples=300, deadline=None)
def test_no_bytes_of_an_engine_break_the_router(
    what: str, places: list[int], flips: list[tuple[int, int]]
) -> None:
    """Each answer is passed on whole, or refused with an error that a client can be told."""
    data = bytearray(WHOLE[what])
    for at, byte in flips:
        data[at % len(data)] = byte

    async def run() -> None:
        leg = Leg()
        leg.receive(*_cuts(bytes(data), places))
        leg.connection.connection_lost(None)
        try:
            body = await leg.relayed()
        except UpstreamError:
            assert not leg.pool.kept
        else:
            assert flips or body == EVENTS

    asyncio.run(run())
