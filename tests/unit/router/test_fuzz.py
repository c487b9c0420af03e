"""Any bytes from a client are answered in HTTP, or their connection is closed."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from itertools import pairwise

import httptools
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.router.corpus import HIDDEN, PLAIN, SHOWN, SMUGGLED
from tests.unit.router.harness import Router, eventually, post, running_router, settings_for
from tests.unit.router.mock_engine import MockEngine

ANYTHING = PLAIN | SMUGGLED
CLEAN = post(SHOWN)


@pytest.fixture
async def impatient(p: MockEngine, d: MockEngine) -> AsyncIterator[Router]:
    """Does not wait long for the rest of what was begun."""
    settings = settings_for(p=[p], d=[d], client_read_timeout=0.1, keep_alive_timeout=0.1)
    async with running_router(settings, "protocol") as router:
        await eventually(lambda: not router.gateway.fleet.missing())
        yield router


class Answers:
    """Parses answers; statuses of those that came whole."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self._parser = httptools.HttpResponseParser(self)

    def take(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        self.statuses.append(self._parser.get_status_code())


def talk(port: int, pieces: Iterator[bytes] | list[bytes]) -> list[int]:
    """Sends the pieces, reads until the router closes; the statuses of its answers."""
    answers = Answers()
    address = ("127.0.0.1", port)
    with socket.create_connection(address, timeout=8) as client, suppress(ConnectionError):
        for piece in pieces:
            client.sendall(piece)
        while data := client.recv(65536):
            answers.take(data)
    return answers.statuses


@pytest.mark.parametrize("name", SMUGGLED)
async def test_no_request_is_hidden_in_another(
    impatient: Router, p: MockEngine, d: MockEngine, name: str
) -> None:
    statuses = await asyncio.to_thread(talk, impatient.port, [SMUGGLED[name]])
    assert all(status == 200 or 400 <= status < 500 for status in statuses)
    for engine in (p, d):
        assert all(HIDDEN not in request.body for request in engine.requests)


@pytest.mark.parametrize("name", PLAIN)
async def test_what_is_unusual_but_right_is_answered(impatient: Router, name: str) -> None:
    statuses = await asyncio.to_thread(talk, impatient.port, [PLAIN[name]])
    assert statuses
    assert set(statuses) <= {200, 408}
    assert statuses[0] == 200


def cut(data: bytes, places: list[int]) -> Iterator[bytes]:
    for start, end in pairwise(sorted({0, len(data), *(at % len(data) for at in places)})):
        yield data[start:end]


@st.composite
def mangled(draw: st.DrawFn) -> list[bytes]:
    """One of the corpus with some bytes changed, lines lost or doubled, cut anywhere."""
    lines = ANYTHING[draw(st.sampled_from(sorted(ANYTHING)))].split(b"\r\n")
    for at in draw(st.lists(st.integers(0, 30), max_size=2)):
        lines[at % len(lines)] *= draw(st.integers(0, 2))
    data = bytearray(b"\r\n".join(lines) or b"\r\n")
    for at, byte in draw(st.lists(st.tuples(st.integers(0, 500), st.integers(0, 255)), max_size=3)):
        data[at % len(data)] = byte
    return list(cut(bytes(data), draw(st.lists(st.integers(0, 500), max_size=4))))


async def test_no_bytes_of_a_client_break_the_router(
    impatient: Router, p: MockEngine, d: MockEngine
) -> None:
    port = impatient.port

    @given(mangled())
    @settings(max_examples=100)
    def check(pieces: list[bytes]) -> None:
        asked = len(p.requests)
        statuses = talk(port, pieces)
        assert 500 not in statuses
        # A request that the prefiller got is one that was answered, or whose client was closed on.
        assert len(p.requests) - asked <= len(statuses) + 1
        assert 200 in talk(port, [CLEAN])

    await asyncio.to_thread(check)
    assert not p.failures
    assert not d.failures
    await eventually(lambda: not impatient.gateway.running)
    assert all(engine.in_flight == 0 for engine in impatient.gateway.fleet.engines)
