"""The owner thread's loop, stepped by hand: a fake agent, a fake clock, a real handshake."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from engine_ext import wire
from engine_ext.agent import TransferState
from engine_ext.config import ConnectorConfig
from engine_ext.results import Results
from engine_ext.types import (
    CacheGeometry,
    ConnectorStats,
    EngineIdentity,
    PullOrder,
    RemoteSource,
    StepMetadata,
    TrackOrder,
    TransferResults,
)
from engine_ext.wire import AgentMetadata, HandshakeServer
from engine_ext.worker import IDLE_WAIT, LEASED_WAIT, READING_WAIT, TransferLoop
from tests.unit.engine_ext.fakes import FakeAgent, FakeTransfer, regions, source

GEOMETRY = CacheGeometry(block_size=16, num_blocks=32)
FACTORS = {"model": "m", "dtype": "float32"}


def remote_metadata(engine_id: str = "engine-p") -> AgentMetadata:
    layers = regions()
    return AgentMetadata(
        engine_id=engine_id,
        agent_metadata=b"agent-p",
        kv_caches_base_addr=[region.base_addr for region in layers],
        device_id=0,
        num_blocks=32,
        block_lens=[region.block_len for region in layers],
        block_strides=[region.block_stride for region in layers],
        kv_cache_layout="LBHNC",
        block_size=16,
        attn_backend_name="CPU_ATTN",
        region_names=[region.name for region in layers],
    )


@pytest.fixture
def prefiller() -> Iterator[HandshakeServer]:
    """A prefill engine's side channel."""
    payload = wire.encode_payload(remote_metadata(), FACTORS)
    server = HandshakeServer("127.0.0.1", 0, {(0, 0): payload})
    yield server
    server.close()


@dataclass
class Harness:
    agent: FakeAgent = field(default_factory=FakeAgent)
    results: Results = field(default_factory=Results)
    stats: ConnectorStats = field(default_factory=ConnectorStats)
    config: ConnectorConfig = field(default_factory=lambda: ConnectorConfig(engine_id="engine-d"))
    now: float = 1000.0

    def __post_init__(self) -> None:
        identity = EngineIdentity("engine-d", "127.0.0.1", 5601, compat_factors=FACTORS)
        self.loop = TransferLoop(
            self.agent, self.config, GEOMETRY, identity, regions(), self.results, self.stats
        )

    def step(self, seconds: float = 0.0) -> float:
        self.now += seconds
        return self.loop.step(self.now)

    def apply(self, meta: StepMetadata) -> None:
        self.loop.apply(meta, self.now)

    def step_until(self, condition: Callable[[], object]) -> None:
        """Real time passes for the sockets, none on the loop's clock."""
        deadline = time.monotonic() + 5
        while not condition():
            assert time.monotonic() < deadline, "condition not reached"
            self.step()

    def results_after(self, condition: Callable[[], object]) -> TransferResults:
        self.step_until(condition)
        self.step()
        return self.results.take()

    def reading(self, origin: RemoteSource) -> FakeTransfer:
        """Orders a pull of 100 tokens and steps until its READ runs."""
        self.apply(StepMetadata(pulls=(pull(origin),)))
        self.step_until(lambda: self.agent.transfers)
        return self.agent.transfers[0]


def pull(origin: RemoteSource, request_id: str = "d-1") -> PullOrder:
    return PullOrder(request_id, origin, (tuple(range(20, 27)),), 0, 100)


@pytest.fixture
def harness() -> Iterator[Harness]:
    made = Harness()
    yield made
    made.loop.close()


OK = TransferResults(finished_recving=frozenset(["d-1"]))
FAILED = TransferResults(finished_recving=frozenset(["d-1"]), failed_recving=frozenset(["d-1"]))


def test_a_read_is_reported_once_and_tells_the_prefiller(
    harness: Harness, prefiller: HandshakeServer
) -> None:
    transfer = harness.reading(source(port=prefiller.port))
    assert transfer.notification == b"p-1:1"
    assert (transfer.local, transfer.remote) == (list(range(20, 27)), list(range(7)))
    assert harness.step() == READING_WAIT
    assert not harness.results.take()
    transfer.state = TransferState.DONE
    harness.step()
    assert harness.results.take() == OK
    assert transfer.released
    assert harness.stats.pulls_ok == 1
    harness.step()
    assert not harness.results.take()


def test_many_requests_to_one_engine_share_one_handshake(
    harness: Harness, prefiller: HandshakeServer
) -> None:
    orders = tuple(pull(source(port=prefiller.port), f"d-{i}") for i in range(8))
    harness.apply(StepMetadata(pulls=orders))
    harness.step_until(lambda: len(harness.agent.transfers) == 8)
    assert harness.agent.peers == ["agent-p"]
    assert harness.stats.handshakes_ok == 1


def test_a_dead_peer_fails_its_request_at_the_deadline_and_delays_no_other(
    harness: Harness, prefiller: HandshakeServer
) -> None:
    dead = source("p-dead", engine_id="dead", port=1)
    live = pull(source(port=prefiller.port), "d-live")
    harness.apply(StepMetadata(pulls=(pull(dead), live)))
    harness.step_until(lambda: harness.agent.transfers)
    assert not harness.results.take()
    harness.step(harness.config.handshake_timeout)
    assert harness.results.take() == FAILED


@pytest.mark.parametrize("method", ["add_peer", "start_read", "poll"])
def test_a_nixl_error_fails_the_request(
    harness: Harness, prefiller: HandshakeServer, method: str
) -> None:
    harness.agent.failing = {method}
    harness.apply(StepMetadata(pulls=(pull(source(port=prefiller.port)),)))
    assert harness.results_after(lambda: harness.stats.pulls_failed) == FAILED


def test_a_failed_read_tells_the_prefiller_and_the_next_one_shakes_hands_again(
    harness: Harness, prefiller: HandshakeServer
) -> None:
    harness.reading(source(port=prefiller.port)).state = TransferState.FAILED
    harness.step()
    assert harness.results.take() == FAILED
    assert harness.agent.sent == [("agent-p", b"p-1:1")]
    assert harness.agent.peers == []
    harness.apply(StepMetadata(pulls=(pull(source("p-2", port=prefiller.port), "d-2"),)))
    harness.step_until(lambda: len(harness.agent.transfers) == 2)
    assert harness.stats.handshakes_ok == 2


def test_an_overdue_read_is_reported_only_when_nixl_let_go_of_it(
    harness: Harness, prefiller: HandshakeServer
) -> None:
    transfer = harness.reading(source(port=prefiller.port))
    harness.agent.failing = {"release"}
    harness.step(harness.config.pull_timeout + 1)
    assert not harness.results.take()
    transfer.state = TransferState.DONE
    harness.agent.failing = set()
    harness.step()
    assert harness.results.take() == FAILED


def test_blocks_outside_the_memory_fail_the_request_not_the_loop(
    harness: Harness, prefiller: HandshakeServer
) -> None:
    harness.apply(StepMetadata(pulls=(pull(source(port=prefiller.port, blocks=[1]), "d-1"),)))
    assert harness.results_after(lambda: harness.stats.pulls_failed) == FAILED
    assert harness.agent.sent == [("agent-p", b"p-1:1")]


@pytest.mark.parametrize("enforce", [True, False])
def test_another_model_is_refused_by_name_unless_told_otherwise(
    enforce: bool, caplog: pytest.LogCaptureFixture
) -> None:
    payload = wire.encode_payload(remote_metadata(), {**FACTORS, "dtype": "bfloat16"})
    server = HandshakeServer("127.0.0.1", 0, {(0, 0): payload})
    config = ConnectorConfig(engine_id="engine-d", enforce_handshake_compat=enforce)
    harness = Harness(config=config)
    harness.apply(StepMetadata(pulls=(pull(source(port=server.port)),)))
    harness.step_until(lambda: harness.stats.pulls_failed or harness.agent.transfers)
    assert bool(harness.agent.transfers) is not enforce
    assert "dtype (float32 here, bfloat16 there)" in caplog.text
    harness.loop.close()
    server.close()


def test_an_engine_that_restarted_on_the_same_address_is_not_read() -> None:
    payload = wire.encode_payload(remote_metadata("engine-new"), FACTORS)
    server = HandshakeServer("127.0.0.1", 0, {(0, 0): payload})
    harness = Harness()
    harness.apply(StepMetadata(pulls=(pull(source(port=server.port)),)))
    assert harness.results_after(lambda: harness.stats.pulls_failed) == FAILED
    harness.loop.close()
    server.close()


def test_heartbeats_go_out_while_a_request_waits_and_stop_after(
    harness: Harness, prefiller: HandshakeServer
) -> None:
    origin = source(port=prefiller.port)
    harness.apply(StepMetadata(tracks=(TrackOrder("d-1", origin),)))
    harness.step_until(lambda: harness.agent.sent)
    assert harness.agent.sent == [("agent-p", b"HB:p-1")]
    harness.step(4.9)
    assert len(harness.agent.sent) == 1
    harness.step(0.1)
    assert len(harness.agent.sent) == 2
    harness.apply(StepMetadata(untracks=("d-1",)))
    harness.step(100)
    assert len(harness.agent.sent) == 2


def test_a_release_waits_for_the_handshake_and_is_sent_once(
    harness: Harness, prefiller: HandshakeServer
) -> None:
    harness.apply(StepMetadata(releases=(source(port=prefiller.port),)))
    harness.step_until(lambda: harness.agent.sent)
    harness.step()
    assert harness.agent.sent == [("agent-p", b"p-1:1")]


def test_a_release_to_a_dead_peer_is_dropped(harness: Harness) -> None:
    harness.apply(StepMetadata(releases=(source(port=1),)))
    harness.step()
    harness.step(harness.config.handshake_timeout)
    harness.step()
    assert harness.stats.handshakes_failed == 1
    assert harness.step(100) == IDLE_WAIT


SENT = TransferResults(finished_sending=frozenset(["p-1"]))


def lease(harness: Harness) -> None:
    harness.apply(StepMetadata(expects=("p-1",)))
    harness.apply(StepMetadata(grants=("p-1",)))


def test_a_leased_request_is_freed_by_its_read(harness: Harness) -> None:
    lease(harness)
    harness.step()
    assert not harness.results.take()
    harness.agent.inbox = [b"p-1:1", b"p-1:1"]
    harness.step()
    assert harness.results.take() == SENT
    assert (harness.stats.leases_released, harness.stats.notifications_unknown) == (1, 1)


def test_a_lease_nobody_reads_ends_with_its_duration(harness: Harness) -> None:
    lease(harness)
    assert harness.step(29.9) == LEASED_WAIT
    assert not harness.results.take()
    harness.step(0.1)
    assert harness.results.take() == SENT
    assert harness.stats.leases_expired == 1


def test_heartbeats_keep_a_lease_for_as_long_as_the_decoder_queues(harness: Harness) -> None:
    lease(harness)
    for _ in range(100):
        harness.agent.inbox = [b"HB:p-1,unknown"]
        harness.step(5)
    assert not harness.results.take()
    harness.step(20)
    assert harness.results.take() == SENT


def test_a_read_that_arrives_before_the_grant_frees_at_the_grant(harness: Harness) -> None:
    harness.apply(StepMetadata(expects=("p-1",)))
    harness.agent.inbox = [b"p-1:1"]
    harness.step()
    harness.apply(StepMetadata(grants=("p-1",)))
    assert harness.results.take() == SENT
    harness.step(1000)
    assert not harness.results.take()


def test_a_cancelled_prefill_is_never_reported(harness: Harness) -> None:
    harness.apply(StepMetadata(expects=("p-1",)))
    harness.apply(StepMetadata(cancels=("p-1",)))
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
    harness.step(31)
    assert harness.results.take() == SENT


def test_both_legs_on_one_engine_end_the_lease(harness: Harness) -> None:
    lease(harness)
    harness.apply(StepMetadata(releases=(source(engine_id="engine-d"),)))
    assert harness.results.take() == SENT
