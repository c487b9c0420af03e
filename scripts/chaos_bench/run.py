"""One run: a router, a load, one thing that goes wrong and is mended, and what came of it."""

import asyncio
import math
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from router.children import Family
from scripts.chaos_bench.answers import OK, WRONG, Ask
from scripts.chaos_bench.client import Result
from scripts.chaos_bench.faults import Blow, Fault
from scripts.chaos_bench.fleet import Engine, Fleet
from scripts.chaos_bench.load import Asks, Load
from scripts.chaos_bench.routers import Contestant, Router, kill
from scripts.chaos_bench.scenarios import Aim, Mode, Role, Scenario
from scripts.chaos_bench.sockets import noting_requests
from scripts.router_bench.accounting import usage

BEFORE = 0.7
"""Seconds of load before anything goes wrong, after all clients have begun."""
BALANCER = 0.3
"""Seconds after SIGTERM until new connections go to the second router: less than its delay."""
PASSED_OVER = 20
"""Requests after which one that had none of them is left alone: it is one of three."""


@dataclass(slots=True)
class Run:
    """Seconds since the harm, or of a wait.

    `asked` are the requests that came to the broken, None where nobody can know; `stopped` is when
    they were left alone, None where they never were.
    """

    scenario: str
    mode: str
    requests: int
    ok: int
    errors: dict[str, int]
    longest: float
    silence: float
    last_error: float | None
    asked: int | None
    stopped: float | None
    router_cpu: float
    """Share of one core."""
    missed: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


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


def summary(
    scenario: Scenario,
    mode: Mode,
    results: Sequence[Result],
    began: float,
    mended: float,
    asked_at: Sequence[float] | None,
) -> Run:
    counted = Counter(result.kind for result in results)
    errors = [result for result in results if result.kind != OK]
    run = Run(
        scenario=scenario.name,
        mode=mode,
        requests=len(results),
        ok=counted.pop(OK, 0),
        errors=dict(counted.most_common()),
        longest=max((result.waited for result in results), default=0.0),
        silence=max((result.silence for result in results), default=0.0),
        last_error=max((error.ended - began for error in errors), default=None),
        asked=None if asked_at is None else len(asked_at),
        stopped=None,
        router_cpu=0.0,
    )
    if asked_at is not None:
        during = [result.started for result in results if began < result.started < mended]
        run.stopped = left_alone([at - began for at in asked_at], [at - began for at in during])
    run.missed = misses(run, scenario.aim_in(mode))
    return run


def left_alone(asked_at: Sequence[float], started: Sequence[float]) -> float | None:
    """When the broken had their last request before so many others passed them over.

    A later one is a trial. None if that never was: clients who all wait ask nobody either.
    """
    came = [0.0, *sorted(asked_at)]
    for at, following in zip(came, [*came[1:], math.inf], strict=True):
        if sum(at < start < following for start in started) > PASSED_OVER:
            return at
    return None


def misses(run: Run, aim: Aim | None) -> list[str]:
    """What is not as it should be; empty when all is."""
    found = [f"{run.errors[WRONG]} WRONG"] if WRONG in run.errors else []
    if not run.ok:
        found.append("no right answer")
    if aim is None:
        return found
    bad = {kind: n for kind, n in run.errors.items() if kind not in aim.forgiven | {WRONG}}
    found += [f"{number} {kind}" for kind, number in bad.items()]
    if aim.longest is not None and run.longest > aim.longest:
        found.append(f"a client waited {run.longest:.1f} s")
    if aim.silence is not None and run.silence > aim.silence:
        found.append(f"a stream stood still for {run.silence:.1f} s")
    return found
