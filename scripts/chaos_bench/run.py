"""One run: a router, a load, one thing that goes wrong and is mended."""

import asyncio
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from router.common.child_processes import Family
from scripts.benchmarks.common import usage
from scripts.chaos_bench.answers import Ask
from scripts.chaos_bench.faults import Blow, Fault
from scripts.chaos_bench.fleet import Engine, Fleet
from scripts.chaos_bench.load import Asks, Load
from scripts.chaos_bench.outcome import Run, summary
from scripts.chaos_bench.routers import Contestant, Router, kill
from scripts.chaos_bench.scenarios import Mode, Role, Scenario
from scripts.chaos_bench.sockets import noting_requests

BEFORE = 0.7
"""Seconds of load before anything goes wrong, after all clients have begun."""
BALANCER = 0.3
"""Seconds after SIGTERM until new connections go to the second router: less than its delay."""


@dataclass
class Bench:
    """Everything that a run needs, and that outlives it."""

    family: Family
    contestant: Contestant
    fleet: Fleet
    clients: int
    seconds: float
    seed: int
    pause: float = 0.0

    async def run(self, scenario: Scenario, mode: Mode, first: Ask, asks: Asks) -> Run:
        """Raises BenchError when a router or an engine does not start."""
        name = f"{scenario.name} {mode}"
        router = await Router.start(self.family, self.contestant, name, self.fleet, first)
        routers = [router]
        spread = scenario.chunks * scenario.interval
        load = Load(router.port, self.clients, asks, self.pause, spread)
        load.connects_anew = scenario.role is Role.ROUTER
        harm = Harming(self, scenario, load, routers, first)
        started, cpu = time.monotonic(), usage(router.child.process.pid).cpu
        try:
            async with load:
                await asyncio.sleep(spread + BEFORE)
                began = time.monotonic()
                asked_at = await harm.do(random.Random(f"{self.seed} {name}"))
                mended = time.monotonic()
                await asyncio.sleep(scenario.after)
                cpu = usage(router.child.process.pid).cpu - cpu
                share = cpu / (time.monotonic() - started)
        finally:
            self.fleet.thaw()
            for each in routers:
                kill(self.family, each.child)
        run = summary(scenario, mode, load.results, began, mended, asked_at)
        run.router_cpu = share
        return run


@dataclass
class Harming:
    bench: Bench
    scenario: Scenario
    load: Load
    routers: list[Router]
    first: Ask

    async def do(self, rng: random.Random) -> list[float] | None:
        """Breaks, waits, mends. When the broken were still asked, or None if nobody can know."""
        if self.scenario.harm is Blow.HANDOVER:
            await self._hand_over()
            return None
        fleet = self.bench.fleet
        engines = fleet.prefillers if self.scenario.role is Role.PREFILL else fleet.decoders
        victims = engines if self.scenario.everyone else [rng.choice(engines)]
        if isinstance(self.scenario.harm, Fault):
            return await self._fault(victims, self.scenario.harm)
        if self.scenario.harm is Blow.FREEZE:
            return await self._freeze(victims)
        await self._kill(victims)
        return None

    async def _last(self) -> None:
        await asyncio.sleep(max(self.bench.seconds, self.scenario.seconds))

    async def _fault(self, victims: Sequence[Engine], fault: Fault) -> list[float]:
        fleet = self.bench.fleet
        for engine in victims:
            await fleet.switch(engine, fault)
        await self._last()
        return [at for engine in victims for at in await fleet.switch(engine, Fault.NONE)]

    async def _freeze(self, victims: Sequence[Engine]) -> list[float]:
        (engine,) = victims
        engine.send(signal.SIGSTOP)
        async with noting_requests(engine.port) as came:
            await self._last()
        self.bench.fleet.thaw()
        return came

    async def _kill(self, victims: Sequence[Engine]) -> None:
        fleet = self.bench.fleet
        if self.scenario.harm is Blow.STOP:
            await asyncio.gather(*map(fleet.stop, victims))
        else:
            for engine in victims:
                fleet.kill(engine)
        if self.scenario.harm is Blow.KILL:
            await self._last()
        await asyncio.gather(*map(fleet.restart, victims))
        if self.scenario.harm is Blow.RESTART:
            await self._last()

    async def _hand_over(self) -> None:
        """As behind a balancer: a second router is ready, then the first is told to end."""
        bench, name = self.bench, f"{self.scenario.name} second"
        second = await Router.start(bench.family, bench.contestant, name, bench.fleet, self.first)
        self.routers.append(second)
        self.routers[0].ask_to_end()
        await asyncio.sleep(BALANCER)
        self.load.port = second.port
