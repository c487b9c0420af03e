"""What vLLM's prefix cache lends, and when: inside vLLM's own scheduler."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from engine_ext.common.orders import LoanAnswer, Revoke
from engine_ext.common.types import LoanRequest
from engine_ext.vllm.optional.loans.cached_blocks import CachedBlocks
from engine_ext.vllm.worker_reports import WorkerReport
from tests.unit.engine_ext.orders import ordered
from tests.vllm.inside.in_process import BLOCK, NUM_BLOCKS, Engine

SYNC, ASYNC = (
    f"engine_ext.vllm.scheduler.{name}" for name in ("DisaggScheduler", "DisaggAsyncScheduler")
)


class Asked:
    """An engine, and a peer that asks it for loans."""

    def __init__(self, model: Path, scheduler: str) -> None:
        self.engine = Engine(model, scheduler_cls=scheduler)
        self.scheduler = self.engine.scheduler
        # As where steps run ahead. vLLM's CPU build does not allow it.
        self.scheduler.defer_block_free = scheduler == ASYNC
        self.scheme = CachedBlocks(self.scheduler).scheme

    def ask(self, request: Request, scheme: str | None = None) -> None:
        asked = LoanRequest("reader", 1, scheme or self.scheme, tuple(request.block_hashes))
        output = KVConnectorOutput(kv_connector_worker_meta=WorkerReport({}, (asked,)))
        self.scheduler._update_from_kv_xfer_finished(output)

    def answers(self) -> tuple[LoanAnswer, ...]:
        """Those that the next step takes to the workers."""
        step = self.scheduler.schedule()
        orders = getattr(step.kv_connector_metadata, "step", None)
        self.engine.answer(step)
        return ordered(orders, LoanAnswer) if orders else ()


def an_idle_engine_lends_what_it_has_computed(scheduler: str, model: Path) -> None:
    asked = Asked(model, scheduler)
    request = asked.engine.add("first", 70)
    asked.engine.run("first")
    asked.ask(request)
    assert asked.scheduler.has_requests(), "the answer goes with a step"
    (answer,) = asked.answers()
    assert answer.num_tokens == 64
    assert answer.last_key == request.block_hashes[3]
    assert not asked.engine.is_empty()
    asked.engine.read_all()
    asked.engine.step()
    assert asked.engine.is_empty(), "unpinned"


def a_prefix_that_is_not_cached_is_refused_beside_a_loan(scheduler: str, model: Path) -> None:
    asked = Asked(model, scheduler)
    cached = asked.engine.add("first", 70)
    asked.engine.run("first")
    asked.ask(cached)
    asked.ask(asked.engine.add("other", [5] * 40))
    lent, refused = asked.answers()
    assert lent.num_tokens == 64
    assert not refused.loan_id
    assert not refused.may_hold_more


def other_keys_are_refused(scheduler: str, model: Path) -> None:
    asked = Asked(model, scheduler)
    request = asked.engine.add("first", 70)
    asked.engine.run("first")
    asked.ask(request, "vllm 0.1 xxhash 0 16")
    (answer,) = asked.answers()
    assert not answer.loan_id


def a_step_under_way_is_waited_for(model: Path) -> None:
    """vLLM has its blocks in the cache already, and what comes next may take them."""
    asked = Asked(model, ASYNC)
    first = asked.engine.add("first", 70, max_tokens=2)
    under_way = asked.scheduler.schedule()
    asked.ask(first)
    assert not asked.scheduler.connector.has_pending_push_work(), "no answer yet"
    asked.engine.answer(under_way)
    (answer,) = asked.answers()
    assert answer.num_tokens == 64


def blocks_of_later_steps_are_not_lent(model: Path) -> None:
    """The request came while 16 tokens of the prompt were under way."""
    asked = Asked(model, ASYNC)
    asked.scheduler.max_num_scheduled_tokens = 32
    request = asked.engine.add("first", 100)
    steps = [asked.scheduler.schedule()]
    asked.ask(request)
    steps.append(asked.scheduler.schedule())
    asked.engine.answer(steps[0])
    steps.append(asked.scheduler.schedule())
    orders = steps[2].kv_connector_metadata.step
    assert [answer.num_tokens for answer in ordered(orders, LoanAnswer)] == [32]
    for step in steps[1:]:
        asked.engine.answer(step)


def requests_that_wait_for_a_step_count_shared_blocks_once(model: Path) -> None:
    asked = Asked(model, ASYNC)
    first = asked.engine.add("first", 70, max_tokens=2)
    under_way = asked.scheduler.schedule()
    num_askers = NUM_BLOCKS // 4 + 1
    for _ in range(num_askers):
        asked.ask(first)
    asked.engine.answer(under_way)
    answers = asked.answers()
    assert [answer.num_tokens for answer in answers] == [64] * num_askers


def a_request_that_waits_beside_others_does_not_show_that_its_prefix_is_gone(model: Path) -> None:
    asked = Asked(model, ASYNC)
    requests = [asked.engine.add(f"r{i}", [i] * 140, max_tokens=2) for i in range(2)]
    under_way = asked.scheduler.schedule()
    for request in requests:
        asked.ask(request)
    asked.engine.answer(under_way)
    lent, refused = asked.answers()
    assert lent.num_tokens == NUM_BLOCKS // 8 * BLOCK
    assert not refused.loan_id
    assert refused.may_hold_more


def evicted_blocks_are_not_lent_after_a_step(model: Path) -> None:
    """vLLM drops what a failed load has spoilt from its cache, while the request waits."""
    asked = Asked(model, ASYNC)
    request = asked.engine.add("first", 70)
    under_way = asked.scheduler.schedule()
    asked.ask(request)
    (ids,) = asked.scheduler.kv_cache_manager.get_block_ids("first")
    asked.engine.pool.evict_blocks({ids[2]})
    asked.engine.answer(under_way)
    (answer,) = asked.answers()
    assert answer.num_tokens == 32


def lent_blocks_outlive_a_full_cache(scheduler: str, model: Path) -> None:
    asked = Asked(model, scheduler)
    request = asked.engine.add("first", 70)
    asked.engine.run("first")
    asked.ask(request)
    (answer,) = asked.answers()
    engine = asked.engine
    rest = engine.pool.get_new_blocks(engine.pool.get_num_free_blocks())
    assert len(rest) == NUM_BLOCKS - 1 - len(answer.block_ids[0])
    assert not {block.block_id for block in rest} & set(answer.block_ids[0])
    engine.pool.free_blocks(rest)
    asked.scheduler.connector.drain()
    engine.step_until(engine.is_empty)


def what_is_not_lent_has_a_name(model: Path) -> None:
    draft = SimpleNamespace(method="eagle", num_speculative_tokens=2)
    changes: tuple[tuple[str, str, Any, str], ...] = (
        ("parallel_config", "tensor_parallel_size", 2, "several tensor or pipeline ranks"),
        ("parallel_config", "pipeline_parallel_size", 2, "several tensor or pipeline ranks"),
        ("parallel_config", "nnodes", 2, "workers on other nodes"),
        ("scheduler_config", "scheduler_cls", None, "scheduler class"),
        ("cache_config", "enable_prefix_caching", False, "prefix caching is off"),
        ("cache_config", "prefix_caching_hash_algo", "xxhash", "xxhash"),
        ("kv_transfer_config", "kv_connector", "MultiConnector", "KV connector"),
        ("", "speculative_config", draft, "draft layers"),
    )
    for part, option, value, named in changes:
        scheduler = Asked(model, SYNC).scheduler
        assert scheduler.connector.loan_problem is None
        config = scheduler.vllm_config
        setattr(getattr(config, part) if part else config, option, value)
        assert named in (scheduler.connector.loan_problem or ""), option
    full = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
    state = MambaSpec(block_size=16, shapes=((1,),), dtypes=(torch.float32,))
    window = SlidingWindowSpec(
        block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=20
    )
    for other in (state, window):
        connector = Asked(model, SYNC).scheduler.connector
        groups = [KVCacheGroupSpec(["a"], full), KVCacheGroupSpec(["b"], other)]
        connector._kv_cache_config = KVCacheConfig(8, [], groups)
        assert "a window or keep a state" in (connector.loan_problem or "")


def a_cache_is_reset_beside_a_loan_whose_blocks_stay(scheduler: str, model: Path) -> None:
    """As `/pause` does in each of its modes, and `/reset_prefix_cache`."""
    asked = Asked(model, scheduler)
    request = asked.engine.add("first", 70)
    asked.engine.run("first")
    asked.ask(request)
    (answer,) = asked.answers()
    pool = asked.scheduler.kv_cache_manager.block_pool
    num_free = pool.get_num_free_blocks()
    assert asked.scheduler.reset_prefix_cache(True, True)
    assert asked.scheduler.reset_prefix_cache()
    assert pool.get_num_free_blocks() == num_free, "the blocks are still lent"
    step = asked.scheduler.schedule()
    assert ordered(step.kv_connector_metadata.step, Revoke) == (answer.loan_id,)
    asked.engine.answer(step)
    asked.ask(request)
    (refused,) = asked.answers()
    assert not refused.loan_id, "the cache has forgotten what the blocks hold"
    asked.engine.read_all()
    asked.engine.step()
    assert asked.engine.is_empty(), "unpinned"


def cases() -> Iterator[tuple[str, Callable[[Path], None]]]:
    for each in (
        an_idle_engine_lends_what_it_has_computed,
        a_prefix_that_is_not_cached_is_refused_beside_a_loan,
        other_keys_are_refused,
        lent_blocks_outlive_a_full_cache,
        a_cache_is_reset_beside_a_loan_whose_blocks_stay,
    ):
        for scheduler in (SYNC, ASYNC):
            yield f"{each.__name__}, {scheduler}", partial(each, scheduler)
    for one in (
        a_step_under_way_is_waited_for,
        blocks_of_later_steps_are_not_lent,
        requests_that_wait_for_a_step_count_shared_blocks_once,
        a_request_that_waits_beside_others_does_not_show_that_its_prefix_is_gone,
        evicted_blocks_are_not_lent_after_a_step,
        what_is_not_lent_has_a_name,
    ):
        yield one.__name__, one
