"""Tests of the rule by which a decode engine computes a prompt itself."""

import asyncio
import dataclasses
import math
from typing import Any, cast

import pytest
from msgspec.structs import replace

from router.fleet.engine import DECODE, Engine, EngineRank, EngineSpec
from router.fleet.step_model import MAX_STEP_TOKENS, StepModel
from router.http_client.pool import EnginePool
from router.proxy.queued_prefill import QueuedPrefill
from router.routing.costs import PlaceLoad
from router.routing.local_prefill import allows, is_trial
from router.settings import Address

MODEL = StepModel(base=0.0106, token=52e-6, token_context=1.65e-9, context=32.1e-9)
# 256 tokens at a context of 8,000 beside 32 answers of 8,000 tokens: 35.5 ms.
BUSY = PlaceLoad(MODEL, 256, 700_000, contexts=256_000, queued_s=0.2, queued_tokens=100)
TARGET = 0.05


def test_a_busy_decode_engine_may_compute_a_prompt_within_the_target() -> None:
    assert allows(BUSY, 4000, 8000, TARGET)


@pytest.mark.parametrize(
    ("change", "uncached", "total", "target"),
    [
        ({}, 4000, 8000, 0.037),  # the longest step takes more than 0.95 of the target
        ({}, 4000, 80_000, TARGET),  # a deep context makes each token of the chunk slower
        ({"contexts": 690_000}, 100, 1000, TARGET),  # the answers' contexts alone take too long
        ({"max_step_tokens": 2048}, 4000, 8000, TARGET),
        ({"queued_s": 0.5}, 4000, 8000, TARGET),
        ({"cache_tokens": 277_000}, 4000, 8000, TARGET),  # 95 % of it is less than 264,000
    ],
)
def test_each_condition_alone_forbids_it(
    change: dict[str, Any], uncached: int, total: int, target: float
) -> None:
    assert not allows(replace(BUSY, **change), uncached, total, target)


def test_a_large_budget_matters_only_for_prompts_that_use_it() -> None:
    idle = replace(BUSY, max_step_tokens=8192, contexts=0, queued_s=0.0, queued_tokens=0)
    assert allows(idle, 512, 512, TARGET)
    assert not allows(idle, 1024, 1024, TARGET)
    # Queued prompts are computed in the same step.
    assert not allows(replace(idle, queued_tokens=512), 512, 512, TARGET)


def test_an_engine_with_a_step_budget_in_time_keeps_the_target_whatever_its_token_budget() -> None:
    large = replace(BUSY, max_step_tokens=8192)
    limited = replace(large, step_limit=0.045)
    assert not allows(large, 4000, 8000, TARGET)
    assert allows(limited, 4000, 8000, TARGET)
    assert allows(limited, 4000, 80_000, TARGET)
    # At 45 ms of a step, 0.95 of this target is exceeded by every long prompt.
    assert not allows(limited, 4000, 8000, 0.047)
    assert allows(limited, 200, 8000, 0.047)
    # Its answers alone need the whole time, and it computes 64 tokens all the same.
    slow = replace(limited, contexts=1_200_000, cache_tokens=2_000_000)
    assert slow.chunk(8000) == 64
    assert not allows(slow, 4000, 8000, TARGET)


@pytest.mark.parametrize("mixing", [None, 0.0, 0.5])
def test_the_time_of_a_prompt_depends_on_the_step_budget_in_time(mixing: float | None) -> None:
    model = dataclasses.replace(MODEL, mixing=mixing)
    limited = replace(BUSY, model=model, max_step_tokens=8192, step_limit=0.045)
    chunk = limited.chunk(8000)
    assert model.worst_step(chunk, 8000, 256_000) == pytest.approx(0.045, rel=0.01)
    as_tokens = replace(limited, step_limit=math.inf, max_step_tokens=chunk)
    assert limited.prefill_seconds(4000, 8000) == as_tokens.prefill_seconds(4000, 8000)
    assert replace(BUSY, step_limit=0.045).chunk(8000) == 256


def test_a_prefill_engine_costs_its_queue_and_the_transfer() -> None:
    idle = replace(BUSY, contexts=0, queued_s=0.0)
    other = PlaceLoad(MODEL, 8192, 700_000)
    # It computes in one step what takes the decode engine eight.
    assert other.remote_cost(2000, 2000) < idle.prefill_cost(2000, 2000)
    assert replace(other, queued_s=0.2).remote_cost(2000, 2000) > idle.prefill_cost(2000, 2000)
    # What the decode engine lacks takes one step, and nothing is transferred.
    assert idle.prefill_cost(200, 2000) < other.remote_cost(200, 2000)
    assert replace(idle, queued_s=0.4).prefill_cost(200, 2000) > other.remote_cost(200, 2000)


def decode_engine(total_tokens: int = 0, num_ranks: int = 1) -> Engine:
    """Return a decode engine that is known well enough, with ranks of 700,000 tokens."""
    spec = EngineSpec(DECODE, Address("d", 1))
    made = Engine(spec, cast(EnginePool, None))
    model = {"base_ms": 10.6, "token_us": 52, "token_context_ns": 1.65, "context_ns": 32.1}
    known = {"max_step_tokens": 256, "num_blocks": 7000, "block_size": 100, "step_model": model}
    made.capabilities.note_identity({"ranks": [known | {"dp_rank": n} for n in range(num_ranks)]})
    ranks = [EngineRank(made, n, n, 700_000) for n in range(num_ranks)]
    made.ranks = ranks if num_ranks > 1 else ()
    made.add_load(1, total_tokens)
    return made


@pytest.mark.parametrize(
    "unknown", [{"step_model": None}, {"max_step_tokens": 0}, {"cache_tokens": 0}]
)
def test_an_engine_that_does_not_report_itself_is_not_judged(unknown: dict[str, Any]) -> None:
    made = decode_engine()
    for name, value in unknown.items():
        setattr(made.capabilities, name, value)
    assert PlaceLoad.of(made, made) is None


def test_a_prefill_engine_without_a_step_model_counts_as_fast_as_the_decode_engine() -> None:
    prefiller = decode_engine(total_tokens=10_000)
    prefiller.capabilities.step_model, prefiller.capabilities.max_step_tokens = None, 0
    assert PlaceLoad.of_prefiller(prefiller, prefiller, MODEL) == PlaceLoad(
        MODEL, MAX_STEP_TOKENS, 700_000, queued_s=10_000 * MODEL.token
    )


def test_a_rank_has_its_own_load_and_an_engine_that_chooses_the_mean_of_its_ranks() -> None:
    made = decode_engine(total_tokens=0, num_ranks=2)
    one, other = made.ranks or ()
    one.add_load(1, 9000)
    one.add_local_prefill(0.2, 100)
    made.add_local_prefill(0.2, 100)
    model = made.capabilities.step_model
    assert model is not None
    assert PlaceLoad.of(made, one) == PlaceLoad(model, 256, 700_000, 9000, 0.2, 100)
    assert PlaceLoad.of(made, other) == PlaceLoad(model, 256, 700_000, 0)
    assert PlaceLoad.of(made, made) == PlaceLoad(model, 256, 700_000, 4500, 0.1, 50)
    made.capabilities.step_limit = 0.045
    limited = PlaceLoad.of(made, made)
    assert limited is not None
    assert limited.step_limit == 0.045


@pytest.mark.parametrize(
    ("budget", "uncached", "is_one"),
    [
        (256, 79, False),
        (256, 80, True),
        (256, 8192, True),
        (256, 8193, False),
        (2048, 319, False),
        (2048, 320, True),
        (2048, 512, True),
        (2048, 513, False),  # a step of unknown length, and of more tokens
        (0, 200, False),
    ],
)
def test_a_trial_has_steps_that_show_the_time_of_a_token(
    budget: int, uncached: int, is_one: bool
) -> None:
    made = decode_engine()
    made.capabilities.max_step_tokens = budget
    assert not is_trial(made, made, uncached)
    made.capabilities.step_model = None
    assert is_trial(made, made, uncached) is is_one
    made.add_local_prefill(0, 1)
    assert not is_trial(made, made, uncached)


def test_a_full_cache_gets_no_trial() -> None:
    made = decode_engine()
    made.capabilities.step_model = None
    assert is_trial(made, made, 200)
    made.add_load(1, int(0.96 * made.cache_tokens))
    assert not is_trial(made, made, 200)


def test_each_page_without_a_step_model_allows_one_more_trial() -> None:
    made = decode_engine()
    made.capabilities.step_model, made.capabilities.trial_prefills = None, 64
    assert not is_trial(made, made, 200)
    made.capabilities.note_identity(
        {"ranks": [{"max_step_tokens": 256, "num_blocks": 99, "block_size": 16}]}
    )
    assert is_trial(made, made, 200)


async def test_a_queued_prompt_counts_until_its_end() -> None:
    decoder = decode_engine()
    load = PlaceLoad.of(decoder, decoder)
    assert load is not None
    seconds = load.prefill_seconds(1000, 1000)
    prompts = [QueuedPrefill({decoder}, seconds, 1000) for _ in range(3)]
    queued = PlaceLoad.of(decoder, decoder)
    assert queued is not None
    assert queued.queued_s == pytest.approx(3 * seconds)
    assert queued.queued_tokens == 3000
    prompts[0].end()
    prompts[0].end()
    assert decoder.local_prefill_tokens == 2000
    # An answer that is not streamed does not show its first token.
    prompts[1].end_in_time(asyncio.get_running_loop())
    prompts[2].end_in_time(asyncio.get_running_loop())
    prompts[2].end()
    async with asyncio.timeout(15):
        while decoder.local_prefill_tokens:  # noqa: ASYNC110 # a timer of the loop has no event
            await asyncio.sleep(0.005)
    assert decoder.local_prefill_s == pytest.approx(0)
