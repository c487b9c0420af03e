"""Unauthenticated NIXL metadata is loaded by a process that the engine can lose, first."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from engine_ext.common.access import Access, SharedSecret
from engine_ext.common.config import ConnectorConfig
from engine_ext.common.types import ConnectorStats, Region
from engine_ext.wire.nixl_metadata import parse
from engine_ext.worker import validator as validators
from engine_ext.worker.agent import AgentError, NixlAgent
from engine_ext.worker.validator import (
    BURST,
    MAX_WAITING,
    REFUSED_SECONDS,
    RESTART_SECONDS,
    TRUSTING,
    UNEXPECTED_BURST,
    UNEXPECTED_SECONDS,
    WAIT_SECONDS,
    MetadataValidation,
    ProcessValidator,
    open_validator,
)
from tests.integration.malformed import Honest, deadly, renamed
from tests.integration.processes import wait_for
from tests.unit.engine_ext.scheduler.fakes import FakeAgent


class Validating:
    """A validator, its counts, and the time that it is told."""

    def __init__(self) -> None:
        self.stats = ConnectorStats()
        self.validator = ProcessValidator(("UCX",), self.stats)
        self.now = 1000.0

    def submit(self, metadata: bytes, *, is_expected: bool = True) -> MetadataValidation:
        return self.validator.submit(metadata, self.now, is_expected=is_expected)

    def until(self, condition: Callable[[], object], what: str) -> None:
        def has_come() -> object:
            self.validator.step(self.now)
            return condition()

        wait_for(has_come, what, 30)

    def problem(self, metadata: bytes) -> str:
        check = self.submit(metadata)
        self.until(lambda: not check.is_pending, "the metadata is judged")
        assert check.problem is not None
        return check.problem

    def start(self) -> int:
        """Returns the pid of a process that is ready."""
        assert self.problem(HONEST.metadata) == ""
        assert self.validator.pid is not None
        return self.validator.pid


HONEST = Honest("honest")
VERSION, *_ = deadly(HONEST.metadata)
"""Of another version of UCX: NIXL's parts of it are as they should be."""


@pytest.fixture
def validating() -> Iterator[Validating]:
    made = Validating()
    yield made
    made.validator.close()


def test_metadata_of_a_real_agent_is_accepted_and_need_not_be_loaded_twice(
    validating: Validating,
) -> None:
    check = validating.submit(HONEST.metadata)
    assert check.is_pending
    validating.until(lambda: not check.is_pending, "the metadata is judged")
    assert check.problem == ""
    assert check.metadata == parse(HONEST.metadata).padded().encode()
    again = validating.submit(HONEST.metadata)
    assert again.problem == ""
    assert validating.stats.metadata_accepted == 2


def test_metadata_that_a_process_dies_of_is_refused_and_the_next_process_goes_on(
    validating: Validating,
) -> None:
    before = validating.start()
    assert "died" in validating.problem(VERSION)
    assert validating.stats.validators_lost == 1
    assert validating.problem(renamed(HONEST.metadata, "another")) == ""
    assert validating.validator.pid != before


def test_metadata_that_nixl_would_not_write_reaches_no_process(validating: Validating) -> None:
    check = validating.submit(b"nonsense")
    assert check.problem == "this is no NIXL metadata"
    assert validating.stats.metadata_refused == 1
    assert validating.validator.pid is None


def test_metadata_that_was_refused_is_refused_at_once_for_a_while(validating: Validating) -> None:
    problem = validating.problem(VERSION)
    assert validating.submit(VERSION).problem == problem
    validating.now += REFUSED_SECONDS
    assert validating.submit(VERSION).is_pending


def test_refused_metadata_does_not_spoil_its_name_for_the_agent_that_has_it(
    validating: Validating,
) -> None:
    """NIXL itself refuses a name from then on of which it failed to load something."""
    padded = parse(HONEST.metadata)
    other = parse(renamed(HONEST.metadata, "honest")).sections[0].descriptors[0]
    assert padded.sections[0].descriptors[0] == other
    twice = HONEST.metadata[:-1] + b"?|"
    assert validating.problem(twice) != ""
    assert validating.problem(HONEST.metadata) == ""


def test_a_check_that_does_not_end_is_refused_at_its_deadline(validating: Validating) -> None:
    pid = validating.start()
    os.kill(pid, signal.SIGSTOP)
    check = validating.submit(renamed(HONEST.metadata, "stopped"))
    validating.validator.step(validating.now)
    assert check.is_pending
    validating.now += 10
    validating.validator.step(validating.now)
    assert "did not come to an end" in (check.problem or "")
    assert validating.problem(renamed(HONEST.metadata, "next")) == ""


def test_processes_that_die_are_replaced_some_at_once_and_then_now_and_then(
    validating: Validating,
) -> None:
    validating.start()
    for number in range(BURST - 1):
        assert "died" in validating.problem(renamed(VERSION, f"deadly {number}"))
    validating.submit(renamed(VERSION, "one more"))
    validating.until(lambda: validating.validator.pid is None, "the last process has died")
    for _ in range(20):
        validating.validator.step(validating.now)
    assert validating.validator.pid is None
    validating.now += RESTART_SECONDS
    validating.validator.step(validating.now)
    assert validating.validator.pid is not None


def test_what_the_engine_asked_for_goes_before_what_strangers_send(
    validating: Validating,
) -> None:
    validating.start()
    judged: list[str] = []
    checks = {
        name: validating.submit(renamed(HONEST.metadata, name), is_expected=name == "asked")
        for name in ("stranger 1", "stranger 2", "asked")
    }

    def note() -> bool:
        judged.extend(n for n, check in checks.items() if not check.is_pending and n not in judged)
        return len(judged) == len(checks)

    validating.until(note, "all are judged")
    assert judged == ["asked", "stranger 1", "stranger 2"]


def test_what_waits_is_bounded_in_number_and_time(validating: Validating) -> None:
    checks = [
        validating.submit(renamed(HONEST.metadata, f"{number}"), is_expected=False)
        for number in range(MAX_WAITING + 1)
    ]
    assert [check.is_pending for check in checks[-2:]] == [True, False]
    assert validating.submit(renamed(HONEST.metadata, "asked")).is_pending
    validating.now += WAIT_SECONDS
    validating.validator.step(validating.now)
    assert not any(check.is_pending for check in checks)


def test_a_check_that_nobody_waits_for_is_not_made(validating: Validating) -> None:
    check = validating.submit(VERSION)
    check.is_wanted = False
    validating.start()
    assert validating.stats.validators_lost == 0


def test_a_process_that_cannot_start_refuses_nothing_by_itself_and_says_so(
    validating: Validating, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    check = validating.submit(HONEST.metadata)
    validating.validator.step(validating.now)
    assert check.is_pending
    assert "the metadata validator did not start" in caplog.text
    validating.now += WAIT_SECONDS
    validating.validator.step(validating.now)
    assert check.problem == "the metadata validator did not get to it in time"


def test_a_start_that_takes_long_is_logged_and_not_begun_anew(
    validating: Validating, caplog: pytest.LogCaptureFixture
) -> None:
    validating.submit(HONEST.metadata)
    validating.validator.step(validating.now)
    first = validating.validator.pid
    for _ in range(10):
        validating.now += 60
        validating.validator.step(validating.now)
    assert caplog.text.count("takes long to start") <= 1
    assert validating.start() == first


def test_the_process_ends_with_its_parent_however_that_ends(tmp_path: Path) -> None:
    program = """
        import time
        from engine_ext.common.types import ConnectorStats
        from engine_ext.worker.validator import ProcessValidator
        validator = ProcessValidator(("UCX",), ConnectorStats())
        validator.step(0)
        print(validator.pid, flush=True)
        time.sleep(60)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True
    )
    with parent:
        assert parent.stdout is not None
        process = Path("/proc") / parent.stdout.readline().strip()
        assert process.exists()
        parent.kill()
    wait_for(lambda: not process.exists(), "the validator's process has ended", 30)


def test_an_agents_metadata_is_not_replaced_by_other_metadata_in_its_name() -> None:
    """NIXL would forget the agent for it, and refuse it from then on."""
    memory = np.zeros(4096, dtype=np.uint8)
    agent = NixlAgent([Region("none", memory.ctypes.data, 1024, 1024, 4)], ["UCX"], 0)
    agent.add_remote(HONEST.metadata)
    with pytest.raises(AgentError, match="known by other metadata"):
        agent.add_remote(parse(HONEST.metadata).padded().encode())
    agent.notify(agent.add_remote(HONEST.metadata), b"still here")

    def has_come() -> bool:
        agent.notifications()
        return [b"still here"] in HONEST.agent.get_new_notifs().values()

    wait_for(has_come, "the message has come", 10)
    agent.remove_remote("honest")
    agent.close()


def test_a_process_that_does_not_start_is_tried_less_and_less_often(
    validating: Validating, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[float] = []

    def fail(*_: object, **__: object) -> None:
        attempts.append(validating.now)
        raise OSError("none")

    monkeypatch.setattr(subprocess, "Popen", fail)
    for _ in range(600):
        validating.now += 1
        validating.validator.step(validating.now)
    assert attempts[:BURST] == [1001 + number for number in range(BURST)]
    assert 8 <= len(attempts) - BURST <= 20


def test_what_strangers_send_is_checked_no_faster_than_its_rate(validating: Validating) -> None:
    validating.start()
    for number in range(UNEXPECTED_BURST + 3):
        validating.submit(renamed(HONEST.metadata, f"stranger {number}"), is_expected=False)
    validating.until(lambda: validating.validator.num_pending <= 2, "a burst of them is judged")
    for _ in range(20):
        validating.validator.step(validating.now)
    assert validating.validator.num_pending == 2
    validating.now += UNEXPECTED_SECONDS
    validating.until(lambda: validating.validator.num_pending == 1, "one more is judged")


@pytest.mark.parametrize("is_mixed", [False, True])
def test_who_must_hold_the_secret_needs_no_validator(is_mixed: bool) -> None:
    access = Access(SharedSecret.of(b"0123456789abcdef"), is_mixed)
    config = ConnectorConfig(engine_id="e", access=access)
    assert open_validator(FakeAgent(), config, ConnectorStats()) is TRUSTING
    assert validators.TRUSTING.submit(b"x", 0, is_expected=False).problem == ""
