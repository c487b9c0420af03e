"""Warm-up of engine pairs before the first request of a client needs them."""

import asyncio
from typing import Any, cast

import pytest

from router.fleet.engine import CircuitState, EngineRole, EngineSpec, Health
from router.fleet.fleet import Fleet
from router.proxy import warmup
from router.proxy.warmup import EngineWarmer
from router.settings import Address
from scripts.mock_engine import MockEngine, Peer, Received, is_release
from tests.unit.router.conftest import StartRouter
from tests.unit.router.engine_scripts import (
    answer_after,
    answering,
    hang,
    usual_decode,
    usual_prefill,
)
from tests.unit.router.harness import Router, eventually
from tests.unit.router.mock_engine import PARAMS
from tests.unit.router.proxy.test_groups import regroup
from tests.unit.router.proxy.test_push import IDENTITY


def warm(engine: MockEngine) -> list[Received]:
    """Return the warm-up requests of an engine."""
    return [r for r in engine.requests if (r.header("x-request-id") or "").startswith("warm-up-")]


def client_legs(engine: MockEngine) -> int:
    return len(engine.requests) - len(warm(engine))


def warmed(router: Router, outcome: str = "done") -> float:
    return router.metric("warm_ups_total", outcome=outcome)


async def lose(router: Router, mock: MockEngine) -> None:
    """Make an engine unhealthy for a while."""
    mock.healthy = False
    await eventually(lambda: not router.engine(mock).is_usable)
    mock.healthy = True
    await eventually(lambda: router.engine(mock).is_usable)


async def test_lazy_warms_engines_that_join_and_not_those_present_at_start(
    start_router: StartRouter, p: MockEngine, d: MockEngine, d2: MockEngine
) -> None:
    router = await start_router(ds=[d, d2], warm_up="lazy")
    await router.knows_its_engines()
    await lose(router, d2)
    await eventually(lambda: warmed(router) == 1)
    assert len(warm(p)) == len(warm(d2)) == 1
    assert not warm(d)
    assert warm(p)[0].json["kv_transfer_params"]["do_remote_decode"]
    assert warm(d2)[0].json["kv_transfer_params"] == PARAMS | {"retain": False}
    assert warm(p)[0].json["prompt"] == warm(d2)[0].json["prompt"]
    assert len(warm(p)[0].json["prompt"]) == warmup.WARM_UP_TOKENS
    await router.settled()


@pytest.mark.parametrize("refuses", [False, True])
async def test_warm_up_has_log_probabilities_compiled_where_engines_allow_them(
    start_router: StartRouter, p: MockEngine, refuses: bool
) -> None:
    async def refuse(request: Received, peer: Peer) -> None:
        if "logprobs" in request.json:
            await peer.answer({"error": {"message": "no logprobs here"}}, 400)
        else:
            await usual_prefill(request, peer)

    p.usual = refuse if refuses else usual_prefill
    router = await start_router(warm_up="eager", kv_canary=0.02)
    await eventually(lambda: warmed(router) == 1)
    asked = ["logprobs" in request.json for request in warm(p)]
    assert asked == ([True, False] if refuses else [True])


async def test_mode_off_warms_no_pair(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    router = await start_router(warm_up="off")
    await lose(router, d)
    assert (await router.complete()).status_code == 200
    assert not warm(p)


async def test_eager_warms_every_pair_once_with_a_prompt_of_its_own(
    start_router: StartRouter, p: MockEngine, d: MockEngine, p2: MockEngine, d2: MockEngine
) -> None:
    router = await start_router(ps=[p, p2], ds=[d, d2], warm_up="eager")
    await eventually(lambda: warmed(router) == 4)
    await eventually(lambda: not any(e.is_cold for e in router.gateway.fleet.engines))
    legs = [len(warm(engine)) for engine in (p, p2, d, d2)]
    assert legs == [2, 2, 2, 2]
    prompts = {tuple(r.json["prompt"]) for engine in (p, p2) for r in warm(engine)}
    assert len(prompts) == 4


async def test_engine_that_joins_gets_no_requests_before_it_is_warm(
    start_router: StartRouter, d: MockEngine, d2: MockEngine
) -> None:
    may_continue = asyncio.Event()

    async def slowly(request: Received, peer: Peer) -> None:
        if request in warm(d2):
            await may_continue.wait()
        await usual_decode(request, peer)

    router = await start_router(ds=[d, d2], warm_up="eager")
    await eventually(lambda: warmed(router) == 2)
    d2.usual = slowly
    d2.requests.clear()
    await lose(router, d2)
    await eventually(lambda: warm(d2))
    for _ in range(4):
        assert (await router.complete()).status_code == 200
    assert not client_legs(d2)
    may_continue.set()
    await eventually(lambda: not router.engine(d2).is_cold)
    for _ in range(4):
        assert (await router.complete()).status_code == 200
    assert client_legs(d2)


async def test_only_engine_of_a_role_is_used_cold(start_router: StartRouter, d: MockEngine) -> None:
    async def never_warm(request: Received, peer: Peer) -> None:
        await (hang if request in warm(d) else usual_decode)(request, peer)

    d.usual = never_warm
    router = await start_router(warm_up="eager")
    await eventually(lambda: warm(d))
    assert router.engine(d).is_cold
    assert (await router.complete()).status_code == 200
    d.usual = usual_decode  # and answers the release of the KV


@pytest.mark.parametrize("status", [401, 500, 503])
async def test_failed_warm_up_does_not_count_against_the_engines(
    start_router: StartRouter, p: MockEngine, status: int
) -> None:
    p.usual = answering(status, {})
    router = await start_router(warm_up="eager")
    await eventually(lambda: warmed(router, "failed") == 1)
    await eventually(lambda: not router.engine(p).is_cold)
    assert router.engine(p).breaker.circuit is CircuitState.CLOSED
    assert len(warm(p)) == 1
    await router.settled()


async def test_kv_is_released_if_the_decoder_fails(
    start_router: StartRouter, d: MockEngine
) -> None:
    d.scripts = [answering(500, {})]
    router = await start_router(warm_up="eager")
    await eventually(lambda: warmed(router, "failed") == 1)
    await router.settled()
    assert router.metric("releases_total", outcome="done") == 1


async def test_warm_up_that_hangs_delays_an_engine_for_a_limited_time(
    start_router: StartRouter, d: MockEngine
) -> None:
    router = await start_router(warm_up="off")
    d.usual = hang
    gateway = router.gateway
    gateway.fleet.starts_engines_cold = True
    warmer = asyncio.create_task(EngineWarmer(gateway, "eager", max_cold_s=0.1).run())
    try:
        await lose(router, d)
        await eventually(lambda: warm(d))
        await eventually(lambda: not router.engine(d).is_cold)
        assert not warmed(router, "done")
    finally:
        d.usual = usual_decode  # and answers the release of the KV
        warmer.cancel()
        await asyncio.gather(warmer, return_exceptions=True)


async def test_engines_that_push_are_warmed_by_a_push(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    p.identity, d.identity = IDENTITY, {"transfer_modes": ["push"], "capabilities": []}
    router = await start_router(warm_up="eager")
    await eventually(lambda: warmed(router) == 1)
    prefill, decode = warm(p)[0], warm(d)[0]
    assert prefill.header("x-request-id") == decode.header("x-request-id")
    sent, told = prefill.json["kv_transfer_params"], decode.json["kv_transfer_params"]
    assert sent["transfer_id"] == told["transfer_id"]


async def test_number_of_concurrent_warm_ups_is_limited(
    start_router: StartRouter, p: MockEngine, d: MockEngine, d2: MockEngine, d3: MockEngine
) -> None:
    running = most = 0

    async def counted(request: Received, peer: Peer) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        await usual_prefill(request, peer)

    p.usual = counted
    router = await start_router(ds=[d, d2, d3], warm_up="eager")
    await eventually(lambda: warmed(router) == 3)
    assert most <= warmup.MAX_CONCURRENT_WARM_UPS


@pytest.mark.parametrize("late", [False, True])
async def test_pair_that_is_no_longer_in_one_group_is_not_warmed(
    start_router: StartRouter,
    p: MockEngine,
    d: MockEngine,
    d2: MockEngine,
    d3: MockEngine,
    late: bool,
) -> None:
    """The change comes while the pair waits, or between its two legs."""
    may_continue = asyncio.Event()
    p.usual = answer_after(may_continue, usual_prefill)
    router = await start_router(ds=[d, d2, d3], warm_up="eager")
    await eventually(lambda: len(warm(p)) == warmup.MAX_CONCURRENT_WARM_UPS)
    begun = {r.header("x-request-id") for r in warm(p)}
    for mock in (d, d2, d3):
        regroup(router, mock, "green")
    if not late:
        regroup(router, p, "green")
    may_continue.set()
    await eventually(lambda: not any(e.is_cold for e in router.gateway.fleet.engines))
    await router.settled()
    legs = [r for mock in (d, d2, d3) for r in warm(mock) if not is_release(r)]
    # Where all of them moved, those begun may go on, and all pairs are new ones.
    assert len(legs) == (0 if late else len(begun) + 3)
    assert len(warm(p)) == len(begun) + (0 if late else 3)


async def test_kv_is_released_if_a_push_fails(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    p.identity, d.identity = IDENTITY, {"transfer_modes": ["push"], "capabilities": []}
    router = await start_router(warm_up="off")
    await router.knows_its_engines()

    async def fails_late(request: Received, peer: Peer) -> None:
        await eventually(lambda: router.engine(p).kv_leases)
        await answering(500, {})(request, peer)

    d.scripts = [fails_late]
    warmer = asyncio.create_task(EngineWarmer(router.gateway, "eager").run())
    try:
        await eventually(lambda: warmed(router, "failed") == 1)
        await router.settled()
        assert router.metric("releases_total", outcome="done") == 1
    finally:
        warmer.cancel()
        await asyncio.gather(warmer, return_exceptions=True)


@pytest.mark.parametrize("mode", ["lazy", "eager"])
async def test_thousand_flapping_engines_do_not_delay_requests(
    start_router: StartRouter, mode: str
) -> None:
    router = await start_router(warm_up="off")
    fleet = Fleet(cast(Any, lambda spec: None), 3)
    with fleet.batch_changes():
        for number in range(1000):
            role = EngineRole.PREFILL if number % 2 else EngineRole.DECODE
            engine = fleet.add(EngineSpec(role, Address(f"h{number}", 1)))
            engine.health = Health.HEALTHY
    warmer = EngineWarmer(router.gateway, mode)
    router.gateway.fleet, alone = fleet, router.gateway.fleet
    most_pairs = 2 * warmup.MAX_PARTNERS
    try:
        for life in range(2):
            for engine in fleet.engines:
                engine.lost_at = float(life)
            meeting = asyncio.create_task(warmer._find_new_engines())
            while not meeting.done():
                met, waiting = len(warmer._met), len(warmer._waiting)
                await asyncio.sleep(0)
                # The loop runs other tasks after each engine.
                assert len(warmer._met) <= met + 1 or not met
                assert len(warmer._waiting) <= waiting + most_pairs
            await meeting
            assert len(warmer._met) == 1000
            assert len(warmer._waiting) < warmup.MAX_WAITING_PAIRS + most_pairs
    finally:
        router.gateway.fleet = alone
