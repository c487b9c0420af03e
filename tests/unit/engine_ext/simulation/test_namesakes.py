"""Two engines with one engine_id, as after a configuration was copied."""

from typing import Any

import pytest

from engine_ext.common.config import ConnectorConfig
from tests.unit.engine_ext.simulation.engine import SimEngine, SimRequest
from tests.unit.engine_ext.simulation.pair import tokens
from tests.unit.engine_ext.simulation.world import World


class Namesakes:
    """P and D, which both call themselves "e"."""

    def __init__(self, mode: str, **config: Any) -> None:
        self.world = World()
        settings = {"engine_id": "e", "lease_duration": 1000.0, "transfer_mode": mode, **config}
        self.prefiller, self.decoder = (
            SimEngine(self.world.network, ConnectorConfig(**settings), port) for port in (1, 2)
        )
        self.world.engines = {"p": self.prefiller, "d": self.decoder}
        self.count = 0

    def ask(self) -> SimRequest:
        """Both legs of a request; D's."""
        self.count += 1
        name, prompt = f"cmpl-x{self.count}-0", tokens(self.count)
        params = self.prefiller.finish(self.prefiller.prefill(f"{name}-0000000a", prompt))
        assert params is not None
        if self.prefiller.config.transfer_mode == "push":
            params = {**params, "remote_request_id": name}
        request = self.decoder.queue(SimRequest(f"{name}-0000000d", prompt, params))
        assert not self.decoder.load(request)
        self.decoder.abort(request)
        return request


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_a_namesake_is_noticed_once_counted_and_need_not_keep_its_blocks(
    mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    two = Namesakes(mode)
    caplog.set_level("WARNING", "engine_ext")
    for _ in range(3):
        two.ask()
    assert two.decoder.scheduler.engine_id_clashes == 3
    (line,) = [record.getMessage() for record in caplog.records if "engine_id" in record.message]
    assert "engine_id e: this one at sim:2 and another one at sim:1" in line
    two.world.until(lambda: not two.prefiller.held, within=2.0)
    two.world.settle(10.0)
    assert two.prefiller.scheduler.engine_id_clashes == 0


def test_a_turn_of_a_namesake_is_noticed_by_its_prefiller() -> None:
    two = Namesakes("pull", bidirectional=True, recompute_threshold=4)
    turn = {
        **(two.decoder.finish(two.decoder.prefill("t-1", tokens(1))) or {}),
        "do_remote_prefill": False,
        "do_remote_decode": True,
    }
    request = two.prefiller.queue(SimRequest("p-2", tokens(1), turn))
    assert not two.prefiller.load(request)
    two.prefiller.abort(request)
    assert two.prefiller.scheduler.engine_id_clashes == 1
    two.world.until(lambda: not two.decoder.held, within=2.0)
    two.world.settle(10.0)


def test_both_legs_at_one_engine_are_no_clash() -> None:
    world = World()
    engine = world.engine("e", port=1, lease_duration=1000.0)
    params = engine.finish(engine.prefill("r-a", tokens(1)))
    request = engine.queue(SimRequest("r-d", tokens(1), params))
    assert not engine.load(request)
    engine.abort(request)
    assert engine.scheduler.engine_id_clashes == 0
    world.until(lambda: not engine.held, within=2.0)
    world.settle(10.0)
