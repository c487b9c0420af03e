"""Three vLLM engines of both roles, whose roles change while chats run."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

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
from tests.integration.processes import BOTH_WAYS, Server, wait_for
from tests.unit.router.harness import eventually, running_router
from tests.vllm.measures import counted, freed
from tests.vllm.servers import OURS, SCHEDULER, Fleet, Kind

RETAINED_S = 20
"""An engine keeps a turn for so long."""
BOTH: dict[str, Any] = {
    **OURS,
    "kv_connector_extra_config": {
        **BOTH_WAYS,
        "target_itl_ms": 1e3 * TARGET_ITL_S,
        "decoder_kv_blocks_ttl": RETAINED_S,
    },
}


@pytest.fixture(scope="module")
def engines(fleet: Fleet) -> Iterator[list[Server]]:
    """Three engines of both roles, and one that answers everything by itself."""
    kinds = [Kind(f"both-{number}", BOTH, SCHEDULER) for number in range(3)]
    with fleet.servers(*kinds, Kind("alone")) as servers, ThreadPoolExecutor(3) as pool:
        list(pool.map(measure_steps, servers[:3]))
        yield servers


@pytest.mark.parametrize("num", [16, pytest.param(200, marks=pytest.mark.nightly)])
async def test_chats_are_those_of_one_engine_while_placement_changes(
    engines: list[Server], num: int
) -> None:
    *both, alone = engines
    async with running_router(settings_for(both)) as router:
        known = router.gateway.fleet.engines
        await eventually(lambda: all(engine.capabilities.step_model for engine in known))
        chats = Chats(router.client, mover_of(router.gateway.fleet))
        for _ in range(num // 8):
            await chats.hold(*[LONG_PROMPTS] * 4, *[LONG_ANSWERS] * 4)
        await router.settled()
        placed = {
            reason: router.metric("decode_only_total", reason=reason)
            for reason in ("cheapest", "same_engine", "sooner")
        }
        hits = router.metric("conversation_turns_total", outcome="hit", reason="")
    assert chats.find_wrong(alone) == []
    assert len(chats.asked) == 3 * num
    with_transfer = len(chats.asked) - sum(placed.values())
    print(f"{num} chats: {placed}, {with_transfer:.0f} on two engines, {hits:.0f} hits")
    assert min(placed["cheapest"], placed["sooner"], with_transfer, hits) > 0
    for server in both:
        wait_for(partial(freed, server), f"{server.name} holds no block", 3 * RETAINED_S)
        assert (counted(server, "leases_active"), counted(server, "pulls_failed")) == (0, 0)
