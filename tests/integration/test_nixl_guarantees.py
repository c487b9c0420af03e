"""What NIXL and UCX do with a transfer that somebody no longer wants: facts that our rules about
blocks rest on and that our simulator imitates (docs/engine-half.md, "End of a transfer").

Each test's name is a fact about the NIXL that is installed. One that fails after an upgrade is
news, not a regression: read the section again.
"""

import multiprocessing
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.integration.nixl_puppet import LENGTH, PIECES, TCP, Puppet
from tests.integration.processes import wait_for
from tests.integration.strings import PATIENCE, Strings, dance

OLD, BLANK, NEW = 1, 9, 7
"""What the source holds, what the destination holds, and what is written over either."""


@dataclass(frozen=True)
class Pair:
    """One that starts transfers and one whose memory they concern."""

    initiator: Strings
    target: Strings
    address: int

    def start(self, operation: str, first: int = 0, count: int = PIECES) -> int:
        arguments = (operation, self.target.name, self.address, first, count)
        return int(self.initiator.does("start", *arguments))

    def start_and_stick(self, operation: str) -> None:
        """Transfer 0 is half way: some of it has landed, sockets are full."""
        destination = self.initiator if operation == "READ" else self.target
        self.start(operation)

        def has_begun() -> bool:
            self.target.does("work")
            assert self.initiator.does("poll", 0) == "PROC"
            return bool(destination.does("count", OLD))

        wait_for(has_begun, f"the {operation} has begun")
        self.target.does("work")

    def settle(self, number: int) -> str:
        """Both work until the transfer ends; its last state, or the exception of its poll."""

        def end() -> str:
            self.target.does("work")
            state, error = self.initiator.tries("poll", number)
            return error or (state if state != "PROC" else "")

        return wait_for(end, "the transfer ends")

    def work_until(self, condition: Callable[[], bool], what: str) -> None:
        def is_so() -> bool:
            self.target.does("work")
            self.initiator.does("work")
            return condition()

        wait_for(is_so, what)


@pytest.fixture(scope="module")
def theatre() -> multiprocessing.context.ForkServerContext:
    """Loads NIXL's bindings once for all puppets."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.integration.nixl_puppet"])
    return context


@pytest.fixture
def puppet(
    theatre: multiprocessing.context.ForkServerContext, tmp_path: Path
) -> Iterator[Callable[..., Strings]]:
    started: list[Strings] = []

    def start(name: str, threads: int = 0, env: dict[str, str] = TCP) -> Strings:
        ends, strings = theatre.Pipe()
        log = tmp_path / f"{name}-{len(started)}.log"
        process = theatre.Process(target=dance, args=(strings, log, env, Puppet, name, threads))
        process.start()
        strings.close()
        started.append(Strings(name, process, ends))
        return started[-1]

    yield start
    for strings in started:
        strings.kill()


@pytest.fixture
def make_pair(puppet: Callable[..., Strings]) -> Callable[..., Pair]:
    def make(operation: str, threads: int = 0, env: dict[str, str] = TCP) -> Pair:
        target, initiator = puppet("target", threads, env), puppet("initiator", threads, env)
        for strings in (target, initiator):
            strings.hears()
        source, destination = (target, initiator)[:: 1 if operation == "READ" else -1]
        source.does("fill", OLD)
        destination.does("fill", BLANK)
        initiator.does("meet", target.does("metadata"))
        target.does("meet", initiator.does("metadata"))
        return Pair(initiator, target, target.does("address"))

    return make


RELEASE = ("release", 0)
PART = ("part", "target")
DEREGISTER = ("deregister",)
GIVING_UP = [
    pytest.param([RELEASE], id="release_xfer_handle"),
    pytest.param([PART], id="remove_remote_agent"),
    pytest.param([DEREGISTER], id="deregister_memory"),
    pytest.param([RELEASE, PART, DEREGISTER], id="all-three"),
]


@pytest.mark.parametrize("steps", GIVING_UP)
def test_a_read_that_was_given_up_lands_all_the_same(
    make_pair: Callable[..., Pair], steps: list[tuple[Any, ...]]
) -> None:
    both = make_pair("READ")
    both.start_and_stick("READ")
    with both.target.frozen():
        for step in steps:
            both.initiator.does(*step)
        missing = both.initiator.does("count", BLANK)
        both.initiator.does("fill", NEW)
    assert missing > LENGTH // 4
    both.work_until(
        lambda: bool(both.initiator.does("count", OLD) == missing), "the rest of it lands"
    )


@pytest.mark.parametrize("steps", GIVING_UP)
def test_a_write_that_was_given_up_goes_on_with_what_its_source_holds_by_then(
    make_pair: Callable[..., Pair], steps: list[tuple[Any, ...]]
) -> None:
    both = make_pair("WRITE")
    both.start_and_stick("WRITE")
    with both.target.frozen():
        for step in steps:
            both.initiator.does(*step)
        both.initiator.does("fill", NEW)
    both.work_until(lambda: not both.target.does("count", BLANK), "all of it lands")
    assert both.target.does("count", NEW) > LENGTH // 4


def test_a_read_does_not_land_once_its_agent_is_destroyed(make_pair: Callable[..., Pair]) -> None:
    both = make_pair("READ")
    both.start_and_stick("READ")
    with both.target.frozen():
        both.initiator.does("destroy")
        both.initiator.does("fill", NEW)
    with suppress(EOFError, ConnectionError):  # its reader's end may be the holder's, see below
        for _ in range(50):
            both.target.does("work")
    assert both.initiator.does("count", NEW) == LENGTH


def test_a_write_sends_nothing_more_once_its_agent_is_destroyed(
    make_pair: Callable[..., Pair],
) -> None:
    """What is on its way by then lands when the target works again."""
    both = make_pair("WRITE")
    both.start_and_stick("WRITE")
    landed = both.target.does("count", OLD)
    with both.target.frozen():
        both.initiator.does("destroy")
        both.initiator.does("fill", NEW)
    for _ in range(50):
        both.target.does("work")
    assert both.target.does("count", NEW) == 0
    assert both.target.does("count", BLANK) > 0
    assert both.target.does("count", OLD) > landed


@pytest.mark.parametrize("operation", ["READ", "WRITE"])
def test_a_transfer_with_a_frozen_peer_runs_until_it_thaws(
    make_pair: Callable[..., Pair], operation: str
) -> None:
    both = make_pair(operation)
    both.start_and_stick(operation)
    with both.target.frozen():
        assert {both.initiator.does("poll", 0) for _ in range(200)} == {"PROC"}
    assert both.settle(0) == "DONE"


def test_polls_after_remove_remote_agent_raise_not_found_while_the_read_goes_on(
    make_pair: Callable[..., Pair],
) -> None:
    """NotFound is no end, and no way leads back to one: a peer that was added again is another."""
    both = make_pair("READ")
    both.start_and_stick("READ")
    metadata = both.target.does("metadata")
    both.initiator.does("part", "target")
    assert both.initiator.raises("poll", 0) == "nixlNotFoundError"
    assert both.initiator.does("count", BLANK)
    both.initiator.does("meet", metadata)
    assert both.initiator.raises("poll", 0) == "nixlNotFoundError"
    both.work_until(lambda: not both.initiator.does("count", BLANK), "the rest of it lands")
    assert both.initiator.raises("poll", 0) == "nixlNotFoundError"


@pytest.mark.parametrize("operation", ["READ", "WRITE"])
def test_a_transfer_with_a_killed_peer_raises_remote_disconnect_and_then_nothing_lands(
    make_pair: Callable[..., Pair], operation: str
) -> None:
    both = make_pair(operation)
    both.start_and_stick(operation)
    both.target.kill()

    def error() -> str:
        return both.initiator.raises("poll", 0)

    assert wait_for(error, "it has failed") == "nixlRemoteDisconnectError"
    both.initiator.does("fill", NEW)
    for _ in range(50):
        both.initiator.does("work")
    assert both.initiator.does("count", NEW) == LENGTH
    assert error() == "nixlRemoteDisconnectError"


def test_a_reader_that_was_frozen_while_its_holder_refilled_gets_a_mixture_and_done(
    make_pair: Callable[..., Pair],
) -> None:
    both = make_pair("READ")
    both.start_and_stick("READ")
    with both.initiator.frozen():
        both.target.does("fill", NEW)
    assert both.settle(0) == "DONE"
    assert both.initiator.does("count", NEW) > LENGTH // 4
    assert both.initiator.does("count", OLD) > 0


def test_a_writer_that_was_frozen_writes_over_what_its_target_holds_by_then_and_is_done(
    make_pair: Callable[..., Pair],
) -> None:
    both = make_pair("WRITE")
    both.start_and_stick("WRITE")
    with both.initiator.frozen():
        both.target.does("fill", NEW)
    assert both.settle(0) == "DONE"
    assert both.target.does("count", OLD) > LENGTH // 4


@pytest.mark.parametrize("operation", ["READ", "WRITE"])
@pytest.mark.parametrize("step", [DEREGISTER, ("part", "initiator")], ids=lambda step: step[0])
def test_a_target_cannot_stop_a_transfer_by_deregistering_or_by_removing_its_peer(
    make_pair: Callable[..., Pair], operation: str, step: tuple[Any, ...]
) -> None:
    both = make_pair(operation)
    both.start_and_stick(operation)
    both.target.does(*step)
    both.target.does("fill", NEW)
    destination = both.initiator if operation == "READ" else both.target
    value = NEW if operation == "READ" else OLD
    assert both.settle(0) == "DONE"
    assert destination.does("count", value) > LENGTH // 4


def test_nothing_is_read_from_a_holder_that_has_destroyed_its_agent(
    make_pair: Callable[..., Pair],
) -> None:
    both = make_pair("READ")
    both.start_and_stick("READ")
    with suppress(EOFError, ConnectionError):  # now and then UCX crashes in it
        both.target.does("destroy")
        both.target.does("fill", NEW)
    error = wait_for(lambda: both.initiator.raises("poll", 0), "it has failed")
    assert error == "nixlRemoteDisconnectError"
    assert both.initiator.does("count", NEW) == 0


def test_nothing_is_written_to_a_target_that_has_destroyed_its_agent(
    make_pair: Callable[..., Pair],
) -> None:
    both = make_pair("WRITE")
    both.start_and_stick("WRITE")
    both.target.does("destroy")
    both.target.does("fill", NEW)
    error = wait_for(lambda: both.initiator.raises("poll", 0), "it has failed")
    assert error == "nixlRemoteDisconnectError"
    assert both.target.does("count", NEW) == LENGTH


def test_a_transfer_that_threads_share_lands_with_the_next_one_after_it_was_given_up(
    make_pair: Callable[..., Pair],
) -> None:
    """NIXL's worker threads work only while they have a transfer: the late data wait for one."""
    both = make_pair("READ", threads=4)
    with both.target.frozen():
        both.start("READ", 0, PIECES // 2)
        both.initiator.does("release", 0)
        both.initiator.does("fill", NEW)
    for _ in range(50):
        both.target.does("work")
        both.initiator.does("work")
    assert both.initiator.does("count", OLD) == 0
    assert late_with_other_reads(both) > 0


def late_with_other_reads(both: Pair) -> int:
    """Old bytes in the first half of the memory, once others were read into the second."""

    def late() -> int:
        both.initiator.tries("part", "target")
        both.initiator.does("meet", both.target.does("metadata"))
        number, error = both.initiator.tries(
            "start", "READ", "target", both.address, PIECES // 2, PIECES // 2
        )
        if not error:
            both.settle(number)
        return int(both.initiator.does("count", OLD, 0, PIECES // 2))

    return wait_for(late, "something of the first READ lands")


def test_a_notification_bears_whatever_name_its_sender_chose(
    puppet: Callable[..., Strings], make_pair: Callable[..., Pair]
) -> None:
    both = make_pair("READ")
    forger = puppet("initiator")
    forger.hears()
    forger.does("meet", both.target.does("metadata"))
    forger.does("say", "target", "forged")

    def received() -> Any:
        forger.does("work")
        return both.target.does("work")

    assert wait_for(received, "it arrives") == ["initiator: forged"]


def test_a_reader_that_dies_before_its_holder_has_seen_the_read_takes_the_holder_with_it(
    make_pair: Callable[..., Pair],
) -> None:
    """UCX without RDMA answers a READ in software and does not expect that it cannot."""
    both = make_pair("READ")
    both.initiator.does("say", "target", "hello")
    received: list[str] = []

    def is_connected() -> bool:
        both.initiator.does("work")
        received.extend(both.target.does("work"))
        return bool(received)

    wait_for(is_connected, "they are connected")
    both.start("READ")
    both.initiator.kill()
    with suppress(EOFError, ConnectionError):
        for _ in range(50):
            both.target.does("work")
    both.target.process.join(PATIENCE)
    assert both.target.process.exitcode == -signal.SIGABRT


def test_on_one_host_a_read_is_over_without_the_frozen_holders_help(
    make_pair: Callable[..., Pair],
) -> None:
    """The reader's kernel copies. Only the news that it is done waits for the holder."""
    both = make_pair("READ", env={})
    with both.target.frozen():
        both.start("READ")
        assert both.initiator.does("count", OLD) == LENGTH
        assert both.initiator.does("poll", 0) == "PROC"
    assert both.settle(0) == "DONE"
