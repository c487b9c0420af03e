"""CPU of processes that have nothing to do but to keep what others may want."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from scripts.bench.ports import free_ports
from scripts.transfer_bench.actor import Actor
from scripts.transfer_bench.engine import EngineSpec
from scripts.transfer_bench.memory import Shape
from scripts.transfer_bench.reference import ReferenceEngine, Setup
from scripts.transfer_bench.report import Aim, Report, Row
from scripts.transfer_bench.sample import Sample
from scripts.transfer_bench.stepping import SteppedEngine

SECTION = "idle: CPU of the whole process, all threads, percent of one core"
AIM = Aim("cpu_percent", 2.0)
SETTLE_SECONDS = 1.0


class IdleEngine(SteppedEngine):
    def cpu_percent(self, seconds: float) -> float:
        """While this call sleeps."""
        started, spent = time.monotonic(), time.process_time()
        time.sleep(seconds)
        return 100 * (time.process_time() - spent) / (time.monotonic() - started)


@dataclass(frozen=True, slots=True)
class Options:
    shape: Shape
    leases: int
    rounds: int
    seconds: float
    directory: Path


def measure(report: Report, options: Options) -> None:
    _connectors(report, options)
    _reference_engine(report, options)


def _connectors(report: Report, options: Options) -> None:
    """P holds leases, D renews them: nothing else happens in either process."""
    for count in (0, options.leases):
        report.say(f"idle: connector alone, {count} leases")
        port_p, port_d = free_ports(2)
        with (
            Actor(IdleEngine, EngineSpec("bench-p", port_p, options.shape, lease_seconds=30)) as p,
            Actor(IdleEngine, EngineSpec("bench-d", port_d, options.shape, lease_seconds=30)) as d,
        ):
            d.call(IdleEngine.track, p.call(IdleEngine.lease, count))
            for side, engine in (("P, leases held", p), ("D, leases renewed", d)):
                measured = partial(engine.call, IdleEngine.cpu_percent, options.seconds)
                spent = _repeat(options, measured)
                report.add(_row(f"{side}: {count}", spent))


def _reference_engine(report: Report, options: Options) -> None:
    report.say(f"idle: reference engine, {options.leases} leases")
    with ReferenceEngine(options.directory, Setup(options.leases + 64)) as engine:
        report.add(
            _row(
                "engine, nothing held",
                _repeat(options, lambda: engine.cpu_percent(options.seconds)),
            )
        )
        engine.lease(options.leases)
        held = f"engine, {options.leases} blocks leased"
        report.add(_row(held, _repeat(options, lambda: engine.cpu_percent(options.seconds))))


def _repeat(options: Options, measure: Callable[[], float]) -> Sample:
    time.sleep(SETTLE_SECONDS)
    return Sample.of([measure() for _ in range(options.rounds)])


def _row(case: str, spent: Sample) -> Row:
    return Row(SECTION, case, {"cpu_percent": spent.median}, len(spent.values), spent.spread, AIM)
