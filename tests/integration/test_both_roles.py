"""Engines of both roles, which prefer roles that change while chats run, or are chosen by cost for
each leg: each answer is that of one engine alone."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager

import httpx
import pytest

from router.fleet.engine import Engine, Intent
from tests.integration.chats import (
    LONG_ANSWERS,
    LONG_PROMPTS,
    TARGET_ITL_S,
    Chats,
    measure_steps,
    mover_of,
    settings_for,
)
from tests.integration.processes import BOTH_WAYS, Launcher, Server, metric, wait_for
from tests.redis_server import running_redis
from tests.unit.router.harness import Router, eventually, running_router

RETAINED_S = 10
"""An engine keeps a turn for so long."""
EXTRA = {**BOTH_WAYS, "target_itl_ms": 1e3 * TARGET_ITL_S, "decoder_kv_blocks_ttl": RETAINED_S}
SHAPES = (LONG_PROMPTS, LONG_ANSWERS) * 4
ASKED = "disagg_engine_prompt_tokens_total"


@pytest.fixture(scope="module")
def engines(launcher: Launcher) -> Iterator[list[Server]]:
    with ExitStack() as stack, ThreadPoolExecutor(3) as pool:
        engines = [
            stack.enter_context(launcher.engine(f"both-{number}", extra=EXTRA))
            for number in range(3)
        ]
        list(pool.map(measure_steps, engines))
        yield engines


def total(engines: list[Server], name: str) -> float:
    return sum(metric(server, f"disagg_engine_{name}") for server in engines)


async def knows_steps(router: Router) -> None:
    await eventually(lambda: all(e.capabilities.step_model for e in router.gateway.fleet.engines))


async def test_chats_are_those_of_one_engine_while_placement_changes(
    engines: list[Server], alone: Server
) -> None:
    names = ("prompt_tokens_computed_total", "kv_pulls_ok_total", "kv_leases_expired_total")
    before = {name: total(engines, name) for name in names}
    async with running_router(settings_for(engines)) as router:
        await knows_steps(router)
        chats = Chats(router.client, mover_of(router.gateway.fleet))
        await chats.hold(*SHAPES * 3)
        await router.settled()
        pools = [engine.pool for engine in router.gateway.fleet.engines]
        assert [pool.open_count for pool in pools] == [pool.idle_count for pool in pools]
        one_engine = router.metric("decode_only_total", reason="cheapest")
        sooner = router.metric("decode_only_total", reason="sooner")
        hits = router.metric("conversation_turns_total", outcome="hit", reason="")
        at_decoder = router.metric("conversation_turns_total", outcome="decoder_alone", reason="")
    assert chats.find_wrong(alone) == []
    assert len(chats.asked) == 3 * chats.num
    wait_for(lambda: not total(engines, "blocks_delayed"), "no block is held", 2 * RETAINED_S)
    computed, pulls, expired = (total(engines, name) - before[name] for name in names)
    # One engine did both, a decode engine computed a prompt because of its load, KV moved.
    assert min(one_engine, sooner, pulls, hits, at_decoder) > 0
    assert computed < 0.75 * chats.prompt_tokens
    assert total(engines, "kv_pulls_failed_total") == 0
    assert expired == chats.num  # the last turns; nothing else was left to run out


@asynccontextmanager
async def killed(router: Router, engine: Engine, victim: Server) -> AsyncIterator[None]:
    victim.kill()
    await eventually(lambda: not engine.is_usable)
    yield


@asynccontextmanager
async def frozen(router: Router, engine: Engine, victim: Server) -> AsyncIterator[None]:
    with victim.frozen():
        await eventually(lambda: not engine.is_usable, 30)
        yield


@asynccontextmanager
async def drained(router: Router, engine: Engine, victim: Server) -> AsyncIterator[None]:
    fleet = router.gateway.fleet
    fleet.set_intent(engine, Intent.DRAINING)
    await eventually(lambda: engine.is_idle, 30)
    asked = metric(victim, ASKED)
    yield
    assert metric(victim, ASKED) == asked
    fleet.set_intent(engine, Intent.SERVING)


GONE = {"killed": killed, "frozen": frozen, "drained": drained}


@pytest.mark.parametrize(
    ("fault", "num_others"), [("killed", 2), ("frozen", 2), ("drained", 2), ("killed", 1)]
)
async def test_the_others_take_over_from_an_engine_and_it_is_used_again_when_it_is_back(
    launcher: Launcher, engines: list[Server], alone: Server, fault: str, num_others: int
) -> None:
    (port, side_channel), others = launcher.free_ports(2), engines[:num_others]
    with ExitStack() as stack:

        def start() -> Server:
            extra, ports = EXTRA, (port, side_channel)
            return stack.enter_context(launcher.engine("leaving", extra=extra, ports=ports))

        victim = start()
        measure_steps(victim)
        settings = settings_for([*others, victim], health_interval=0.3, health_timeout=3.0)
        async with running_router(settings) as router:
            await knows_steps(router)
            engine = router.gateway.fleet.find(f"127.0.0.1:{port}")
            assert engine is not None
            chats = Chats(router.client, mover_of(router.gateway.fleet))
            holding = asyncio.create_task(chats.hold(*SHAPES * 2))
            await eventually(lambda: len(chats.asked) > 8 and engine.in_flight, 60)
            async with GONE[fault](router, engine, victim):
                await holding
            if fault == "killed":
                victim = await asyncio.to_thread(start)
            await eventually(lambda: engine.is_available, 30)
            asked = metric(victim, ASKED)
            await chats.hold(*SHAPES)
            await router.settled()
            assert metric(victim, ASKED) > asked
        assert chats.find_wrong(alone) == []
        assert len(chats.asked) == 3 * chats.num


async def test_two_workers_that_place_legs_by_themselves_answer_as_one_engine(
    launcher: Launcher, engines: list[Server], alone: Server
) -> None:
    with (
        running_redis() as redis,
        launcher.router(
            engines, engines, "--workers", "2", "--target-itl", str(TARGET_ITL_S), *redis.options
        ) as router,
    ):
        async with httpx.AsyncClient(base_url=router.url, verify=False) as client:
            chats = Chats(client)
            await chats.hold(*SHAPES * 2)
        assert "now prefers" in router.log.read_text()
    assert chats.find_wrong(alone) == []
    assert len(chats.asked) == 3 * chats.num
