"""The owner thread's loop, stepped by hand: a fake agent, a fake clock, a real handshake."""

import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from engine_ext.common.access import Access, SharedSecret
from engine_ext.common.config import ConnectorConfig
from engine_ext.common.orders import (
    Decline,
    Expect,
    Fence,
    LeaseCancel,
    LeaseGrant,
    LoanAnswer,
    LoanAsk,
    PullOrder,
    Revoke,
    StepMetadata,
    TrackOrder,
    Untrack,
)
from engine_ext.common.types import (
    CacheGeometry,
    ConnectorStats,
    EngineIdentity,
    LoanRequest,
    PeerAddress,
    RemoteSource,
    TransferResults,
)
from engine_ext.wire import handshake
from engine_ext.wire import notifications as wire
from engine_ext.wire.errors import EXTENSION_VERSION
from engine_ext.wire.handshake import AgentMetadata
from engine_ext.wire.listener import HandshakeServer
from engine_ext.worker.agent import TransferState
from engine_ext.worker.loop import (
    IDLE_WAIT,
    LEASED_WAIT,
    PEER_WAIT,
    RECENT_WAIT,
    TRANSFER_WAIT,
    WAIT_SHARE,
)
from engine_ext.worker.results import MAX_LOAN_KEYS, MAX_LOAN_REQUESTS
from engine_ext.worker.sealed import sealed
from tests.unit.engine_ext.scheduler.fakes import (
    FakeAgent,
    FakeTransfer,
    metadata_of,
    regions,
    source,
)
from tests.unit.engine_ext.worker.stepped_loop import SteppedLoop

GEOMETRY = CacheGeometry(block_size=16, num_blocks=32)
FACTORS = {"model": "m", "dtype": "float32"}


def remote_metadata(engine_id: str = "engine-p", extension: int | None = None) -> AgentMetadata:
    layers = regions()
    names = [region.name for region in layers]
    more = {"region_names": names, "disagg_ext": extension, "lease_extension": 20.0}
    return metadata_of(engine_id, "agent-p", layers, **more)


@pytest.fixture
def prefiller() -> Iterator[HandshakeServer]:
    """The side channel of a stock prefill engine."""
    yield from listening(remote_metadata())


@pytest.fixture
def silent() -> Iterator[int]:
    """A port where connections are taken and nothing is ever said."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        yield door.getsockname()[1]


@pytest.fixture
def extended() -> Iterator[HandshakeServer]:
    """The side channel of a prefill engine that runs our extension."""
    yield from listening(remote_metadata(extension=EXTENSION_VERSION))


def listening(metadata: AgentMetadata) -> Iterator[HandshakeServer]:
    payload = handshake.encode_payload(metadata, FACTORS)
    server = HandshakeServer("127.0.0.1", 0, {(0, 0): payload})
    yield server
    server.close()


class Harness(SteppedLoop):
    def __init__(
        self,
        config: ConnectorConfig | None = None,
        geometry: CacheGeometry = GEOMETRY,
        agent: FakeAgent | None = None,
        stats: ConnectorStats | None = None,
    ) -> None:
        config = config or ConnectorConfig(engine_id="engine-d")
        identity = EngineIdentity("engine-d", "127.0.0.1", 5601, compat_factors=FACTORS)
        super().__init__(config, identity, geometry, regions(), agent, stats=stats)

    def results_after(self, condition: Callable[[], object]) -> TransferResults:
        self.step_until(condition)
        self.step()
        return self.results.take()

    def sent(self) -> list[wire.Notification]:
        """What was sent and not yet looked at."""
        messages, self.agent.sent = self.agent.sent, []
        return [wire.decode_notification(message) for _, message in messages]

    def hears(self, message: wire.ExtensionMessage, sender: str = "agent-p") -> None:
        self.agent.sender = sender
        self.agent.inbox.append(wire.encode_extension(message))
        self.step()

    def reading(self, origin: RemoteSource, *, recomputes: bool = False) -> FakeTransfer:
        """Orders a pull of 100 tokens and steps until its READ runs."""
        self.apply(StepMetadata((replace(pull(origin), recomputes=recomputes),)))
        self.step_until(lambda: self.agent.transfers)
        return self.agent.transfers[0]


def pull(origin: RemoteSource, request_id: str = "d-1") -> PullOrder:
    return PullOrder(request_id, origin, (tuple(range(20, 27)),), 0, 100, is_proven=True)


@pytest.fixture
def harness() -> Iterator[Harness]:
    made = Harness()
    yield made
    made.loop.close()


OK = TransferResults(finished_recving=frozenset(["d-1"]))
FAILED = TransferResults(finished_recving=frozenset(["d-1"]), failed_recving=frozenset(["d-1"]))


def test_a_read_is_reported_once_and_notifies_the_source(
    harness: Harness, prefiller: HandshakeServer
) -> None:
    transfer = harness.reading(source(port=prefiller.port))
    assert transfer.notification == b"p-1:1"
    assert transfer.local == [*range(20, 27), *range(32 + 20, 32 + 27)]
    assert transfer.remote == [*range(7), *range(32, 32 + 7)]
    assert harness.step() == TRANSFER_WAIT
    assert not harness.results.take()
    transfer.state = TransferState.DONE
    harness.step()
    assert harness.results.take() == OK
    assert transfer.released
    assert harness.stats.pulls_ok == 1
    harness.step()
    assert not harness.results.take()


def test_a_read_that_hangs_is_polled_less_often_until_a_new_one_begins(
    harness: Harness, prefiller: HandshakeServer
) -> None:
    harness.reading(source(port=prefiller.port))
    assert harness.step() == TRANSFER_WAIT
    assert harness.step(seconds=0.05) == pytest.approx(WAIT_SHARE * 0.05)
    assert harness.step(seconds=10) == RECENT_WAIT
    harness.apply(StepMetadata((pull(source(port=prefiller.port), "d-2"),)))
    assert harness.step() == TRANSFER_WAIT


def test_many_requests_to_one_engine_share_one_handshake(
    harness: Harness, prefiller: HandshakeServer
) -> None:
    orders = tuple(pull(source(port=prefiller.port), f"d-{i}") for i in range(8))
    harness.apply(StepMetadata(orders))
    harness.step_until(lambda: len(harness.agent.transfers) == 8)
    assert harness.agent.peers == ["agent-p"]
    assert harness.stats.handshakes_ok == 1


def test_a_silent_peer_fails_its_request_at_the_deadline_and_delays_no_other(
    harness: Harness, prefiller: HandshakeServer, silent: int
) -> None:
    dead = source("p-dead", engine_id="dead", port=silent)
    live = pull(source(port=prefiller.port), "d-live")
    harness.apply(StepMetadata((pull(dead), live)))
    harness.step_until(lambda: harness.agent.transfers)
    assert not harness.results.take()
    harness.step(harness.config.handshake_timeout)
    assert harness.results.take() == FAILED


def test_a_peer_that_is_not_there_fails_its_request_before_the_deadline(harness: Harness) -> None:
    dead = source("p-dead", engine_id="dead", port=1)
    harness.apply(StepMetadata((pull(dead),)))
    assert harness.results_after(lambda: harness.stats.handshakes_failed) == FAILED


@pytest.mark.parametrize("method", ["add_remote", "prepare", "start_read"])
def test_a_nixl_error_fails_the_request(
    harness: Harness, prefiller: HandshakeServer, method: str
) -> None:
    harness.agent.failing = {method}
    harness.apply(StepMetadata((pull(source(port=prefiller.port)),)))
    assert harness.results_after(lambda: harness.stats.pulls_failed) == FAILED


def test_a_failed_read_notifies_the_source_and_the_next_one_shakes_hands_again(
    harness: Harness, prefiller: HandshakeServer
) -> None:
    harness.reading(source(port=prefiller.port)).state = TransferState.FAILED
    harness.step()
    assert harness.results.take() == FAILED
    assert harness.agent.sent == [("agent-p", b"p-1:1")]
    assert harness.agent.peers == []
    harness.apply(StepMetadata((pull(source("p-2", port=prefiller.port), "d-2"),)))
    harness.step_until(lambda: len(harness.agent.transfers) == 2)
    assert harness.stats.handshakes_ok == 2


def quarantined(harness: Harness) -> int:
    """Blocks."""
    return harness.stats.quarantined_blocks_active


@pytest.mark.parametrize("failing", [set(), {"poll"}])
def test_an_overdue_read_is_reported_and_its_blocks_are_fenced_until_nixl_has_ended_it(
    harness: Harness, prefiller: HandshakeServer, failing: set[str]
) -> None:
    transfer = harness.reading(source(port=prefiller.port))
    harness.agent.failing = failing
    harness.step(harness.config.transfer_timeout + 1)
    assert harness.results.take() == FAILED
    assert quarantined(harness) == 7
    harness.apply(StepMetadata((Fence("d-1"),)))
    harness.step(10_000)
    assert not harness.results.take()
    harness.agent.failing = set()
    transfer.state = TransferState.DONE
    harness.step()
    assert harness.results.take() == TransferResults(finished_sending=frozenset({"d-1"}))
    assert replace(transfer).released
    assert (quarantined(harness), harness.loop.num_open) == (0, 0)


def test_an_overdue_read_into_blocks_that_will_be_computed_is_reported_when_it_has_ended(
    harness: Harness, prefiller: HandshakeServer
) -> None:
    transfer = harness.reading(source(port=prefiller.port), recomputes=True)
    harness.step(10_000)
    assert not harness.results.take()
    transfer.state = TransferState.DONE
    harness.step()
    assert harness.results.take() == FAILED


def test_an_engine_with_a_read_in_quarantine_is_not_read_from_before_that_has_ended(
    harness: Harness, prefiller: HandshakeServer
) -> None:
    transfer = harness.reading(source(port=prefiller.port))
    harness.step(harness.config.transfer_timeout + 1)
    harness.results.take()
    again = pull(source("p-2", port=prefiller.port), "d-2")
    harness.apply(StepMetadata((again,)))
    harness.step()
    assert harness.results.take().failed_recving == {"d-2"}
    assert len(harness.agent.transfers) == 1
    transfer.state = TransferState.FAILED
    harness.step()
    harness.apply(StepMetadata((pull(source("p-3", port=prefiller.port), "d-3"),)))
    harness.step_until(lambda: len(harness.agent.transfers) == 2)


def test_a_fence_ends_a_load_that_has_not_begun(
    harness: Harness, prefiller: HandshakeServer
) -> None:
    harness.apply(StepMetadata((pull(source(port=prefiller.port)),)))
    harness.apply(StepMetadata((Fence("d-1"),)))
    harness.step()
    assert harness.results.take() == replace(FAILED, finished_sending=frozenset({"d-1"}))
    harness.step_until(lambda: harness.agent.sent)
    assert harness.agent.sent == [("agent-p", b"p-1:1")]
    assert harness.agent.transfers == []


def test_a_fence_waits_for_the_read_that_is_under_way(
    harness: Harness, prefiller: HandshakeServer
) -> None:
    transfer = harness.reading(source(port=prefiller.port))
    harness.apply(StepMetadata((Fence("d-1"),)))
    harness.step()
    assert not harness.results.take()
    transfer.state = TransferState.DONE
    harness.step()
    assert harness.results.take() == replace(FAILED, finished_sending=frozenset({"d-1"}))


def test_a_fence_of_a_load_that_is_over_is_answered_at_once(
    harness: Harness, prefiller: HandshakeServer
) -> None:
    harness.reading(source(port=prefiller.port)).state = TransferState.DONE
    harness.step()
    assert harness.results.take() == OK
    harness.apply(StepMetadata((Fence("d-1"),)))
    harness.step()
    assert harness.results.take() == TransferResults(finished_sending=frozenset({"d-1"}))


def test_blocks_outside_the_memory_fail_the_request_not_the_loop(
    harness: Harness, prefiller: HandshakeServer
) -> None:
    harness.apply(StepMetadata((pull(source(port=prefiller.port, blocks=[1]), "d-1"),)))
    assert harness.results_after(lambda: harness.stats.pulls_failed) == FAILED
    assert harness.agent.sent == [("agent-p", b"p-1:1")]


@pytest.mark.parametrize("enforce", [True, False])
def test_another_model_is_refused_by_name_unless_compatibility_is_not_enforced(
    enforce: bool, caplog: pytest.LogCaptureFixture
) -> None:
    payload = handshake.encode_payload(remote_metadata(), {**FACTORS, "dtype": "bfloat16"})
    server = HandshakeServer("127.0.0.1", 0, {(0, 0): payload})
    config = ConnectorConfig(engine_id="engine-d", enforce_handshake_compat=enforce)
    harness = Harness(config=config)
    harness.apply(StepMetadata((pull(source(port=server.port)),)))
    harness.step_until(lambda: harness.stats.pulls_failed or harness.agent.transfers)
    assert bool(harness.agent.transfers) is not enforce
    assert "dtype (float32 here, bfloat16 there)" in caplog.text
    harness.loop.close()
    server.close()


def test_an_engine_that_restarted_on_the_same_address_is_not_read() -> None:
    payload = handshake.encode_payload(remote_metadata("engine-new"), FACTORS)
    server = HandshakeServer("127.0.0.1", 0, {(0, 0): payload})
    harness = Harness()
    harness.apply(StepMetadata((pull(source(port=server.port)),)))
    assert harness.results_after(lambda: harness.stats.pulls_failed) == FAILED
    harness.loop.close()
    server.close()


def test_heartbeats_go_out_while_a_request_waits_and_stop_after(
    harness: Harness, prefiller: HandshakeServer
) -> None:
    origin = source(port=prefiller.port)
    harness.apply(StepMetadata((TrackOrder("d-1", origin.address, "p-1"),)))
    harness.step_until(lambda: harness.agent.sent)
    assert harness.agent.sent == [("agent-p", b"HB:p-1")]
    harness.step(4.9)
    assert len(harness.agent.sent) == 1
    harness.step(0.1)
    assert len(harness.agent.sent) == 2
    harness.apply(StepMetadata((Untrack("d-1"),)))
    harness.step(100)
    assert len(harness.agent.sent) == 2


def test_a_release_waits_for_the_handshake_and_is_sent_once(
    harness: Harness, prefiller: HandshakeServer
) -> None:
    harness.apply(StepMetadata((Decline(source(port=prefiller.port)),)))
    harness.step_until(lambda: harness.agent.sent)
    harness.step()
    assert harness.agent.sent == [("agent-p", b"p-1:1")]


def test_a_release_to_a_dead_peer_is_dropped(harness: Harness) -> None:
    harness.apply(StepMetadata((Decline(source(port=1)),)))
    harness.step()
    harness.step(harness.config.handshake_timeout)
    harness.step()
    assert harness.stats.handshakes_failed == 1
    assert harness.step(100) == IDLE_WAIT


def end(harness: Harness, seconds: float) -> None:
    """Until leases of that length have ended, grace included."""
    harness.step(seconds)
    harness.step(harness.config.revoke_grace)


SENT = TransferResults(finished_sending=frozenset(["p-1"]))


def lease(harness: Harness) -> None:
    harness.apply(StepMetadata((Expect("p-1"),)))
    harness.apply(StepMetadata((LeaseGrant("p-1", 30),)))


def test_a_leased_request_is_freed_by_its_read(harness: Harness) -> None:
    lease(harness)
    harness.step()
    assert not harness.results.take()
    harness.agent.inbox = [b"p-1:1", b"p-1:1"]
    harness.step()
    assert harness.results.take() == SENT
    assert (harness.stats.leases_released, harness.stats.notifications_unknown) == (1, 1)


def test_an_unread_lease_ends_after_its_duration_and_a_grace(harness: Harness) -> None:
    lease(harness)
    assert harness.step(29.9) == LEASED_WAIT
    harness.step(0.1)
    assert harness.stats.leases_expired == 1
    assert not harness.results.take()
    harness.step(harness.config.revoke_grace)
    assert harness.results.take() == SENT


def test_heartbeats_keep_a_lease_for_as_long_as_the_decoder_queues(harness: Harness) -> None:
    lease(harness)
    for _ in range(100):
        harness.agent.inbox = [b"HB:p-1,unknown"]
        harness.step(5)
    assert not harness.results.take()
    end(harness, 20)
    assert harness.results.take() == SENT


def test_a_read_that_arrives_before_the_grant_frees_at_the_grant(harness: Harness) -> None:
    harness.apply(StepMetadata((Expect("p-1"),)))
    harness.agent.inbox = [b"p-1:1"]
    harness.step()
    harness.apply(StepMetadata((LeaseGrant("p-1", 30),)))
    assert harness.results.take() == SENT
    harness.step(1000)
    assert not harness.results.take()


def test_a_cancelled_prefill_is_never_reported(harness: Harness) -> None:
    harness.apply(StepMetadata((Expect("p-1"),)))
    harness.apply(StepMetadata((LeaseCancel("p-1"),)))
    harness.agent.inbox = [b"p-1:1"]
    harness.step(1000)
    assert not harness.results.take()


def test_notifications_that_make_no_sense_are_counted_and_ignored(harness: Harness) -> None:
    lease(harness)
    harness.agent.inbox = [b"", b"\xff", b"no colon", b"other:1", b"HB:", b"PUSH_REG:x"]
    harness.step()
    assert not harness.results.take()
    assert harness.stats.notifications_unknown == 5


def test_a_failing_notification_queue_is_survived_by_leases(harness: Harness) -> None:
    lease(harness)
    harness.agent.failing = {"notifications"}
    end(harness, 31)
    assert harness.results.take() == SENT


def test_both_legs_on_one_engine_end_the_lease(harness: Harness) -> None:
    lease(harness)
    harness.apply(StepMetadata((Decline(source(engine_id="engine-d")),)))
    assert harness.results.take() == SENT


# Between two engines that run the extension, what matters is answered.


def arrived(harness: Harness, extended: HandshakeServer) -> int:
    """A READ whose data is here; returns the sequence number its answer must carry."""
    transfer = harness.reading(source(port=extended.port))
    transfer.state = TransferState.DONE
    harness.step()
    assert not harness.results.take()
    read = wire.decode_notification(transfer.notification)
    assert isinstance(read, wire.Read)
    assert read.request_id == "p-1"
    return read.sequence


def test_a_reader_sends_a_hello_only_to_a_source_with_the_extension(
    harness: Harness, extended: HandshakeServer
) -> None:
    harness.reading(source(port=extended.port))
    assert harness.sent() == [wire.Hello(b"fake")]


def test_a_read_counts_once_the_source_answers_that_it_was_in_time(
    harness: Harness, extended: HandshakeServer
) -> None:
    sequence = arrived(harness, extended)
    harness.hears(wire.ReadAck(sequence, valid=True))
    assert harness.results.take() == OK


def test_a_read_that_outlived_its_lease_is_a_failed_load(
    harness: Harness, extended: HandshakeServer
) -> None:
    sequence = arrived(harness, extended)
    harness.hears(wire.ReadAck(sequence, valid=False))
    assert harness.results.take() == FAILED
    assert harness.stats.reads_unproven == 1


def test_a_source_that_does_not_answer_fails_the_load_and_is_forgotten(
    harness: Harness, extended: HandshakeServer
) -> None:
    arrived(harness, extended)
    harness.step(harness.config.confirm_timeout)
    assert harness.results.take() == FAILED
    assert harness.agent.peers == []


def test_an_answer_by_another_agent_or_to_another_read_does_not_count(
    harness: Harness, extended: HandshakeServer
) -> None:
    sequence = arrived(harness, extended)
    harness.hears(wire.ReadAck(sequence, valid=True), sender="agent-x")
    harness.hears(wire.ReadAck(sequence + 1, valid=True))
    assert not harness.results.take()


def tracked(harness: Harness, extended: HandshakeServer) -> tuple[RemoteSource, wire.Renew]:
    """A request that waits for its READ, and its first heartbeat."""
    origin = source(port=extended.port)
    harness.apply(StepMetadata((TrackOrder("d-1", origin.address, "p-1"),)))
    harness.step_until(lambda: len(harness.agent.sent) == 2)
    _, renew = harness.sent()
    assert isinstance(renew, wire.Renew)
    return origin, renew


def test_an_answered_heartbeat_spares_the_wait_for_the_answer(
    harness: Harness, extended: HandshakeServer
) -> None:
    origin, renew = tracked(harness, extended)
    assert renew.request_ids == ("p-1",)
    harness.hears(wire.Renewed(renew.sequence, 20.0))
    harness.reading(origin).state = TransferState.DONE
    harness.step()
    assert harness.results.take() == OK


def test_a_read_that_is_over_when_posted_is_judged_by_the_time_after_it(
    harness: Harness, extended: HandshakeServer
) -> None:
    """Posting copies, for seconds: the lease that was valid before may have ended meanwhile."""
    origin, renew = tracked(harness, extended)
    harness.hears(wire.Renewed(renew.sequence, 20.0))
    harness.agent.starts_as = TransferState.DONE
    harness.apply(StepMetadata((pull(origin),)))
    harness.step()
    assert len(harness.agent.transfers) == 1
    harness.step(25)
    assert not harness.results.take()
    read = wire.decode_notification(harness.agent.transfers[0].notification)
    assert isinstance(read, wire.Read)
    harness.hears(wire.ReadAck(read.sequence, valid=False))
    assert harness.results.take() == FAILED


def test_a_lease_known_to_be_gone_is_not_read(harness: Harness, extended: HandshakeServer) -> None:
    origin, _ = tracked(harness, extended)
    harness.hears(wire.Gone(("p-1",)))
    harness.apply(StepMetadata((pull(origin),)))
    harness.step()
    assert harness.results.take() == FAILED
    assert harness.agent.transfers == []


def test_a_source_answers_heartbeats_and_notifies_the_reader_when_a_lease_ends(
    harness: Harness,
) -> None:
    lease(harness)
    harness.hears(wire.Hello(b"agent-d"), sender="agent-d")
    harness.hears(wire.Renew(5, ("p-1", "p-0")), sender="agent-d")
    assert harness.sent() == [wire.Renewed(5, 20.0, gone=("p-0",), clock=harness.now)]
    harness.step(30)
    assert harness.sent() == [wire.Gone(("p-1",))]
    assert not harness.results.take()


def test_a_stock_reader_gets_no_message_when_its_lease_ends(harness: Harness) -> None:
    lease(harness)
    harness.agent.sender = "stock-d"
    harness.agent.inbox = [b"HB:p-1"]
    harness.step()
    harness.step(60)
    assert harness.stats.leases_expired == 1
    assert harness.sent() == []


def test_in_mixed_mode_a_stock_readers_messages_count_after_its_lease_has_ended() -> None:
    nixl, stats = FakeAgent(sender="stock-d"), ConnectorStats()
    access = Access(SharedSecret.of(b"a secret of the fleet"), is_mixed=True)
    harness = Harness(agent=sealed(nixl, access, stats), stats=stats)  # type: ignore[arg-type] # sealed
    for _ in range(2):
        lease(harness)
        nixl.inbox = [b"HB:p-1"]
        harness.step()
        end(harness, 60)
    assert (stats.heartbeats_received, stats.notifications_unsealed) == (2, 0)
    harness.loop.close()


def test_a_source_answers_whether_a_read_was_in_time(harness: Harness) -> None:
    lease(harness)
    harness.hears(wire.Read("p-1", sequence=1), sender="agent-d")
    assert harness.results.take() == SENT
    harness.hears(wire.Read("p-1", sequence=2), sender="agent-d")
    assert harness.sent() == [wire.ReadAck(1, valid=True), wire.ReadAck(2, valid=False)]


def test_a_release_is_idempotent_and_unanswered(harness: Harness) -> None:
    lease(harness)
    for _ in range(2):
        harness.hears(wire.Read("p-1"), sender="agent-d")
    assert harness.results.take() == SENT
    assert harness.sent() == []


def test_a_revoked_turn_is_kept_for_its_grace(harness: Harness) -> None:
    harness.apply(StepMetadata((LeaseGrant("p-1", 480, renewable=False),)))
    harness.apply(StepMetadata((Revoke("p-1"),)))
    harness.step()
    assert not harness.results.take()
    harness.step(harness.config.revoke_grace)
    assert harness.results.take() == SENT
    assert harness.stats.leases_revoked == 1


def outcomes(harness: Harness) -> tuple[int, int, int]:
    """Of leases: released, expired, revoked."""
    stats = harness.stats
    return stats.leases_released, stats.leases_expired, stats.leases_revoked


def test_a_lease_that_ended_early_is_not_counted_once_more_when_its_reader_confirms(
    harness: Harness,
) -> None:
    lease(harness)
    harness.hears(wire.Renew(5, ("p-1",)), sender="agent-d")
    harness.apply(StepMetadata((Revoke("p-1"),)))
    harness.hears(wire.Read("p-1"), sender="agent-d")
    assert harness.results.take() == SENT
    assert outcomes(harness) == (0, 0, 1)
    lease(harness)
    harness.step(30)
    harness.hears(wire.Read("p-1"), sender="agent-d")
    assert harness.results.take() == SENT
    assert outcomes(harness) == (0, 1, 1)
    assert harness.stats.leases_granted == 2


def test_a_lease_that_was_read_by_all_and_ends_with_the_last_horizon_is_released(
    harness: Harness,
) -> None:
    lease(harness)
    harness.hears(wire.Renew(5, ("p-1",)), sender="agent-d")
    harness.hears(wire.Read("p-1"), sender="another")
    assert not harness.results.take()
    harness.step(60)
    assert harness.results.take() == SENT
    assert outcomes(harness) == (1, 0, 0)


def test_a_reader_whose_agent_is_unknown_or_broken_ends_nothing(harness: Harness) -> None:
    lease(harness)
    harness.agent.failing = {"add_remote", "notify"}
    harness.hears(wire.Hello(b"broken"), sender="agent-d")
    harness.hears(wire.Read("p-1", sequence=1), sender="agent-d")
    assert harness.results.take() == SENT


def test_a_source_that_shuts_down_notifies_every_reader(harness: Harness) -> None:
    lease(harness)
    harness.hears(wire.Hello(b"agent-d"), sender="agent-d")
    harness.hears(wire.Renew(5, ("p-1",)), sender="agent-d")
    harness.sent()
    harness.loop.revoke_all(harness.now)
    assert harness.sent() == [wire.Gone(("p-1",))]


def test_a_decline_is_unsent_until_it_was_sent_or_the_source_is_known_dead(
    harness: Harness, prefiller: HandshakeServer, silent: int
) -> None:
    harness.apply(
        StepMetadata((Decline(source(port=prefiller.port)), Decline(source(port=silent))))
    )
    harness.step_until(lambda: harness.agent.sent)
    assert harness.loop.has_unsent
    harness.step(harness.config.handshake_timeout)
    assert not harness.loop.has_unsent


def test_the_longer_nothing_happens_the_later_the_loop_looks_again(harness: Harness) -> None:
    lease(harness)
    waits = [harness.step(seconds) for seconds in (0.05, 0.25, 0.7, 4, 10)]
    assert waits == pytest.approx([RECENT_WAIT, 0.003, 0.01, LEASED_WAIT, LEASED_WAIT])
    harness.hears(wire.Renew(1, ("p-1",)))
    assert harness.step() == RECENT_WAIT


def test_a_reader_that_waits_for_a_loan_looks_less_often_as_time_passes(
    extended: HandshakeServer,
) -> None:
    harness = Harness(ConnectorConfig(engine_id="engine-d", loan_timeout=60.0))
    holder = PeerAddress("engine-p", "127.0.0.1", extended.port)
    harness.apply(StepMetadata((LoanAsk("d-1", (holder,), "scheme", (b"key",), 16),)))
    harness.step_until(lambda: harness.agent.sent)
    assert harness.step(30) == PEER_WAIT
    harness.hears(wire.Renew(1, ("p-1",)))
    assert harness.step() == RECENT_WAIT
    harness.loop.close()


def test_an_order_that_fails_costs_no_other_order(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    unknown: Any = None
    harness.apply(StepMetadata((unknown, LeaseGrant("p-1", 30), unknown, Fence("d-1"))))
    harness.step()
    assert harness.results.take().finished_sending == {"d-1"}
    assert harness.stats.leases_active == 1
    assert len([record for record in caplog.records if record.exc_info]) == 2


def test_only_agents_that_have_introduced_themselves_get_an_answer_about_loans() -> None:
    harness = Harness()
    ask = wire.AskLoan(7, "scheme", (b"key",))
    harness.hears(ask, sender="agent-x")
    assert not harness.sent()
    assert not harness.results.take()
    harness.hears(wire.Hello(b"agent-p"))
    harness.hears(ask)
    assert harness.sent() == [wire.Loan(7, may_hold_more=True)], "this host lends nothing"
    assert not harness.results.take()


def test_requests_for_loans_reach_the_scheduler_half_and_too_many_are_refused() -> None:
    harness = Harness(geometry=replace(GEOMETRY, lends=True))
    harness.hears(wire.Hello(b"agent-p"))
    for number in range(MAX_LOAN_REQUESTS + 1):
        harness.hears(wire.AskLoan(number, "scheme", (b"key",)))
    assert harness.sent() == [wire.Loan(MAX_LOAN_REQUESTS, may_hold_more=True)]
    asked = harness.results.take().loan_requests
    assert [one.sequence for one in asked] == list(range(MAX_LOAN_REQUESTS))
    assert asked[0] == LoanRequest("agent-p", 0, "scheme", (b"key",))
    assert not harness.results.take()


def test_a_step_looks_up_few_keys_of_several_requests_for_loans() -> None:
    """Each key takes the holder's answers some time. What is left wakes an idle engine again."""
    harness, woken = Harness(geometry=replace(GEOMETRY, lends=True)), []
    harness.hears(wire.Hello(b"agent-p"))
    for number, num_keys in enumerate((MAX_LOAN_KEYS + 1, 1, MAX_LOAN_KEYS - 1, 1)):
        harness.hears(wire.AskLoan(number, "scheme", (b"key",) * num_keys))
    harness.results.set_wake(lambda: woken.append(bool(harness.results)))
    steps = [harness.results.take().loan_requests for _ in range(3)]
    assert [[one.sequence for one in asked] for asked in steps] == [[0], [1, 2], [3]]
    assert woken == [True, True]
    assert not harness.results.take()


def test_a_loan_is_answered_after_its_grant_and_refused_when_it_has_ended() -> None:
    harness = Harness()
    harness.hears(wire.Hello(b"agent-p"))
    answer = LoanAnswer("agent-p", 3, "loan-1", ((4, 5),), 32, b"key")
    grant = LeaseGrant("loan-1", 5.0, extension=5.0)
    harness.apply(StepMetadata((grant, answer)))
    assert harness.sent() == [wire.Loan(3, "loan-1", ((4, 5),), 32, b"key", 5.0)]
    harness.hears(wire.Read("loan-1"))
    assert harness.results.take().finished_sending == {"loan-1"}
    harness.apply(StepMetadata((replace(answer, sequence=4),)))
    assert harness.sent() == [wire.Loan(4, may_hold_more=True)]
    refused = LoanAnswer("agent-p", 5, "", (), 0, b"")
    harness.apply(StepMetadata((refused, replace(refused, may_hold_more=True))))
    assert harness.sent() == [wire.Loan(5), wire.Loan(5, may_hold_more=True)]
