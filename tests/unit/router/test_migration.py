"""The streams of an engine that drains move to another engine. The engines are mock engines; real
ones are in tests/integration/test_migration.py."""

import asyncio
import functools
from collections.abc import AsyncIterator
from time import monotonic as now
from typing import Any

import pytest

from router.fleet.engine import Engine, Intent
from router.proxy.migration import StreamMigrator
from router.proxy.retry import MAX_FAILED_LEGS
from scripts.mock_engine import DONE, MockEngine, Peer, Received, Script, chunk
from tests.unit.router.conftest import StartRouter
from tests.unit.router.engine_scripts import answer_after, fails, refuses, reset
from tests.unit.router.harness import Router, eventually
from tests.unit.router.mock_engine import running_engine
from tests.unit.router.test_resume import (
    LAST,
    OURS,
    PROMPT,
    WORDS,
    computes,
    dies_after,
    from_the_beginning_to,
    legs,
    texts_of,
    to_the_end,
    word_event,
)

RANK = {
    "remote_host": "10.9.8.7",
    "remote_port": 5600,
    "tp_size": 1,
    "lends": True,
    "borrows": True,
    "num_blocks": 10_000,
    "block_size": 16,
}


def lends(name: str, dp_size: int = 1) -> dict[str, Any]:
    ids = [name] if dp_size == 1 else [f"{name}_dp{number}" for number in range(dp_size)]
    ranks = [RANK | {"remote_engine_id": one, "dp_rank": n} for n, one in enumerate(ids)]
    return OURS | {"ranks": ranks, "dp_size": dp_size}


@pytest.fixture
async def d2() -> AsyncIterator[MockEngine]:
    async with running_engine(to_the_end) as engine:
        engine.identity = lends("d-2")
        yield engine


@pytest.fixture
def start_router(
    start_router: StartRouter, p: MockEngine, d: MockEngine, d2: MockEngine
) -> StartRouter:
    p.identity, d.identity, p.usual = OURS, lends("d-1"), computes
    return functools.partial(start_router, ds=[d, d2], identified=True)


async def stands_still(request: Received, peer: Peer) -> None:
    await from_the_beginning_to(2, request, peer)
    await peer.wait_left()


def serve(router: Router, engine: Engine) -> None:
    router.gateway.fleet.set_intent(engine, Intent.SERVING)


def drain(router: Router, engine: Engine, *, migrates: bool = True) -> None:
    """Apply what the admin API applies."""
    router.gateway.migrating = frozenset((engine.name,)) if migrates else frozenset()
    router.gateway.fleet.set_intent(engine, Intent.DRAINING)


def resumes(router: Router) -> float:
    return router.metric("resumes_total", kind="migrated", outcome="resumed")


def has_moved(router: Router, times: int) -> bool:
    return resumes(router) == times


async def begin_stream(
    router: Router, engine: Engine, other: Engine, num_words: int = 2
) -> asyncio.Task[Any]:
    """Return a stream at `engine` whose client has these words."""
    drain(router, other, migrates=False)
    stream = asyncio.create_task(router.stream())
    size = 4 * (len(PROMPT) + num_words)
    await eventually(lambda: router.gateway.memory.resume_buffers.size == size)
    assert engine.in_flight == 1
    serve(router, other)
    return stream


async def test_a_stream_of_a_drained_engine_moves_and_borrows_its_blocks(
    start_router: StartRouter, p: MockEngine, d: MockEngine, d2: MockEngine
) -> None:
    router = await start_router()
    leaving, seen = router.engine(d), []

    async def looks(request: Received, peer: Peer) -> None:
        seen.append((leaving.in_flight, leaving.kv_leases))
        await to_the_end(request, peer)

    d.usual, d2.usual = stands_still, looks
    stream = await begin_stream(router, leaving, router.engine(d2))
    drain(router, leaving)
    assert texts_of((await stream).text) == WORDS
    assert len(legs(p)) == 1, "nothing is prefilled again"
    params = legs(d2)[0].json["kv_transfer_params"]
    assert params["holders"] == [
        {
            "remote_engine_id": "d-1",
            "remote_host": "10.9.8.7",
            "remote_port": 5600,
            "tp_size": 1,
            "expected_tokens": len(PROMPT) + 2,
        }
    ]
    assert params["begun"]["spoken"] == 2
    assert seen == [(0, 1)], "the engine is drained once its blocks are read"
    assert resumes(router) == 1
    await router.settled()
    assert (leaving.breaker.failures, leaving.is_idle) == (0, True)


async def test_the_data_parallel_rank_that_has_the_stream_lends_it(
    start_router: StartRouter, p: MockEngine, d: MockEngine, d2: MockEngine
) -> None:
    """The router knows the rank if its policy chooses ranks."""
    d.identity, d2.identity = lends("d-1", 2), lends("d-2", 2)
    d.usual = stands_still
    router = await start_router(decode_policy="prefix")
    prompt = [*range(5000, 5300)]
    drain(router, router.engine(d2), migrates=False)
    stream = asyncio.create_task(router.stream(prompt=prompt))
    await eventually(lambda: router.gateway.memory.resume_buffers.size == 4 * (len(PROMPT) + 2))
    serve(router, router.engine(d2))
    drain(router, router.engine(d))
    assert texts_of((await stream).text) == WORDS
    rank = legs(d)[0].header("x-data-parallel-rank")
    (holder,) = legs(d2)[0].json["kv_transfer_params"]["holders"]
    assert holder["remote_engine_id"] == f"d-1_dp{rank}"
    assert legs(d2)[0].header("x-data-parallel-rank") in ("0", "1")
    assert (len(legs(p)), resumes(router)) == (1, 1)


@pytest.mark.parametrize("who", ["leaving", "taking", "one of two ranks"])
async def test_without_a_loan_a_prefill_engine_computes_the_stream(
    start_router: StartRouter, p: MockEngine, d: MockEngine, d2: MockEngine, who: str
) -> None:
    d.usual = stands_still
    (d2 if who == "taking" else d).identity = lends("d-1", 2) if "ranks" in who else OURS
    router = await start_router()
    stream = await begin_stream(router, router.engine(d), router.engine(d2))
    drain(router, router.engine(d))
    assert texts_of((await stream).text) == WORDS
    assert len(legs(p)) == 2
    params = legs(d2)[0].json["kv_transfer_params"]
    assert "holders" not in params
    assert "remote_engine_id" in params


async def test_a_stream_may_move_more_often_than_legs_may_fail(
    start_router: StartRouter, d: MockEngine, d2: MockEngine
) -> None:
    """In a rolling upgrade, it may move to the engine that is drained next."""

    async def says_a_word(request: Received, peer: Peer) -> None:
        begun = request.json["kv_transfer_params"].get("begun", {})
        await from_the_beginning_to(begun.get("spoken", 0) + 1, request, peer)
        await peer.wait_left()

    router = await start_router()
    here, there = router.engine(d), router.engine(d2)
    d.usual = d2.usual = says_a_word
    stream = await begin_stream(router, here, there, 1)
    for number in range(1, MAX_FAILED_LEGS + 1):
        if number == MAX_FAILED_LEGS:
            d.usual = d2.usual = to_the_end
        drain(router, here)
        await eventually(functools.partial(has_moved, router, number))
        serve(router, here)
        here, there = there, here
    assert texts_of((await stream).text) == WORDS


@pytest.mark.parametrize(("lendable", "at_once"), [(1000, 6), (3 * (len(PROMPT) + 2), 3)])
async def test_as_many_streams_move_at_once_as_the_engine_lends(
    start_router: StartRouter,
    monkeypatch: pytest.MonkeyPatch,
    d: MockEngine,
    d2: MockEngine,
    lendable: int,
    at_once: int,
) -> None:
    """The first one moves alone."""
    step, goes_on = StreamMigrator.step, asyncio.Event()
    moved_by_step = []

    def counted(migrator: StreamMigrator) -> None:
        step(migrator)
        moved_by_step.append(len(legs(d2)))

    async def waits(request: Received, peer: Peer) -> None:
        if len(legs(d2)) > 1:
            await goes_on.wait()
        await to_the_end(request, peer)

    monkeypatch.setattr(StreamMigrator, "step", counted)
    rank = RANK | {"remote_engine_id": "d-1", "num_blocks": 8 * lendable, "block_size": 1}
    d.identity = lends("d-1") | {"ranks": [rank]}
    d.usual, d2.usual = stands_still, waits
    router = await start_router()
    leaving, other = router.engine(d), router.engine(d2)
    drain(router, other, migrates=False)
    streams = [asyncio.create_task(router.stream()) for _ in range(7)]
    held = 7 * 4 * (len(PROMPT) + 2)
    await eventually(lambda: router.gateway.memory.resume_buffers.size == held)
    serve(router, other)
    drain(router, leaving)
    await eventually(lambda: moved_by_step[-3:] == [1 + at_once] * 3)
    goes_on.set()
    assert [texts_of((await one).text) for one in streams] == [WORDS] * 7
    assert resumes(router) == 7


@pytest.mark.parametrize("why", ["no other engine", "no migration", "full", "another model"])
async def test_a_stream_that_no_engine_can_take_runs_to_its_end(
    start_router: StartRouter, d: MockEngine, d2: MockEngine, why: str
) -> None:
    goes_on = asyncio.Event()

    async def pauses(request: Received, peer: Peer) -> None:
        await from_the_beginning_to(2, request, peer)
        await goes_on.wait()
        for number in range(2, len(WORDS)):
            finish = LAST if number == len(WORDS) - 1 else None
            await peer.send(chunk(word_event(request, number, finish)))
        await peer.send(chunk(DONE) + b"0\r\n\r\n")

    d.usual = pauses
    if why == "another model":
        d2.identity = lends("d-2") | {"renders": {"model": "2"}}
    router = await start_router()
    other = router.engine(d2)
    stream = await begin_stream(router, router.engine(d), other)
    if why == "no other engine":
        drain(router, other)
    if why == "full":
        other.add_load(0, 150_000)
    drain(router, router.engine(d), migrates=why != "no migration")
    migrator = StreamMigrator(router.gateway)
    for _ in range(3):
        migrator.step()
    goes_on.set()
    assert texts_of((await stream).text) == WORDS
    assert (resumes(router), legs(d2)) == (0, [])
    if why == "full":
        other.add_load(0, -150_000)


async def test_the_setting_moves_the_streams_of_every_engine_that_drains(
    start_router: StartRouter, d: MockEngine, d2: MockEngine
) -> None:
    d.usual = stands_still
    router = await start_router(migrate_on_drain=True)
    stream = await begin_stream(router, router.engine(d), router.engine(d2))
    drain(router, router.engine(d), migrates=False)
    assert texts_of((await stream).text) == WORDS
    assert resumes(router) == 1


def use_up_retries(router: Router) -> None:
    while router.gateway.budget.take(now()):
        pass


@pytest.mark.parametrize("may_retry", [True, False])
@pytest.mark.parametrize("script", [fails, refuses, dies_after(0)])
async def test_a_stream_that_the_other_engine_does_not_take_goes_back_and_stays(
    start_router: StartRouter,
    p: MockEngine,
    d: MockEngine,
    d2: MockEngine,
    script: Script,
    may_retry: bool,
) -> None:
    """No limit of retries applies: without the move, the client would have had no error."""
    router = await start_router()
    d.usual, d2.usual = stands_still, script
    leaving = router.engine(d)
    stream = await begin_stream(router, leaving, router.engine(d2))
    if not may_retry:
        use_up_retries(router)
    goes_on = asyncio.Event()
    d.usual = answer_after(goes_on, to_the_end)
    drain(router, leaving)
    await eventually(lambda: len(legs(d)) == 2)
    goes_on.set()
    assert texts_of((await stream).text) == WORDS
    assert (len(legs(d2)), len(legs(d)), len(legs(p))) == (1, 2, 1), "nothing is prefilled again"
    assert resumes(router) == 0
    assert router.metric("resumes_total", kind="returned", outcome="resumed") == 1
    await router.settled()
    assert (leaving.breaker.failures, leaving.is_idle) == (0, True)


async def test_a_stream_that_meets_a_stale_connection_moves_on_a_new_one(
    start_router: StartRouter, p: MockEngine, d: MockEngine, d2: MockEngine
) -> None:
    router = await start_router(health_interval=60, engine_idle_age=60)  # a connection stays idle
    d.usual, d2.scripts = stands_still, [reset]
    stream = await begin_stream(router, router.engine(d), router.engine(d2))
    drain(router, router.engine(d))
    assert texts_of((await stream).text) == WORDS
    assert (len(legs(d)), len(legs(d2)), len(legs(p))) == (1, 2, 1), "it borrows the blocks, too"
    assert resumes(router) == 1


@pytest.mark.parametrize("script", [fails, refuses])
async def test_a_stream_that_no_prefill_engine_computes_goes_back(
    start_router: StartRouter, p: MockEngine, d: MockEngine, d2: MockEngine, script: Script
) -> None:
    d2.identity = OURS  # which borrows nothing
    router = await start_router()
    leaving = router.engine(d)
    d.usual = stands_still
    stream = await begin_stream(router, leaving, router.engine(d2))
    goes_on = asyncio.Event()
    p.usual, d.usual = answer_after(goes_on, script), to_the_end
    use_up_retries(router)
    drain(router, leaving)
    await eventually(lambda: len(legs(p)) == 2)
    assert not leaving.is_idle, "or it may be stopped before the stream returns"
    goes_on.set()
    assert texts_of((await stream).text) == WORDS
    assert (len(legs(p)), legs(d2)) == (2, [])
    await router.settled()
    assert leaving.is_idle


async def test_a_stream_that_the_draining_engine_does_not_take_back_moves_on(
    start_router: StartRouter, d: MockEngine, d2: MockEngine
) -> None:
    """It was stopped too soon."""
    async with running_engine(to_the_end) as d3:
        d3.identity = lends("d-3")
        router = await start_router(ds=[d, d2, d3])
        drain(router, router.engine(d3), migrates=False)
        d.usual, d2.usual = stands_still, fails
        stream = await begin_stream(router, router.engine(d), router.engine(d2))

        async def is_stopped(request: Received, peer: Peer) -> None:
            serve(router, router.engine(d3))
            await fails(request, peer)

        d.usual = is_stopped
        drain(router, router.engine(d))
        assert texts_of((await stream).text) == WORDS
        assert [len(legs(engine)) for engine in (d, d2, d3)] == [2, 1, 1]
