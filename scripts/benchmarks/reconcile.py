"""Measure what a fleet that changes costs the event loop that serves requests.

python scripts/bench.py reconcile       a thousand engines, some seconds
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Sequence

from router.common.deadlines import Deadlines
from router.fleet.engine import EngineRole, EngineSpec, Health
from router.fleet.fleet import Fleet
from router.fleet.registry import EngineRegistry
from router.fleet.sources.factory import StaticSource
from router.fleet.sources.source import SourceReport
from router.http_client.pool import EnginePool, PoolLimits
from router.server.serve import GC_THRESHOLDS
from router.settings import Address, Settings
from scripts.benchmarks.common import Sample, bench_parser, positive

LIMITS = PoolLimits(connect_timeout_s=1, max_idle_connections=8, max_idle_s=4, max_head_bytes=65536)


def measure(count: int, times: int) -> tuple[list[float], list[float]]:
    """Return the milliseconds of applying a listing, and of removing the engines that left.

    The engines are in two groups. A listing has from nearly none to nearly all of them, at random.
    """
    deadlines, rng = Deadlines(), random.Random(1)
    fleet = Fleet(lambda spec: EnginePool(*spec.address, LIMITS, deadlines), 2)
    settings = Settings(prefill=("10.1.0.0:8000",), decode=("10.1.0.1:8000",))
    registry = EngineRegistry(fleet, [StaticSource(settings)], bound=3600.0)
    known = [
        EngineSpec(
            EngineRole.PREFILL if number % 2 else EngineRole.DECODE,
            Address(f"10.0.{number // 250}.{number % 250}", 8000),
            frozenset(["m"]),
            "blue" if number % 3 else "green",
        )
        for number in range(count)
    ]
    applying, removing = [], []
    for _ in range(times):
        share = rng.random()
        listed = tuple(one for one in known if rng.random() < share)
        registry.sources[0].note(SourceReport(listed))
        began = time.thread_time()
        registry.reconcile()
        middle = time.thread_time()
        registry.remove_drained()
        ended = time.thread_time()
        applying.append((middle - began) * 1e3)
        removing.append((ended - middle) * 1e3)
        for engine in fleet.engines:
            engine.health = Health.HEALTHY
    return applying, removing


def show(name: str, times: Sequence[float]) -> None:
    sample = Sample(times)
    p50, p99, worst = (sample.percentile(percent) for percent in (50, 99, 100))
    print(f"{name:28} p50 {p50:6.2f} ms   p99 {p99:6.2f} ms   worst {worst:6.2f} ms")


def main(arguments: Sequence[str]) -> int:
    parser = bench_parser("reconcile", __doc__)
    parser.add_argument("--engines", type=positive, default=1000, metavar="N", help="at most")
    parser.add_argument("--times", type=positive, default=200, metavar="N", help="listings")
    options = parser.parse_args(arguments)
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    print(f"{options.engines} engines, each there or not at random; CPU time of the loop's thread")
    applying, removing = measure(options.engines, options.times)
    show("a listing applied", applying)
    show("engines that left removed", removing)
    return 0
