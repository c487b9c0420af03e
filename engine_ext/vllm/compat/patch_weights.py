"""Every way to change the weights of a running vLLM engine, so that our connector hears of it.

vLLM does not notify its KV connectors. All ways meet in `EngineCore`: its methods are what an HTTP
server or `LLM` calls, in the thread that runs the engine's steps, between two of them. We wrap
those that load an adapter (`add_lora`), call the workers (`collective_rpc`), discard weights or
move the KV cache (`sleep`, `release_kv_cache_memory`) and name the weights (`set_weight_version`).
`Scheduler.update_from_output` reads which loads have failed before it asks the connector, so loads
that were under way when the weights changed, and loads whose reports were lost, are put among the
failed ones there.

If a release changes weights in another way, KV of old weights may be used with new ones, which no
later check finds. So this is tier 1: a release is supported when each method of its EngineCore and
of its workers has been looked at (HARMLESS_METHODS names those that leave weights alone; an unknown
one counts as a change).

Installed by the connector itself while the engine is being built, with the plugin or without.
"""

from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore

from engine_ext.vllm.compat.patching import wrap
from engine_ext.vllm.connector_calls import NO_SLEEP, ConnectorCalls, find_our_connector

HARMLESS_METHODS = frozenset(
    (
        "check_health",
        "compute_weight_checksums",
        "get_model_inspection",
        "get_supported_tasks",
        "init_weight_transfer_engine",
        "list_loras",
        "profile",
        "release_late_interaction_query_cache",
        "reset_encoder_cache",
        "reset_mm_cache",
        "save_sharded_state",
        "save_tensorized_model",
        "shutdown_weight_transfer_engine",
        "supports_draft_weight_updates",
        "synchronize_device",
        "update_max_model_len",
    )
)
"""Methods of vLLM's workers that leave all weights as they are. Whatever else is called may be an
extension's own way to load weights, and counts as one."""

MODEL_METHODS = frozenset(
    (
        "finish_weight_update",
        "reload_weights",
        "reset_weights",
        "start_draft_weight_update",
        "start_weight_update",
        "update_weights",
    )
)
"""These change the model's own weights, and no adapter's."""

PAUSE, DISCARD = 0, 2
"""Levels of sleep: nothing moves; weights do not come back by themselves."""


def install() -> None:
    """Idempotent."""
    wrap(EngineCore, "add_lora", _wrap_add_lora)
    wrap(EngineCore, "collective_rpc", _wrap_collective_rpc)
    wrap(EngineCore, "sleep", _wrap_sleep)
    wrap(EngineCore, "release_kv_cache_memory", _wrap_release_kv_cache_memory)
    wrap(EngineCore, "set_weight_version", _wrap_set_weight_version)
    wrap(Scheduler, "update_from_output", _wrap_update_from_output)


def _our_connector(core: Any) -> ConnectorCalls | None:
    """None also while the engine is being built."""
    return find_our_connector(getattr(getattr(core, "scheduler", None), "connector", None))


def _wrap_add_lora(original: Any) -> Any:
    """vLLM's workers load an adapter that they do not have, or that is to be loaded in place; then
    they read its files now."""

    def add_lora(self: Any, lora_request: Any) -> Any:
        ours = _our_connector(self)
        if ours is None:
            return original(self, lora_request)
        if not lora_request.load_inplace and lora_request.lora_int_id in self.list_loras():
            return original(self, lora_request)
        seen, is_loaded = ours.look_at_adapter(lora_request), False
        try:
            answer = original(self, lora_request)
            is_loaded = True
        finally:
            loaded = seen if is_loaded else None
            ours.adapter_loaded(lora_request, loaded, list(self.scheduler.requests.values()))
        return answer

    return add_lora


def _wrap_collective_rpc(original: Any) -> Any:
    def collective_rpc(self: Any, method: str | Callable[..., Any], *args: Any, **kw: Any) -> Any:
        name = method if isinstance(method, str) else None
        ours = None if name in HARMLESS_METHODS else _our_connector(self)
        if ours is None:
            return original(self, method, *args, **kw)
        try:
            return original(self, method, *args, **kw)
        finally:
            _report_change(self, ours, name or "a function", keeps_adapters=name in MODEL_METHODS)

    return collective_rpc


def _wrap_sleep(original: Any) -> Any:
    def sleep(self: Any, level: int = 1, *args: Any, **kw: Any) -> Any:
        ours = _our_connector(self)
        if ours is not None and level > PAUSE:
            _refuse_to_move_memory(self)
        if ours is not None and level >= DISCARD:
            _report_change(self, ours, f"sleep({level})", keeps_adapters=False)
        return original(self, level, *args, **kw)

    return sleep


def _wrap_release_kv_cache_memory(original: Any) -> Any:
    def release_kv_cache_memory(self: Any) -> None:
        if _our_connector(self) is not None:
            _refuse_to_move_memory(self)
        original(self)

    return release_kv_cache_memory


def _refuse_to_move_memory(core: Any) -> None:
    """Raises RuntimeError, which the caller of /sleep sees, where other engines would read from
    memory that is gone. vLLM 0.33 asks workers by itself (`unregister_kv_caches`)."""
    if core.vllm_config.model_config.enable_cumem_allocator:
        raise RuntimeError(NO_SLEEP)


def _report_change(core: Any, ours: ConnectorCalls, by: str, keeps_adapters: bool) -> None:
    ours.weights_changed(by, list(core.scheduler.requests.values()), keeps_adapters)


def _wrap_set_weight_version(original: Any) -> Any:
    def set_weight_version(self: Any, weight_version: str) -> None:
        original(self, weight_version)
        ours = _our_connector(self)
        if ours is not None:
            ours.weights_named(weight_version)

    return set_weight_version


def _wrap_update_from_output(original: Any) -> Any:
    """vLLM takes from a step's output first which loads have failed."""

    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        loads = model_runner_output.kv_connector_output
        ended = loads and (loads.finished_recving or loads.finished_sending)
        ours = find_our_connector(self.connector) if ended else None
        if ours is not None:
            ours.recover_reports(loads)
            ours.fail_stale_loads(loads)
        return original(self, scheduler_output, model_runner_output)

    return update_from_output
