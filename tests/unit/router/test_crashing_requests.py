"""A request that crashes engines is not retried on the whole fleet."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from tests.unit.router.conftest import StartRouter
from tests.unit.router.harness import Router
from tests.unit.router.mock_engine import (
    STREAM_HEAD,
    MockEngine,
    Peer,
    Received,
    Script,
    chunk,
    event,
    fails,
    is_release,
    running_engine,
    usual_decode,
    usual_prefill,
)
from tests.unit.router.test_resume import OURS, computes, dies_after

POISON = "poison"


def dying(engine: MockEngine, tasks: list[asyncio.Task[None]], says: bytes = b"") -> None:
    """It lives until it is asked for POISON: then its process is gone, after it said something."""
    usual = engine.usual

    async def script(request: Received, peer: Peer) -> None:
        if request.json.get("prompt") != POISON:
            return await usual(request, peer)
        if says and request.json.get("max_tokens") != 1:
            await peer.send(says)
        peer.reset()
        tasks.append(asyncio.create_task(engine.stop()))

    engine.usual = script


@contextlib.asynccontextmanager
async def fleet(
    start: StartRouter, p: MockEngine, d: MockEngine, mode: str
) -> AsyncIterator[tuple[Router, list[MockEngine]]]:
    """Two prefillers and two decoders, all of which die of it."""
    async with running_engine(usual_prefill) as p2, running_engine(usual_decode) as d2:
        engines = [p, p2, d, d2]
        tasks: list[asyncio.Task[None]] = []
        changes = {"transfer_mode": mode, "without_prefiller": "decode", "health_interval": 60}
        router = await start(ps=[p, p2], ds=[d, d2], **changes)
        await router.knows_its_engines()
        for engine in engines:
            dying(engine, tasks)
        yield router, engines
        await asyncio.gather(*tasks)


def asked_for_it(engines: list[MockEngine]) -> int:
    return sum(
        any(one.json.get("prompt") == POISON and not is_release(one) for one in engine.requests)
        for engine in engines
    )


@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize("is_reused", [False, True])
async def test_two_engines_die_at_a_request_and_no_third_one(
    start_router: StartRouter, p: MockEngine, d: MockEngine, mode: str, is_reused: bool
) -> None:
    async with fleet(start_router, p, d, mode) as (router, engines):
        if is_reused:
            for _ in range(4):
                assert (await router.complete()).status_code == 200
        answer = await router.complete(prompt=POISON)
        assert answer.status_code == 502
        assert "2 engines died while they worked on this request" in answer.text
        assert answer.headers["x-should-retry"] == "false"
        assert asked_for_it(engines) == 2


async def test_nor_where_the_client_has_some_of_the_answer(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    """Decoders die after their first words; prefillers live."""
    says = STREAM_HEAD + chunk(event("a")[:20])
    async with running_engine(usual_decode) as d2, running_engine(usual_decode) as d3:
        router = await start_router(ds=[d, d2, d3], health_interval=60)
        tasks: list[asyncio.Task[None]] = []
        for engine in (d, d2, d3):
            dying(engine, tasks, says)
        answer = await router.stream(prompt=POISON)
        assert answer.status_code == 502
        assert asked_for_it([d, d2, d3]) == 2
        await asyncio.gather(*tasks)


async def test_nor_where_another_goes_on_with_it(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    """A vLLM whose core dies says so in an event of the stream before it goes."""
    p.usual = computes
    tasks: list[asyncio.Task[None]] = []

    def dies_in_the_middle(engine: MockEngine) -> Script:
        async def script(request: Received, peer: Peer) -> None:
            await dies_after(2, "error")(request, peer)
            tasks.append(asyncio.create_task(engine.stop()))

        return script

    async with running_engine(usual_decode) as d2, running_engine(usual_decode) as d3:
        engines = [d, d2, d3]
        for engine in (p, *engines):
            engine.identity = OURS
        router = await start_router(ds=engines, health_interval=60, max_resumes=5)
        await router.knows_its_engines()
        for engine in engines:
            engine.usual = dies_in_the_middle(engine)
        answer = await router.stream(prompt=POISON)
        assert "2 engines died while they worked on this request" in answer.text
        assert asked_for_it(engines) == 2
        await asyncio.gather(*tasks)


async def test_engines_that_only_fail_are_no_deaths(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    """Twice 500, or twice a lost connection of an engine that lives."""

    async def loses(request: Received, peer: Peer) -> None:
        peer.reset()

    for fault in (fails, loses):
        async with running_engine(usual_decode) as d2, running_engine(usual_decode) as d3:
            router = await start_router(ds=[d, d2, d3])
            d.scripts, d2.scripts = [fault], [fault]
            assert (await router.complete()).status_code == 200
            await router.settled()


async def test_engines_that_die_one_after_the_other_of_other_causes(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    """One death is no reason to give up."""
    async with running_engine(usual_decode) as d2:
        router = await start_router(ds=[d, d2], health_interval=60)
        tasks: list[asyncio.Task[None]] = []
        dying(d, tasks)
        answers = [await router.complete(prompt=POISON) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200] * 3
        await asyncio.gather(*tasks)


async def test_engine_that_dies_after_it_was_probed_counts_before_the_next_leg(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    async with running_engine(usual_decode) as d2, running_engine(usual_decode) as d3:
        engines, lost = [d, d2, d3], set[MockEngine]()
        router = await start_router(ds=engines, health_interval=60)
        await router.knows_its_engines()

        def loses(engine: MockEngine) -> Script:
            async def script(request: Received, peer: Peer) -> None:
                if is_release(request):
                    return await usual_decode(request, peer)
                lost.add(engine)
                peer.reset()

            return script

        async def prefills(request: Received, peer: Peer) -> None:
            if len(lost) == 2:  # both answered the probe
                await asyncio.gather(*[engine.stop() for engine in lost])
            await usual_prefill(request, peer)

        p.usual = prefills
        for engine in engines:
            engine.usual = loses(engine)
        answer = await router.complete(prompt=POISON)
        assert "2 engines died while they worked on this request" in answer.text
        assert len(lost) == 2
