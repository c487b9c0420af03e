"""Many runs: mock fleets side by side, then the reference engines alone."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from router.common.child_processes import Family
from scripts.chaos_bench import reference
from scripts.chaos_bench.asks import mock_asks
from scripts.chaos_bench.fleet import mock_fleet
from scripts.chaos_bench.outcome import Run
from scripts.chaos_bench.routers import Contestant
from scripts.chaos_bench.run import Bench
from scripts.chaos_bench.scenarios import Mode, Scenario


@dataclass(frozen=True, slots=True)
class Plan:
    """`at_once` runs side by side, each with engines and a router of its own."""

    contestant: Contestant
    todo: Sequence[tuple[Scenario, Mode]]
    clients: int
    seconds: float
    seed: int
    at_once: int


@dataclass
class Session:
    family: Family
    plan: Plan
    note: Callable[[Run], None]

    async def run(self) -> None:
        """Raises BenchError."""
        mocked = deque(one for one in self.plan.todo if not one[0].is_real)
        real = [scenario for scenario, _ in self.plan.todo if scenario.is_real]
        async with asyncio.TaskGroup() as group:
            for lane in range(min(self.plan.at_once, len(mocked))):
                group.create_task(self._run_mocked(f"lane {lane}", mocked))
        if real:
            await self._run_real(real)

    async def _run_mocked(self, name: str, todo: deque[tuple[Scenario, Mode]]) -> None:
        plan = self.plan
        fleet = mock_fleet(self.family, name, plan.seed)
        await fleet.start()
        bench = Bench(self.family, plan.contestant, fleet, plan.clients, plan.seconds, plan.seed)
        first = mock_asks("first", Mode.UNARY, 1, 0.0, plan.seed)()
        while todo:
            scenario, mode = todo.popleft()
            asks = mock_asks(scenario.name, mode, scenario.chunks, scenario.interval, plan.seed)
            self.note(await bench.run(scenario, mode, first, asks))

    async def _run_real(self, todo: Sequence[Scenario]) -> None:
        plan = self.plan
        fleet = reference.reference_fleet(self.family)
        await fleet.start()
        oracle = await reference.Oracle.learn(fleet.decoders[0], plan.seed)
        clients = min(reference.CLIENTS, plan.clients)
        bench = Bench(self.family, plan.contestant, fleet, clients, plan.seconds, plan.seed)
        bench = replace(bench, pause=reference.PAUSE)
        for scenario in todo:
            self.note(await bench.run(scenario, Mode.MIXED, oracle.first(), oracle.asks()))
