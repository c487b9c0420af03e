"""Clients, a real gateway, the real router, and engines: what a gateway must not spoil."""

import asyncio
import contextlib
import resource
from collections.abc import AsyncIterator, Awaitable, Callable
from ipaddress import ip_address
from pathlib import Path

import httpx
import pytest

from scripts.mock_engine import DONE, STREAM_HEAD, MockEngine, Peer, Received, chunk
from tests.k8s import proxies, ways
from tests.k8s.ways import OneByOne, Way, heard_one_by_one, through_envoy, through_traefik
from tests.unit.router.conftest import d, p
from tests.unit.router.engine_scripts import streaming_until, usual_decode, usual_prefill
from tests.unit.router.harness import eventually, post
from tests.unit.router.mock_engine import event

__all__ = ["d", "p"]

STREAM = {"prompt": "x", "stream": True}
PROMPT = {"prompt": "x"}
PATH = "/v1/completions"
NO_RETRIES = {name: proxies.ENVOY_ROUTE[name] for name in ("timeout",)}
"""They would cure some of what is looked for here."""
OpenWay = Callable[..., Awaitable[Way]]


@pytest.fixture(params=["envoy", "traefik"])
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "traefik":
        request.getfixturevalue("gateway_cluster")
    return str(request.param)


@pytest.fixture
async def open_way(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, p: MockEngine, d: MockEngine
) -> AsyncIterator[OpenWay]:
    async with contextlib.AsyncExitStack() as stack:

        async def start(count: int = 1, *flags: str) -> Way:
            if kind == "envoy":
                opened = through_envoy(tmp_path, p, d, count, *flags, route=NO_RETRIES)
            else:
                cluster = request.getfixturevalue("gateway_cluster")
                opened = through_traefik(tmp_path, cluster, p, d, count, *flags)
            return await stack.enter_async_context(opened)

        yield start


async def test_chunks_come_as_they_were_sent(open_way: OpenWay, d: MockEngine) -> None:
    script = OneByOne()
    d.scripts = [script]
    assert (await heard_one_by_one(await open_way(), script)).endswith(DONE)


class Held:
    """An engine's script that does not end by itself; `left` is set when its client has gone."""

    def __init__(self, opening: bytes = b"") -> None:
        self.asked, self.left = asyncio.Event(), asyncio.Event()
        self._opening = opening

    async def __call__(self, request: Received, peer: Peer) -> None:
        if self._opening:
            await peer.send(self._opening)
        self.asked.set()
        await peer.wait_left(None)
        self.left.set()


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_clients_leaving_reaches_the_engine(
    open_way: OpenWay, p: MockEngine, d: MockEngine, leg: str
) -> None:
    way = await open_way()
    held = Held(STREAM_HEAD + chunk(event("a")) if leg == "decode" else b"")
    (d if leg == "decode" else p).scripts = [held]
    async with way.client() as client:
        asking = asyncio.create_task(_heard(client))
        async with asyncio.timeout(120):
            await held.asked.wait()
            asking.cancel()
            await held.left.wait()


async def _heard(client: httpx.AsyncClient) -> bytes:
    async with client.stream("POST", PATH, json=STREAM) as answer:
        return b"".join([block async for block in answer.aiter_raw()])


async def test_both_engines_are_told_what_the_gateway_tells_of_the_client(
    open_way: OpenWay, kind: str, p: MockEngine, d: MockEngine
) -> None:
    trace = {
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "tracestate": "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE",
    }
    way = await open_way()
    async with way.client() as client:
        answer = await client.post(PATH, json=PROMPT, headers=trace)
    assert answer.status_code == 200
    for engine in (p, d):
        told = engine.last
        # One address, not the gateway's: Envoy gives its machine's for a client on loopback.
        client_is = ip_address(told.header("x-forwarded-for") or "")
        assert str(client_is) not in (router for router, _ in ways.addresses(0, 1))
        assert told.header("x-forwarded-proto") == "http"
        # Envoy leaves the host where it was, and so says it nowhere else.
        host = told.header("x-forwarded-host")
        assert host == (None if kind == "envoy" else "llm.test")
        assert told.header("host") == f"127.0.0.1:{engine.port}"
        for name, value in trace.items():
            assert told.header(name) == value
        for name in ("connection", "keep-alive", "te", "transfer-encoding", "upgrade"):
            assert told.header(name) is None


async def test_a_router_that_is_deleted_costs_nobody_anything(
    open_way: OpenWay, p: MockEngine, d: MockEngine
) -> None:
    d.usual = Working()
    way = await open_way(2, "--shutdown-delay=10")
    load = Load(way)
    async with load.running(12):
        await load.until(100)
        await way.delete(0)
        assert await way.routers[0].ended() == 0
        await load.until(len(load.outcomes) + 100)
    assert load.outcomes.count("ok") == len(load.outcomes)


class Working:
    """A decoder that takes its time: 0.2 s, streamed or not."""

    async def __call__(self, request: Received, peer: Peer) -> None:
        if request.json.get("stream"):
            await peer.send(STREAM_HEAD)
            for number in range(10):
                await asyncio.sleep(0.02)
                await peer.send(chunk(event(str(number))))
            await peer.send(chunk(DONE) + b"0\r\n\r\n")
        else:
            await asyncio.sleep(0.2)
            await usual_decode(request, peer)


class Load:
    """Callers on kept connections, each of whom asks as soon as it is answered."""

    def __init__(self, way: Way) -> None:
        self._way = way
        self.outcomes: list[str] = []

    @contextlib.asynccontextmanager
    async def running(self, callers: int) -> AsyncIterator[None]:
        over = asyncio.Event()
        async with self._way.client() as client:
            tasks = [
                asyncio.create_task(self._call(client, over, number)) for number in range(callers)
            ]
            try:
                yield
            finally:
                over.set()
                await asyncio.gather(*tasks)

    async def until(self, count: int) -> None:
        await eventually(lambda: len(self.outcomes) >= count, 120)

    async def _call(self, client: httpx.AsyncClient, over: asyncio.Event, number: int) -> None:
        while not over.is_set():
            self.outcomes.append(await self._outcome(client, number % 2 == 0))

    async def _outcome(self, client: httpx.AsyncClient, streamed: bool) -> str:
        try:
            answer = await client.post(PATH, json=STREAM if streamed else PROMPT)
        except httpx.HTTPError as error:
            return repr(error)
        if answer.status_code != 200 or (streamed and not answer.content.endswith(DONE)):
            return f"{answer.status_code} {answer.text[-200:]}"
        return "ok"


async def test_a_long_prefill_passes_what_would_cut_it_by_default(
    tmp_path: Path, p: MockEngine, d: MockEngine
) -> None:
    """Envoy's default ends a request after 15 seconds; the one that it must not end is older."""
    p.usual = is_cut = PrefillAfter()
    async with ways.routers(p, d, 1) as (target, _):
        to = ways.addresses(target, 1)
        with (
            proxies.envoy(tmp_path, to, route={}, cluster={}) as by_default,
            proxies.envoy(tmp_path, to) as cured,
        ):
            for port in (by_default, cured):
                await proxies.until_listening(port)
            async with Way(cured).client() as patient, Way(by_default).client() as impatient:
                asking = asyncio.create_task(patient.post(PATH, json=STREAM))
                await eventually(lambda: p.requests, 60)
                assert (await impatient.post(PATH, json=STREAM)).status_code == 504
                is_cut.event.set()
                assert (await asking).status_code == 200


class PrefillAfter:
    """A prefill engine's script that answers once `event` is set."""

    def __init__(self) -> None:
        self.event = asyncio.Event()

    async def __call__(self, request: Received, peer: Peer) -> None:
        await self.event.wait()
        await usual_prefill(request, peer)


async def test_a_heartbeat_outlives_a_gateways_patience(
    tmp_path: Path, p: MockEngine, d: MockEngine
) -> None:
    """Envoy's is five minutes, here eight seconds, and the wait for the first byte counts."""
    p.usual = is_cut = PrefillAfter()
    impatient = {"timeout": "0s", "idle_timeout": "8s"}
    beat = "--stream-heartbeat=0.4"
    async with (
        through_envoy(tmp_path, p, d, 1, route=impatient) as silent,
        through_envoy(tmp_path, p, d, 1, beat, route=impatient) as beating,
        silent.client() as unheard,
        beating.client() as heard,
    ):
        asking = asyncio.create_task(heard.post(PATH, json=STREAM))
        await eventually(lambda: p.requests, 60)
        assert (await unheard.post(PATH, json=STREAM)).status_code == 504
        is_cut.event.set()
        answer = await asking
    assert answer.status_code == 200
    assert answer.content.replace(b": heartbeat\n\n", b"") == event("a") + event("b") + DONE


async def test_more_streams_than_envoys_breaker_lets_through(
    tmp_path: Path, p: MockEngine, d: MockEngine
) -> None:
    """By default it takes 1,024 at once, and lets those beyond wait for another's end."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # Envoy's, too: it inherits it
    async with ways.routers(p, d, 1) as (target, _):
        to = ways.addresses(target, 1)
        with (
            proxies.envoy(tmp_path, to, cluster={}) as by_default,
            proxies.envoy(tmp_path, to) as cured,
        ):
            assert await _streams_at_once(by_default, d, BREAKER) == BREAKER
            assert await _streams_at_once(cured, d, CALLERS) == CALLERS


BREAKER = 1024
CALLERS = 1100
BATCH = 50
LAST_CHUNK = b"0\r\n\r\n"


async def _streams_at_once(port: int, d: MockEngine, most: int) -> int:
    """How many of CALLERS' reach the engine while none ends; all of them end well at last."""
    over = asyncio.Event()
    d.usual, d.requests = streaming_until(over, event("a"), DONE), []
    await proxies.until_listening(port)
    asking: list[asyncio.Task[bytes]] = []

    def have_come() -> bool:
        return len(d.requests) >= min(len(asking), most)

    while len(asking) < CALLERS:  # no more at once than an engine's backlog takes
        asking.extend(asyncio.create_task(_opened(port)) for _ in range(BATCH))
        await eventually(have_come, 60)
    await asyncio.sleep(0.5)  # for more, if more can come
    seen = len(d.requests)
    over.set()
    answers = await asyncio.gather(*asking)
    assert {answer[:15] for answer in answers} == {b"HTTP/1.1 200 OK"}
    assert all(answer.endswith(LAST_CHUNK) for answer in answers)
    return seen


async def _opened(port: int) -> bytes:
    """Asks for a stream with as little as can be, and hears it to its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(post(b'{"prompt": "x", "stream": true}', headers=b"connection: close\r\n"))
        async with asyncio.timeout(300):
            return await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize("name", ["haproxy", "nginx"])
async def test_two_more_proxies_hold_no_chunk_back(
    name: str, tmp_path: Path, p: MockEngine, d: MockEngine
) -> None:
    script = OneByOne()
    d.scripts = [script]
    start = proxies.haproxy if name == "haproxy" else proxies.nginx
    async with ways.routers(p, d, 1) as (target, _):
        with start(tmp_path, ways.addresses(target, 1)) as port:
            way = Way(port)
            await ways.until_open(way)
            assert (await heard_one_by_one(way, script)).endswith(DONE)
