"""vLLM of another version: what of ours does not fit is off, and nothing else is."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from vllm.v1.core.sched.scheduler import Scheduler

from engine_ext.common.config import ConnectorConfig
from engine_ext.vllm import describe, scheduler
from engine_ext.vllm.compat import support
from engine_ext.vllm.compat.probe import Feature
from engine_ext.vllm.connector import DisaggConnector
from engine_ext.vllm.optional.answers import PREEMPTION_RETURN, RESUME, THRESHOLD
from engine_ext.vllm.optional.engine_loop import IDLE_REST
from engine_ext.vllm.optional.load_failures import LOAD_FAILURES
from engine_ext.vllm.optional.steps import STEP_BUDGET
from engine_ext.vllm.optional.streams import STREAMS
from engine_ext.vllm.optional.without_patch import FAILURE_POLICY, SCHEDULER
from tests.vllm.inside.in_process import Engine, refusal

OURS = "engine_ext.vllm.scheduler.DisaggScheduler"
IN_STREAMS = {"cache_hit_threshold", "begun", "hand_back", "load_failures"}
"""Capabilities that need them."""
OVERRIDES = {
    "add_request": (RESUME,),
    "schedule": (IDLE_REST, THRESHOLD, RESUME, PREEMPTION_RETURN, STEP_BUDGET),
    "update_from_output": (THRESHOLD, PREEMPTION_RETURN, LOAD_FAILURES, FAILURE_POLICY),
    "has_requests": (IDLE_REST, THRESHOLD, PREEMPTION_RETURN),
    "has_finished_requests": (IDLE_REST,),
    "_handle_failed_recving": (FAILURE_POLICY,),
    "_handle_blocked_waiting_request": (THRESHOLD, RESUME),
}
"""What each is for."""


def overridden() -> set[str]:
    """By the parts of our scheduler class."""
    ours = [cls for cls in scheduler.DisaggScheduler.__mro__ if cls.__module__.startswith("engine")]
    return {name for cls in ours for name in vars(cls)}


@contextmanager
def without(*lost: Feature) -> Iterator[None]:
    """As a process is that has started so."""
    for feature in lost:
        support.turn_off(feature, "planted")
    importlib.reload(scheduler)
    try:
        yield
    finally:
        support.probe_again()
        importlib.reload(scheduler)


def answers(model: Path) -> None:
    """Prefills, loads and ends, with every block back."""
    engine = Engine(model, scheduler_cls=OURS)
    engine.add("p", 40, {"do_remote_decode": True})
    assert engine.run("p").reason == "length"
    params = engine.ended["p"].params
    assert params is not None
    engine.step()
    engine.read_all()
    engine.add("low", 40, cache_hit_threshold=0.9)
    is_judged = support.is_on(THRESHOLD)
    assert engine.run("low").reason == ("cache_threshold" if is_judged else "length")
    engine.scheduler.connector.drain()
    engine.step_until(engine.is_empty)


def a_feature_that_is_off_is_off_alone(feature: Feature, model: Path) -> None:
    with without(feature):
        by_it: dict[str, str] = {}
        off = [feature]
        for lost in off:
            depends = [each for each in support.OPTIONAL if lost in each.requires]
            by_it |= dict.fromkeys((each.name for each in depends), f"{lost.name} is off")
            off += depends
        assert support.missing() == {feature.name: "planted", **by_it}
        for name, wanted in OVERRIDES.items():
            assert (name in overridden()) is any(map(support.is_on, wanted)), name
        answers(model)


def with_everything_off_vllm_serves(model: Path) -> None:
    off = [each for each in support.OPTIONAL if each is not SCHEDULER]
    with without(*off):
        assert not set(OVERRIDES) & overridden()
        answers(model)
        assert DisaggConnector.build_kv_connector_stats({"pulls_ok": 1}) is None
        assert DisaggConnector.build_prom_metrics() is None


def a_name_that_vllm_changed_is_found(model: Path) -> None:
    original = Scheduler._handle_failed_recving
    support.probe_again()
    Scheduler._handle_failed_recving = lambda self, failed: original(self, failed)
    try:
        with without():
            (why,) = support.missing().values()
            answers(model)
    finally:
        Scheduler._handle_failed_recving = original
        support.probe_again()
    assert why.endswith("_handle_failed_recving takes (self, failed), not (self, failed_req_ids)")


def an_attribute_that_vllm_dropped_is_found(model: Path) -> None:
    """It is set by `Scheduler.__init__`, and nowhere before that."""
    assert not hasattr(Scheduler, "recompute_kv_load_failures")
    assert support.is_on(FAILURE_POLICY)
    support.probe_again()
    original = Scheduler.__init__
    Scheduler.__init__ = lambda self: None
    try:
        why = support.reason(FAILURE_POLICY)
    finally:
        Scheduler.__init__ = original
        support.probe_again()
    assert str(why).endswith("recompute_kv_load_failures")


def what_is_asked_for_and_off_is_refused_by_name(model: Path) -> None:
    for feature, extra in (
        (THRESHOLD, {"global_cache_hit_threshold": 0.5}),
        (PREEMPTION_RETURN, {"hand_back": True}),
        (STEP_BUDGET, {"target_itl_ms": 50}),
        (SCHEDULER, {}),
    ):
        with without(feature):
            words = refusal(partial(Engine, model, scheduler_cls=OURS, extra=extra))
        assert f"{feature.name}" in words, words
        assert "planted" in words, words


def what_is_off_is_not_promised(model: Path) -> None:
    engine = Engine(model, scheduler_cls=OURS)
    config = engine.scheduler.vllm_config
    ours: ConnectorConfig = describe.connector_config(config)
    every = {*describe.capabilities_of(config, ours), *describe.capabilities_of(config, None)}
    for feature, promised in (
        (THRESHOLD, {"cache_hit_threshold"}),
        (RESUME, {"begun"}),
        (PREEMPTION_RETURN, {"hand_back"}),
        (STREAMS, {"streamed_kv_transfer_params", "tell_token_ids", *IN_STREAMS}),
        (LOAD_FAILURES, {"load_failures"}),
    ):
        assert promised <= every
        with without(feature):
            said = describe.engine(config)
            assert feature.name in said.missing
            assert feature.name not in said.features
            assert every - set(said.capabilities) == promised


def cases() -> Iterator[tuple[str, Callable[[Path], None]]]:
    for case in (
        with_everything_off_vllm_serves,
        a_name_that_vllm_changed_is_found,
        an_attribute_that_vllm_dropped_is_found,
        what_is_asked_for_and_off_is_refused_by_name,
        what_is_off_is_not_promised,
    ):
        yield case.__name__, case
    for feature in support.OPTIONAL:
        if feature is not SCHEDULER:
            yield f"without {feature.name}", partial(a_feature_that_is_off_is_off_alone, feature)
