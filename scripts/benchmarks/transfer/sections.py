"""The measurements: each section prints rows of one kind."""

from __future__ import annotations

import argparse
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from nixl._api import nixl_agent, nixl_agent_config

from engine_ext.common.config import ConnectorConfig, TransferMode
from engine_ext.common.orders import StepMetadata, TrackOrder
from engine_ext.common.types import CacheGeometry, FinishStatus, PeerAddress, Region
from engine_ext.layout.plan import PeerLayout
from engine_ext.worker.agent import NixlAgent
from engine_ext.worker.checksums import Checksums, HostBlocks
from scripts.benchmarks.common import BenchError, Sample, ratios, report_progress
from scripts.benchmarks.transfer.engine import (
    BLOCK_SIZE,
    REPORT_TIMEOUT_S,
    Actor,
    BenchEngine,
    BenchRequest,
    EngineSpec,
    both_sides,
    make_connector,
)
from scripts.benchmarks.transfer.memory import Memory, Shape
from scripts.benchmarks.transfer.report import Aim, Report, Row

GIGA, MILLI, MICRO = 1e9, 1e3, 1e6
ORDERS = ("ascending", "descending", "random")
MAX_CHECKSUM_BLOCKS = 1024
STEP_PAUSE_S = 200e-6
"""Where the engine would compute: the owner thread may run, caches cool down."""
STEPS_PER_ROUND = 200
SETTLE_S = 1.0
TINY = Shape(2, 64, 4096)
RAW_AIM = Aim("of_raw", 0.9, at_least=True)
HANDSHAKE_AIM = Aim("total_ms", 20.0)
STEP_AIM = Aim("step_us", 50.0)
IDLE_AIM = Aim("cpu_percent", 2.0)


class Side(BenchEngine):
    """An engine beside raw NIXL over the same memory."""

    def __init__(self, spec: EngineSpec, seed: int = 1) -> None:
        super().__init__(spec)
        self.memory.stamp(seed)
        self._size = spec.shape.total_bytes
        self._raw: Any = None
        self._peer = ""
        self._stop = threading.Event()

    def raw_open(self, serves: bool) -> bytes:
        """Open an agent of the connector's kind and return its metadata.

        The side that is read `serves`: connections need somebody who polls.
        """
        threads = ConnectorConfig(engine_id="raw").num_threads
        config = nixl_agent_config(enable_prog_thread=False, num_threads=threads, backends=["UCX"])
        self._raw = nixl_agent(str(uuid.uuid4()), config)
        whole = [(self.memory.address, self._size, self.memory.device_id, "")]
        self._registered = self._raw.register_memory(whole, self.memory.mem_type)
        if serves:
            threading.Thread(target=self._poll, daemon=True).start()
        return bytes(self._raw.get_agent_metadata())

    def raw_meet(self, metadata: bytes) -> None:
        name = self._raw.add_remote_agent(metadata)
        self._peer = name.decode() if isinstance(name, bytes) else name

    def _poll(self) -> None:
        while not self._stop.wait(0.001):
            self._raw.get_new_notifs()

    def raw_extent(self, size: int) -> tuple[int, int, int]:
        return self.memory.address, size, self.memory.device_id

    def raw_read(self, remote: tuple[int, int, int]) -> float:
        """Return the seconds of a READ in one descriptor, from the post to the end."""
        local = self.raw_extent(remote[1])
        descriptors = [
            self._raw.get_xfer_descs([side], self.memory.mem_type) for side in (local, remote)
        ]
        handle = self._raw.initialize_xfer("READ", *descriptors, self._peer)
        started = time.monotonic()
        state = self._raw.transfer(handle)
        while state == "PROC" and time.monotonic() < started + REPORT_TIMEOUT_S:
            state = self._raw.check_xfer_state(handle)
        seconds = time.monotonic() - started
        self._raw.release_xfer_handle(handle)
        if state != "DONE":
            raise BenchError(f"raw NIXL: READ ended as {state}")
        return seconds

    def copy(self, num_bytes: int) -> float:
        return self.memory.copy(num_bytes)

    def sum_up(self, blocks: Sequence[int]) -> float:
        """Return the CPU seconds of checksums over these blocks."""
        checksums = Checksums(self.regions, CacheGeometry(BLOCK_SIZE, len(blocks)), HostBlocks())
        started = time.thread_time()
        checksums.lease("all", (tuple(blocks),))
        while checksums.is_busy:
            checksums.step()
        return time.thread_time() - started

    def num_verified(self) -> int:
        return self.connector.worker.stats().loads_verified

    def close(self) -> None:
        self._stop.set()
        if self._raw is not None:
            self._raw.deregister_memory(self._registered)
        super().close()


def _load(
    holder: Actor[Side], reader: Actor[Side], name: str, remote: list[int], local: list[int]
) -> float:
    params = holder.call(Side.prefill, f"p-{name}", remote).params
    seconds = reader.call(Side.load, f"d-{name}", params, local).seconds
    holder.call(Side.drain)
    return seconds


def throughput(report: Report, options: argparse.Namespace) -> None:
    """READs through the connector, in turns with raw NIXL over the same memory."""
    shape = Shape(options.layers, max(options.blocks) + 64, options.block_kib * 1024)
    rng, number = random.Random(options.seed), 0
    spec_p, spec_d = both_sides(shape, options.device)

    def ids(count: int, order: str) -> list[int]:
        if order == "random":
            return rng.sample(range(shape.blocks), count)
        first = rng.randrange(shape.blocks - count + 1)
        found = list(range(first, first + count))
        return found if order == "ascending" else found[::-1]

    with Actor(Side, spec_p, 1) as holder, Actor(Side, spec_d, 2) as reader:
        metadata = holder.call(Side.raw_open, True)
        reader.call(Side.raw_open, False)
        reader.call(Side.raw_meet, metadata)
        for count in options.blocks:
            extent = holder.call(Side.raw_extent, shape.moved_bytes(count))
            for order in ORDERS:
                report_progress(f"throughput: {count} blocks, {order}")
                ours, raw = [], []
                for _ in range(options.rounds + 1):  # the first warms up
                    number += 1
                    remote, local = ids(count, order), ids(count, order)
                    ours.append(_load(holder, reader, str(number), remote, local))
                    raw.append(reader.call(Side.raw_read, extent))
                # The last load lies under the raw READ now: another one shows right bytes.
                _load(holder, reader, f"check-{number}", remote, local)
                expected = holder.call(Side.marks, remote)
                if (reader.call(Side.marks, local) != expected).any():
                    raise BenchError(f"{count} blocks, {order}: other bytes arrived than were sent")
                of_raw = ratios(raw[1:], ours[1:])
                moved = shape.moved_bytes(count) / GIGA
                figures = {
                    "connector_GB/s": moved / Sample(ours[1:]).median,
                    "raw_GB/s": moved / Sample(raw[1:]).median,
                    "of_raw": of_raw.median,
                }
                aim = RAW_AIM if count >= 256 and order != "random" else None
                case = f"{count} blocks {order}"
                title = "throughput: READ through the connector, from the order to its report"
                report.add(Row(title, case, figures, options.rounds, of_raw.spread, aim))


def copy(report: Report, options: argparse.Namespace) -> None:
    """READs against copies within one memory."""
    shape = Shape(options.layers, max(options.blocks), options.block_kib * 1024)
    spec_p, spec_d = both_sides(shape, options.device)
    spec_d = replace(spec_d, shape=replace(shape, blocks=2 * shape.blocks))
    with Actor(Side, spec_p) as holder, Actor(Side, spec_d) as reader:
        for count in options.blocks:
            report_progress(f"copy: {count} blocks")
            blocks, moved = list(range(count)), shape.moved_bytes(count)
            reads, copies = [], []
            for index in range(options.rounds + 1):  # the first warms up
                reads.append(_load(holder, reader, f"{count}-{index}", blocks, blocks))
                copies.append(reader.call(Side.copy, moved))
            read, copied = Sample(reads[1:]), Sample(copies[1:])
            figures = {
                "read_GB/s": moved / GIGA / read.median,
                "copy_GB/s": moved / GIGA / copied.median,
                "of_copy": copied.median / read.median,
            }
            title = "copy: READ between two processes against a copy within one"
            report.add(Row(title, f"{count} blocks", figures, options.rounds, read.spread))


def checksum(report: Report, options: argparse.Namespace) -> None:
    """Measure the cost of `kv_checksum`. The holder computes it beside the READ, the reader
    afterwards."""
    counts = sorted({min(count, MAX_CHECKSUM_BLOCKS) for count in options.blocks})
    shape = Shape(options.layers, max(counts), options.block_kib * 1024)
    plain, checked = both_sides(shape, "cpu"), both_sides(shape, "cpu", checksums=True)
    rounds = options.rounds
    title = "checksum: summing up blocks on one core, and loads with and without"
    with (
        Actor(Side, plain[0]) as plain_p,
        Actor(Side, plain[1]) as plain_d,
        Actor(Side, checked[0]) as holder,
        Actor(Side, checked[1]) as reader,
    ):
        for count in counts:
            report_progress(f"checksum: {count} blocks")
            blocks, size = list(range(count)), shape.moved_bytes(count) / GIGA
            cpu = Sample([plain_p.call(Side.sum_up, blocks) for _ in range(rounds)])
            figures = {"core_seconds/GB": cpu.median / size, "GB/s": size / cpu.median}
            report.add(Row(title, f"{count} blocks summed up", figures, rounds, cpu.spread))
            without, with_sums = [], []
            for index in range(rounds + 1):  # the first warms up
                without.append(_load(plain_p, plain_d, f"{count}-{index}", blocks, blocks))
                with_sums.append(_load(holder, reader, f"{count}-{index}", blocks, blocks))
            before, after = Sample(without[1:]), Sample(with_sums[1:])
            figures = {
                "without_ms": before.median * MILLI,
                "with_ms": after.median * MILLI,
                "more_s/GB": (after.median - before.median) / size,
            }
            report.add(Row(title, f"{count} blocks loaded", figures, rounds, after.spread))
        if reader.call(Side.num_verified) != len(counts) * (rounds + 1):
            raise BenchError("some loads were not verified")


class TimedAgent(NixlAgent):
    """Notes how long each part of a handshake takes, and when it began and ended."""

    def __init__(self, regions: Sequence[Region], config: ConnectorConfig) -> None:
        super().__init__(regions, config.backends, config.num_threads)
        self.took: dict[str, float] = {}
        self.began = self.ended = 0.0
        self.answered = threading.Event()

    def add_remote(self, metadata: bytes) -> str:
        self.began = time.monotonic()
        with self._timing("add_remote_ms"):
            return super().add_remote(metadata)

    def prepare(self, name: str, layout: PeerLayout) -> Any:
        with self._timing("prepare_ms"):
            return super().prepare(name, layout)

    def notify(self, name: str, message: bytes) -> None:
        if self.ended:
            return super().notify(name, message)
        with self._timing("hello_ms"):
            super().notify(name, message)
        self.ended = time.monotonic()

    def notifications(self) -> list[tuple[str, bytes]]:
        received = super().notifications()
        if received:
            self.answered.set()
        return received

    @contextmanager
    def _timing(self, part: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.took[part] = (time.monotonic() - started) * MILLI


class Newcomer:
    """Opens a fresh connector for every handshake: it knows nothing of the peer."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._memory = Memory(spec.shape, spec.device)
        self._regions = self._memory.regions()
        self._count = 0

    def meet(self, peer: PeerAddress) -> dict[str, float]:
        """Return the milliseconds of each part of a handshake."""
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
            worker.start_load_kv(StepMetadata((TrackOrder("d-1", peer, "p-1"),)))
            if not agents[0].answered.wait(REPORT_TIMEOUT_S):
                raise BenchError("no handshake, or no answer to the first heartbeat")
            total, until_reply = agents[0].ended - started, agents[0].began - started
            parts = {"total_ms": total * MILLI, "side_channel_ms": until_reply * MILLI}
            return parts | agents[0].took
        finally:
            worker.shutdown()


def handshake(report: Report, options: argparse.Namespace) -> None:
    """From the order to renew a lease at an unknown engine, until it can be read."""
    title = "handshake: from the order to renew a lease there, to a peer that can be read"
    for count in options.descriptors:
        report_progress(f"handshake: {count} descriptors")
        # Blocks are small, so that a million fit; the cost does not depend on their size.
        shape = Shape(options.layers, -(-count // options.layers), 4096)
        spec_p, spec_d = both_sides(shape, options.device)
        peer = PeerAddress(spec_p.name, "127.0.0.1", spec_p.port)
        with Actor(BenchEngine, spec_p), Actor(Newcomer, spec_d) as newcomer:
            spent = [newcomer.call(Newcomer.meet, peer) for _ in range(options.rounds)]
        columns = {name: Sample([one[name] for one in spent]) for name in spent[0]}
        figures = {name: sample.median for name, sample in columns.items()}
        aim = HANDSHAKE_AIM if count >= 1_000_000 else None
        spread = columns["total_ms"].spread
        report.add(Row(title, f"{count} descriptors", figures, options.rounds, spread, aim))


def handover(report: Report, options: argparse.Namespace) -> None:
    """From P's last token to D's first, without the forward passes."""
    title = "hand-over: from P's last token to D's report, without the forward passes"
    shape = Shape(options.layers, max(options.handover_blocks) + 1, options.block_kib * 1024)
    modes: tuple[TransferMode, ...] = ("pull", "push")
    for mode in modes:
        spec_p, spec_d = both_sides(shape, options.device, mode=mode)
        with Actor(BenchEngine, spec_p) as p, Actor(BenchEngine, spec_d) as d:
            for count in options.handover_blocks:
                report_progress(f"hand-over: {mode}, {count} blocks")
                blocks, taken = list(range(count)), []
                for number in range(options.requests + 1):  # the first warms up
                    name = f"{count}-{number}"
                    if mode == "pull":
                        granted = p.call(BenchEngine.prefill, name, blocks)
                        loaded = d.call(BenchEngine.load, name, granted.params, blocks)
                    else:  # D waits while P computes, as when a router starts both legs together
                        params = {"do_remote_prefill": True, "remote_engine_id": spec_p.name}
                        params |= {"remote_host": "127.0.0.1", "remote_port": spec_p.port}
                        params |= {"remote_request_id": name}
                        d.begin(BenchEngine.load, name, params, blocks)
                        time.sleep(options.prefill_seconds)
                        granted = p.call(BenchEngine.prefill, name, blocks)
                        loaded = d.collect()
                    taken.append(MILLI * (loaded.loaded_at - granted.last_token_at))
                    p.call(BenchEngine.drain)
                total = Sample(taken[1:])
                figures = {"p50_ms": total.median, "p99_ms": total.percentile(99)}
                case = f"{mode} {count} blocks"
                report.add(Row(title, case, figures, options.requests, total.spread))


class SteppedEngine(BenchEngine):
    """Measures the CPU time of the engine's thread. Tracked requests wait, as in a full engine."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self._tracked: list[BenchRequest] = []

    def track(self, params: Sequence[dict[str, Any]]) -> None:
        """D: these requests arrived and are not scheduled; their leases are renewed."""
        for one in params:
            request = BenchRequest(f"d-{len(self._tracked)}", one, BLOCK_SIZE)
            self._tracked.append(request)
            self.connector.scheduler.on_new_request(request)
        self.step()

    def lease(self, count: int) -> list[dict[str, Any]]:
        """Run prefills on P that no engine reads, and return their params."""
        blocks = self.regions[0].num_blocks
        return [self.prefill(f"p-{number}", [number % blocks]).params for number in range(count)]

    def steps(self, rounds: int) -> list[float]:
        """Return the microseconds of CPU per step, for each round."""
        empty = _cpu(lambda: None)
        return [(_cpu(self._one_step) - empty) * MICRO for _ in range(rounds)]

    def cpu_percent(self, seconds: float) -> float:
        """Return the CPU of the whole process while this call sleeps."""
        started, spent = time.monotonic(), time.process_time()
        time.sleep(seconds)
        return 100 * (time.process_time() - spent) / (time.monotonic() - started)

    def request(self, request_id: str, num_blocks: int) -> float:
        """Return the microseconds of the scheduler half over a prefill's life."""
        blocks, num_tokens = tuple(range(num_blocks)), num_blocks * BLOCK_SIZE
        request = BenchRequest(request_id, {"do_remote_decode": True}, num_tokens, num_tokens)
        scheduler = self.connector.scheduler
        started = time.thread_time()
        scheduler.on_new_request(request)
        scheduler.get_num_new_matched_tokens(request, 0)
        scheduler.update_state_after_alloc(request, (blocks,), 0)
        scheduler.request_finished(request, (blocks,), FinishStatus.LENGTH_CAPPED)
        scheduler.build_connector_meta()
        return (time.thread_time() - started) * MICRO

    def _one_step(self) -> None:
        """Do what the engine's core does, with the head of the queue asked about once."""
        scheduler, worker = self.connector.scheduler, self.connector.worker
        scheduler.has_pending_work()
        if self._tracked:
            scheduler.get_num_new_matched_tokens(self._tracked[0], 0)
        worker.start_load_kv(scheduler.build_connector_meta())
        scheduler.update_connector_output(worker.get_transfer_results())


def _cpu(step: Callable[[], None]) -> float:
    """Return the seconds of this thread's CPU per call, pauses left out."""
    spent = 0.0
    for _ in range(STEPS_PER_ROUND):
        started = time.thread_time()
        step()
        spent += time.thread_time() - started
        time.sleep(STEP_PAUSE_S)
    return spent / STEPS_PER_ROUND


def step(report: Report, options: argparse.Namespace) -> None:
    """CPU of the engine's thread per step and per prefill, and of an idle process."""
    title = "step: CPU of the engine's thread in the connector's hooks"
    for count in options.tracked:
        report_progress(f"step and idle: {count} tracked requests")
        spec_p, spec_d = both_sides(TINY, "cpu", lease_seconds=60.0)
        with Actor(SteppedEngine, spec_p) as p, Actor(SteppedEngine, spec_d) as d:
            d.call(SteppedEngine.track, p.call(SteppedEngine.lease, count))
            for side, engine in (("P, leases held", p), ("D, tracked", d)):
                spent = Sample(engine.call(SteppedEngine.steps, options.rounds))
                aim, figures = STEP_AIM if count == 100 else None, {"step_us": spent.median}
                case = f"{side}: {count}"
                report.add(Row(title, case, figures, options.rounds, spent.spread, aim))
            time.sleep(SETTLE_S)
            for side, engine in (("P idle, leases held", p), ("D idle, leases renewed", d)):
                seconds = [options.idle_seconds] * options.rounds
                idle = Sample([engine.call(SteppedEngine.cpu_percent, one) for one in seconds])
                figures, case = {"cpu_percent": idle.median}, f"{side}: {count}"
                report.add(Row(title, case, figures, options.rounds, idle.spread, IDLE_AIM))
    with Actor(SteppedEngine, both_sides(TINY, "cpu")[0]) as engine:
        for count in options.blocks:
            numbers = range(options.rounds)
            taken = [engine.call(SteppedEngine.request, f"r-{n}", count) for n in numbers]
            spent, case = Sample(taken), f"P, prompt of {count * BLOCK_SIZE} tokens"
            figures = {"request_us": spent.median}
            report.add(Row(title, case, figures, options.rounds, spent.spread))


SECTIONS = {
    "throughput": throughput,
    "copy": copy,
    "checksum": checksum,
    "handshake": handshake,
    "handover": handover,
    "step": step,
}
