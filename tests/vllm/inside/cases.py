"""What runs inside vLLM's environment, in one process:
`python -m tests.vllm.inside.cases MODEL RESULTS`.

Writes one JSON object: the name of each case, and its traceback where it failed.
"""

import inspect
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from vllm.config import KVTransferConfig
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output.request import StructuredOutputRequest

from engine_ext.common.orders import Decline, PullOrder
from engine_ext.common.support import refuse_unsupported_memory
from engine_ext.common.types import CacheGeometry, FinishDecision, LoadProblem, Region
from engine_ext.vllm import describe, plugin
from engine_ext.vllm.compat import support
from engine_ext.vllm.connector import DisaggConnector
from engine_ext.vllm.connector_calls import ConnectorCalls
from engine_ext.vllm.optional.answers import THRESHOLD as THRESHOLD_FEATURE
from engine_ext.vllm.optional.answers.resumed_request import FIELD as GIVEN
from engine_ext.vllm.pending_reports import PendingReports
from tests.unit.engine_ext.orders import ordered
from tests.unit.engine_ext.scheduler.fakes import told
from tests.vllm.inside import (
    compat_cases,
    hand_back_cases,
    lending_cases,
    push_cases,
    resumed_answer_cases,
    step_budget_cases,
    weight_cases,
)
from tests.vllm.inside.in_process import FULL, Engine, refusal
from tests.vllm.inside.planted import IDLE, Broken, Fault, faults, public

THRESHOLD = {"global_cache_hit_threshold": 0.5}
OURS = "engine_ext.vllm.scheduler.DisaggScheduler"
ASYNC = "vllm.v1.core.sched.async_scheduler.AsyncScheduler"

STARTING = {
    "set_xfer_handshake_metadata_pp_aware",
    "register_kv_caches",
    "unregister_kv_caches",
    "get_handshake_metadata",
    "get_required_kvcache_layout",
    "build_kv_connector_stats",
    "build_prom_metrics",
}
"""vLLM calls these while it starts or before it sleeps, and does neither if they raise."""
PAGES = {"inspect"}
"""Called by `inspect_worker` alone, which lets nothing out."""

HOOKS = {*public(DisaggConnector), *public(ConnectorCalls)} - STARTING - PAGES
ROLES = ("prefill", "decode", "turn")

Case = Callable[[Path], None]


def every_hook_is_guarded(model: Path) -> None:
    # What `guarded` returns wraps the hook.
    bare = {name for name in HOOKS if not hasattr(getattr(DisaggConnector, name), "__wrapped__")}
    assert bare == set()
    assert len(HOOKS) > 30


def nothing_leaves_a_hook_whose_half_is_broken(model: Path) -> None:
    engine = Engine(model)
    scheduler: Any = engine.scheduler.connector
    worker: Any = engine.ranks[0].connector
    scheduler._scheduler, worker._worker = Broken(), Broken()
    for connector in (scheduler, worker):
        for name in HOOKS:
            hook = getattr(connector, name)
            given = inspect.signature(hook).parameters.values()
            hook(*[None for each in given if each.kind is each.POSITIONAL_OR_KEYWORD])


def a_fault_costs_one_request(
    fault: Fault, role: str, policy: str, scheduler: str | None, num_ranks: int, model: Path
) -> None:
    engine = Engine(model, policy, scheduler, num_ranks, [fault])
    params = params_of(role, model)
    engine.add("faulty", 40, params)
    ended = engine.run("faulty")
    ends(engine)
    assert engine.fired or fault.hook in IDLE
    engine.faults.clear()
    is_lost = role != "prefill" and fault.ends_load and bool(engine.fired)
    assert ended.reason == ("error" if is_lost and policy == "fail" else "length"), ended
    engine.add("next", 40, params)
    assert engine.run("next").reason == "length"
    if role != "decode" and fault.hook != "resume":
        assert engine.ended["next"].params is not None
    ends(engine)


def ends(engine: Engine) -> None:
    """All that is held is given up by its readers, and the engine has all its blocks."""
    for _ in range(4):
        if engine.scheduler.has_requests():
            engine.step()
    engine.read_all()
    engine.scheduler.connector.drain()
    engine.step_until(engine.is_empty)
    engine.scheduler.connector.resume()
    engine.scheduler.reset_connector_cache()
    engine.step()


def params_of(role: str, model: Path) -> dict[str, Any]:
    if role == "prefill":
        return {"do_remote_decode": True}
    prefiller = Engine(model)
    prefiller.add("p", 40, {"do_remote_decode": True}, 1)
    params = prefiller.run("p").params
    assert params is not None
    return told(params, remote_engine_id="another", retain=role == "turn")


def a_failed_load_without_a_policy_ends_as_vllm_says(policy: str, model: Path) -> None:
    faults = [Fault("start_load_kv", False), Fault("load_failure_policy", False)]
    engine = Engine(model, policy, OURS, 1, faults)
    engine.add("d", 40, params_of("decode", model))
    assert engine.run("d").reason == ("error" if policy == "fail" else "length")
    assert len(engine.fired) == 2
    ends(engine)


def a_turn_is_computed_unless_a_read_may_still_write(
    policy: str, num_ranks: int, in_quarantine: bool, model: Path
) -> None:
    extra = {"kv_recompute_threshold": 16}
    decoder = Engine(model, scheduler_cls=OURS, extra=extra)
    decoder.add("t", 80, {"retain": True}, 1)
    turn = told(decoder.run("t").params or {}, remote_engine_id="another")
    engine = Engine(model, policy, OURS, num_ranks, extra=extra)
    engine.ranks[-1].problem = LoadProblem("late", True, in_quarantine)
    engine.add("p", 80, {**turn, "do_remote_decode": True}, 1)
    ended = engine.run("p")
    assert [
        len(ordered(meta, PullOrder))
        for meta in engine.ranks[0].applied
        if ordered(meta, PullOrder)
    ] == [1]
    assert ended.reason == ("error" if in_quarantine else "length")
    for _ in range(3):
        engine.step()
    assert not engine.is_empty(), "its blocks are kept: of the late READ, or for a reader"
    assert engine.ranks[-1].late == (["p"] if in_quarantine else [])
    engine.ranks[-1].land()
    ends(engine)


def reports_that_nobody_waits_for_end_no_engine(num_ranks: int, model: Path) -> None:
    engine = Engine(model, num_ranks=num_ranks)
    engine.add("a", 40)
    for rank in engine.ranks:
        rank.half.results.sent("a")
        rank.half.results.sent("ghost")
        rank.half.results.received("phantom", ok=False)
    assert engine.run("a").reason == "length"
    ends(engine)


def blocks_that_we_keep_of_a_failed_load_are_freed_when_we_say_so(model: Path) -> None:
    pending = PendingReports()
    pending.load("d")
    pending.finish("d", FinishDecision(True, None))
    output = KVConnectorOutput(finished_recving={"d"})
    pending.settle(output)
    assert not output.finished_recving
    output = KVConnectorOutput(finished_sending={"d"})
    pending.settle(output)
    assert output.finished_sending == {"d"}


def leased(model: Path, scheduler: str | None) -> Engine:
    """One that holds a lease and a turn, and whose loop can be woken."""
    engine = Engine(model, scheduler_cls=scheduler)
    if scheduler is not None:
        engine.scheduler.set_wake(lambda: None)
    engine.add("p", 40, params_of("prefill", model), 1)
    engine.add("t", 40, params_of("turn", model), 1)
    engine.step_until(lambda: {"p", "t"} <= engine.ended.keys())
    for _ in range(3):
        engine.step()
    assert engine.scheduler.connector.scheduler.num_leased == 2
    return engine


def an_engine_that_leaves_waits_for_its_readers_and_for_no_turn(
    scheduler: str | None, model: Path
) -> None:
    engine = leased(model, scheduler)
    assert engine.scheduler.has_requests() is (scheduler is None)  # ours rests
    engine.scheduler.connector.drain()
    engine.scheduler.disagg_is_leaving = True
    for _ in range(3):
        engine.step()
    assert engine.scheduler.connector.scheduler.num_leased == 1
    assert engine.scheduler.has_requests()
    engine.read_all()
    engine.step_until(engine.is_empty)
    engine.step()
    assert not engine.scheduler.has_requests()


def a_pause_waits_for_readers_and_for_no_turn(scheduler: str | None, model: Path) -> None:
    engine = leased(model, scheduler)
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    for _ in range(3):
        engine.step()
    assert engine.scheduler.connector.scheduler.num_leased == 1
    assert engine.scheduler.has_requests()
    engine.read_all()
    engine.step_until(engine.is_empty)
    engine.step()
    assert not engine.scheduler.has_requests()
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.add("next", 40, params_of("turn", model))
    assert engine.run("next").params is not None


def a_turn_promises_no_token_that_a_step_is_yet_to_compute(scheduler: str, model: Path) -> None:
    """Steps are scheduled ahead of the model; the answer ends by a stop token, which nobody could
    foresee, while one more is under way."""
    engine = Engine(model, scheduler_cls=scheduler)
    request = engine.add("turn", 40, {"retain": True}, max_tokens=20)
    request.sampling_params.stop_token_ids = [5]
    steps = [engine.scheduler.schedule(), engine.scheduler.schedule()]
    engine.answer(steps[0], token=3)
    steps.append(engine.scheduler.schedule())
    engine.answer(steps[1], token=5)
    assert request.num_in_flight_tokens == 1
    params = engine.ended["turn"].params
    assert params is not None
    assert params["remote_num_tokens"] == params["prefix_proof"]["n"] == 41
    engine.answer(steps[2])


def a_structured_request_is_judged(model: Path) -> None:
    engine = Engine(model, scheduler_cls=OURS)
    request = engine.add("s", 40, cache_hit_threshold=0.5)
    wait_for_grammar(engine, request)
    for _ in range(2):
        engine.step()
    assert "s" not in engine.ended
    request.structured_output_request.grammar = object()
    assert engine.run("s").reason == "cache_threshold"
    ends(engine)


def a_request_behind_blocked_ones_is_judged(model: Path) -> None:
    engine = Engine(model, scheduler_cls=OURS)
    engine.scheduler.max_num_running_reqs = engine.scheduler.max_num_active_reqs = 2
    for number in range(4):
        wait_for_grammar(engine, engine.add(f"blocked-{number}", 20))
    engine.add("low", 40, cache_hit_threshold=0.5)
    assert engine.run("low").reason == "cache_threshold"
    engine.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    ends(engine)


def what_was_given_counts_as_generated(scheduler: str, model: Path) -> None:
    """Loaded from P as far as that has it, and preempted on the way."""
    engine = Engine(model, scheduler_cls=scheduler)
    given = {"token_ids": [5, 6, 7]}
    request = engine.add("b", 40, params_of("decode", model), 8, **{GIVEN: given})
    assert list(request.all_token_ids[40:]) == given["token_ids"]
    engine.step_until(lambda: request.num_output_tokens == 4)
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert engine.run("b").reason == "length"
    assert list(request.output_token_ids[:3]) == given["token_ids"]
    assert request.num_output_tokens == 8
    assert [
        len(ordered(meta, PullOrder))
        for meta in engine.ranks[0].applied
        if ordered(meta, PullOrder)
    ] == [1]
    ends(engine)


def a_begun_request_whose_grammar_does_not_follow_ends_alone(model: Path) -> None:
    engine = Engine(model, scheduler_cls=OURS)
    request = engine.add("g", 40, None, 8, **{GIVEN: {"token_ids": [5, 6]}})
    wait_for_grammar(engine, request)
    engine.step()
    request.structured_output_request.grammar = object()
    assert engine.run("g").reason == "error"
    engine.add("next", 40)
    assert engine.run("next").reason == "length"
    ends(engine)


def more_than_a_begun_requests_prompt_is_in_the_cache(model: Path) -> None:
    """vLLM asserts that this cannot be."""
    engine = Engine(model, scheduler_cls=OURS)
    for name in ("first", "again"):
        engine.add(name, 40, None, 45, **{GIVEN: {"token_ids": [5] * 40}})
        assert engine.run(name).reason == "length"
    ends(engine)


def what_was_given_too_much_ends_no_engine(model: Path) -> None:
    engine = Engine(model, scheduler_cls=OURS)
    for name, forged in (
        ("all", [5] * 4),
        ("more", [5] * 5000),
        ("none", []),
        ("odd", ["x"]),
    ):
        request = engine.add(name, 40, None, 4, **{GIVEN: {"token_ids": forged}})
        assert request.num_output_tokens == 0
        assert engine.run(name).reason == "length"
    ends(engine)


def what_has_begun_is_not_refused_for_want_of_kv(model: Path) -> None:
    """Its beginning has been said."""
    engine = Engine(model, scheduler_cls=OURS, extra=THRESHOLD)
    engine.add("begun", 40, None, 4, **{GIVEN: {"token_ids": [5]}})
    assert engine.run("begun").reason == "length"
    engine.add("new", 200)
    assert engine.run("new").reason == "cache_threshold"
    ends(engine)


def what_ended_elsewhere_is_declined(model: Path) -> None:
    engine = Engine(model, scheduler_cls=OURS)
    engine.add("b", 40, params_of("decode", model), 4, **{GIVEN: {"token_ids": [5, 6]}})
    engine.scheduler.finish_requests("b", RequestStatus.FINISHED_ABORTED)
    ends(engine)
    (declined,) = [
        ordered(meta, Decline) for meta in engine.ranks[0].applied if ordered(meta, Decline)
    ]
    assert [source.request_id for source in declined] == ["p"]


def wait_for_grammar(engine: Engine, request: Any) -> None:
    """As a request is that came with structured output: its grammar is being compiled."""
    engine.scheduler.waiting.remove_request(request)
    params = StructuredOutputsParams(regex="a")
    request.sampling_params.structured_outputs = params
    request.structured_output_request = StructuredOutputRequest.from_sampling_params(
        request.sampling_params
    )
    request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    engine.scheduler._enqueue_waiting_request(request)


def a_prompt_below_the_threshold_is_refused_once(model: Path) -> None:
    engine = Engine(model, scheduler_cls=OURS)
    engine.add("cold", 40, cache_hit_threshold=0.5)
    assert engine.run("cold").reason == "cache_threshold"
    ends(engine)
    engine.add("warms", 40)
    engine.run("warms")
    engine.add("warm", 40, cache_hit_threshold=0.5)
    assert engine.run("warm").reason == "length"
    ends(engine)


def a_global_threshold_without_the_plugin_is_refused_at_start(model: Path) -> None:
    with patch.object(support, "is_installed", lambda feature: feature is not THRESHOLD_FEATURE):
        problem = refusal(lambda: Engine(model, scheduler_cls=OURS, extra=THRESHOLD))
    assert "global_cache_hit_threshold" in problem
    engine = Engine(model, scheduler_cls=OURS, extra=THRESHOLD)
    engine.add("cold", 40)
    assert engine.run("cold").reason == "cache_threshold"


def what_cannot_be_is_refused_by_name(model: Path) -> None:
    host = Region(name="a", base_addr=0, block_len=1, block_stride=1, num_blocks=1)
    gpu = replace(host, mem_type="VRAM")
    geometry = CacheGeometry(16, 1)
    for key, value, where, region in (
        ("kv_buffer_device", "cuda", {}, host),
        ("kv_buffer_device", "cpu", {}, gpu),
        ("enable_cross_layers_blocks", True, {"kv_connector_extra_config"}, host),
    ):
        transfer: dict[str, Any] = {"kv_connector": "DisaggConnector", "kv_role": "kv_both"}
        transfer |= {"kv_connector_extra_config": {key: value}} if where else {key: value}
        given: Any = SimpleNamespace(kv_transfer_config=KVTransferConfig(**transfer))
        config = describe.connector_config(given)
        said = refusal(partial(refuse_unsupported_memory, config, geometry, [region]))
        assert key in said
        if region is gpu:
            is_documented(*said.split(": "))
    unfit: tuple[tuple[str, str, Any, str], ...] = (
        ("model_config", "enable_sleep_mode", True, "sleep mode"),
        ("parallel_config", "decode_context_parallel_size", 2, "decode context parallelism"),
        ("parallel_config", "prefill_context_parallel_size", 2, "prefill context parallelism"),
    )
    for part, option, given, named in unfit:
        scheduler = Engine(model).scheduler
        setattr(getattr(scheduler.vllm_config, part), option, given)
        refuse = describe.refuse_unsupported
        said = refusal(partial(refuse, scheduler.vllm_config, scheduler.kv_cache_config))
        assert named in said
        is_documented(said)


def is_documented(*messages: str) -> None:
    """Require in the support matrix, word for word, what each message says is not supported."""
    page = Path("docs/support.md").read_text(encoding="utf-8")
    assert [said for said in messages if f"`{said.partition(' yet. ')[0]}`" not in page] == []


def a_kv_cache_that_others_read_does_not_sleep(model: Path) -> None:
    engine = Engine(model)
    worker: Any = engine.ranks[0].connector
    worker.unregister_kv_caches()
    worker._vllm_config.model_config.enable_cumem_allocator = True
    is_documented(refusal(worker.unregister_kv_caches))


SIZES: dict[str, Any] = {"block_size": 16, "num_kv_heads": 1, "dtype": torch.float32}
RING = CircularBufferSpec(head_size=16, **SIZES)
REPLAYED = SlidingWindowMLASpec(head_size=8, sliding_window=32, bounded_replay=True, **SIZES)


def a_ring_is_refused_where_nothing_says_early_that_prompts_end_a_token_early(model: Path) -> None:
    """Also where vLLM has one group of layers that differ, as its workers see it."""
    latent = MLAAttentionSpec(head_size=8, tokens_per_state=4, **SIZES)
    both = UniformTypeKVCacheSpecs(16, kv_cache_specs={"attn": latent, "ring": RING})
    config = Engine(model).scheduler.vllm_config
    for spec, is_ring in ((RING, True), (both, True), (REPLAYED, False), (latent, False)):
        cache = KVCacheConfig(8, [], [KVCacheGroupSpec(["0"], spec)])
        for model_type in ("", "step5"):
            config.model_config.hf_text_config.model_type = model_type
            refused = {"CircularBufferSpec"} if is_ring and not model_type else set()
            assert describe.unknown_cache_kinds(config, cache) == refused
            if refused:
                is_documented(refusal(partial(describe.refuse_unsupported, config, cache)))


def a_load_brings_the_ring_and_the_window_that_would_be_computed_again(model: Path) -> None:
    """vLLM computes the last token alone, of a second prompt with a cached prefix too: its prefix
    cache has nothing of the window, so the load fills all of that."""
    like: dict[str, Any] = {"groups": (FULL, REPLAYED, RING), "model_type": "deepseek_v41"}
    prefiller, decoder = Engine(model, **like), Engine(model, **like)
    for name, first_token in (("first", 0), ("second", 96)):
        prefiller.add(name, 109, {"do_remote_decode": True}, 1)
        params = prefiller.run(name).params or {}
        assert params["remote_num_tokens"] == 108
        assert [len(ids) for ids in params["remote_block_ids"]] == [7, 3, 1]
        request = decoder.add(name, 109, told(params, remote_engine_id="another"))
        decoder.step()
        (order,) = ordered(decoder.ranks[0].applied[-1], PullOrder)
        assert (order.first_token, order.last_token) == (first_token, 108)
        _, window, ring = order.local_block_ids
        assert [block > 0 for block in window] == [False] * 4 + [True] * 3
        assert len(ring) == 1
        scheduled = decoder.scheduler.schedule()
        assert (scheduled.num_scheduled_tokens, request.replay_start) == ({name: 1}, 0)
        decoder.answer(scheduled)
        decoder.run(name)
    ends(decoder)
    ends(prefiller)


def the_state_before_guesses_is_what_moves(mode: str, model: Path) -> None:
    """A request has blocks for the states behind guesses, too. The one that we name is the one that
    vLLM's kernels read first: where a prompt was computed in steps, and where one is loaded."""
    sizes: dict[str, Any] = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    full = FullAttentionSpec(block_size=16, **sizes)
    state = MambaSpec(
        shapes=((1,),),
        dtypes=(torch.float32,),
        block_size=16 if mode == "align" else 256,
        mamba_cache_mode=mode,
        num_speculative_blocks=3,
    )
    groups = [KVCacheGroupSpec(["full"], full), KVCacheGroupSpec(["state"], state)]
    config = KVCacheConfig(64, [], groups)
    manager = KVCacheManager(config, 256, state.block_size, 16, enable_caching=mode == "align")
    connector: Any = DisaggConnector.__new__(DisaggConnector)
    connector._windows = describe.windows(config)
    connector._guess_blocks = describe.guess_blocks(config)
    engine = Engine(model)
    computed, loaded = engine.add("computed", 75), engine.add("loaded", 75)
    for num_tokens in (32, 32, 11):
        assert manager.allocate_slots(computed, num_tokens, num_lookahead_tokens=3)
        computed.num_computed_tokens += num_tokens
    assert manager.allocate_slots(
        loaded, 0, num_external_computed_tokens=75, delay_cache_blocks=True, num_lookahead_tokens=3
    )
    for request in (computed, loaded):
        block_ids = manager.get_block_ids(request.request_id)
        table = torch.tensor([block_ids[1]], dtype=torch.int32)
        read = mamba_get_block_table_tensor(table, torch.tensor([75]), state, mode)
        assert read.shape == (1, 1 + 3)
        assert connector._by_group(block_ids)[1] == (int(read[0, 0]),) != (0,)


def a_hit_that_windows_lag_behind_is_not_local(model: Path) -> None:
    """A load brings a state whole, and of a window no token before the first that is loaded; of a
    second kind of full attention vLLM may have less than it says."""
    sizes: dict[str, Any] = {"block_size": 16, "num_kv_heads": 1, "head_size": 8}
    full = FullAttentionSpec(**sizes, dtype=torch.float32)
    window = SlidingWindowSpec(**sizes, dtype=torch.float32, sliding_window=20)
    state = MambaSpec(block_size=16, shapes=((1,),), dtypes=(torch.float32,))
    other = replace(full, num_kv_heads=2)
    for specs, expected in (
        ((full, state), True),
        ((full, full, state), True),
        ((full, other, state), False),
        ((full, state, window), False),
    ):
        groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
        connector: Any = DisaggConnector.__new__(DisaggConnector)
        connector._kv_cache_config = SimpleNamespace(kv_cache_groups=groups)
        assert connector.supports_divergent_local_hybrid_hits is expected


def of_a_window_the_tokens_that_guesses_need_are_kept_too(model: Path) -> None:
    sizes: dict[str, Any] = {"block_size": 16, "num_kv_heads": 1, "head_size": 8}
    window = SlidingWindowSpec(
        **sizes, dtype=torch.float32, sliding_window=64, extra_retained_tokens=2
    )
    given: Any = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=window)])
    assert describe.windows(given) == (66,)


def stock_and_ours_do_not_meet_where_stock_leaves_out_a_prompts_end(model: Path) -> None:
    text = SimpleNamespace(model_type="")
    plain = SimpleNamespace(is_hybrid=False, is_attention_free=False, hf_text_config=text)
    given: Any = SimpleNamespace(model_config=plain, num_prefill_lookahead_tokens=3)
    assert describe.stock_hash(given, "FLASH_ATTN", "pull") is None
    assert describe.stock_hash(Engine(model).scheduler.vllm_config, "FLASH_ATTN", "pull")


def what_kv_role_says_of_loads_is_heard(model: Path) -> None:
    """vLLM keeps the blocks of an aborted request from its steps under way for consumers alone."""
    for role, batches, loads in (
        ("kv_both", 2, True),
        ("kv_consumer", 2, True),
        ("kv_producer", 2, False),
        ("kv_producer", 1, True),
    ):
        transfer = KVTransferConfig(kv_connector="DisaggConnector", kv_role=role)
        given: Any = SimpleNamespace(kv_transfer_config=transfer, max_concurrent_batches=batches)
        assert describe.may_load(given) is loads
    connector = Engine(model).scheduler.connector
    connector._kv_transfer_config.kv_role = "kv_consumer"
    assert connector.requires_kv_delivery


def a_permuted_layout_is_passed_on(model: Path) -> None:
    transfer = KVTransferConfig(
        kv_connector="DisaggConnector", kv_role="kv_both", enable_permute_local_kv=True
    )
    given: Any = SimpleNamespace(kv_transfer_config=transfer)
    assert describe.connector_config(given).permute_layout


def cases() -> Iterator[tuple[str, Case]]:
    for plain in (
        every_hook_is_guarded,
        nothing_leaves_a_hook_whose_half_is_broken,
        blocks_that_we_keep_of_a_failed_load_are_freed_when_we_say_so,
        a_structured_request_is_judged,
        a_request_behind_blocked_ones_is_judged,
        a_prompt_below_the_threshold_is_refused_once,
        a_begun_request_whose_grammar_does_not_follow_ends_alone,
        more_than_a_begun_requests_prompt_is_in_the_cache,
        what_was_given_too_much_ends_no_engine,
        what_has_begun_is_not_refused_for_want_of_kv,
        what_ended_elsewhere_is_declined,
        a_global_threshold_without_the_plugin_is_refused_at_start,
        what_cannot_be_is_refused_by_name,
        a_kv_cache_that_others_read_does_not_sleep,
        a_ring_is_refused_where_nothing_says_early_that_prompts_end_a_token_early,
        a_load_brings_the_ring_and_the_window_that_would_be_computed_again,
        a_hit_that_windows_lag_behind_is_not_local,
        of_a_window_the_tokens_that_guesses_need_are_kept_too,
        stock_and_ours_do_not_meet_where_stock_leaves_out_a_prompts_end,
        what_kv_role_says_of_loads_is_heard,
        a_permuted_layout_is_passed_on,
    ):
        yield plain.__name__, plain
    for several in (
        an_engine_that_leaves_waits_for_its_readers_and_for_no_turn,
        a_pause_waits_for_readers_and_for_no_turn,
    ):
        for scheduler in (None, OURS):
            yield f"{several.__name__}, {scheduler}", partial(several, scheduler)
    for ahead in ("engine_ext.vllm.scheduler.DisaggAsyncScheduler", ASYNC):
        turn = partial(a_turn_promises_no_token_that_a_step_is_yet_to_compute, ahead)
        yield f"{turn.func.__name__}, {ahead}", turn
    for ours in (OURS, "engine_ext.vllm.scheduler.DisaggAsyncScheduler"):
        given = partial(what_was_given_counts_as_generated, ours)
        yield f"{given.func.__name__}, {ours}", given
    for mode in ("none", "align"):
        guesses = partial(the_state_before_guesses_is_what_moves, mode)
        yield f"{guesses.func.__name__}, {mode}", guesses
    for policy in ("fail", "recompute"):
        alone = partial(a_failed_load_without_a_policy_ends_as_vllm_says, policy)
        yield f"{alone.func.__name__}, {policy}", alone
    for how in product(("fail", "recompute"), (1, 2), (False, True)):
        turn = partial(a_turn_is_computed_unless_a_read_may_still_write, *how)
        yield f"{turn.func.__name__}, {how}", turn
    for num_ranks in (1, 2):
        reports = partial(reports_that_nobody_waits_for_end_no_engine, num_ranks)
        yield f"{reports.func.__name__}, {num_ranks} ranks", reports
    yield from resumed_answer_cases.cases()
    yield from hand_back_cases.cases()
    yield from lending_cases.cases()
    yield from compat_cases.cases()
    yield from weight_cases.cases(partial(params_of, "decode"))
    yield from push_cases.cases()
    yield from step_budget_cases.cases(partial(params_of, "decode"))
    yield from planted()


def planted() -> Iterator[tuple[str, Case]]:
    for fault in faults():
        for role in ROLES:
            for scheduler, num_ranks in ((None, 2), (OURS, 1)):
                for policy in ("fail", "recompute"):
                    how = (fault, role, policy, scheduler, num_ranks)
                    name = ", ".join(map(str, how))
                    yield name, partial(a_fault_costs_one_request, *how)


def run(case: Case, model: Path) -> str | None:
    try:
        case(model)
    except Exception:
        return traceback.format_exc()
    return None


if __name__ == "__main__":
    plugin.register()
    results = {name: run(case, Path(sys.argv[1])) for name, case in cases()}
    Path(sys.argv[2]).write_text(json.dumps(results))
