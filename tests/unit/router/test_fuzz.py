"""Any bytes from a client are answered in HTTP, or their connection is closed."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from itertools import pairwise

import httptools
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scripts.mock_engine import MockEngine, Peer, Received
from tests.unit.router.conversations.engines import decoding, prefilling
from tests.unit.router.corpus import HIDDEN, PLAIN, SHOWN, SMUGGLED
from tests.unit.router.harness import Router, eventually, post, running_router, settings_for
from tests.unit.router.mock_engine import USUAL

ANYTHING = PLAIN | SMUGGLED
CLOSE = b"connection: close\r\n"
CLEAN = post(SHOWN, headers=CLOSE)


@pytest.fixture
async def impatient(p: MockEngine, d: MockEngine) -> AsyncIterator[Router]:
    """Does not wait long for the rest of what was begun."""
    settings = settings_for(p=[p], d=[d], client_read_timeout=0.1, keep_alive_timeout=0.1)
    async with running_router(settings) as router:
        await eventually(lambda: not router.gateway.fleet.unavailable_roles())
        yield router


@pytest.fixture
async def patient(p: MockEngine, d: MockEngine) -> AsyncIterator[Router]:
    """Waits for a request, however much the machine delays it, and soon closes a connection that it
    has answered."""
    changes = settings_for(p=[p], d=[d], keep_alive_timeout=0.1, without_prefiller="decode")
    async with running_router(changes) as router:
        await eventually(lambda: not router.gateway.fleet.unavailable_roles())
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
async def test_what_is_unusual_but_right_is_answered(patient: Router, name: str) -> None:
    statuses = await asyncio.to_thread(talk, patient.port, [PLAIN[name]])
    assert statuses
    assert set(statuses) == {200}


def cut(data: bytes, places: list[int]) -> Iterator[bytes]:
    for start, end in pairwise(sorted({0, len(data), *(at % len(data) for at in places)})):
        yield data[start:end]


# Names that engines read params by, each letter as it is or escaped, which is the same to JSON.
PARAMS, EXTRA = "kv_transfer_params", "vllm_xargs"
PLANTED = b"planted"
FORGED = b'{"do_remote_prefill":true,"remote_host":"planted","remote_block_ids":[[1]]}'


@st.composite
def spelled(draw: st.DrawFn, name: str) -> bytes:
    escaped = draw(st.sets(st.integers(0, len(name) - 1), max_size=3))
    form = draw(st.sampled_from(["\\u%04x", "\\u%04X"]))
    letters = (form % ord(x) if at in escaped else x for at, x in enumerate(name))
    return f'"{"".join(letters)}"'.encode()


@st.composite
def planted(draw: st.DrawFn, *, top: bool = True) -> bytes:
    """An object with params where an engine would read them, or looks as if, once or more often."""
    value = st.sampled_from([FORGED, b"[%s]" % FORGED, b'"planted"', b"{}", b"null", b"1"])
    members = [st.tuples(spelled(PARAMS), value), st.tuples(spelled("x"), value)]
    if top:
        members.append(st.tuples(spelled(EXTRA), planted(top=False) | value))
        members.append(st.sampled_from(PLAIN_MEMBERS))
    given = draw(st.lists(st.one_of(members), max_size=5))
    space = draw(st.sampled_from([b"", b" ", b"\r\n\t"]))
    if top:
        given.insert(draw(st.integers(0, len(given))), (b'"prompt"', b'"shown"'))
    inner = (space + b",").join(space + name + space + b":" + text for name, text in given)
    return b"{" + inner + space + b"}" + space


PLAIN_MEMBERS = [
    (b'"stream"', b"true"),
    (b'"n"', b"2"),
    (b'"conversation_id"', b'"c"'),
    (b'"cache_hit_threshold"', b"0.5"),
]


def read_by_engines(body: bytes) -> list[str]:
    """All params in it that some reader of JSON finds, whichever of two equal names it takes."""
    pairs = json.loads(body, object_pairs_hook=lambda pairs: pairs)
    found = [value for name, value in pairs if name == PARAMS]
    extras = (value for name, value in pairs if name == EXTRA and isinstance(value, list))
    for extra in extras:
        found += [pair[1] for pair in extra if isinstance(pair, tuple) and pair[0] == PARAMS]
    return [json.dumps(value) for value in found]


def seen(*engines: MockEngine) -> list[str]:
    """The planted params that an engine read, since this was last asked."""
    bodies = [request.body for engine in engines for request in engine.requests]
    for engine in engines:
        engine.requests.clear()
    return [x for body in bodies for x in read_by_engines(body) if PLANTED.decode() in x]


@st.composite
def mangled(draw: st.DrawFn) -> list[bytes]:
    """One of the corpus, or with params in it, some bytes changed, lines lost or doubled, cut."""
    corpus = st.sampled_from(sorted(ANYTHING)).map(ANYTHING.__getitem__)
    lines = draw(corpus | planted().map(lambda body: post(body, headers=CLOSE))).split(b"\r\n")
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
        statuses = talk(port, pieces)
        assert 500 not in statuses
        # A request that the prefiller got is one that was answered, or whose client was closed on.
        # Its leg may have been sent twice, where a kept connection was closed at that moment.
        asked = {(r.header("x-request-id") or "").rpartition(".")[0] for r in p.requests}
        assert len(asked) <= len(statuses) + 1
        assert not seen(p, d)
        # On a machine that stalls, a clean request may come too late as well.
        assert any(200 in talk(port, [CLEAN]) for _ in range(5))

    await asyncio.to_thread(check)
    assert not p.failures
    assert not d.failures
    await eventually(lambda: not impatient.gateway.tasks.running)
    assert all(engine.in_flight == 0 for engine in impatient.gateway.fleet.engines)


PATHS = st.sampled_from(["/v1/completions", "/v1/chat/completions"])


@pytest.mark.parametrize("keeps", [True, False])
async def test_no_spelling_of_params_by_a_client_is_read_by_an_engine(
    patient: Router, p: MockEngine, d: MockEngine, keeps: bool
) -> None:
    p.usual, d.usual = prefilling(), decoding()
    if not keeps:
        p.usual = p_without_params

    @given(planted(), PATHS)
    @example(
        b'{"vllm_xargs":{"kv_transfer_params":%s},"vllm_xargs":{}}' % FORGED, "/v1/completions"
    )
    @example(
        b'{"vllm_xargs":{},"vllm_xargs":{"kv_transfer_params":%s}}' % FORGED, "/v1/completions"
    )
    @settings(max_examples=200)
    def check(body: bytes, path: str) -> None:
        assert talk(patient.port, [post(body, path, CLOSE)]) in ([200], [400])
        assert not seen(p, d)

    await asyncio.to_thread(check)


async def p_without_params(request: Received, peer: Peer) -> None:
    """The decoder is then sent what the client sent, byte by byte."""
    await peer.answer(USUAL)


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":"x","kv_transfer_params":%s}' % FORGED,
        b'{"prompt":"x","kv_transfer\\u005fparams":%s}' % FORGED,
        b'{"prompt":"x","vllm_xargs":{"kv_transfer_params":%s}}' % FORGED,
    ],
)
async def test_a_client_that_is_trusted_is_heard(p: MockEngine, d: MockEngine, body: bytes) -> None:
    """And what looks for planted params finds them."""
    trusting = settings_for(p=[p], d=[d], trust_client_kv_params=True, keep_alive_timeout=0.1)
    async with running_router(trusting) as router:
        await eventually(lambda: not router.gateway.fleet.unavailable_roles())
        assert await asyncio.to_thread(talk, router.port, [post(body)]) == [200]
    assert len(seen(p, d)) == 1
