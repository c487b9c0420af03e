"""Deadlines, and the bytes of answers that are read whole, in one memory for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from router.http_client import answer_limits
from router.http_client.answer_limits import (
    NEVER,
    TICK_S,
    UNCOUNTED_BYTES,
    Deadlines,
    MemoryBudget,
    Reservation,
)
from router.http_client.errors import AnswersFullError
from router.http_client.pool import EnginePool
from tests.unit.router.harness import eventually
from tests.unit.router.http_client.asking import REQUEST, soon
from tests.unit.router.mock_engine import MockEngine, Peer, Received

MIB = 1024 * 1024


async def test_the_routers_own_requests_are_never_rejected_for_memory(
    pool: EnginePool, engine: MockEngine
) -> None:
    async def script(request: Received, peer: Peer) -> None:
        await peer.answer(b"x" * MIB)

    memory = pool.memory = MemoryBudget(1)
    engine.usual = script
    assert len((await pool.fetch(REQUEST, soon(), 2 * MIB)).body) == MIB
    answer = await pool.request(REQUEST, soon())
    with pytest.raises(AnswersFullError):
        await answer.read(2 * MIB)
    await eventually(lambda: pool.open_count == pool.idle_count)
    memory.limit = 0
    answer = await pool.request(REQUEST, soon())
    await answer.read(2 * MIB)
    assert memory.size == MIB
    answer.close()
    answer.close()
    assert memory.size == 0


def test_a_reservation_counts_large_answers_and_stays_unchanged_without_room() -> None:
    memory = MemoryBudget(4 * MIB)
    one, other = Reservation(memory), Reservation(memory)
    assert one.resize(UNCOUNTED_BYTES)
    assert memory.size == 0
    assert one.resize(3 * MIB)
    assert not other.resize(2 * MIB)
    assert other.resize(MIB)
    assert not one.resize(3 * MIB + 1)
    assert (one.size, memory.size) == (3 * MIB, 4 * MIB)
    memory.limit = MIB  # as an operator may set it meanwhile
    assert one.resize(2 * MIB), "less is always possible"
    assert not one.resize(2 * MIB + 1)
    one.release()
    one.release()
    other.release()
    assert memory.size == 0


class OneTimer:
    """The part of an event loop that Deadlines uses, with a clock that the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.time = 0.0
        monkeypatch.setattr(answer_limits, "now", lambda: self.time)

    def call_later(self, delay: float, callback: Callable[..., None], *args: Any) -> None:
        self._due, self._callback, self._args = self.time + delay, callback, args

    def fire(self, late: float = 0.0) -> None:
        self.time = self._due + late
        self._callback(*self._args)


class Waiting:
    def __init__(self, deadline: float) -> None:
        self.deadline, self.expired = deadline, 0

    def expire(self) -> None:
        self.expired += 1


def test_after_a_stall_of_the_process_deadlines_wait_until_sockets_were_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop: Any = OneTimer(monkeypatch)
    deadlines, read, silent = Deadlines(), Waiting(1.0), Waiting(1.0)
    deadlines.start(loop)
    deadlines.watch(read)
    deadlines.watch(silent)
    loop.fire(late=60)
    assert not silent.expired
    read.deadline = NEVER  # its data had arrived during the stall
    loop.fire(late=60)  # a loop that is always late does not postpone for ever
    assert (read.expired, silent.expired) == (0, 1)
    late = Waiting(loop.time + 3 * TICK_S / 2)
    deadlines.watch(late)
    loop.fire()
    assert not late.expired
    loop.fire(late=TICK_S / 2)
    assert late.expired
