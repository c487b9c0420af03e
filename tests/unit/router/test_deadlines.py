"""Deadlines, and what they do after the process stood still."""

from collections.abc import Callable
from typing import Any

import pytest

from router.common import deadlines as module
from router.common.deadlines import NEVER, TICK_S, Deadlines


class OneTimer:
    """The part of an event loop that Deadlines uses, with a clock that the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.time = 0.0
        monkeypatch.setattr(module, "now", lambda: self.time)

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


def test_seconds_since_leave_out_the_time_in_which_the_process_stood_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop: Any = OneTimer(monkeypatch)
    deadlines = Deadlines()
    assert deadlines.seconds_since(-1.0) == 1.0, "nothing runs yet"
    deadlines.start(loop)
    loop.time = 60.0  # no timer has fired yet
    assert deadlines.seconds_since(0.0) == pytest.approx(TICK_S)
    loop.fire(late=60)
    loop.time += TICK_S / 2
    assert deadlines.seconds_since(0.0) == pytest.approx(TICK_S * 3 / 2)
    assert deadlines.seconds_since(30.0) == pytest.approx(TICK_S / 2), "it stood still then"
    assert deadlines.seconds_since(loop.time - 0.01) == pytest.approx(0.01)
