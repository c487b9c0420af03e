"""A request that crashes engines is not retried on the whole fleet."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import cast

import httpx
import pytest

from router.fleet.engine import PREFILL, Engine, EngineSpec, Health
from router.http_client.errors import DisconnectedError
from router.http_client.pool import EnginePool
from router.proxy import recovery
from router.proxy.legs import LegFailure
from router.proxy.run import Run
from router.settings import Address
from scripts.mock_engine import STREAM_HEAD, MockEngine, Peer, Received, Script, chunk, is_release
from tests.unit.router.conftest import StartRouter
from tests.unit.router.engine_scripts import answer_after, fails, reset, usual_decode, usual_prefill
from tests.unit.router.harness import Router, eventually
from tests.unit.router.mock_engine import event, running_engine
from tests.unit.router.test_resume import OURS, computes, dies_after

POISON = "poison"


@pytest.fixture(autouse=True)
def _short_outages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "OUTAGE_S", 0.2)


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
async def dying_fleet(
    start: StartRouter, p: MockEngine, d: MockEngine, mode: str, **settings: float
) -> AsyncIterator[tuple[Router, list[MockEngine]]]:
    """Two prefillers and two decoders, all of which die of it."""
    async with running_engine(usual_prefill) as p2, running_engine(usual_decode) as d2:
        engines = [p, p2, d, d2]
        tasks: list[asyncio.Task[None]] = []
        changes = {"transfer_mode": mode, "without_prefiller": "decode", "health_interval": 60}
        router = await start(ps=[p, p2], ds=[d, d2], **changes, **settings)
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
    async with dying_fleet(start_router, p, d, mode) as (router, engines):
        if is_reused:
            for _ in range(4):
                assert (await router.complete()).status_code == 200
        answer = await router.complete(prompt=POISON)
        assert answer.status_code == 502
        assert "2 engines died while they worked on this request" in answer.text
        assert answer.headers["x-should-retry"] == "false"
        assert asked_for_it(engines) == 2


async def test_nor_where_the_client_has_some_of_the_answer(
    start_router: StartRouter, d: MockEngine, d2: MockEngine, d3: MockEngine
) -> None:
    """Decoders die after their first words; prefillers live."""
    says = STREAM_HEAD + chunk(event("a")[:20])
    router = await start_router(ds=[d, d2, d3], health_interval=60)
    tasks: list[asyncio.Task[None]] = []
    for engine in (d, d2, d3):
        dying(engine, tasks, says)
    answer = await router.stream(prompt=POISON)
    assert answer.status_code == 502
    assert asked_for_it([d, d2, d3]) == 2
    await asyncio.gather(*tasks)


async def test_nor_where_another_goes_on_with_it(
    start_router: StartRouter, p: MockEngine, d: MockEngine, d2: MockEngine, d3: MockEngine
) -> None:
    """A vLLM whose core dies says so in an event of the stream before it goes."""
    p.usual = computes
    tasks: list[asyncio.Task[None]] = []

    def dies_in_the_middle(engine: MockEngine) -> Script:
        async def script(request: Received, peer: Peer) -> None:
            await dies_after(2, "error")(request, peer)
            tasks.append(asyncio.create_task(engine.stop()))

        return script

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
    start_router: StartRouter, d: MockEngine
) -> None:
    """Twice 500, or twice a lost connection of an engine that lives."""
    for fault in (fails, reset):
        async with running_engine(usual_decode) as d2, running_engine(usual_decode) as d3:
            router = await start_router(ds=[d, d2, d3])
            d.scripts, d2.scripts = [fault], [fault]
            assert (await router.complete()).status_code == 200
            await router.settled()


async def test_engines_that_die_one_after_the_other_of_other_causes(
    start_router: StartRouter, d: MockEngine, d2: MockEngine
) -> None:
    """One death is no reason to give up."""
    router = await start_router(ds=[d, d2], health_interval=60)
    tasks: list[asyncio.Task[None]] = []
    dying(d, tasks)
    answers = [await router.complete(prompt=POISON) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200] * 3
    await asyncio.gather(*tasks)


async def test_engine_that_dies_after_it_was_probed_counts_before_the_next_leg(
    start_router: StartRouter, p: MockEngine, d: MockEngine, d2: MockEngine, d3: MockEngine
) -> None:
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


async def test_request_whose_deadline_comes_before_the_wait_ends_is_refused_at_once(
    start_router: StartRouter, p: MockEngine, d: MockEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "OUTAGE_S", 60.0)
    async with dying_fleet(start_router, p, d, "pull", request_timeout=50.0) as (router, engines):
        answer = await router.complete(prompt=POISON)
        assert answer.headers["x-should-retry"] == "false"
        assert asked_for_it(engines) == 2


async def test_client_that_disconnects_ends_the_wait(
    start_router: StartRouter, p: MockEngine, d: MockEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = asyncio.Event()

    def outage(least: float, most: float) -> float:
        waits.set()
        return 60.0

    monkeypatch.setattr("router.proxy.recovery.random.uniform", outage)
    async with dying_fleet(start_router, p, d, "pull") as (router, engines):
        request = asking(router, prompt=POISON)
        await waits.wait()
        request.cancel()
        await router.settled()
        assert asked_for_it(engines) == 2


async def never_answers(request: Received, peer: Peer) -> None:
    """Work on the request until the engine dies."""
    await peer.wait_left(None)


def num_asked(engine: MockEngine) -> int:
    return sum(one.json.get("prompt") == "hello" and not is_release(one) for one in engine.requests)


def asking(router: Router, **fields: str) -> asyncio.Task[httpx.Response]:
    return asyncio.create_task(router.complete(**fields))


async def test_crashing_request_in_company_kills_three_engines_and_all_others_are_answered(
    start_router: StartRouter,
    p: MockEngine,
    d: MockEngine,
    p2: MockEngine,
    d2: MockEngine,
    d3: MockEngine,
) -> None:
    """One other request meets it on both prefill engines; decode engines compute the prompts."""
    router = await start_router(
        ps=[p, p2], ds=[d, d2, d3], health_interval=60, without_prefiller="decode"
    )
    await router.knows_its_engines()
    tasks: list[asyncio.Task[None]] = []
    others: list[asyncio.Task[httpx.Response]] = []

    def crashes_after(engine: MockEngine, usual: Script, is_time: Script) -> Script:
        async def script(request: Received, peer: Peer) -> None:
            if request.json.get("prompt") != POISON:
                return await usual(request, peer)
            await is_time(request, peer)
            peer.reset()
            tasks.append(asyncio.create_task(engine.stop()))

        return script

    async def all_have_arrived(request: Received, peer: Peer) -> None:
        await eventually(lambda: num_asked(p) + num_asked(p2) == (3 if tasks else 2))

    async def all_are_answered(request: Received, peer: Peer) -> None:
        await asyncio.wait(others)

    for engine in (p, p2):
        engine.usual = crashes_after(engine, never_answers, all_have_arrived)
    for engine in (d, d2, d3):
        engine.usual = crashes_after(engine, usual_decode, all_are_answered)
    for number in (1, 2):  # one on each prefill engine
        others.append(asking(router))
        await eventually(lambda n=number: num_asked(p) + num_asked(p2) == n)  # type: ignore[misc]
    answer = await router.complete(prompt=POISON)
    assert answer.status_code == 502
    assert "3 engines died while they worked on this request" in answer.text
    assert asked_for_it([p, p2, d, d2, d3]) == 3
    assert [(await one).status_code for one in others] == [200, 200]
    assert min(num_asked(p), num_asked(p2)) == 1
    assert max(num_asked(p), num_asked(p2)) == 2
    await asyncio.gather(*tasks)


@pytest.mark.parametrize("num_killed", [2, 3])
async def test_engines_killed_at_once_cost_no_request_that_was_in_flight(
    start_router: StartRouter, p: MockEngine, monkeypatch: pytest.MonkeyPatch, num_killed: int
) -> None:
    """The second engine dies when it has requests of the first one, and the third one likewise.
    The last prefill engine answers, or if there is none, decode engines compute the prompts."""
    monkeypatch.setattr(recovery, "OUTAGE_S", 1.5)
    async with running_engine(never_answers) as p2, running_engine(never_answers) as p3:
        router = await start_router(ps=[p, p2, p3], without_prefiller="decode")
        await router.knows_its_engines()
        may_answer = asyncio.Event()
        p.usual, p3.usual = never_answers, answer_after(may_answer, usual_prefill)
        requests = [asking(router) for _ in range(12)]
        await eventually(lambda: [num_asked(one) for one in (p, p2, p3)] == [4, 4, 4])
        await p.stop()
        await eventually(lambda: num_asked(p2) + num_asked(p3) == 12)
        assert num_asked(p2) > 4
        await p2.stop()
        await eventually(lambda: num_asked(p3) >= 8)
        if num_killed == 3:
            await p3.stop()
        may_answer.set()
        assert [(await one).status_code for one in requests] == [200] * 12


async def test_loss_of_an_engine_without_the_request_speaks_for_an_outage(
    start_router: StartRouter, p: MockEngine, p2: MockEngine, p3: MockEngine
) -> None:
    """Three engines die while only one request is in flight, which was on two of them."""
    router = await start_router(ps=[p, p2, p3], without_prefiller="decode")
    await router.knows_its_engines()
    engines = {f"127.0.0.1:{one.port}": one for one in (p, p2, p3)}
    for engine in engines.values():
        engine.usual = never_answers
    request = asking(router)
    await eventually(lambda: any(map(num_asked, engines.values())))
    first = next(one for one in engines.values() if num_asked(one))
    await first.stop()
    await eventually(lambda: sum(map(num_asked, engines.values())) == 2)
    idle_name, idle = next(one for one in engines.items() if not num_asked(one[1]))
    await idle.stop()
    lost = router.gateway.fleet.find(idle_name)
    assert lost is not None
    await eventually(lambda: lost.health is Health.UNHEALTHY)
    await next(one for one in engines.values() if one not in (first, idle)).stop()
    assert (await request).status_code == 200


async def test_engine_lost_long_before_excuses_no_request(
    start_router: StartRouter,
    p: MockEngine,
    d: MockEngine,
    p2: MockEngine,
    p3: MockEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recovery, "OUTAGE_S", 0.0)
    router = await start_router(ps=[p, p2, p3], without_prefiller="decode")
    await router.knows_its_engines()
    lost = router.gateway.fleet.find(f"127.0.0.1:{p3.port}")
    assert lost is not None
    await p3.stop()
    await eventually(lambda: lost.health is Health.UNHEALTHY)
    tasks: list[asyncio.Task[None]] = []
    for engine in (p, p2, d):
        dying(engine, tasks)
    assert (await router.complete(prompt=POISON)).status_code == 502
    assert asked_for_it([p, p2, d]) == 2
    await asyncio.gather(*tasks)


@pytest.mark.parametrize("is_alone", [True, False])
def test_each_request_of_a_dead_engine_knows_whether_it_was_alone(is_alone: bool) -> None:
    """The first one whose leg fails, and the last one, when no leg is left."""
    engine = Engine(EngineSpec(PREFILL, Address("e", 1)), cast(EnginePool, None))
    num_legs = 1 if is_alone else 2
    engine.add_load(num_legs, 0)
    for _ in range(num_legs):
        engine.add_load(-1, 0)
        run = SimpleNamespace(suspects={})
        failed = LegFailure(DisconnectedError("gone"), engine, PREFILL)
        recovery.note_possible_crash(cast(Run, run), failed)
        assert run.suspects[engine].has_company is not is_alone
