"""The control's line to its workers: late or not, each has the state; nobody waits for the dead."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from router.admin import processes as processes_module
from router.admin.processes import (
    ControlChannel,
    DesiredState,
    Tunables,
    WorkerProcess,
    follow_control,
)
from router.fleet.engine import EngineRole, EngineSpec
from router.fleet.registry import OperatorOverrides
from router.fleet.views import FleetView
from router.settings import Address, load
from tests.unit.router.harness import eventually
from tests.unit.router.test_settings import ENGINES

SPEC = EngineSpec(EngineRole.DECODE, Address("::1", 9), frozenset("ab"), "blue", 0.5)
EMPTY = DesiredState(Tunables.of(load(ENGINES)))
FULL = replace(
    EMPTY,
    overrides=OperatorOverrides((SPEC,), frozenset([Address("h", 1)]), {"blue": 0.1}),
    store_keys=("0123456789abcdef",),
)


class FakeProcess:
    def __init__(self) -> None:
        self.states: list[DesiredState] = []
        self.fault: Exception | None = None

    def apply(self, state: DesiredState) -> FleetView:
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault
        self.states.append(state)
        return FleetView(engines=[], groups=[], has_all_listings=True)


@contextlib.asynccontextmanager
async def worker(path: Path) -> AsyncIterator[FakeProcess]:
    member = FakeProcess()
    async with follow_control(path, cast(WorkerProcess, member)):
        yield member


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes_module, "RECONNECT_DELAY_S", 0.01)


def test_a_state_is_the_same_on_the_other_side() -> None:
    assert DesiredState.from_json(FULL.to_json()) == FULL
    assert DesiredState.from_json(EMPTY.to_json()) == EMPTY
    assert b"\n" not in FULL.to_json()
    for garbage in (b"", b"{}", b"null", FULL.to_json()[:-1]):
        with pytest.raises(ValueError, match=r"\w"):
            DesiredState.from_json(garbage)


async def test_all_are_told_and_who_comes_later_is_told_at_once(tmp_path: Path) -> None:
    path, channel = tmp_path / "control", ControlChannel(EMPTY, 2)
    async with channel.open(path), worker(path) as one:
        assert one.states == [EMPTY], "before it serves"
        assert await channel.publish(FULL) == [
            FleetView(engines=[], groups=[], has_all_listings=True),
            None,
        ]
        assert one.states[-1] == FULL
        async with worker(path) as other:
            assert other.states == [FULL]
            assert None not in await channel.publish(EMPTY)
            assert other.states[-1] == one.states[-1] == EMPTY
        assert (await channel.publish(FULL)).count(None) == 1
        async with worker(path) as again:
            assert again.states == [FULL]
            assert None not in await channel.publish(FULL)


async def test_one_that_stands_still_is_not_waited_for_and_has_the_state_later(
    tmp_path: Path,
) -> None:
    path, channel = tmp_path / "control", ControlChannel(EMPTY, 2)
    async with channel.open(path), worker(path) as one:
        reader, writer = await asyncio.open_unix_connection(str(path))
        assert DesiredState.from_json(await reader.readline()) == EMPTY  # and says nothing
        async with asyncio.timeout(5):
            views = await channel.publish(FULL)
        assert views.count(None) == 1
        assert one.states[-1] == FULL
        assert await reader.read() == b"", "it has to dial again, where it is told all"
        writer.close()


async def test_what_is_told_while_one_comes_reaches_it(tmp_path: Path) -> None:
    """Its first exchange is under way when the state changes."""
    path, channel = tmp_path / "control", ControlChannel(EMPTY, 1)
    async with channel.open(path):
        reader, writer = await asyncio.open_unix_connection(str(path))
        assert DesiredState.from_json(await reader.readline()) == EMPTY
        telling = asyncio.create_task(cast(Any, channel.publish(FULL)))
        await asyncio.sleep(0)
        said = (
            FleetView(engines=[], groups=[], has_all_listings=True).model_dump_json().encode()
            + b"\n"
        )
        writer.write(said)
        assert DesiredState.from_json(await reader.readline()) == FULL
        writer.write(said)
        assert await telling == [FleetView(engines=[], groups=[], has_all_listings=True)]
        writer.close()


@pytest.mark.parametrize("garbage", [b"{}\n", b"\xff\n", b"no end"])
async def test_nonsense_is_no_answer(tmp_path: Path, garbage: bytes) -> None:
    path, channel = tmp_path / "control", ControlChannel(EMPTY, 1)
    async with channel.open(path):
        reader, writer = await asyncio.open_unix_connection(str(path))
        await reader.readline()
        writer.write(garbage)
        async with asyncio.timeout(5):
            assert await channel.publish(FULL) == [None]
        writer.close()


async def test_a_fault_in_a_worker_is_told_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, channel = tmp_path / "control", ControlChannel(EMPTY, 1)
    async with channel.open(path), worker(path) as one:
        one.fault = RuntimeError("a fault of ours")
        assert await channel.publish(FULL) == [None]
        await eventually(lambda: one.states[-1] == FULL)
        assert "a fault of ours" in caplog.text


async def test_lines_of_the_dead_are_not_kept(tmp_path: Path) -> None:
    path, channel = tmp_path / "control", ControlChannel(EMPTY, 1)
    async with channel.open(path):
        for _ in range(20):
            async with worker(path):
                pass
        await eventually(lambda: len(channel._workers) <= 1)


async def test_a_worker_serves_even_if_there_is_no_control(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(processes_module, "FIRST_STATE_TIMEOUT_S", 0.05)
    async with worker(tmp_path / "control") as one:
        assert not one.states
    assert "serving without" in caplog.text
