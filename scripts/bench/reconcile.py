"""What a fleet that comes and goes costs the event loop that serves requests.

scripts/bench_reconcile.py                     a thousand engines, about half a minute
scripts/bench_reconcile.py --engines 200       fewer
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import random
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import NamedTuple

import msgspec
import uvloop

from router.fleet.engine import Health
from router.fleet.engine_spec import EngineRole, EngineSpec, ListedEngine
from router.fleet.fleet import Fleet
from router.fleet.reconcile import reconcile
from router.fleet.registry import LOOK, PAUSE, EngineRegistry
from router.fleet.sources.file import FileSource
from router.fleet.sources.pod_api import PAGE, PodListPage
from router.fleet.sources.source import SourceReport
from router.http_client.deadlines import Deadlines
from router.http_client.pool import EnginePool, PoolLimits
from router.proxy.gateway import Gateway
from router.server.serve import GC_THRESHOLDS
from router.settings import Address, Settings
from router.telemetry.metrics import Metrics

LIMITS = PoolLimits(connect_timeout_s=1, max_idle_connections=8, max_idle_s=4, max_head_bytes=65536)
TICK = 0.001


class Told:
    """A source that lists what it is given."""

    name = "told"
    first = SourceReport()

    def __init__(self) -> None:
        self.reports: asyncio.Queue[SourceReport] = asyncio.Queue()

    async def watch(self) -> AsyncGenerator[SourceReport, None]:
        while True:
            yield await self.reports.get()


class World:
    """A fleet, whoever is told of its changes, and a source to change it by."""

    def __init__(self, count: int) -> None:
        deadlines, self.source = Deadlines(), Told()
        self.everyone = everyone(count)
        self.fleet = Fleet((), lambda spec: EnginePool(*spec.address, LIMITS, deadlines), 2)
        settings = Settings(
            prefiller_hosts=("p",), prefiller_ports=(1,), decoder_hosts=("d",), decoder_ports=(1,)
        )
        self.gateway = Gateway(settings, self.fleet, Metrics())
        self.registry = EngineRegistry(self.fleet, [self.source], bound=3600.0)


class Step(NamedTuple):
    """Milliseconds of this thread's time."""

    applied: float
    removed: float


def everyone(count: int) -> list[ListedEngine]:
    """Prefillers and decoders of two groups."""
    return [
        ListedEngine(
            EngineSpec(
                EngineRole.PREFILL if number % 2 else EngineRole.DECODE,
                Address(f"10.0.{number // 250}.{number % 250}", 8000),
                frozenset(["m"]),
                "blue" if number % 3 else "green",
            )
        )
        for number in range(count)
    ]


def some(listed: Sequence[ListedEngine], chance: random.Random) -> tuple[ListedEngine, ...]:
    """Each with a probability that is itself drawn: from nearly none to nearly all."""
    share = chance.random()
    return tuple(one for one in listed if chance.random() < share)


def decided(count: int, times: int) -> Iterator[float]:
    chance, listed = random.Random(1), everyone(count)
    there: dict[Address, ListedEngine] = {}
    for _ in range(times):
        wanted = {one.address: one for one in some(listed, chance)}
        began = time.thread_time()
        reconcile(there, wanted)
        yield (time.thread_time() - began) * 1e3
        there = wanted


def steps(count: int, times: int) -> Iterator[Step]:
    """Engines leave, join, and those that left are removed."""
    chance, world = random.Random(1), World(count)
    for _ in range(times):
        world.registry.sources[0].note(SourceReport(some(world.everyone, chance)))
        began = time.thread_time()
        world.registry.reconcile()
        applied = time.thread_time()
        world.registry.remove_drained()
        ended = time.thread_time()
        for engine in world.fleet.engines:
            engine.health = Health.HEALTHY
        yield Step((applied - began) * 1e3, (ended - applied) * 1e3)


def pages(times: int) -> Iterator[float]:
    """An answer of the API server, with pods as large as they are in life."""
    pod = {
        "metadata": {
            "name": "d" * 40,
            "labels": {f"label-{n}": "x" * 30 for n in range(12)},
            "managedFields": [{"fieldsV1": {f"f:{n}": {"f:x": {}} for n in range(120)}}] * 2,
        },
        "spec": {
            "containers": [{"env": [{"name": f"N{n}", "value": "v" * 40} for n in range(40)]}]
        },
        "status": {"phase": "Running", "podIP": "10.0.0.1", "conditions": [{"type": "Ready"}]},
    }
    text = json.dumps({"metadata": {"resourceVersion": "1"}, "items": [pod] * PAGE}).encode()
    for _ in range(times):
        began = time.thread_time()
        msgspec.json.decode(text, type=PodListPage)
        yield (time.thread_time() - began) * 1e3


async def lateness(work: Callable[[], Awaitable[object]], times: int) -> list[float]:
    """Milliseconds by which a loop that wants to wake every TICK was late at most, each time."""
    found = []
    for _ in range(times):
        working, worst = asyncio.ensure_future(work()), 0.0
        while not working.done():
            began = time.perf_counter()
            await asyncio.sleep(TICK)
            worst = max(worst, time.perf_counter() - began - TICK)
        found.append(worst * 1e3)
        await working
    return found


async def loop_figures(count: int, times: int, directory: Path) -> dict[str, list[float]]:
    chance, world, path = random.Random(2), World(count), directory / "engines.yaml"
    path.write_text("engines: []")
    file = FileSource(path, interval=0)
    running = asyncio.create_task(world.registry.run())

    async def nothing() -> None:
        await asyncio.sleep(PAUSE + 2 * LOOK)

    async def change() -> None:
        world.source.reports.put_nowait(SourceReport(some(world.everyone, chance)))
        await nothing()

    async def read_again() -> None:
        path.write_text(as_file(some(world.everyone, chance)))
        async with aclosing(file.watch()) as reports:
            assert (await anext(reports)).listed is not None

    figures = {
        "nothing": await lateness(nothing, times),
        "a set applied, who left removed": await lateness(change, times),
        "a file read and parsed": await lateness(read_again, times),
    }
    running.cancel()
    return figures


def as_file(listed: Sequence[ListedEngine]) -> str:
    entries = [
        {"url": f"http://{x.address}", "role": x.spec.role, "models": ["m"], "group": x.spec.group}
        for x in listed
    ]
    return "\n".join(["engines:", *[f"- {json.dumps(one)}" for one in entries]] if listed else
                     ["engines: []"])  # fmt: skip


def show(what: str, times: Sequence[float]) -> None:
    ordered = sorted(times)
    p50, p99 = (ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.99))
    print(f"{what:40} p50 {p50:6.2f} ms   p99 {p99:6.2f} ms   worst {ordered[-1]:6.2f} ms")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", type=int, default=1000, metavar="N", help="at most so many")
    parser.add_argument("--times", type=int, default=200, metavar="N", help="how many sets")
    options = parser.parse_args()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)  # as in a router that serves
    taken = list(steps(options.engines, options.times))
    print(f"{options.engines} engines, each there or not at random; CPU time of the loop's thread")
    show("reconcile alone", list(decided(options.engines, options.times)))
    show("a set applied", [step.applied for step in taken])
    show("who left removed", [step.removed for step in taken])
    show("both", [sum(step) for step in taken])
    show(f"a page of {PAGE} pods decoded", list(pages(options.times)))
    print("and how late the event loop is at most meanwhile")
    with tempfile.TemporaryDirectory() as directory:
        turns = max(1, options.times // 20)
        figures = uvloop.run(loop_figures(options.engines, turns, Path(directory)))
    for what, late in figures.items():
        show(what, late)
    return 0
