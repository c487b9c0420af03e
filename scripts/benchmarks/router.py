"""CPU time of a router per request, beside another router and beside no router at all.

    python scripts/bench.py router                                   every case, three minutes
    python scripts/bench.py router --peer vllm-router                with ratios to the Rust router
    python scripts/bench.py router --peer checkout --peer-dir DIR    another commit's work tree
    python scripts/bench.py router --peer checkout --peer-flag=--ui  this commit with another flag
    python scripts/bench.py router --only unary paced-quarter --rounds 9
    python scripts/bench.py router --saturate                        with a full core, asked by wrk
    python scripts/bench.py router --instructions --only unary turn  counted by callgrind, too
    python scripts/bench.py router --engines 100 --only agent        of a hundred engines

All routers share one core; the mock engines and the load have the others. Rounds take turns, so
that the machine's mood is the same for all, and figures are medians over rounds; a ratio is the
median of the ratios within rounds. CPU is the kernel's account of all threads of the router.

Instructions are those of user space, less those of as long a time without requests.

Exit status: 0 measured; 1 could not measure; 2 wrong options, or no valgrind for --instructions.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import orjson
import uvloop

from router.commands.bench.load import Client, LoadExchange, drive, request_bytes
from router.common.child_processes import ChildEndedError, ChildProcess, ChildProcesses
from scripts.benchmarks.common import (
    BenchError,
    Sample,
    bench_parser,
    cpu_seconds,
    describe,
    free_ports,
    peak_bytes,
    positive,
    ratios,
    report_progress,
    write_report,
)
from scripts.benchmarks.contestants import (
    CHECKOUT,
    OURS,
    PEERS,
    ROOT,
    install_package,
    our_command,
    package_command,
)

PATH = "/v1/chat/completions"
DIRECT = "direct"
ANSWER_TIMEOUT_S = 60.0
IDLE_S = 20.0
CHUNKS = 64
PACE_US = 5000
TURNS = 4
KB, MB = 1024, 1024 * 1024
CLIENT_HEADERS = (("user-agent", "bench"), ("accept", "*/*"), ("authorization", "Bearer key"))
SATURATED = {"unary": 32, "32k": 32, "burst": 32, "paced": 512}
"""The connections with which wrk fills the routers' core, by case."""
WRK_S, WRK_WARM_UP_S = 4, 1
COUNTED_CLIENTS, COUNTED_REQUESTS = 8, 192
CALLGRIND = ["valgrind", "--tool=callgrind", "--trace-children=yes", "--instr-atstart=no"]
TOTAL = re.compile(r"^(?:totals|summary): (\d+)$", re.MULTILINE)
BUSY = 0.9
"""Share of its core below which a router was not saturated."""
WRK_ENDED = re.compile(r"^ended (\d+) (\d+) (\d+)$", re.MULTILINE)
WRK_SCRIPT = """\
local file = io.open("{path}", "rb")
local raw = file:read("*a")
file:close()
request = function() return raw end
done = function(summary)
  local errors = summary.errors
  local failed = errors.connect + errors.read + errors.write + errors.status
  io.write(string.format("ended %d %d %d\\n", summary.requests, summary.duration, failed))
end
"""

Requests = Callable[[int, int], bytes]
"""The bytes of a request, by the number of its client and its place among the client's requests."""


@dataclass(frozen=True, slots=True)
class Case:
    """`total` requests by `connections` clients; an answer has `chunks` that come one by one."""

    name: str
    requests: Requests
    connections: int = 32
    total: int = 4000
    chunks: int = 1


def cases() -> Mapping[str, Case]:
    burst = {"stream": True, "max_tokens": CHUNKS}
    paced = burst | {"seed": PACE_US}
    long = paced | {"max_tokens": 1000}  # and a prompt of about 113,000 tokens
    made = [
        Case("latency", _same(KB), connections=1, total=600),
        Case("unary", _same(KB)),
        Case("unary-1000", _same(KB), connections=1000),
        Case("32k", _same(32 * KB), total=2000),
        Case("1m", _same(MB), connections=4, total=60),
        Case("burst", _same(KB, burst), total=3000, chunks=CHUNKS),
        Case("paced", _same(KB, paced), total=256, chunks=CHUNKS),
        Case("paced-quarter", _same(KB, paced), 50, 400, CHUNKS),
        Case("paced-1000", _same(KB, paced), 1000, 1000, CHUNKS),
        Case("agent", _same(452 * KB, long), 16, 32, chunks=1000),
        Case("turn", _turns("x-session-id")),
        Case("turn-alone", _turns("x-no-session")),
    ]
    return {case.name: case for case in made}


def _same(size: int, fields: Mapping[str, object] | None = None) -> Requests:
    """One user message that makes the body about `size` bytes."""
    messages = [{"role": "user", "content": "a" * (size - 100)}]
    body = {"model": "m", "max_tokens": 16, "messages": messages, **(fields or {})}
    request = request_bytes(PATH, orjson.dumps(body), CLIENT_HEADERS)
    return lambda client, number: request


def _turns(header: str) -> Requests:
    """Conversations of TURNS turns, named by `header`, which the router may not know."""
    question, answer = (
        {"role": r, "content": c} for r, c in (("user", "a" * KB), ("assistant", "x"))
    )
    bodies = [
        orjson.dumps({"model": "m", "messages": [question, *[answer, question] * turn]})
        for turn in range(TURNS)
    ]

    def request(client: int, number: int) -> bytes:
        name = (header, f"bench-{client}-{number // TURNS}")
        return request_bytes(PATH, bodies[number % TURNS], (*CLIENT_HEADERS, name))

    return request


@dataclass(frozen=True, slots=True)
class Contestant:
    """A router; or no router at all, without `port` and `pid`. `counted` is the same router under
    callgrind, which writes into files whose names begin with `counts`."""

    name: str
    port: int | None = None
    pid: int | None = None
    counts: Path = Path()
    counted: Contestant | None = None

    @property
    def cpu(self) -> float:
        """CPU seconds until now."""
        return 0.0 if self.pid is None else cpu_seconds(self.pid)


@dataclass(frozen=True, slots=True)
class Run:
    """One contestant in one round. Times in seconds, pairs are p50 and p99; `peak` in bytes."""

    case: str
    contestant: str
    requests: int
    chunks: int
    elapsed: float
    cpu: float
    peak: int
    first_byte: tuple[float, float] = (0.0, 0.0)
    whole: tuple[float, float] = (0.0, 0.0)

    @property
    def cpu_us(self) -> float:
        """CPU microseconds per request."""
        return self.cpu / self.requests * 1e6


@dataclass(slots=True)
class Session:
    """Mock engines on their cores and routers on theirs, for all cases."""

    prefiller: int
    decoder: int
    contestants: list[Contestant]

    async def run(self, case: Case, contestant: Contestant, share: float) -> Run:
        """Warm up, then send `share` of the case's requests. Raises BenchError."""
        total = max(case.connections, int(case.total * share))
        ports = [self.prefiller, self.decoder] if contestant.port is None else [contestant.port]
        clients = [_Clients(number, ports, case) for number in range(case.connections)]
        with contextlib.ExitStack() as stack:
            for each in clients:
                stack.callback(each.close)
            await _drive(clients, min(total, 4 * len(clients)))
            for each in clients:
                each.exchanges.clear()
            before = contestant.cpu
            elapsed = await _drive(clients, total)
            cpu = contestant.cpu - before
        legs = [legs for each in clients for legs in each.exchanges]
        first = [sum(e.seconds for e in each[:-1]) + _first(each[-1]) for each in legs]
        whole = [sum(e.seconds for e in each) for each in legs]
        return replace(
            _run(case, contestant, len(legs), elapsed, cpu),
            first_byte=_p50_and_p99(first),
            whole=_p50_and_p99(whole),
        )

    async def count(self, case: Case, contestant: Contestant) -> float:
        """Return the instructions of a request at a router under callgrind. Raises BenchError."""
        case, total = replace(case, connections=COUNTED_CLIENTS), COUNTED_REQUESTS
        with contextlib.ExitStack() as stack:
            clients = [_Clients(n, [contestant.port or 0], case) for n in range(case.connections)]
            for each in clients:
                stack.callback(each.close)
            _control_callgrind(contestant, "--instr=on")
            await _drive(clients, total // 2)
            _dump_callgrind(contestant)
            seconds = await _drive(clients, total)
            counted = _dump_callgrind(contestant)
            await asyncio.sleep(seconds)
        return (counted - _dump_callgrind(contestant)) / total

    async def saturate(self, case: Case, contestant: Contestant, share: float) -> Run:
        """Let wrk ask, which costs its own core least. Raises BenchError."""
        case = replace(case, connections=SATURATED.get(case.name, case.connections))
        with tempfile.TemporaryDirectory() as folder:
            raw, script = Path(folder) / "request", Path(folder) / "request.lua"
            raw.write_bytes(case.requests(0, 0))
            script.write_text(WRK_SCRIPT.format(path=raw))
            await _wrk(contestant, case, script, WRK_WARM_UP_S)
            before = contestant.cpu
            requests, elapsed = await _wrk(contestant, case, script, WRK_S * share)
            run = _run(case, contestant, requests, elapsed, contestant.cpu - before)
        if run.cpu < BUSY * run.elapsed:
            report_progress(f"  its core was {run.cpu / run.elapsed:.0%} busy: not saturated")
        return run


class _Clients:
    """One client of a contestant, or, without a router, one of each engine."""

    def __init__(self, number: int, ports: Sequence[int], case: Case) -> None:
        self._number, self._case, self._count = number, case, 0
        self._clients = [Client("127.0.0.1", port) for port in ports]
        self.exchanges: list[list[LoadExchange]] = []

    async def ask(self) -> None:
        request, legs = self._case.requests(self._number, self._count), []
        self._count += 1
        for client in self._clients:
            exchange = await client.send(request, ANSWER_TIMEOUT_S, _discard)
            if exchange.problem or exchange.status != 200:
                raise BenchError(f"an answer with status {exchange.status}: {exchange.problem}")
            legs.append(exchange)
        self.exchanges.append(legs)

    def close(self) -> None:
        for client in self._clients:
            client.close()


def _discard(piece: bytes) -> None: ...


def _control_callgrind(contestant: Contestant, *command: str) -> None:
    asked = ["callgrind_control", *command, str(contestant.pid)]
    subprocess.run(asked, check=True, capture_output=True)


def _dump_callgrind(contestant: Contestant) -> int:
    """Return the instructions since the last call. Raises BenchError."""
    _control_callgrind(contestant, "--dump")
    dumps = contestant.counts.parent.glob(f"{contestant.counts.name}.*[0-9]")
    newest = max(dumps, key=lambda path: path.stat().st_mtime_ns)
    found = TOTAL.search(newest.read_text())
    if found is None:
        raise BenchError(f"callgrind counted nothing of {contestant.name}")
    return int(found[1])


async def _drive(clients: Sequence[_Clients], total: int) -> float:
    try:
        return await drive(clients, range(total), lambda client, _: client.ask())
    except ExceptionGroup as several:
        raise several.exceptions[0] from None


def _first(exchange: LoadExchange) -> float:
    return (exchange.first_byte or exchange.ended) - exchange.started


def _run(case: Case, contestant: Contestant, requests: int, elapsed: float, cpu: float) -> Run:
    peak = 0 if contestant.pid is None else peak_bytes(contestant.pid)
    return Run(case.name, contestant.name, requests, case.chunks, elapsed, cpu, peak)


def _p50_and_p99(values: Sequence[float]) -> tuple[float, float]:
    sample = Sample(values)
    return sample.percentile(50), sample.percentile(99)


async def _wrk(
    contestant: Contestant, case: Case, script: Path, seconds: float
) -> tuple[int, float]:
    """Return how many requests wrk sent, and the seconds that they took. Raises BenchError."""
    process = await asyncio.create_subprocess_exec(
        *("wrk", "-t1", f"-c{case.connections}", f"-d{max(1, round(seconds))}s"),
        *("-s", str(script), f"http://127.0.0.1:{contestant.port}/"),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(seconds + 30):
            output, _ = await process.communicate()
    except TimeoutError as error:
        process.kill()
        raise BenchError("wrk does not end") from error
    text = output.decode(errors="replace")
    ended = WRK_ENDED.search(text)
    if process.returncode or ended is None or ended[1] == "0" or ended[3] != "0":
        raise BenchError(f"wrk or {contestant.name} failed: {text}")
    return int(ended[1]), int(ended[2]) / 1e6


@contextlib.contextmanager
def opened(options: argparse.Namespace) -> Iterator[Session]:
    """Start the engines and the routers, until the block ends. Raises BenchError and
    ChildEndedError."""
    given = sorted(os.sched_getaffinity(0))
    if len(given) < 2:
        raise BenchError("two cores are needed: one for the routers, one for all else")
    core, *others = given
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with contextlib.ExitStack() as stack:
        family = ChildProcesses(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        stack.callback(family.stop)
        command = [sys.executable, "-m", "scripts.mock_engine", "pair"]
        command += [f"--{options.resumable}"] if options.resumable else []
        # The router counts each address of a mock engine as one more engine of its role.
        command += ["--host", "0.0.0.0"] if options.engines > 2 else []
        engines = family.start("engines", command, "", cores=others)
        while not engines.log_lines():
            engines.check()
            time.sleep(0.05)
        prefiller, decoder = map(int, engines.log_lines()[0].split())
        session = Session(prefiller, decoder, [])
        for name in (OURS, *([options.peer] if options.peer else ())):
            made: Contestant | None = None
            for is_counted in (True, False) if options.instructions else (False,):
                (port,) = free_ports(1)
                counts = family.directory / name
                prefix = [*CALLGRIND, f"--callgrind-out-file={counts}"] if is_counted else []
                command = [*prefix, *_command(name, options, port, session)]
                router = family.start(name, command, "", cores=[core])
                asyncio.run(_wait_until_answering(router, port))
                made = Contestant(name, port, router.process.pid, counts, made)
            assert made is not None
            session.contestants.append(made)
        session.contestants += [] if options.saturate else [Contestant(DIRECT)]
        os.sched_setaffinity(0, others)
        stack.callback(os.sched_setaffinity, 0, given)
        yield session


def _command(name: str, options: argparse.Namespace, port: int, session: Session) -> list[str]:
    engines = [session.prefiller], [session.decoder]
    hosts = [f"127.0.{i // 250}.{i % 250 + 1}" for i in range(options.engines // 2)]
    if name == OURS:
        return our_command(port, *engines, hosts=hosts)
    if name == CHECKOUT:
        return our_command(port, *engines, options.peer_flag, options.peer_dir or ROOT, hosts)
    environment = (options.peer_dir or Path(".venv-peers") / name).absolute()
    install_package(name, environment)
    return package_command(name, environment, port, *engines, options.peer_flag, hosts)


async def _wait_until_answering(router: ChildProcess, port: int) -> None:
    """A router may be healthy before it has found its engines."""
    latest, client = time.monotonic() + ANSWER_TIMEOUT_S, Client("127.0.0.1", port)
    while (await client.send(_same(KB)(0, 0), ANSWER_TIMEOUT_S)).status != 200:
        router.check()
        if time.monotonic() > latest:
            raise BenchError(f"{router.name} does not answer")
        await asyncio.sleep(0.2)
    client.close()


async def measure(session: Session, case: Case, options: argparse.Namespace) -> list[Run]:
    """Return the runs of a case. Raises BenchError."""
    measure_one, runs = session.saturate if options.saturate else session.run, []
    for _ in range(options.rounds):
        for contestant in session.contestants:
            run = await measure_one(case, contestant, options.share)
            rate = run.requests / run.elapsed
            report_progress(
                f"  {case.name}: {run.contestant}: {run.cpu_us:.1f} us, {rate:.0f} requests/s"
            )
            runs.append(run)
    return runs


def figures(runs: Sequence[Run], contestant: str) -> dict[str, float]:
    """Return medians over rounds. Latencies are those that a router adds to no router."""
    made = [run for run in runs if run.contestant == contestant]
    base = [run for run in runs if run.contestant == DIRECT]
    found = {"requests/s": statistics.median(run.requests / run.elapsed for run in made)}
    if contestant != DIRECT:
        cpu = [run.cpu_us for run in made]
        found |= {"cpu_us": statistics.median(cpu), "cpu_us_low": min(cpu), "cpu_us_high": max(cpu)}
        if made[0].chunks > 1:
            found["cpu_us_per_chunk"] = found["cpu_us"] / made[0].chunks
        found["cpu_share"] = statistics.median(run.cpu / run.elapsed for run in made)
        found["peak_mib"] = max(run.peak for run in made) / MB
    for name in ("first_byte", "whole") if base else ():
        for index, rank in enumerate(("p50", "p99")):
            own, without = (
                statistics.median(getattr(run, name)[index] for run in each)
                for each in (made, base)
            )
            prefix = "" if contestant == DIRECT else "added_"
            found[f"{prefix}{name}_{rank}_ms"] = 1e3 * (own - (without if prefix else 0))
    return found


def ratio(runs: Sequence[Run], peer: str) -> float:
    """Return the median over rounds of what a request costs us as a share of the peer."""
    ours, theirs = ([run.cpu_us for run in runs if run.contestant == n] for n in (OURS, peer))
    return ratios(ours, theirs).median


async def _measure_idle(session: Session) -> None:
    routers = [each for each in session.contestants if each.pid is not None]
    before = [each.cpu for each in routers]
    await asyncio.sleep(IDLE_S)
    for router, cpu in zip(routers, before, strict=True):
        print(f"idle: {router.name}: {(router.cpu - cpu) / IDLE_S:.2%} of a core")


async def _measure_all(session: Session, options: argparse.Namespace) -> None:
    content, known = [], cases()
    if options.engines > 2:
        await _measure_idle(session)
    for name in options.only or (SATURATED if options.saturate else known):
        runs = await measure(session, known[name], options)
        found = {each.name: figures(runs, each.name) for each in session.contestants}
        for each in session.contestants:
            if each.counted is not None:
                found[each.name]["instructions"] = await session.count(known[name], each.counted)
        print(f"\n{name}")
        for contestant, row in found.items():
            texts = (f"{figure} {value:.4g}" for figure, value in row.items())
            print(f"  {contestant:<14}{'  '.join(texts)}")
        to_peer = ratio(runs, options.peer) if options.peer else None
        if to_peer is not None:
            print(f"  ratio to {options.peer}: {to_peer:.3f}")
        sys.stdout.flush()
        rows = [asdict(run) for run in runs]
        content.append({"case": name, "ratio": to_peer, "figures": found, "runs": rows})
    write_report(options, machine=describe("uvloop"), cases=content)


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    if options.instructions and shutil.which("valgrind") is None:
        print("bench router: --instructions needs valgrind (apt-get install)", file=sys.stderr)
        return 2
    try:
        if options.saturate and shutil.which("wrk") is None:
            raise BenchError("--saturate needs wrk (apt-get install wrk)")
        report_progress(", ".join(f"{key} {value}" for key, value in describe("uvloop").items()))
        with opened(options) as session:
            uvloop.run(_measure_all(session, options))
            return 0
    except (BenchError, ChildEndedError) as error:
        print(f"bench router: error: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = bench_parser("router", __doc__)
    names = list(cases())
    add = parser.add_argument
    add("--peer", choices=PEERS, help="the router to compare with")
    add("--peer-dir", type=Path, metavar="DIR",
        help="a checkout's work tree (this one), or vllm-router's environment (.venv-peers/NAME)"
        )  # fmt: skip
    add("--peer-flag", action="append", default=[], metavar="=FLAG", help="one more for the peer")
    add("--resumable", nargs="?", const="resumable", choices=("resumable", "stock"),
        help="engines name the tokens of their streams: ours (default), or stock vLLM"
        )  # fmt: skip
    add("--engines", type=positive, default=2, help="of both roles together (2)")
    add("--only", nargs="+", choices=names, metavar="CASE", help=", ".join(names))
    add("--rounds", type=positive, default=5, help="runs of each contestant and case (5)")
    add("--share", type=float, default=1.0, help="of the usual number of requests (1)")
    add("--saturate", action="store_true", help="with the routers' core full, asked by wrk")
    add("--instructions", action="store_true", help="also count them, with valgrind's callgrind")
    add("--json", type=Path, metavar="FILE", help="also write every run there")
    return parser
