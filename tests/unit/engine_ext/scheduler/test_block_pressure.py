"""Requests that lack blocks at a decode engine: see `engine_ext.scheduler.block_pressure`."""

from typing import Any

import pytest

from engine_ext.common.config import ConnectorConfig
from engine_ext.common.orders import (
    ConfirmReturn,
    PushInquiry,
    PushWithdrawal,
    Reclaim,
    Revoke,
    StepMetadata,
)
from engine_ext.common.types import CacheGeometry, EngineIdentity, FinishStatus, TransferResults
from engine_ext.scheduler.block_pressure import LATE_SECONDS, STALLED_SECONDS, TURN_SECONDS
from engine_ext.scheduler.scheduler import SchedulerConnector
from tests.unit.engine_ext.orders import ordered
from tests.unit.engine_ext.scheduler.fakes import Request

LATER = (None, False)
WHERE = {
    "do_remote_prefill": True,
    "remote_engine_id": "p",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
}


class Decoder:
    """One with a cache of 40 blocks of 16 tokens, and a clock."""

    def __init__(self, max_model_len: int | None = None, **settings: Any) -> None:
        self.now = 1000.0
        host_takes_back = settings.pop("host_takes_back", True)
        config = ConnectorConfig(
            engine_id="d", transfer_mode="push", bidirectional=True, **settings
        )
        self.half = SchedulerConnector(
            config,
            EngineIdentity("d", "10.0.0.2", 5600),
            CacheGeometry(16, 40, max_model_len=max_model_len),
            clock=lambda: self.now,
            host_takes_back=host_takes_back,
        )

    def arrives(self, name: str, num_blocks: int, **params: Any) -> Request:
        where = {**WHERE, "remote_request_id": name, **params}
        request = Request(name, where, 16 * num_blocks)
        self.half.on_new_request(request)
        return request

    def asked(self, request: Request) -> tuple[int | None, bool]:
        return self.half.get_num_new_matched_tokens(request, 0)

    def admitted(self, request: Request, *, loads: bool = True) -> None:
        num_tokens = request.num_prompt_tokens if loads else 0
        blocks = (tuple(range(num_tokens // 16)),)
        self.half.update_state_after_alloc(request, blocks, num_tokens)

    def registers(self, name: str, num_blocks: int) -> Request:
        request = self.arrives(name, num_blocks)
        assert self.asked(request) == (16 * num_blocks, True)
        self.admitted(request)
        return request

    def hears(self, **results: str) -> None:
        reported: dict[str, Any] = {name: frozenset(ids.split()) for name, ids in results.items()}
        self.half.update_connector_output(TransferResults(**reported))

    def step(self, seconds: float = 0.0) -> StepMetadata:
        self.now += seconds
        return self.half.build_connector_meta()


def test_a_request_without_room_asks_once_whether_its_prompt_is_there() -> None:
    decoder = Decoder()
    decoder.registers("early", 20)
    request = decoder.arrives("short", 10)
    assert decoder.asked(request) == (160, True)
    assert decoder.asked(request) == (160, True), "a host may ask twice in a step"
    decoder.step()
    assert decoder.asked(request) == LATER
    assert [inquiry.request_id for inquiry in ordered(decoder.step(), PushInquiry)] == ["short"]
    assert decoder.asked(request) == LATER
    assert not decoder.step()
    decoder.hears(ready="short")
    assert decoder.asked(request) == (160, True)
    assert not ordered(decoder.step(), Reclaim), "it has not been without room since"


def test_a_ready_request_without_room_reclaims_as_much_as_it_needs_the_newest_first() -> None:
    decoder = Decoder()
    for name in ("a", "b", "c"):
        decoder.registers(name, 9)
    request = decoder.arrives("ready", 12)
    decoder.half.loads.ready("ready")
    for _ in range(3):
        assert decoder.asked(request) == (192, True)
        reclaims = ordered(decoder.step(), Reclaim)
        if reclaims:
            assert reclaims == ("c", "b")
    decoder.hears(returned="c")
    assert ordered(decoder.step(), ConfirmReturn) == ("c",)
    again = Request("c", None, 9 * 16)
    assert decoder.half.load_failure_policy(again) == "recompute"
    decoder.hears(finished_recving="c", failed_recving="c")
    assert decoder.half.load_failure_policy(again) == "recompute"
    assert decoder.asked(again) == LATER, "what was given back asks first"


def test_early_registrations_leave_some_room_and_a_single_one_may_take_all() -> None:
    decoder = Decoder()
    decoder.registers("all", 38)
    assert decoder.asked(decoder.arrives("next", 1)) == LATER
    decoder.hears(finished_recving="all")
    decoder.registers("a", 20)
    decoder.registers("b", 16)
    assert decoder.asked(decoder.arrives("c", 1)) == LATER


def test_a_host_that_takes_nothing_back_registers_early_beside_the_longest_request_only() -> None:
    decoder = Decoder(max_model_len=16 * 20, host_takes_back=False)
    decoder.registers("a", 10)
    decoder.registers("b", 8)
    assert decoder.asked(decoder.arrives("c", 1)) == LATER
    ready = decoder.arrives("ready", 20)
    decoder.half.loads.ready("ready")
    for _ in range(3):
        assert decoder.asked(ready) == (320, True)
        assert not ordered(decoder.step(), Reclaim)


@pytest.mark.parametrize("mode", ["waits", "grows"])
def test_a_turn_gives_way_when_nothing_moves(mode: str) -> None:
    decoder = Decoder()
    turn = decoder.arrives("turn", 10, retain=True, proves_prefix=True)
    turn.num_computed_tokens = 160
    decoder.half.request_finished(turn, (tuple(range(10)),), FinishStatus.STOPPED)
    running = decoder.arrives("running", 20)
    decoder.admitted(running, loads=False)
    waiting = decoder.arrives("waiting", 20)
    decoder.half.loads.ready("waiting")
    decoder.asked(waiting)
    decoder.step(TURN_SECONDS / 2)
    if mode == "grows":
        decoder.asked(running)
        assert ordered(decoder.step(), Revoke) == ("turn",)
        return
    short = decoder.arrives("short", 1)
    decoder.admitted(short, loads=False)
    for _ in range(2):
        decoder.asked(waiting)
        assert not ordered(decoder.step(TURN_SECONDS / 2), Revoke), "one has just begun"
    decoder.asked(waiting)
    assert ordered(decoder.step(), Revoke) == ("turn",), "although two run"


def test_a_loaded_request_that_does_not_start_reclaims_blocks() -> None:
    decoder = Decoder()
    decoder.registers("loaded", 10)
    decoder.registers("early", 20)
    decoder.hears(finished_recving="loaded")
    assert not ordered(decoder.step(), Reclaim)
    assert ordered(decoder.step(LATE_SECONDS), Reclaim) == ("early",)


def test_when_nothing_moves_the_newest_registration_is_withdrawn() -> None:
    """Of an engine that gives nothing back, say."""
    decoder = Decoder()
    for name in ("old", "new"):
        decoder.registers(name, 10)
        decoder.half.loads.ready(name)
    waiting = decoder.arrives("waiting", 30)
    decoder.half.loads.ready("waiting")
    decoder.asked(waiting)
    decoder.step(STALLED_SECONDS - 1)
    decoder.asked(waiting)
    assert not ordered(decoder.step(1), PushWithdrawal)
    for name in ("new", "old"):
        decoder.asked(waiting)
        (withdrawal,) = ordered(decoder.step(STALLED_SECONDS), PushWithdrawal)
        assert withdrawal.request_id == name
