"""The number of engines that the offered load needs."""

import asyncio
from time import monotonic as now
from typing import cast

import pytest

from router.coordination.demand import BUSY_SHARE, DRAIN_S, NEEDED_SHARE, EngineDemand
from router.fleet.engine import BOTH, DECODE, PREFILL, Engine, EngineRole, EngineSpec
from router.http_client.pool import EnginePool
from router.settings import Address
from scripts.mock_engine import MockEngine
from tests.unit.router.harness import Router

TOKENS_PER_S = 10_000
MODEL = {"base_ms": 10.0, "token_us": 100, "token_context_ns": 0, "context_ns": 30.0}
P, D = ("g", PREFILL), ("g", DECODE)


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def leg(self, engine: Engine, tokens: int) -> None:
        """A prefill engine computes a prompt."""
        sent, self.seconds = self.seconds, self.seconds + tokens / TOKENS_PER_S
        engine.note_prefill(sent, self.seconds, tokens)


def engine_of(role: EngineRole, number: int = 1, cache_tokens: int = 100_000) -> Engine:
    made = Engine(EngineSpec(role, Address("e", number), group="g"), cast(EnginePool, None))
    known = {"num_blocks": cache_tokens // 10, "block_size": 10, "step_model": MODEL}
    made.capabilities.note_identity({"ranks": [{**known, "max_step_tokens": 2048}]})
    return made


def measured(clock: Clock, number: int = 1) -> Engine:
    """An engine whose rate is known."""
    made = engine_of(PREFILL, number)
    for _ in range(64):
        clock.leg(made, 9000)
    assert made.prefill_tokens_per_second == pytest.approx(TOKENS_PER_S)
    return made


def test_prefill_engines_are_needed_for_the_work_that_comes() -> None:
    clock, demand = Clock(), EngineDemand(0.05)
    engines = [measured(clock, 1), engine_of(PREFILL, 2)]
    assert demand.read(engines, clock.seconds)[P] == 0.0
    for _ in range(30):  # The new engine counts as fast as the other one.
        start = clock.seconds
        for made in engines:
            made.note_prefill(start, start + 5, 5 * TOKENS_PER_S)
        clock.seconds = start + 10
        needed = demand.read(engines, clock.seconds)[P]
    assert needed == pytest.approx(1.0 / BUSY_SHARE, rel=0.02)


async def test_regular_samples_measure_the_work_between_two_readers() -> None:
    clock, demand = Clock(), EngineDemand(0.05)
    made = measured(clock)
    sampling = asyncio.create_task(demand.sample(lambda: [made]))
    try:
        await asyncio.sleep(0)  # its first sample
        made.note_prefill(clock.seconds, clock.seconds + 60, 60 * TOKENS_PER_S)
        assert demand.read([made], now() + 60)[P] > 0.5 / BUSY_SHARE
    finally:
        sampling.cancel()


async def test_router_samples_what_its_requests_need(router: Router, p: MockEngine) -> None:
    made = router.engine(p)
    clock = Clock()
    for _ in range(64):
        clock.leg(made, 9000)
    # The work since the router's own sample counts, even before the metric's first scrape.
    assert router.metric("engines_needed", group=made.group, role="prefill") > 0


def test_what_is_queued_needs_engines_too() -> None:
    clock, demand = Clock(), EngineDemand(0.05)
    made = measured(clock)
    made.add_load(3, 5 * int(DRAIN_S) * TOKENS_PER_S)
    assert demand.read([made], clock.seconds)[P] == pytest.approx(5.0)


def test_decode_engines_are_needed_for_kv_and_for_short_steps() -> None:
    full, demand = engine_of(DECODE, cache_tokens=100_000), EngineDemand(0.05)
    full.add_load(9, 140_000)
    assert demand.read([full], 1.0)[D] == pytest.approx(1.4 / NEEDED_SHARE)
    slow = engine_of(DECODE, cache_tokens=10_000_000)
    slow.add_load(9, 1_000_000)  # 30 ms of each step, where 15 ms are left
    assert EngineDemand(0.05).read([slow], 1.0)[D] == pytest.approx(2.0)
    assert EngineDemand(0.0).read([slow], 1.0)[D] == pytest.approx(0.1 / NEEDED_SHARE)


def test_decode_engines_are_needed_for_slots() -> None:
    made = engine_of(DECODE, cache_tokens=10_000_000)
    made.capabilities.max_num_seqs = 10
    made.add_load(14, 14)
    assert EngineDemand(0.0).read([made], 1.0)[D] == pytest.approx(1.4 / NEEDED_SHARE)


def test_the_sum_over_routers_is_what_all_requests_need() -> None:
    one, other = engine_of(DECODE), engine_of(DECODE)
    for of_router in (one, other):
        of_router.add_load(5, 40_000)
        of_router.set_load_elsewhere(5, 40_000)
    both = engine_of(DECODE)
    both.add_load(10, 80_000)
    found = [EngineDemand(0.05).read([each], 1.0)[D] for each in (one, other, both)]
    assert found[0] + found[1] == pytest.approx(found[2])


def test_engines_of_both_roles_are_needed_for_prompts_and_for_answers() -> None:
    demand = EngineDemand(0.0)
    engines = [engine_of(BOTH, 1), engine_of(BOTH, 2)]
    engines[0].add_load(1, 70_000)
    assert demand.read(engines, 0.0) == {P: 0.0, D: pytest.approx(1.0)}
    for second in range(10, 600, 10):
        for one in engines:  # also of requests that one engine serves alone
            one.offered_prefill_s += 4.0
        needed = demand.read(engines, second)
    assert needed[P] == pytest.approx(0.8 / BUSY_SHARE, rel=0.02)
    engines[1].add_local_prefill(2 * DRAIN_S, 1)
    assert demand.read(engines, 6000.0)[P] == pytest.approx(2.0)


def test_unknown_engines_have_no_number() -> None:
    strange = engine_of(DECODE, cache_tokens=0)
    strange.add_load(1, 70_000)
    assert EngineDemand(0.0).read([engine_of(PREFILL), strange], 9.0) == {}


def test_numbers_follow_slowly() -> None:
    made, demand = engine_of(DECODE), EngineDemand(0.0)
    made.add_load(1, 70_000)
    assert demand.read([made], 1.0)[D] == pytest.approx(1.0)
    made.add_load(-1, -70_000)
    assert 0.7 < demand.read([made], 16.0)[D] < 0.8
    assert demand.read([made], 16.0)[D] == pytest.approx(demand.read([made], 16.0)[D])
    assert demand.read([made], 600.0)[D] < 0.01
