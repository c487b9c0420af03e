"""Engines that are stopped in the middle of a transfer, and go on later: SIGSTOP, over real NIXL.

What a transfer may still touch is nobody else's, and what comes too late counts for nothing. The
transfers go over TCP without shared memory, where a READ needs the holder's help as a WRITE does
its target's; whoever's memory one goes to stops a process when the first bytes have come.
"""

import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest

from tests.integration.connector_puppet import HALVES, ConnectorPuppet
from tests.integration.nixl_puppet import TCP
from tests.integration.strings import Strings, dance

NUM_BLOCKS = len(HALVES["first"])
ROUNDS = 100
"""In which NIXL is asked how the transfer is, and messages are looked for."""
TRANSFER_TIMEOUT = 8.0
"""Seconds: several times what a transfer takes on a machine that stands still now and then."""
LEASE = 5.0


@pytest.fixture(scope="module")
def theatre() -> ForkServerContext:
    """Loads NIXL's bindings once for all puppets."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.integration.connector_puppet"])
    return context


@pytest.fixture
def engine(
    theatre: ForkServerContext, tmp_path: Path, free_ports: Callable[[int], list[int]]
) -> Iterator[Callable[..., Strings]]:
    started: list[Strings] = []

    def start(name: str, **settings: Any) -> Strings:
        ends, strings = theatre.Pipe()
        arguments = (strings, tmp_path / f"{name}.log", TCP, ConnectorPuppet)
        process = theatre.Process(target=dance, args=(*arguments, name, free_ports(1)[0], settings))
        process.start()
        strings.close()
        started.append(Strings(name, process, ends))
        started[-1].hears()
        return started[-1]

    yield start
    for strings in started:
        strings.kill()


def test_blocks_that_a_frozen_holder_is_read_into_are_free_when_the_read_has_landed(
    engine: Callable[..., Strings],
) -> None:
    holder = engine("p")
    reader = engine("d", transfer_timeout=TRANSFER_TIMEOUT, quarantine_share=1.0)
    holder.does("fill", 1)
    first, second = (holder.does("prefill", f"p-{half}", half) for half in HALVES)
    reader.does("stop_in_the_middle", holder.process.pid)
    reader.does("load", "d-1", first, "first")
    holder.wait_until_stopped()
    assert reader.does("load_reported", "d-1") == "failed"
    assert reader.does("end_with_error", "d-1", "first"), "the host keeps its blocks"
    reader.does("quarantined", NUM_BLOCKS)
    assert reader.does("freed_by", ROUNDS) == []
    assert reader.does("share", "first") < 1, "the READ was in its middle"

    reader.does("load", "d-2", second, "second")
    assert reader.does("load_reported", "d-2") == "failed"
    assert reader.does("num_started") == 1, "an engine that keeps us waiting is not read from"

    holder.thaw()
    assert reader.does("freed", "d-1", "first") == 1, "it has landed by then"
    reader.does("quarantined", 0)
    reader.does("load", "d-3", holder.does("prefill", "p-3", "second"), "second")
    assert reader.does("load_reported", "d-3") == "ok"
    assert reader.does("share", "second") == 1
    assert reader.does("is_untouched", "first"), "and nothing of it after that"


def test_a_prefill_does_not_wait_for_a_frozen_engine_that_retained_the_last_turn(
    engine: Callable[..., Strings],
) -> None:
    holder = engine("d", bidirectional=True, retain_share=1.0)
    reader = engine(
        "p", bidirectional=True, prefill_load_timeout=TRANSFER_TIMEOUT, quarantine_share=1.0
    )
    holder.does("fill", 1)
    reader.does("load", "p-0", holder.does("retain", "d-0", "second"), "second")
    assert reader.does("load_reported", "p-0") == "ok"
    first, second = (holder.does("retain", f"d-{half}", half) for half in HALVES)
    reader.does("stop_in_the_middle", holder.process.pid)
    reader.does("load", "p-1", first, "first")
    holder.wait_until_stopped()
    assert reader.does("load_reported", "p-1") == "failed"
    assert reader.does("policy", "p-1") == "fail", "its blocks cannot be computed into"
    assert reader.does("end_with_error", "p-1", "first"), "the host keeps its blocks"
    reader.does("quarantined", NUM_BLOCKS)
    assert reader.does("freed_by", ROUNDS) == []
    assert reader.does("share", "first") < 1, "the READ was in its middle"

    reader.does("load", "p-2", second, "second")
    assert reader.does("load_reported", "p-2") == "failed"
    assert reader.does("num_started") == 2
    assert reader.does("policy", "p-2") == "recompute", "no READ touches its blocks"

    holder.thaw()
    assert reader.does("freed", "p-1", "first") == 1, "it has landed by then"
    reader.does("quarantined", 0)
    assert reader.does("is_untouched", "first")


@pytest.mark.parametrize("transfer_timeout", [60.0, 2.5])
def test_a_reader_frozen_until_its_holder_has_refilled_the_blocks_does_not_count_what_it_read(
    engine: Callable[..., Strings], transfer_timeout: float
) -> None:
    """It thaws within its own time for a READ, and after."""
    holder = engine("p", lease_duration=LEASE)
    reader = engine("d", transfer_timeout=transfer_timeout)
    holder.does("fill", 1)
    first = holder.does("prefill", "p-1", "first")
    reader.does("stop_in_the_middle")
    reader.begins("load", "d-1", first, "first")
    reader.wait_until_stopped()
    holder.does("freed", "p-1", "first")
    holder.does("fill", 2)
    reader.thaw()
    assert reader.hears() == (None, "")
    assert reader.does("load_reported", "d-1") == "failed"
    assert reader.does("end_with_error", "d-1", "first")
    assert reader.does("freed", "d-1", "first") < 1, "there was something to find out"
    reader.does("quarantined", 0)
    reader.does("load", "d-2", holder.does("prefill", "p-2", "second"), "second")
    assert reader.does("load_reported", "d-2") == "ok"
    assert reader.does("share", "second", 2) == 1
    assert reader.does("is_untouched", "first")


def test_blocks_that_are_written_from_are_free_when_the_frozen_target_has_all_of_them(
    engine: Callable[..., Strings],
) -> None:
    prefiller = engine("p", transfer_mode="push", transfer_timeout=TRANSFER_TIMEOUT)
    decoder = engine("d", transfer_mode="push")
    prefiller.does("fill", 1)
    coordinates = prefiller.does("coordinates")
    decoder.does("load", "d-2", {**coordinates, "transfer_id": "t-2"}, "second")
    decoder.does("stop_in_the_middle")
    decoder.does("load", "d-1", {**coordinates, "transfer_id": "t-1"}, "first")
    prefiller.does("prefill", "p-1", "first", "t-1")
    decoder.wait_until_stopped()
    prefiller.does("quarantined", NUM_BLOCKS)

    prefiller.does("prefill", "p-2", "second", "t-2")
    prefiller.does("freed", "p-2", "second")
    assert prefiller.does("num_started") == 1, "an engine that keeps us waiting is not written to"
    assert prefiller.does("freed_by", ROUNDS) == ["p-2"]

    decoder.thaw()
    prefiller.does("freed", "p-1", "first")
    assert decoder.does("load_reported", "d-1") == "ok"
    assert decoder.does("share", "first") == 1
    assert decoder.does("load_reported", "d-2") == "failed"
    assert decoder.does("share", "second") == 0
    prefiller.does("quarantined", 0)
    prefiller.does("fill", 2)
    decoder.does("load", "d-3", {**coordinates, "transfer_id": "t-3"}, "second")
    prefiller.does("prefill", "p-3", "second", "t-3")
    assert decoder.does("load_reported", "d-3") == "ok"
    assert decoder.does("share", "second", 2) == 1
    assert decoder.does("share", "first") == 1, "nothing of the first landed later"


def test_blocks_that_a_frozen_engine_writes_to_are_free_when_its_write_has_landed(
    engine: Callable[..., Strings],
) -> None:
    prefiller = engine("p", transfer_mode="push")
    decoder = engine("d", transfer_mode="push", registration_timeout=TRANSFER_TIMEOUT)
    prefiller.does("fill", 1)
    coordinates = prefiller.does("coordinates")
    decoder.does("stop_in_the_middle", prefiller.process.pid)
    decoder.does("load", "d-1", {**coordinates, "transfer_id": "t-1"}, "first")
    prefiller.does("prefill", "p-1", "first", "t-1")
    prefiller.wait_until_stopped()
    assert decoder.does("load_reported", "d-1") == "failed"
    assert decoder.does("end_with_error", "d-1", "first"), "the host keeps its blocks"
    decoder.does("quarantined", NUM_BLOCKS)
    assert decoder.does("freed_by", ROUNDS) == []
    assert decoder.does("share", "first") < 1, "the WRITE was in its middle"

    prefiller.thaw()
    assert decoder.does("freed", "d-1", "first") == 1, "it has landed by then"
    decoder.does("quarantined", 0)
    prefiller.does("freed", "p-1", "first")
    decoder.does("load", "d-2", {**coordinates, "transfer_id": "t-2"}, "second")
    prefiller.does("prefill", "p-2", "second", "t-2")
    assert decoder.does("load_reported", "d-2") == "ok"
    assert decoder.does("share", "second") == 1
    assert decoder.does("is_untouched", "first"), "and nothing of it after that"
