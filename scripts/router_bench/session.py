"""One session: engines on their cores, routers on theirs, cases in rounds that take turns."""

import asyncio
import contextlib
import os
import resource
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scripts.bench.errors import BenchError
from scripts.bench.ports import free_ports
from scripts.router_bench import cases
from scripts.router_bench.accounting import usage
from scripts.router_bench.cases import Case
from scripts.router_bench.contestants import PEERS, Engines, Peer, Process, ours
from scripts.router_bench.load import Asking, Connection, Direct, Outcome, Routed, dial, drive
from scripts.router_bench.runs import Run, percentiles

OURS = "disagg-router"
DIRECT = "direct"
READY = 60.0
"""Seconds until a router that lives must also answer."""
IDLE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Cores:
    """The routers have one core, all of them the same; engines and load have the others."""

    router: frozenset[int]
    others: frozenset[int]

    @classmethod
    def split(cls, given: Sequence[int]) -> "Cores":
        """Raises BenchError with fewer than two."""
        if len(given) < 2:
            raise BenchError("two cores are needed: one for the routers, one for all else")
        return cls(frozenset(given[:1]), frozenset(given[1:]))


@dataclass(slots=True)
class Contestant:
    """`port` is None for no router at all; then `pid` is nobody's."""

    name: str
    port: int | None = None
    pid: int | None = None


@dataclass(slots=True)
class Session:
    engines: Engines
    contestants: list[Contestant]
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    place: int = 0

    async def run(self, case: Case, total: int, contestant: Contestant) -> Run:
        async with self._clients(case, contestant) as clients:
            await drive(clients, min(total, 4 * len(clients)))
            before = _cpu_of(contestant)
            outcome = await drive(clients, total)
            cpu = _cpu_of(contestant) - before
        self.place += 1
        return self._run(case, contestant, outcome, cpu)

    async def watched(
        self, case: Case, contestant: Contestant, asking: Callable[[], Awaitable[Outcome]]
    ) -> Run:
        """What the contestant costs while somebody else asks it."""
        before = _cpu_of(contestant)
        outcome = await asking()
        cpu = _cpu_of(contestant) - before
        self.place += 1
        return self._run(case, contestant, outcome, cpu)

    async def idle(self, contestant: Contestant, count: int) -> Run:
        """Streams that have begun and say nothing: what they cost while nothing comes."""
        assert contestant.port is not None
        connections = await dial(contestant.port, count)
        try:
            request = cases.silent_stream()
            async with asyncio.timeout(READY):
                await asyncio.gather(*[one.first_byte(request) for one in connections])
            before, started = _cpu_of(contestant), time.perf_counter()
            await asyncio.sleep(IDLE_SECONDS)
            cpu, elapsed = _cpu_of(contestant) - before, time.perf_counter() - started
        finally:
            for connection in connections:
                connection.close()
        self.place += 1
        outcome = Outcome(elapsed)
        return self._run(Case("idle", lambda *_: request, count), contestant, outcome, cpu)

    @contextlib.asynccontextmanager
    async def _clients(self, case: Case, contestant: Contestant) -> AsyncIterator[list[Asking]]:
        clients = await self._dial(case, contestant)
        try:
            yield clients
        finally:
            for client in clients:
                client.close()

    async def _dial(self, case: Case, contestant: Contestant) -> list[Asking]:
        if contestant.port is not None:
            made = await dial(contestant.port, case.connections)
            return [Routed(connection, case.requests) for connection in made]
        prefillers = await dial(self.engines.prefiller, case.connections)
        decoders = await dial(self.engines.decoder, case.connections)
        return [Direct(p, d, case.requests) for p, d in zip(prefillers, decoders, strict=True)]

    def _run(self, case: Case, contestant: Contestant, outcome: Outcome, cpu: float) -> Run:
        timings = outcome.timings
        return Run(
            session=self.id,
            place=self.place,
            case=case.name,
            contestant=contestant.name,
            requests=len(timings) or case.connections,
            chunks=case.chunks,
            elapsed=outcome.elapsed,
            cpu=cpu,
            peak=0 if contestant.pid is None else usage(contestant.pid).peak,
            first_byte=percentiles([t.first_byte for t in timings] or [0.0]),
            whole=percentiles([t.whole for t in timings] or [0.0]),
        )


def _cpu_of(contestant: Contestant) -> float:
    return 0.0 if contestant.pid is None else usage(contestant.pid).cpu


@contextlib.contextmanager
def opened(peer: str | None, environment: Path, logs: Path) -> Iterator[Session]:
    """Everything started and answering. Raises BenchError."""
    cores = Cores.split(sorted(os.sched_getaffinity(0)))
    os.sched_setaffinity(0, cores.others)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with contextlib.ExitStack() as stack:
        tells = peer is not None and PEERS[peer].engines_tell
        engines = _start_engines(stack, cores, tells)
        commands = {OURS: None} if peer is None else {OURS: None, peer: PEERS[peer]}
        contestants = [
            _start(stack, cores, engines, name, given, environment, logs)
            for name, given in commands.items()
        ]
        yield Session(engines, [*contestants, Contestant(DIRECT)])


def _start_engines(stack: contextlib.ExitStack, cores: Cores, tells: bool) -> Engines:
    command = [sys.executable, "-m", "scripts.router_bench.mock_engine", *["tells"] * tells]
    process = Process(command, set(cores.others), None)
    stack.callback(process.stop)
    assert process.child.stdout is not None
    ports = process.child.stdout.readline().split()
    if len(ports) != 2:
        raise BenchError("the mock engines do not start")
    return Engines(*map(int, ports))


def _start(
    stack: contextlib.ExitStack,
    cores: Cores,
    engines: Engines,
    name: str,
    peer: Peer | None,
    environment: Path,
    logs: Path,
) -> Contestant:
    (port,) = free_ports(1)
    command = ours(port, engines) if peer is None else peer.arguments(environment, port, engines)
    process = Process(command, set(cores.router), logs / f"{name}.log")
    stack.callback(process.stop)
    process.until_healthy(port)
    asyncio.run(_until_answering(port, cases.cases()["unary"]))
    return Contestant(name, port, process.pid)


async def _until_answering(port: int, case: Case) -> None:
    """A router may live before it has found its engines."""
    latest = time.monotonic() + READY
    while True:
        try:
            connection = await Connection.open(port)
            await connection.ask(case.requests(0, 0))
        except (BenchError, OSError) as error:
            if time.monotonic() > latest:
                raise BenchError(f"the router on port {port} does not answer: {error}") from error
            await asyncio.sleep(0.2)
        else:
            connection.close()
            return


async def measure(session: Session, case: Case, rounds: int, share: float) -> AsyncIterator[Run]:
    """Rounds in which all contestants take turns; `share` of the case's usual total."""
    total = max(case.connections, int(case.total * share))
    for _ in range(rounds):
        for contestant in session.contestants:
            yield await session.run(case, total, contestant)


async def measure_idle(session: Session, count: int, rounds: int) -> AsyncIterator[Run]:
    for _ in range(rounds):
        for contestant in session.contestants:
            if contestant.port is not None:
                yield await session.idle(contestant, count)
