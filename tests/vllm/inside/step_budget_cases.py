"""Steps that decode compute as much of prompts as target_itl_ms allows: inside vLLM's scheduler."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from vllm.config import KVTransferConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.structured_output import StructuredOutputManager

from engine_ext.common.step_costs import StepCosts, StepWork
from engine_ext.vllm import describe
from tests.vllm.inside.in_process import BLOCK, LAYER, NUM_BLOCKS, Engine, configuration, refusal

SCHEDULERS = tuple(
    f"engine_ext.vllm.scheduler.{name}" for name in ("DisaggScheduler", "DisaggAsyncScheduler")
)
COSTS = StepCosts(10.0, 100.0, 300.0, 9000.0)
TARGET_MS = 30.0
LOW_MS = 5.0
"""Less than a step takes without prompts."""
ANSWERS = ("first", "second")
LONG = 60


def answering(scheduler: str, model: Path, target_ms: float | None = TARGET_MS) -> Engine:
    """An engine whose steps' times are known, with two answers."""
    extra = {} if target_ms is None else {"target_itl_ms": target_ms}
    engine = Engine(model, scheduler_cls=scheduler, extra=extra)
    engine.scheduler.connector.step_fit.costs = COSTS
    requests = [engine.add(name, 20, None, LONG) for name in ANSWERS]
    engine.step_until(lambda: all(one.num_output_tokens for one in requests))
    return engine


def add(engine: Engine, name: str, num_tokens: int) -> Any:
    """Add a prompt of which nothing is cached."""
    request = engine.add(name, num_tokens)
    request.skip_reading_prefix_cache = True
    return request


def step(engine: Engine) -> dict[str, int]:
    """Run a step; return the tokens of each request."""
    scheduled = engine.scheduler.schedule()
    found = dict(scheduled.num_scheduled_tokens)
    engine.answer(scheduled)
    return found


def chunks_of(engine: Engine, request: Any) -> list[int]:
    """The tokens of a prompt in each step, all of which decode the answers."""
    found = []
    while not request.num_output_tokens:
        tokens = step(engine)
        assert [tokens[name] for name in ANSWERS] == [1, 1]
        found.append(tokens[request.request_id])
    return found


def a_chunk_ends_within_the_target(scheduler: str, model: Path) -> None:
    engine = answering(scheduler, model)
    before, chunks = 0, chunks_of(engine, add(engine, "prompt", 400))
    assert sum(chunks) == 400
    for count in chunks[:-1]:
        # The answers have 20 prompt tokens each, and less than 20 of their own.
        longest = COSTS.milliseconds(StepWork.of([(count, before)], 80))
        assert 26.0 < longest <= 27.3, chunks
        before += count
    uncut = answering(scheduler, model, None)
    assert chunks_of(uncut, add(uncut, "prompt", 400)) == [400]
    assert "_reserve_prefill_lookahead" not in vars(uncut.scheduler)


def a_low_target_leaves_some_tokens_to_the_first_prompt(scheduler: str, model: Path) -> None:
    engine = answering(scheduler, model, LOW_MS)
    first, second = add(engine, "one", 150), add(engine, "two", 150)
    assert step(engine) == {"first": 1, "second": 1, "one": 64}
    assert step(engine) == {"first": 1, "second": 1, "one": 64}
    assert step(engine) == {"first": 1, "second": 1, "one": 22, "two": 42}
    engine.step_until(lambda: first.num_output_tokens and second.num_output_tokens)


def a_prompt_that_waits_makes_steps_longer(scheduler: str, model: Path) -> None:
    engine = answering(scheduler, model, LOW_MS)
    add(engine, "one", 400)
    add(engine, "late", 100).arrival_time = 0.0  # By a wall clock that is set meanwhile.
    assert step(engine)["one"] == 64
    assert step(engine)["one"] == 64
    engine.scheduler.step_clock = lambda: time.monotonic() + 60
    assert step(engine) == {"first": 1, "second": 1, "one": 272, "late": 100}


def kv_is_loaded_while_a_prompt_takes_all_of_the_time(
    params: Callable[[], dict[str, Any]], scheduler: str, model: Path
) -> None:
    engine = answering(scheduler, model, LOW_MS)
    loaded = engine.add("loaded", 40, params())
    prompt = add(engine, "prompt", 400)
    engine.step_until(lambda: loaded.num_output_tokens == 3)
    assert not prompt.num_output_tokens
    # It came to run behind the prompt, which leaves it its token in each step.
    engine.scheduler.max_num_scheduled_tokens = 3 + 64
    assert step(engine) == {"first": 1, "second": 1, "prompt": 64, "loaded": 1}


def a_prompt_without_answers_is_not_cut(scheduler: str, model: Path) -> None:
    engine = Engine(model, scheduler_cls=scheduler, extra={"target_itl_ms": LOW_MS})
    engine.scheduler.connector.step_fit.costs = COSTS
    add(engine, "alone", 400)
    assert step(engine) == {"alone": 400}


def a_chunk_of_a_model_with_states_ends_at_a_block(scheduler: str, model: Path) -> None:
    engine = answering(scheduler, model)
    engine.scheduler.need_mamba_block_aligned_split = True
    chunks = chunks_of(engine, add(engine, "prompt", 400))
    assert sum(chunks) == 400
    assert len(chunks) > 4
    assert not any(count % BLOCK for count in chunks[:-1]), chunks
    engine.scheduler.cache_config.block_size = 128  # More than the time allows.
    request = add(engine, "wide", 300)
    assert chunks_of(engine, request)[:2] == [128, 128]


def an_error_costs_the_target_alone(scheduler: str, model: Path) -> None:
    engine = answering(scheduler, model)
    engine.scheduler.connector.step_budget.take = None
    assert chunks_of(engine, add(engine, "prompt", 400)) == [400]
    assert chunks_of(engine, add(engine, "next", 100)) == [100]


def what_cannot_keep_a_target_refuses_it(model: Path) -> None:
    def target(scheduler: str | None, asked: Any, is_chunked: bool = True) -> float | None:
        config = configuration(model, "fail", scheduler, {"target_itl_ms": asked})
        config.scheduler_config.enable_chunked_prefill = is_chunked
        return describe.target_itl_ms(config, describe.connector_config(config))

    assert target(SCHEDULERS[0], 50) == 50
    assert "--scheduler-cls" in refusal(partial(target, None, 50))
    assert "chunked prefill" in refusal(partial(target, SCHEDULERS[0], 50, is_chunked=False))
    assert "target_itl_ms" in refusal(partial(target, SCHEDULERS[0], 0))


def a_target_that_no_connector_of_ours_reads_is_refused(model: Path) -> None:
    config = configuration(model, "fail", SCHEDULERS[0], {})
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="ExampleConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"target_itl_ms": 50, "shared_storage_path": str(model)},
    )
    config.scheduler_config.disable_hybrid_kv_cache_manager = True
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    cache = KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec([LAYER], spec)])
    make = config.scheduler_config.get_scheduler_cls()
    problem = refusal(lambda: make(config, cache, StructuredOutputManager(config), BLOCK))
    assert "target_itl_ms" in problem


def cases(
    loads: Callable[[Path], dict[str, Any]],
) -> Iterator[tuple[str, Callable[[Path], None]]]:
    """`loads` makes the params of a request that loads KV."""
    for plain in (
        what_cannot_keep_a_target_refuses_it,
        a_target_that_no_connector_of_ours_reads_is_refused,
    ):
        yield plain.__name__, plain
    for scheduler in SCHEDULERS:
        for case in (
            a_chunk_ends_within_the_target,
            a_low_target_leaves_some_tokens_to_the_first_prompt,
            a_prompt_that_waits_makes_steps_longer,
            a_prompt_without_answers_is_not_cut,
            a_chunk_of_a_model_with_states_ends_at_a_block,
            an_error_costs_the_target_alone,
        ):
            yield f"{case.__name__}, {scheduler}", partial(case, scheduler)

        def loading(model: Path, scheduler: str = scheduler) -> None:
            made = partial(loads, model)
            kv_is_loaded_while_a_prompt_takes_all_of_the_time(made, scheduler, model)

        yield f"kv_is_loaded_while_a_prompt_takes_all_of_the_time, {scheduler}", loading
