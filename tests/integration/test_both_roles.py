"""Engines of both roles, which prefer roles that change while chats run, or are chosen by cost for
each leg: each answer is that of one engine alone."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

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
from tests.unit.router.harness import Router, eventually, running_router

RETAINED_S = 10
"""An engine keeps a turn for so long."""
EXTRA = {**BOTH_WAYS, "target_itl_ms": 1e3 * TARGET_ITL_S, "decoder_kv_blocks_ttl": RETAINED_S}
SHAPES = (LONG_PROMPTS, LONG_ANSWERS) * 4


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
