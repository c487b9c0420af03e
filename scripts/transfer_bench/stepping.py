"""What the connector costs the engine's thread: CPU per step, and per request."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from engine_ext.base.proof import PrefixProof
from engine_ext.base.types import FinishStatus
from scripts.bench.ports import free_ports
from scripts.transfer_bench.actor import Actor
from scripts.transfer_bench.engine import BLOCK_SIZE, BenchEngine, BenchRequest, EngineSpec
from scripts.transfer_bench.memory import Shape
from scripts.transfer_bench.report import Aim, Report, Row
from scripts.transfer_bench.sample import Sample

SECTION = "step: CPU of the engine's thread in the connector's hooks"
REQUEST_SECTION = "request: CPU of the engine's thread over one request's life"
AIM = Aim("step_us", 50.0)
AIM_TRACKED = 100
PAUSE = 200e-6
"""Where the engine would compute: the owner thread may run, caches cool down."""
STEPS_PER_ROUND = 200
MICRO = 1e-3
"""Nanoseconds to microseconds."""


class SteppedEngine(BenchEngine):
    """Counts its thread's CPU time in the hooks. Tracked requests wait, as in a full engine."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self._tracked: list[BenchRequest] = []

    def track(self, params: Sequence[dict[str, Any]]) -> None:
        """D: these arrived and are not scheduled; their leases are renewed."""
        for one in params:
            request = BenchRequest(f"d-{len(self._tracked)}", one, BLOCK_SIZE)
            self._tracked.append(request)
            self.connector.scheduler.on_new_request(request)
        self.step()

    def lease(self, count: int) -> list[dict[str, Any]]:
        """P: prefills that nobody reads; returns what P answered."""
        return [self.prefill(f"p-{i}", [i % self.num_blocks]).params for i in range(count)]

    def steps(self, rounds: int) -> list[float]:
        """Microseconds of CPU per step, one figure per round."""
        empty = _cpu(lambda: None, STEPS_PER_ROUND)
        return [(_cpu(self._one_step, STEPS_PER_ROUND) - empty) * MICRO for _ in range(rounds)]

    def requests(self, count: int, num_blocks: int, *, reader: bool) -> list[float]:
        """Microseconds of CPU in the scheduler half from arrival to end, per request."""
        run = self._decode_request if reader else self._prefill_request
        return [run(f"r-{i}", num_blocks) * MICRO for i in range(count)]

    @property
    def num_blocks(self) -> int:
        return self.regions[0].num_blocks

    def _one_step(self) -> None:
        """As the engine's core does it, with the head of the queue asked about once."""
        scheduler, worker = self.connector.scheduler, self.connector.worker
        scheduler.has_pending_work()
        if self._tracked:
            scheduler.get_num_new_matched_tokens(self._tracked[0], 0)
        worker.start_load_kv(scheduler.build_connector_meta())
        scheduler.update_connector_output(worker.get_transfer_results())

    def _prefill_request(self, request_id: str, num_blocks: int) -> int:
        blocks = tuple(range(num_blocks))
        num_tokens = num_blocks * BLOCK_SIZE
        request = BenchRequest(request_id, {"do_remote_decode": True}, num_tokens, num_tokens)
        scheduler = self.connector.scheduler
        started = time.thread_time_ns()
        scheduler.on_new_request(request)
        scheduler.get_num_new_matched_tokens(request, 0)
        scheduler.update_state_after_alloc(request, (blocks,), 0)
        answer = scheduler.request_finished(request, (blocks,), FinishStatus.LENGTH_CAPPED)
        scheduler.build_connector_meta()
        spent = time.thread_time_ns() - started
        self._params = answer.kv_transfer_params
        return spent

    def _decode_request(self, request_id: str, num_blocks: int) -> int:
        self._prefill_request(request_id, num_blocks)
        params = _told_by("another", self._params or {})
        blocks = tuple(range(num_blocks))
        request = BenchRequest(request_id, params, num_blocks * BLOCK_SIZE)
        scheduler = self.connector.scheduler
        started = time.thread_time_ns()
        scheduler.on_new_request(request)
        missing, _ = scheduler.get_num_new_matched_tokens(request, 0)
        scheduler.update_state_after_alloc(request, (blocks,), missing or 0)
        scheduler.request_finished(request, (blocks,), FinishStatus.STOPPED)
        scheduler.build_connector_meta()
        return time.thread_time_ns() - started


def _told_by(engine_id: str, params: dict[str, Any]) -> dict[str, Any]:
    """As that engine would have told it."""
    proof = PrefixProof.from_wire(params["prefix_proof"], params)
    assert isinstance(proof, PrefixProof)
    params = {**params, "remote_engine_id": engine_id}
    return {**params, "prefix_proof": proof.to_wire(params)}


def _cpu(step: Callable[[], None], count: int) -> float:
    """Nanoseconds of this thread's CPU per call, pauses left out."""
    spent = 0
    for _ in range(count):
        started = time.thread_time_ns()
        step()
        spent += time.thread_time_ns() - started
        time.sleep(PAUSE)
    return spent / count


def measure(report: Report, shape: Shape, tracked: Sequence[int], rounds: int) -> None:
    for count in tracked:
        report.say(f"step: {count} tracked requests")
        port_p, port_d = free_ports(2)
        with (
            Actor(SteppedEngine, EngineSpec("bench-p", port_p, shape)) as p,
            Actor(SteppedEngine, EngineSpec("bench-d", port_d, shape)) as d,
        ):
            d.call(SteppedEngine.track, p.call(SteppedEngine.lease, count))
            aim = AIM if count == AIM_TRACKED else None
            for side, engine in (("P", p), ("D", d)):
                spent = Sample.of(engine.call(SteppedEngine.steps, rounds))
                case = f"{side}, {count} {'leases' if side == 'P' else 'tracked'}"
                report.add(Row(SECTION, case, {"step_us": spent.median}, rounds, spent.spread, aim))


def measure_requests(
    report: Report, shape: Shape, num_blocks: Sequence[int], requests: int
) -> None:
    """The scheduler half alone: what grows with the prompt is the proof of the prefix."""
    (port,) = free_ports(1)
    with Actor(SteppedEngine, EngineSpec("bench-r", port, shape)) as engine:
        for count in num_blocks:
            for side in ("P", "D"):
                report.say(f"request: {count * BLOCK_SIZE} tokens on {side}")
                spent = Sample.of(
                    engine.call(SteppedEngine.requests, requests, count, reader=side == "D")
                )
                case = f"{side}, prompt of {count * BLOCK_SIZE} tokens"
                figures = {"request_us": spent.median}
                report.add(Row(REQUEST_SECTION, case, figures, requests, spent.spread))
