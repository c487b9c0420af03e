"""Measure what a fleet that changes costs the event loop that serves requests.

python scripts/bench.py reconcile       a thousand engines, about half a minute
"""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

import uvloop

from router.fleet.engine import EngineRole, EngineSpec, Health
from router.fleet.fleet import Fleet
from router.fleet.registry import EngineRegistry
from router.fleet.sources.source import SourceReport
from router.http_client.answer_limits import Deadlines
from router.http_client.pool import EnginePool, PoolLimits
from router.settings import Address
from scripts.benchmarks.common import Sample, bench_parser, positive

LIMITS = PoolLimits(connect_timeout_s=1, max_idle_connections=8, max_idle_s=4, max_head_bytes=65536)
GC_THRESHOLDS = (50_000, 20, 50)  # as in a router that serves
TICK_S = 0.001
SETTLE_S = 1.2  # a change is applied, and engines that left are removed


class QueueSource:
    """A source that lists what a benchmark gives to it."""

    name = "benchmark"
    first = SourceReport()

    def __init__(self) -> None:
        self.reports: asyncio.Queue[SourceReport] = asyncio.Queue()

    async def watch(self) -> AsyncGenerator[SourceReport, None]:
        while True:
            yield await self.reports.get()


class World:
    """A registry of engines in two groups, each of them there or not at random."""

    def __init__(self, count: int, seed: int) -> None:
        deadlines = Deadlines()
        self.source = QueueSource()
        self.fleet = Fleet(lambda spec: EnginePool(*spec.address, LIMITS, deadlines), 2)
        self.registry = EngineRegistry(self.fleet, [self.source], bound=3600.0)
        self._rng = random.Random(seed)
        self._all = [
            EngineSpec(
                EngineRole.PREFILL if number % 2 else EngineRole.DECODE,
                Address(f"10.0.{number // 250}.{number % 250}", 8000),
                frozenset(["m"]),
                "blue" if number % 3 else "green",
            )
            for number in range(count)
        ]

    def some(self) -> tuple[EngineSpec, ...]:
        """Return from nearly none to nearly all engines."""
        share = self._rng.random()
        return tuple(one for one in self._all if self._rng.random() < share)


def applied(count: int, times: int) -> tuple[list[float], list[float]]:
    """Return the milliseconds of applying a listing, and of removing the engines that left."""
    world, applying, removing = World(count, 1), [], []
    for _ in range(times):
        world.registry.sources[0].note(SourceReport(world.some()))
        began = time.thread_time()
        world.registry.reconcile()
        middle = time.thread_time()
        world.registry.remove_drained()
        ended = time.thread_time()
        applying.append((middle - began) * 1e3)
        removing.append((ended - middle) * 1e3)
        for engine in world.fleet.engines:
            engine.health = Health.HEALTHY
    return applying, removing


async def lateness(work: Callable[[], Awaitable[object]]) -> float:
    """Return the milliseconds by which a loop that wakes every TICK_S was late at most."""
    working, worst = asyncio.ensure_future(work()), 0.0
    while not working.done():
        began = time.perf_counter()
        await asyncio.sleep(TICK_S)
        worst = max(worst, time.perf_counter() - began - TICK_S)
    await working
    return worst * 1e3


async def loop_lateness(count: int, times: int) -> dict[str, list[float]]:
    world = World(count, 2)
    running = asyncio.create_task(world.registry.run())

    async def nothing() -> None:
        await asyncio.sleep(SETTLE_S)

    async def change() -> None:
        world.source.reports.put_nowait(SourceReport(world.some()))
        await nothing()

    works = {"nothing": nothing, "a listing applied, engines removed": change}
    found = {name: [await lateness(work) for _ in range(times)] for name, work in works.items()}
    running.cancel()
    return found


def show(name: str, times: Sequence[float]) -> None:
    sample = Sample(times)
    p50, p99, worst = (sample.percentile(percent) for percent in (50, 99, 100))
    print(f"{name:40} p50 {p50:6.2f} ms   p99 {p99:6.2f} ms   worst {worst:6.2f} ms")


def main(arguments: Sequence[str]) -> int:
    parser = bench_parser("reconcile", __doc__)
    parser.add_argument("--engines", type=positive, default=1000, metavar="N", help="at most")
    parser.add_argument("--times", type=positive, default=200, metavar="N", help="listings")
    options = parser.parse_args(arguments)
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    print(f"{options.engines} engines, each there or not at random; CPU time of the loop's thread")
    applying, removing = applied(options.engines, options.times)
    show("a listing applied", applying)
    show("engines that left removed", removing)
    print("and how late the event loop is at most meanwhile")
    turns = max(1, options.times // 20)
    for name, late in uvloop.run(loop_lateness(options.engines, turns)).items():
        show(name, late)
    return 0
