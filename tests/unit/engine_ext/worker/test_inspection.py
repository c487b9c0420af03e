"""What can be seen of a worker half from outside."""

import logging
import threading
from collections.abc import Iterator
from hashlib import blake2b

import pytest

from engine_ext.common.config import ConnectorConfig
from engine_ext.common.inspection import LIMIT
from engine_ext.common.orders import LeaseGrant, StepMetadata
from engine_ext.common.types import EngineIdentity
from engine_ext.http import leases
from engine_ext.wire import notifications as wire
from engine_ext.wire.errors import EXTENSION_VERSION
from engine_ext.wire.listener import HandshakeServer
from engine_ext.worker.agent import TransferState
from engine_ext.worker.results import MOST_ENGINES, MOST_TRANSFERS, TransferLog
from engine_ext.worker.worker import WorkerConnector
from tests.unit.engine_ext.scheduler.fakes import FakeAgent, regions, source
from tests.unit.engine_ext.worker.test_worker import (
    GEOMETRY,
    Harness,
    lease,
    listening,
    remote_metadata,
)

KEY = leases.new_key()


@pytest.fixture
def holder() -> Iterator[HandshakeServer]:
    """The side channel of a prefill engine that runs our extension."""
    yield from listening(remote_metadata(extension=EXTENSION_VERSION))


@pytest.fixture
def harness() -> Iterator[Harness]:
    made = Harness()
    yield made
    made.loop.close()


def test_a_lease_is_seen_with_its_age_its_end_and_its_readers_horizons(harness: Harness) -> None:
    lease(harness)
    harness.step(10)
    harness.hears(wire.Renew(1, ("p-1",)), sender="agent-d")
    (seen,) = harness.loop.inspect(harness.now + 5).leases
    assert (seen.request_id, seen.state, seen.age_seconds, seen.seconds_left) == (
        "p-1",
        "granted",
        15,
        15,
    )
    assert [(reader.agent, reader.seconds_left) for reader in seen.readers] == [("agent-d", 15)]
    harness.hears(wire.Read("p-1", sequence=1), sender="agent-d")
    assert harness.loop.inspect(harness.now).num_leases == 0
    (bucket,) = [b for b in harness.stats.lease_age_at_read_seconds.buckets() if b.times]
    assert bucket == (1, 10)


def test_names_are_shown_hashed_and_found_by_name(harness: Harness) -> None:
    names = ("p-1", "p-2")
    harness.apply(StepMetadata((*(LeaseGrant(name, 30) for name in names),)))
    shown = leases.rank(harness.loop.inspect(harness.now), KEY)
    assert [one["request"] for one in shown["leases"]] == [leases.hashed(n, KEY) for n in names]
    assert not any(name in str(shown) for name in names)
    assert leases.hashed("p-1", leases.new_key()) != leases.hashed("p-1", KEY)
    asked = leases.rank(harness.loop.inspect(harness.now, "p-2"), KEY)
    assert [one["request"] for one in asked["leases"]] == [leases.hashed("p-2", KEY)]
    assert asked["num_leases"] == 2


def test_of_many_leases_the_first_are_shown_and_all_are_counted(harness: Harness) -> None:
    grants = tuple(LeaseGrant(f"p-{number}", 30) for number in range(LIMIT + 5))
    harness.apply(StepMetadata((*grants,)))
    seen = harness.loop.inspect(harness.now)
    assert (len(seen.leases), seen.num_leases) == (LIMIT, LIMIT + 5)
    last = harness.loop.inspect(harness.now, f"p-{LIMIT + 4}")
    assert [one.request_id for one in last.leases] == [f"p-{LIMIT + 4}"]


def test_a_peer_is_seen_in_use_and_an_overdue_read_in_quarantine(
    harness: Harness, holder: HandshakeServer
) -> None:
    transfer = harness.reading(source(port=holder.port))
    (peer,) = harness.loop.inspect(harness.now + 3).peers
    assert (peer.engine_id, peer.port, peer.rank) == ("engine-p", holder.port, 0)
    assert (peer.connected_seconds, peer.in_use) == (3, True)
    harness.step(harness.config.transfer_timeout + 1)
    seen = harness.loop.inspect(harness.now)
    (one,) = seen.quarantined
    assert (one.request_id, one.engine_id, one.num_blocks) == ("d-1", "engine-p", 7)
    assert one.overdue_seconds == pytest.approx(1)
    assert seen.num_quarantined == 1
    transfer.state = TransferState.DONE
    harness.step()
    assert harness.loop.inspect(harness.now).quarantined == ()


def test_a_read_that_counted_is_one_line_at_info(
    harness: Harness, holder: HandshakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "engine_ext.worker.results"):
        transfer = harness.reading(source(port=holder.port))
        transfer.state = TransferState.DONE
        harness.step()
        assert not [one for one in caplog.records if one.name.endswith(".results")], (
            "not proven yet"
        )
        read = wire.decode_notification(transfer.notification)
        assert isinstance(read, wire.Read)
        harness.now += 0.5
        harness.hears(wire.ReadAck(read.sequence, valid=True))
    (line,) = [one.getMessage() for one in caplog.records if one.name.endswith(".results")]
    what = "request d-1: READ peer=engine-p blocks=7 bytes=57344 ms=500.0 proven_tokens=100"
    assert line == what


@pytest.mark.parametrize(("remote_id", "shown_as"), [("p-1", "READ"), ("loan-1", "LOAN")])
def test_transfers_are_shown_with_their_engine_and_hashed_names(
    harness: Harness, holder: HandshakeServer, remote_id: str, shown_as: str
) -> None:
    transfer = harness.reading(source(remote_id, port=holder.port))
    assert leases.rank(harness.loop.inspect(harness.now), KEY)["transfers"] == [], "it runs"
    transfer.state = TransferState.DONE
    harness.step()
    read = wire.decode_notification(transfer.notification)
    assert isinstance(read, wire.Read)
    harness.now += 0.5
    harness.hears(wire.ReadAck(read.sequence, valid=True))
    shown = leases.rank(harness.loop.inspect(harness.now + 3), KEY)
    assert shown["engine_id"] == "engine-d"
    what = {"what": shown_as, "engine_id": "engine-p"}
    assert shown["moved"] == [
        what | {"transfers": 1, "bytes": 57344, "seconds": 0.5, "busy_seconds": 0.5}
    ]
    (one,) = shown["transfers"]
    assert one == what | {
        "found_by": leases.found_by("d-1"),
        "blocks": 7,
        "bytes": 57344,
        "seconds": pytest.approx(0.5),
        "age_seconds": 3,
    }


def test_transfers_and_engines_are_remembered_up_to_a_number() -> None:
    report = TransferLog(lambda: 5.0)
    for number in range(2 * MOST_ENGINES):
        report.record(
            "READ",
            f"d-{number}",
            f"p-{number}",
            num_blocks=1,
            num_bytes=2,
            began=4.0,
            num_proven=0,
        )
    assert len(report.moved()) == MOST_ENGINES
    assert len(seen := report.transfers(6.0)) == MOST_TRANSFERS
    assert (seen[-1].request_id, seen[-1].seconds, seen[-1].age_seconds) == ("d-511", 1, 1)


@pytest.mark.parametrize(
    ("times", "busy"),
    [
        ([(0, 2), (3, 4)], 3),
        ([(0, 2), (1, 3), (2, 5)], 5),  # in order, and overlapping
        ([(4, 5), (6, 7), (0, 10)], 10),  # short ones within a long one
        ([(1, 2), (4, 5), (3, 6), (0, 7)], 7),
        ([(1, 1), (1, 1)], 0),
    ],
)
def test_transfers_that_run_together_count_their_time_once(
    times: list[tuple[int, int]], busy: float
) -> None:
    now = 0.0
    report = TransferLog(lambda: now)
    for began, ended in times:
        now = ended
        report.record("READ", "d-1", "p-1", num_blocks=1, num_bytes=8, began=began, num_proven=0)
    (moved,) = report.moved()
    assert (moved.transfers, moved.bytes) == (len(times), 8 * len(times))
    assert moved.seconds == sum(ended - began for began, ended in times)
    assert moved.busy_seconds == busy


ATTEMPT = ".0123456789" + "42"
"""As the router adds it."""


@pytest.mark.parametrize(
    "client", ["mine", "mine-7", "mine-0a1b2c3d", "cmpl-1", "a.0123456789", "."]
)
@pytest.mark.parametrize("kind", ["chatcmpl-{}", "0_chatcmpl-{}", "cmpl-{}-0", "12_cmpl-{}-13"])
@pytest.mark.parametrize("suffix", ["", "-0a1b2c3d"])
def test_a_transfer_is_found_by_the_clients_part_of_its_requests_name(
    client: str, kind: str, suffix: str
) -> None:
    name = kind.format(client + ATTEMPT) + suffix
    assert leases.found_by(name) == blake2b(client.encode(), digest_size=8).hexdigest()


def test_what_engines_replace_in_a_name_makes_no_difference() -> None:
    assert leases.found_by(f"cmpl-a:b{ATTEMPT}-0") == leases.found_by(f"cmpl-a-b{ATTEMPT}-0")


def test_a_confirmation_after_the_lease_has_ended_is_counted(harness: Harness) -> None:
    lease(harness)
    harness.hears(wire.Read("p-1", sequence=1), sender="agent-d")
    assert harness.stats.confirmations_late == 0
    harness.hears(wire.Read("p-1", sequence=2), sender="agent-e")
    harness.hears(wire.Read("p-1"), sender="agent-e")
    assert harness.stats.confirmations_late == 1, "one had read, one never did"
    harness.agent.inbox = [b"p-1:1"]
    harness.step()
    assert harness.stats.confirmations_late == 2


@pytest.fixture
def worker() -> Iterator[WorkerConnector]:
    identity = EngineIdentity("e", "127.0.0.1", 1)
    made = WorkerConnector(
        ConnectorConfig(engine_id="e"), GEOMETRY, identity, lambda *_: FakeAgent()
    )
    made.register_kv_caches(regions())
    yield made
    made.shutdown()


def test_any_thread_may_ask_a_running_worker(worker: WorkerConnector) -> None:
    worker.start_load_kv(StepMetadata((LeaseGrant("p-1", 30),)))
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda: found.append(worker.inspect(seconds=60).num_leases))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [1] * 8


def test_inspecting_a_worker_that_has_ended_times_out(worker: WorkerConnector) -> None:
    worker.shutdown()
    with pytest.raises(TimeoutError):
        worker.inspect(seconds=0.1)
