"""From the first thought of a peer to a peer that can be read, and where the time goes."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from engine_ext.base.access import OPEN, Access, SharedSecret
from engine_ext.base.config import ConnectorConfig
from engine_ext.base.types import PeerAddress, Region, StepMetadata, TrackOrder
from engine_ext.layout.plan import PeerLayout
from engine_ext.transfer.agent import NixlAgent
from scripts.bench.errors import BenchError
from scripts.bench.ports import free_ports
from scripts.transfer_bench.actor import Actor
from scripts.transfer_bench.engine import (
    WAIT_SECONDS,
    BenchEngine,
    EngineSpec,
    make_connector,
)
from scripts.transfer_bench.memory import Shape, allocate, regions
from scripts.transfer_bench.report import Aim, Report, Row
from scripts.transfer_bench.sample import Sample

SECTION = "handshake: from the order to renew a lease there, to a peer that can be read"
BLOCK_BYTES = 4096
"""Small, so that a million blocks fit the address space; the cost does not depend on it."""
SECRET = Access(SharedSecret.of(b"what the two engines share"))
AIM = Aim("total_ms", 20.0)
AIM_FROM_DESCRIPTORS = 1_000_000


class TimedAgent(NixlAgent):
    """Notes how long each part of an introduction takes, and when it began and ended."""

    def __init__(self, regions: Sequence[Region], config: ConnectorConfig) -> None:
        super().__init__(regions, config.backends, config.num_threads)
        self.took: dict[str, float] = {}
        self.began = 0.0
        self.ended = 0.0
        self.ready = threading.Event()
        self.answered = threading.Event()

    def add_remote(self, metadata: bytes) -> str:
        self.began = time.monotonic()
        with self._timing("add_remote"):
            return super().add_remote(metadata)

    def prepare(self, name: str, layout: PeerLayout) -> Any:
        with self._timing("prepare"):
            return super().prepare(name, layout)

    def notify(self, name: str, message: bytes) -> None:
        if self.ready.is_set():
            return super().notify(name, message)
        with self._timing("hello"):
            super().notify(name, message)
        self.ended = time.monotonic()
        self.ready.set()

    def notifications(self) -> list[tuple[str, bytes]]:
        received = super().notifications()
        if received:
            self.answered.set()
        return received

    @contextmanager
    def _timing(self, part: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.took[part] = time.monotonic() - started


@dataclass(frozen=True, slots=True)
class Spent:
    """Milliseconds."""

    total: float
    side_channel: float
    """Until the reply was there and checked, waking the owner thread included."""
    add_remote: float
    prepare: float
    hello: float


class Newcomer:
    """Opens a fresh connector for every handshake: nothing is known of the peer."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._memory = allocate(spec.shape, spec.device)
        self._regions = regions(self._memory, spec.shape)
        self._count = 0

    def meet(self, peer: PeerAddress) -> Spent:
        self._count += 1
        agents: list[TimedAgent] = []

        def open_timed(regions: Sequence[Region], config: ConnectorConfig) -> TimedAgent:
            agents.append(TimedAgent(regions, config))
            return agents[0]

        name = f"{self._spec.name}-{self._count}"
        worker = make_connector(replace(self._spec, name=name), open_timed).worker
        worker.register_kv_caches(self._regions)
        try:
            started = time.monotonic()
            worker.start_load_kv(StepMetadata(tracks=(TrackOrder("d-1", peer, "p-1"),)))
            if not agents[0].answered.wait(WAIT_SECONDS):
                raise BenchError("no handshake, or no answer to the first heartbeat")
            return _spent(agents[0], started)
        finally:
            worker.shutdown()


def _spent(agent: TimedAgent, started: float) -> Spent:
    took = {part: seconds * 1e3 for part, seconds in agent.took.items()}
    return Spent((agent.ended - started) * 1e3, (agent.began - started) * 1e3, **took)


def measure(
    report: Report, device: str, layers: int, descriptors: Sequence[int], rounds: int
) -> None:
    for count in descriptors:
        for access, words in ((OPEN, ""), (SECRET, ", shared secret")):
            shape = Shape(layers, -(-count // layers), BLOCK_BYTES)
            report.say(f"handshake: {count} descriptors{words}")
            report.add(_row(count, words, _rounds(shape, device, rounds, access)))


def _rounds(shape: Shape, device: str, rounds: int, access: Access) -> list[Spent]:
    port_p, port_d = free_ports(2)
    holder_spec = EngineSpec("bench-p", port_p, shape, device, access=access)
    newcomer_spec = EngineSpec("bench-d", port_d, shape, device, access=access)
    peer = PeerAddress("bench-p", "127.0.0.1", port_p)
    with Actor(BenchEngine, holder_spec), Actor(Newcomer, newcomer_spec) as newcomer:
        return [newcomer.call(Newcomer.meet, peer) for _ in range(rounds)]


def _row(count: int, words: str, spent: list[Spent]) -> Row:
    total = Sample.of([one.total for one in spent])
    figures = {
        "total_ms": total.median,
        "side_channel_ms": Sample.of([one.side_channel for one in spent]).median,
        "add_remote_ms": Sample.of([one.add_remote for one in spent]).median,
        "prepare_ms": Sample.of([one.prepare for one in spent]).median,
        "hello_ms": Sample.of([one.hello for one in spent]).median,
        "first_ms": total.values[0],
    }
    aim = AIM if count >= AIM_FROM_DESCRIPTORS else None
    return Row(SECTION, f"{count} descriptors{words}", figures, len(spent), total.spread, aim)
