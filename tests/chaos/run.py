"""One drill: a router, a load, one failure, and what came of it."""

import asyncio
import contextlib
import math
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field

from router.commands.bench.load import Client, drive
from router.common.child_processes import ChildProcesses
from scripts.benchmarks.common import BenchError, cpu_seconds
from scripts.mock_engine import Fault
from tests.chaos.processes import Engine, EngineFleet, RouterCommand, RouterProcess, noting_requests
from tests.chaos.questions import OK, WRONG, Questions, judge
from tests.chaos.scenarios import Aim, Blow, Mode, Role, Scenario

ANSWER_TIMEOUT_S = 30.0
BEFORE_S = 0.7
"""Load before anything is broken, after all clients have begun."""
BALANCER_S = 0.3
"""From SIGTERM until new connections go to the second router: less than its shutdown delay."""
FAILURE_PAUSE_S = 0.1
"""After a failure, so that quick failures do not outnumber everything else."""
READY_TIMEOUT_S = 120.0
READY_ANSWERS = 6
"""Right answers in a row after which a router knows all its engines."""
PASSED_OVER = 20
"""Requests without one for the broken engine after which it counts as left alone: it is one of
three."""


@dataclass(slots=True)
class Result:
    """A request's outcome. Times are monotonic, in seconds; `silence` is the longest gap."""

    kind: str
    started: float
    ended: float
    silence: float


@dataclass
class DrillLoad:
    """Clients that send the next request as soon as they have an answer."""

    port: int
    """It changes when a balancer moves new connections to another router."""
    clients: int
    questions: Questions
    pause: float
    spread: float
    """Seconds over which the clients begin, so that they do not send in step."""
    connects_anew: bool
    results: list[Result] = field(default_factory=list)
    _is_over: bool = False

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Send requests until the block ends, and wait for the answers that are still to come."""
        clients = [Client("127.0.0.1", self.port) for _ in range(self.clients)]
        numbers = {client: number for number, client in enumerate(clients)}

        async def ask(client: Client, _: None) -> None:
            if (number := numbers.pop(client, None)) is not None:
                await asyncio.sleep(self.spread * number / self.clients)
            if self._is_over:
                return
            client.port = self.port
            question = self.questions()
            exchange = await client.send(question.request, ANSWER_TIMEOUT_S)
            kind = judge(question, exchange)
            self.results.append(
                Result(kind, exchange.started, exchange.ended, exchange.longest_gap)
            )
            if self.connects_anew:
                client.close()
            await asyncio.sleep(self.pause if kind == OK else FAILURE_PAUSE_S)

        load = asyncio.create_task(drive(clients, self._until_over(), ask))
        try:
            yield
            self._is_over = True
            await load
        finally:
            load.cancel()
            for client in clients:
                client.close()

    def _until_over(self) -> Iterator[None]:
        while not self._is_over:
            yield None


@dataclass(slots=True)
class Outcome:
    """The view of the clients in one drill. Times are in seconds; moments count from the harm.

    `asked` counts the requests that the broken engine received, None where that cannot be known;
    `stopped` is when it was left alone, None where it never was. `router_cpu` is a share of a core.
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
    missed: list[str] = field(default_factory=list)
    """Return the differences from the scenario's aim."""


@dataclass
class Drill:
    """All that outlives one run of a scenario."""

    family: ChildProcesses
    command: RouterCommand
    fleet: EngineFleet
    first: Questions
    """Short ones, by which a new router shows that it knows its engines."""
    clients: int
    seconds: float
    seed: int
    pause: float = 0.0

    async def run(self, scenario: Scenario, mode: Mode, questions: Questions) -> Outcome:
        """Raises BenchError when a router or an engine does not start."""
        name = f"{scenario.name} {mode}"
        await self.fleet.start()
        routers = [await self._start_router(name)]
        spread = scenario.chunks * scenario.interval
        connects_anew = scenario.role is Role.ROUTER
        load = DrillLoad(
            routers[0].port, self.clients, questions, self.pause, spread, connects_anew
        )
        pid = routers[0].child.process.pid
        started, cpu = time.monotonic(), cpu_seconds(pid)
        try:
            async with load.running():
                await asyncio.sleep(spread + BEFORE_S)
                began = time.monotonic()
                rng = random.Random(f"{self.seed} {name}")
                asked_at = await self._harm(scenario, rng, load, routers)
                mended = time.monotonic()
                await asyncio.sleep(scenario.after)
                share = (cpu_seconds(pid) - cpu) / (time.monotonic() - started)
        finally:
            self.fleet.thaw()
            for router in routers:
                router.kill()
        return summary(scenario, mode, load.results, (began, mended), asked_at, share)

    async def _start_router(self, name: str) -> RouterProcess:
        router = await RouterProcess.start(self.family, self.command, name, self.fleet)
        client, right, latest = Client("127.0.0.1", router.port), 0, time.monotonic()
        latest += READY_TIMEOUT_S
        while right < READY_ANSWERS:
            question = self.first()
            kind = judge(question, await client.send(question.request, ANSWER_TIMEOUT_S))
            right = right + 1 if kind == OK else 0
            if time.monotonic() > latest:
                router.kill()
                raise BenchError(f"a router answers wrongly for {READY_TIMEOUT_S:g} s: {kind}")
            await asyncio.sleep(0 if right else 0.2)
        client.close()
        return router

    async def _harm(
        self,
        scenario: Scenario,
        rng: random.Random,
        load: DrillLoad,
        routers: list[RouterProcess],
    ) -> list[float] | None:
        """Break, wait and mend; return when the broken were asked meanwhile, if that is known."""
        fleet, seconds = self.fleet, max(self.seconds, scenario.seconds)
        engines = fleet.prefillers if scenario.role is Role.PREFILL else fleet.decoders
        victims = engines if scenario.everyone else [rng.choice(engines)]
        match scenario.harm:
            case Fault() as fault:
                for engine in victims:
                    await fleet.switch(engine, fault)
                await asyncio.sleep(seconds)
                return [at for one in victims for at in await fleet.switch(one, Fault.NONE)]
            case Blow.FREEZE:
                victims[0].send(signal.SIGSTOP)
                async with noting_requests(victims[0].port) as asked_at:
                    await asyncio.sleep(seconds)
                fleet.thaw()
                return asked_at
            case Blow.HANDOVER:
                # As behind a balancer: the second router is ready before the first gets SIGTERM.
                routers.append(await self._start_router(f"{scenario.name} second"))
                routers[0].ask_to_end()
                await asyncio.sleep(BALANCER_S)
                load.port = routers[1].port
            case blow:
                await self._kill(victims, blow, seconds, scenario.restarts)
        return None

    async def _kill(
        self, victims: Sequence[Engine], blow: Blow, seconds: float, restarts: bool
    ) -> None:
        if blow is Blow.STOP:
            await asyncio.gather(*map(self.fleet.stop, victims))
        else:
            for engine in victims:
                self.fleet.kill(engine)
        if blow is Blow.KILL:
            await asyncio.sleep(seconds)
        if restarts:
            await asyncio.gather(*map(self.fleet.restart, victims))
        if blow is Blow.RESTART:
            await asyncio.sleep(seconds)


def summary(
    scenario: Scenario,
    mode: Mode,
    results: Sequence[Result],
    harmed: tuple[float, float],
    asked_at: Sequence[float] | None,
    router_cpu: float,
) -> Outcome:
    """`harmed` is from when to when something was broken."""
    began, mended = harmed
    counted = Counter(result.kind for result in results)
    failed = [result.ended - began for result in results if result.kind != OK]
    outcome = Outcome(
        scenario=scenario.name,
        mode=mode,
        requests=len(results),
        ok=counted.pop(OK, 0),
        errors=dict(counted.most_common()),
        longest=max((result.ended - result.started for result in results), default=0.0),
        silence=max((result.silence for result in results), default=0.0),
        last_error=max(failed, default=None),
        asked=None if asked_at is None else len(asked_at),
        stopped=None,
        router_cpu=router_cpu,
    )
    if asked_at is not None:
        during = [result.started for result in results if began < result.started < mended]
        outcome.stopped = left_alone([at - began for at in asked_at], [at - began for at in during])
    outcome.missed = misses(outcome, scenario.aim_in(mode))
    return outcome


def left_alone(asked_at: Sequence[float], started: Sequence[float]) -> float | None:
    """Return when the broken had their last request before PASSED_OVER others; None for never.

    A later request is a trial. Clients that all wait do not show that anyone was left alone.
    """
    came = [0.0, *sorted(asked_at)]
    for at, following in zip(came, [*came[1:], math.inf], strict=True):
        if sum(at < start < following for start in started) > PASSED_OVER:
            return at
    return None


def misses(outcome: Outcome, aim: Aim) -> list[str]:
    found = [f"{outcome.errors[WRONG]} WRONG"] if WRONG in outcome.errors else []
    if not outcome.ok:
        found.append("no right answer")
    found += [f"{count} {kind}" for kind, count in outcome.errors.items() if kind != WRONG]
    if aim.longest is not None and outcome.longest > aim.longest:
        found.append(f"a client waited {outcome.longest:.1f} s")
    if aim.silence is not None and outcome.silence > aim.silence:
        found.append(f"a stream stood still for {outcome.silence:.1f} s")
    return found
