"""Every prefill that was answered is read or released, whoever leaves or fails, and when."""

import asyncio
import json
from random import Random

import pytest

from scripts.mock_engine import DONE, STREAM_HEAD, MockEngine, Peer, Received, chunk, is_release
from tests.unit.router.conftest import StartRouter
from tests.unit.router.engine_scripts import answering, hang, raw, reset, usual_decode
from tests.unit.router.harness import Router, eventually, post
from tests.unit.router.mock_engine import PARAMS, event, running_engine

REQUESTS = 60


class Books:
    """What was prefilled, what decoders read, and what was released: ids of prefills."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.prefilled: list[str] = []
        self.read: list[str] = []
        self.released: list[str] = []

    async def prefill(self, request: Received, peer: Peer) -> None:
        await asyncio.sleep(self.random.choice((0, 0.005, 0.02)))
        if self.random.random() < 0.1:
            return await answering(500, {})(request, peer)
        name = f"prefill-{len(self.prefilled)}"
        self.prefilled.append(name)
        answer = {"kv_transfer_params": {**PARAMS, "remote_request_id": name}}
        await peer.answer(answer)
        if self.random.random() < 0.1:
            await peer.answer(answer)  # twice: one of them nobody asked for

    async def decode(self, request: Received, peer: Peer) -> None:
        name = request.json["kv_transfer_params"]["remote_request_id"]
        if is_release(request):
            self.released.append(name)
            return await answering(404, {})(request, peer)
        await asyncio.sleep(self.random.choice((0, 0.005, 0.02)))
        fate = self.random.random()
        if fate < 0.1:
            return await reset(request, peer)
        if fate < 0.2:
            return await answering(self.random.choice((400, 500)), {})(request, peer)
        if fate < 0.3:
            return await peer.wait_left()
        self.read.append(name)
        if fate < 0.4:
            return await raw(STREAM_HEAD + chunk(event("a")[:9]))(request, peer)
        if fate < 0.5:
            await peer.send(STREAM_HEAD + chunk(event("a")))
            await asyncio.sleep(0.02)
            return await peer.send(chunk(DONE) + b"0\r\n\r\n")
        await usual_decode(request, peer)

    async def client(self, router: Router, number: int) -> None:
        """It leaves at any moment, without a word."""
        body = {"model": "m", "prompt": f"{number}", "stream": self.random.random() < 0.5}
        patience = self.random.choice((0.001, 0.01, 0.02, 0.03, 0.05, 0.3))
        async with router.socket() as client:
            await client.send(post(json.dumps(body).encode()))
            try:
                async with asyncio.timeout(patience):
                    await client.reader.read()
            except TimeoutError:
                client.writer.transport.abort()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
async def test_every_prefill_is_read_or_released(
    start_router: StartRouter, p: MockEngine, d: MockEngine, seed: int
) -> None:
    books = Books(seed)
    p.usual = d.usual = books.prefill
    async with running_engine(books.prefill) as p2, running_engine(books.decode) as d2:
        d.usual = books.decode
        router = await start_router(ps=[p, p2], ds=[d, d2], health_interval=1)
        for first in range(0, REQUESTS, 10):
            await asyncio.gather(*(books.client(router, first + n) for n in range(10)))
        await router.settled()
    missing = set(books.prefilled) - set(books.read) - set(books.released)
    assert not missing
    assert books.read
    assert books.released
    assert len(books.released) == len(set(books.released)), "each once"


async def test_a_prefiller_holds_kv_until_its_decoder_has_it(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    """Which is when the decoder says its first word, however long it goes on."""
    goes_on, ends = asyncio.Event(), asyncio.Event()

    async def slowly(request: Received, peer: Peer) -> None:
        await goes_on.wait()
        await peer.send(STREAM_HEAD + chunk(event("a")))
        await ends.wait()
        await peer.send(chunk(DONE) + b"0\r\n\r\n")

    d.scripts = [slowly]
    router = await start_router()
    prefiller, decoder = router.engine(p), router.engine(d)
    asking = asyncio.create_task(router.stream())
    await eventually(lambda: d.requests)
    assert (prefiller.in_flight, prefiller.kv_leases) == (0, 1)
    goes_on.set()
    await eventually(lambda: prefiller.kv_leases == 0)
    assert decoder.in_flight == 1
    ends.set()
    assert (await asking).status_code == 200
    await router.settled()


async def test_a_prefiller_holds_nothing_for_a_client_that_left(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    d.scripts = [hang]
    router = await start_router()
    async with router.socket() as client:
        await client.send(post(b'{"model": "m", "prompt": "x"}'))
        await eventually(lambda: router.engine(p).kv_leases == 1)
        client.writer.transport.abort()
        await eventually(lambda: router.engine(p).kv_leases == 0)
    await router.settled()
