"""An exception in any hook costs one request at most: the engine lives, every block comes back, and
the next request is right. Two reference engines in this process, over real NIXL."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from engine_ext.common.config import ConnectorConfig, LoadFailurePolicy
from engine_ext.common.types import CacheGeometry
from engine_ext.connector import Connector, build_connector
from engine_ext.reference.kv_connector import SchedulerHalf, WorkerHalf
from engine_ext.reference.messages import RequestOutput
from engine_ext.reference.model_config import ModelConfig
from tests.conftest import find_free_ports
from tests.unit.reference.core.harness import Driver, greedy, make_core, prompt, request

LEASE = 3.0
PATIENCE = 60.0
PROMPT = prompt(100)
Moment = Literal["before", "after"]

RECOVERY = {"fail_load", "fail_loads", "fail_finish"}
"""Called when another hook has raised."""
TAKING = {"build_connector_meta", "get_transfer_results"}
"""Handing out what they took is the last thing they do: nothing can raise after it."""
IDLE = {"on_step", "on_preempted", "load_failure_policy", "revoke"}
"""Not called where nothing is staged or pushed, nobody is preempted, no load fails and every answer
is taken."""
OUTSIDE = {"set_wake", "stats", "inspect", "lend_from", "borrow_with"}
"""Called by the engine's start and by pages, not by a step."""


def hooks_of(half: type) -> list[str]:
    """Of the interface itself, so that a new hook is not forgotten."""
    return [name for name, value in vars(half).items() if callable(value) and name[0] != "_"]


HOOKS = [hook for half in (SchedulerHalf, WorkerHalf) for hook in hooks_of(half)]
FAULTS = [
    (hook, moment)
    for hook in HOOKS
    for moment in ("before", "after")
    if hook not in RECOVERY | OUTSIDE and not (hook in TAKING and moment == "after")
]


class Planted:
    """A half of a connector, one hook of which raises once, before or after it did its work."""

    def __init__(self, half: Any) -> None:
        self._half = half
        self.fault: tuple[str, Moment] | None = None

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._half, name)
        return self._raising(value) if self.fault and self.fault[0] == name else value

    def _raising(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            assert self.fault is not None
            (name, moment), self.fault = self.fault, None
            if moment == "after":
                hook(*args)
            raise RuntimeError(f"planted {moment} {name}")

        return call


class PlantedConnector:
    def __init__(self, connector: Connector) -> None:
        self._connector = connector
        self.scheduler: Any = Planted(connector.scheduler)
        self.worker: Any = Planted(connector.worker)
        self.start = connector.start
        self.shutdown = connector.shutdown

    def plant(self, hook: str, moment: Moment) -> None:
        half = self.scheduler if hook in hooks_of(SchedulerHalf) else self.worker
        half.fault = (hook, moment)

    @property
    def has_fired(self) -> bool:
        return self.scheduler.fault is None and self.worker.fault is None


class Engine(Driver):
    """Stepped by the test; its connector is real but for the planted exception."""

    def __init__(self, model: Path, port: int, policy: LoadFailurePolicy) -> None:
        config = ConnectorConfig(
            engine_id=f"engine-{port}", lease_duration=LEASE, load_failure_policy=policy
        )

        def connect(_: ModelConfig, geometry: CacheGeometry) -> Any:
            whole = {"model": "tiny"}
            self.connector = PlantedConnector(
                build_connector(config, geometry, host="127.0.0.1", port=port, model_factors=whole)
            )
            return self.connector

        super().__init__(make_core(model, connect=connect))
        self.connector.start(self.core.cache.regions())
        self.number = 0

    def answer(self, params: Any, max_tokens: int) -> RequestOutput:
        self.number += 1
        name = f"r{self.number}"
        self.add(request(name, PROMPT, greedy(max_tokens, ignore_eos=True), params))
        self.until(lambda: self.is_finished(name))
        return self.result(name)

    def until(self, condition: Callable[[], bool], *others: "Engine") -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, "not reached"
            for engine in (self, *others):
                engine.step()
            time.sleep(0.001)

    def has_all_blocks(self) -> bool:
        stats = self.core.stats()
        return stats.num_blocks_free == stats.num_blocks_total


@pytest.fixture(scope="module", params=["fail", "recompute"])
def pair(request: pytest.FixtureRequest, model: Path) -> Iterator[tuple[Engine, Engine]]:
    engines = [Engine(model, port, request.param) for port in find_free_ports(2)]
    yield engines[0], engines[1]
    for engine in engines:
        engine.connector.shutdown()


@pytest.fixture(scope="module")
def right(model: Path) -> tuple[int, ...]:
    alone = Driver(make_core(model))
    return alone.run(request("alone", PROMPT, greedy(6, ignore_eos=True)))[0].token_ids


@pytest.mark.parametrize(("hook", "moment"), FAULTS)
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_exception_in_a_hook_costs_one_request_at_most(
    pair: tuple[Engine, Engine], right: tuple[int, ...], hook: str, moment: Moment, side: str
) -> None:
    prefiller, decoder = pair
    planted = prefiller if side == "prefill" else decoder
    for is_faulty in (True, False):
        if is_faulty:
            planted.connector.plant(hook, moment)
        params = prefiller.answer({"do_remote_decode": True}, 1).kv_transfer_params
        last = decoder.answer(params, 6)
        assert last.finish_reason == "length" or (is_faulty and last.finish_reason == "error")
        if last.finish_reason == "length":
            assert last.token_ids == right
        all_blocks_come_back(pair)
        if is_faulty:
            call_by_hand(planted)
            assert planted.connector.has_fired or hook in IDLE
    assert params is not None


def all_blocks_come_back(pair: tuple[Engine, Engine]) -> None:
    """Both take steps: one tells the other that it will not read."""
    prefiller, decoder = pair
    prefiller.until(lambda: prefiller.has_all_blocks() and decoder.has_all_blocks(), decoder)
    for engine in pair:
        engine.assert_empty()


def call_by_hand(engine: Engine) -> None:
    """What no request calls, nor a step."""
    assert engine.core.has_work in (True, False)
    engine.core.scheduler.release("nobody", "nothing")
    engine.core.scheduler.drain()
    engine.core.abort("nobody")


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_failed_load_without_a_policy_ends_its_request(
    pair: tuple[Engine, Engine], right: tuple[int, ...], moment: Moment
) -> None:
    prefiller, decoder = pair
    decoder.connector.plant("start_load_kv", "before")
    decoder.connector.plant("load_failure_policy", moment)
    params = prefiller.answer({"do_remote_decode": True}, 1).kv_transfer_params
    assert decoder.answer(params, 6).finish_reason == "error"
    assert decoder.connector.has_fired
    all_blocks_come_back(pair)
    assert decoder.answer(None, 6).token_ids == right
