"""Weights that change under vLLM's own scheduler and engine, in one process."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.v1.engine.core import EngineCore

from engine_ext.common.orders import PullOrder, Revoke
from engine_ext.vllm.connector_calls import NO_SLEEP
from engine_ext.vllm.weights import keys_of
from tests.unit.engine_ext.orders import ordered
from tests.unit.engine_ext.scheduler.fakes import told
from tests.vllm.inside.in_process import Engine

OURS = "engine_ext.vllm.scheduler.DisaggScheduler"
PREFILL = {"do_remote_decode": True}


class Core(EngineCore):  # type: ignore[misc] # vLLM's
    """vLLM's, over a scheduler of ours and workers that do nothing."""

    def __init__(self, engine: Engine) -> None:
        self.scheduler = engine.scheduler
        self.model_executor: Any = Workers()
        self._weight_version = "default"
        self.vllm_config = engine.scheduler.vllm_config

    def pause_scheduler(self, *args: Any, **kwargs: Any) -> None:
        """Nothing runs."""


class Workers:
    def __init__(self) -> None:
        self.loaded: set[int] = set()
        self.fails = False

    def collective_rpc(self, *args: Any) -> list[None]:
        if self.fails:
            raise RuntimeError("planted")
        return [None]

    def sleep(self, level: int) -> None:
        """As on a CPU."""

    def list_loras(self) -> set[int]:
        return self.loaded

    def add_lora(self, lora: LoRARequest) -> bool:
        if self.fails:
            raise RuntimeError("planted")
        self.loaded.add(lora.lora_int_id)
        return True


def changes(engine: Engine) -> None:
    Core(engine).collective_rpc("update_weights")


def what_changes_weights_and_what_does_not(model: Path) -> None:
    for act, expected in (
        (lambda core: core.collective_rpc("compute_weight_checksums"), False),
        (lambda core: core.collective_rpc("init_weight_transfer_engine", kwargs={}), False),
        (lambda core: core.compute_weight_checksums(), False),
        (lambda core: core.sleep(1), False),
        (lambda core: core.set_weight_version("7"), False),
        (lambda core: core.collective_rpc("reload_weights"), True),
        (lambda core: core.collective_rpc("an_extensions_own", args=("x",)), True),
        (lambda core: core.collective_rpc(lambda worker: None), True),
        (lambda core: core.sleep(2), True),
        (lambda core: core.sleep(level=2), True),
        (failed_update, True),
    ):
        engine = Engine(model)
        before = engine.add("before", 40)
        act(Core(engine))
        assert (keys_of(before) is None) is expected
        after = engine.add("after", 40)
        assert keys_of(after) is not None
        assert (before.block_hashes != after.block_hashes) is expected
        again = engine.add("again", 40)
        assert again.block_hashes == after.block_hashes


def failed_update(core: Core) -> None:
    """Some ranks may have carried it out."""
    core.model_executor.fails = True
    assert problem_of(partial(core.collective_rpc, "update_weights")) == "planted"


def an_engine_whose_kv_cache_would_move_does_not_sleep(model: Path) -> None:
    core = Core(Engine(model))
    core.vllm_config.model_config.enable_cumem_allocator = True
    core.sleep(0)
    for act in (partial(core.sleep, 1), partial(core.sleep, level=2), core.release_kv_cache_memory):
        assert problem_of(act) == NO_SLEEP


def problem_of(act: Callable[[], Any]) -> str | None:
    try:
        act()
    except RuntimeError as error:
        return str(error)
    return None


def leases_and_turns_end_and_what_runs_leaves_none(model: Path) -> None:
    engine = Engine(model)
    engine.add("p", 40, PREFILL, 1)
    engine.run("p")
    engine.step()
    assert engine.scheduler.connector.scheduler.num_leased == 1
    engine.add("running", 40, PREFILL, 1)
    scheduled = engine.scheduler.schedule()
    engine.add("waiting", 40, PREFILL, 1)
    changes(engine)
    engine.answer(scheduled)
    for name in ("running", "waiting"):
        assert engine.run(name).params is None
    engine.step_until(lambda: not engine.scheduler.connector.scheduler.num_leased)
    assert [ordered(meta, Revoke) for meta in engine.ranks[0].applied if ordered(meta, Revoke)] == [
        ("p",)
    ]
    engine.add("next", 40, PREFILL, 1)
    assert engine.run("next").params is not None


def a_load_that_waits_or_is_under_way_is_not_used(
    params: dict[str, Any], policy: str, scheduler: str | None, model: Path
) -> None:
    engine = Engine(model, policy, scheduler)
    engine.add("loading", 40, params)
    scheduled = engine.scheduler.schedule()
    engine.add("waiting", 40, params | {"remote_request_id": "p"})
    changes(engine)
    engine.answer(scheduled)
    assert engine.run("loading").reason == ("error" if policy == "fail" else "length")
    assert engine.run("waiting").reason == "length"
    pulled = [
        order.request_id for meta in engine.ranks[0].applied for order in ordered(meta, PullOrder)
    ]
    assert pulled == ["loading"]
    engine.step_until(engine.is_empty)


def vllms_own_cache_finds_no_kv_of_before(model: Path) -> None:
    engine = Engine(model)
    for name, is_found in (("first", False), ("second", True), ("third", False), ("fourth", True)):
        if name == "third":
            changes(engine)
        engine.add(name, 40)
        scheduled = engine.scheduler.schedule()
        (new,) = scheduled.scheduled_new_reqs
        assert (new.num_computed_tokens > 0) is is_found, name
        engine.answer(scheduled)
        engine.run(name)


def an_adapter_is_looked_at_when_workers_load_it(model: Path) -> None:
    with TemporaryDirectory() as path:
        _look_at_adapter(Engine(model), path)


def _look_at_adapter(engine: Engine, path: str) -> None:
    core = Core(engine)
    file = Path(path) / "adapter_config.json"
    file.write_text("old")
    lora = LoRARequest("a", 1, path)
    in_place = LoRARequest("a", 1, path, load_inplace=True)

    def key() -> Any:
        request = engine.add(f"r{len(engine.scheduler.requests)}", 40)
        request.lora_request = lora
        engine.scheduler.connector.on_new_request(request)
        return keys_of(request)

    core.add_lora(lora)
    old = key()
    assert old
    file.write_text("newer")
    assert key() is None
    core.add_lora(lora)
    assert key() is None, "vLLM has not read the files again"
    core.add_lora(in_place)
    new = key()
    assert new
    assert new != old
    core.model_executor.fails = True
    assert problem_of(partial(core.add_lora, in_place)) == "planted"
    assert key() is None


def an_adapter_whose_files_change_while_a_request_waits_takes_no_kv(model: Path) -> None:
    """vLLM may read the new files with the request's first step."""
    with TemporaryDirectory() as path:
        file = Path(path) / "adapter_config.json"
        file.write_text("old")
        prefiller, decoder = Engine(model), Engine(model)
        for engine in (prefiller, decoder):
            Core(engine).add_lora(LoRARequest("a", 1, path))
        add_of_adapter(prefiller, "p", path, PREFILL, 1)
        params = prefiller.run("p").params
        assert params is not None
        asked = told(params, remote_engine_id="another")
        request = add_of_adapter(decoder, "d", path, asked)
        ask = decoder.scheduler.connector.get_num_new_matched_tokens
        assert ask(request, 0) == (40, True)
        file.write_text("newer")
        assert ask(request, 0) == (0, False)


def add_of_adapter(engine: Engine, name: str, path: str, params: Any, max_tokens: int = 4) -> Any:
    request = engine.add(name, 40, None, max_tokens)
    request.lora_request, request.kv_transfer_params = LoRARequest("a", 1, path), params
    engine.scheduler.connector.on_new_request(request)
    return request


def cases(params: Callable[[Path], dict[str, Any]]) -> Iterator[tuple[str, Callable[[Path], None]]]:
    """`params`: of a prefill that a decode request may load."""
    for plain in (
        what_changes_weights_and_what_does_not,
        an_engine_whose_kv_cache_would_move_does_not_sleep,
        leases_and_turns_end_and_what_runs_leaves_none,
        vllms_own_cache_finds_no_kv_of_before,
        an_adapter_is_looked_at_when_workers_load_it,
        an_adapter_whose_files_change_while_a_request_waits_takes_no_kv,
    ):
        yield plain.__name__, plain
    for policy in ("fail", "recompute"):
        for scheduler in (None, OURS):
            unused = partial(_loading, params, policy, scheduler)
            name = a_load_that_waits_or_is_under_way_is_not_used.__name__
            yield f"{name}, {policy}, {scheduler}", unused


def _loading(
    params: Callable[[Path], dict[str, Any]], policy: str, scheduler: str | None, model: Path
) -> None:
    a_load_that_waits_or_is_under_way_is_not_used(params(model), policy, scheduler, model)
