"""Break engines and routers under load, and count what clients see of it.

    python scripts/bench.py chaos                                 every scenario, about four minutes
    python scripts/bench.py chaos --short --check                 the short form, as tests run it
    python scripts/bench.py chaos --peer vllm-router --json FILE  the same against vllm-router
    python scripts/bench.py chaos --only stock-kill-d             before vLLM without our plugin
    python scripts/bench.py chaos --compare NAME=FILE NAME=FILE   a table of what files hold

Three prefill and three decode engines that answer as vLLM does, then one and two reference engines
whose tokens are compared with those of one engine alone; each is a process. Each run has a router
of its own. Exit status: 0 done; 1 could not be done, or with --check an aim was missed; 2 wrong
options.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import signal
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from router.commands.console import CommandParser
from router.common.child_processes import ChildProcesses
from scripts.benchmarks.common import BenchError, describe, write_report
from scripts.benchmarks.contestants import OURS, PD_FLAGS, install_package
from tests.chaos.processes import NIXL, EngineFleet, RouterCommand, mock_fleet
from tests.chaos.questions import (
    REAL_CLIENTS,
    REAL_PAUSE_S,
    Oracle,
    Questions,
    mock_questions,
    real_fleet,
    warm_up,
)
from tests.chaos.run import Drill, Outcome
from tests.chaos.scenarios import SHORT, Engines, Mode, Role, Scenario, scenarios

PROGRAM = "bench chaos"
HEAD = f"{'scenario':<16}{'mode':<10}{'asked':>6}{'ok':>6}{'longest':>9}{'left alone':>15}  errors"
SHORT_S, LONG_S = 2.0, 3.0
SHORT_AT_ONCE, AT_ONCE = 4, 2

Todo = Sequence[tuple[Scenario, Mode]]


def main(arguments: Sequence[str]) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    todo = _todo(options)
    if not todo:
        parser.error("nothing of --only is in the short form")
    try:
        if options.compare:
            print(table(dict(options.compare)))
            return 0
        return _run(options, todo)
    except BenchError as error:
        parser.exit(1, f"{PROGRAM}: error: {error}\n")
    except KeyboardInterrupt:
        return 130


def _todo(options: argparse.Namespace) -> Todo:
    known = scenarios()
    every = [(known[name], mode) for name in known for mode in known[name].modes]
    todo = [(known[name], mode) for name, mode in SHORT] if options.short else every
    if options.kv_protocol != NIXL:
        todo = [one for one in every if is_of_all_engines(*one, options.kv_protocol)]
    if not options.only:
        return [one for one in todo if one[0].engines is not Engines.STOCK]
    return [one for one in todo if one[0].name in options.only]


def is_of_all_engines(scenario: Scenario, mode: Mode, protocol: str) -> bool:
    """Return True for drills without reference engines, and without a stream that only an engine of
    ours can continue. SGLang's decode engines answer nothing without prefill engines."""
    if scenario.engines is not Engines.MOCK or scenario.role is Role.ROUTER:
        return False
    is_cut = mode is Mode.STREAMED and scenario.role is Role.DECODE
    return not is_cut and not (scenario.everyone and protocol == "sglang")


def _run(options: argparse.Namespace, todo: Todo) -> int:
    name, environment = OURS, None
    if options.peer != "none":
        name = options.peer
        environment = (options.peer_dir or Path(".venv-peers") / name).absolute()
        install_package(name, environment)
    command = RouterCommand(name, tuple(options.router_arg), environment, options.kv_protocol)
    machine, made = describe(), list[Outcome]()
    print(HEAD, flush=True)
    with tempfile.TemporaryDirectory(prefix="chaos-") as directory:
        family = ChildProcesses(options.logs or Path(directory))
        try:
            asyncio.run(_until_signal(_Session(family, command, options, todo, made)))
        finally:
            family.stop()
    places = {(scenario.name, str(mode)): n for n, (scenario, mode) in enumerate(todo)}
    made.sort(key=lambda one: places[one.scenario, one.mode])
    write_report(options, machine=machine, runs=[asdict(outcome) for outcome in made])
    missed = [f"{outcome.scenario} {outcome.mode}" for outcome in made if outcome.missed]
    print(f"aims missed: {', '.join(missed)}" if missed else "every aim is met")
    return 1 if missed and options.check else 0


async def _until_signal(session: _Session) -> None:
    """Let engines and routers end before this process does, also on SIGTERM and SIGHUP."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    try:
        await session.run()
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    except ExceptionGroup as several:
        raise several.exceptions[0] from None


class _Session:
    """All runs: those with mock engines side by side, then those with real engines."""

    def __init__(
        self,
        family: ChildProcesses,
        command: RouterCommand,
        options: argparse.Namespace,
        todo: Todo,
        made: list[Outcome],
    ) -> None:
        self._family, self._command, self._todo, self._made = family, command, todo, made
        self._seed, self._clients = options.seed, options.clients
        self._seconds = options.seconds or (SHORT_S if options.short else LONG_S)
        self._at_once = options.at_once or (SHORT_AT_ONCE if options.short else AT_ONCE)

    async def run(self) -> None:
        """Raises BenchError."""
        mocked = deque(one for one in self._todo if one[0].engines is Engines.MOCK)
        async with asyncio.TaskGroup() as group:
            for lane in range(min(self._at_once, len(mocked))):
                group.create_task(self._run_mocked(f"lane {lane}", mocked))
        for engines in (Engines.REFERENCE, Engines.STOCK):
            real = [scenario for scenario, _ in self._todo if scenario.engines is engines]
            if real:
                await self._run_real(engines, real)

    async def _run_real(self, engines: Engines, todo: Sequence[Scenario]) -> None:
        fleet = real_fleet(self._family, engines)
        await fleet.start()
        if engines is Engines.STOCK:
            for engine in (*fleet.prefillers, *fleet.decoders):
                await warm_up(engine)
        oracle = await Oracle.learn(fleet.decoders[0], engines, self._seed)
        drill = replace(
            self._drill(fleet, oracle.questions()),
            clients=min(REAL_CLIENTS, self._clients),
            pause=REAL_PAUSE_S,
        )
        for scenario in todo:
            self._note(await drill.run(scenario, Mode.MIXED, oracle.questions()))

    async def _run_mocked(self, name: str, todo: deque[tuple[Scenario, Mode]]) -> None:
        fleet = mock_fleet(self._family, name, self._seed, self._command.protocol)
        drill = self._drill(fleet, mock_questions("first", Mode.UNARY, 1, 0.0, self._seed))
        while todo:
            scenario, mode = todo.popleft()
            shape = (scenario.chunks, scenario.interval, self._seed)
            questions = mock_questions(scenario.name, mode, *shape)
            self._note(await drill.run(scenario, mode, questions))

    def _drill(self, fleet: EngineFleet, first: Questions) -> Drill:
        harm = (self._clients, self._seconds, self._seed)
        return Drill(self._family, self._command, fleet, first, *harm)

    def _note(self, outcome: Outcome) -> None:
        self._made.append(outcome)
        print(line(outcome), flush=True)


def line(one: Outcome) -> str:
    after = "never" if one.stopped is None else f"{one.stopped:.1f} s"
    alone = "" if one.asked is None else f"{after} ({one.asked})"
    counts = f"{one.scenario:<16}{one.mode:<10}{one.requests:>6}{one.ok:>6}{one.longest:>7.1f} s"
    verdict = f"  MISSED: {', '.join(one.missed)}" if one.missed else ""
    return f"{counts}{alone:>15}  {errors(one.errors)}{verdict}"


def errors(counted: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {kind}" for kind, number in counted.items()) or "none"


def table(columns: Mapping[str, Path]) -> str:
    """Return files' outcomes as Markdown; what missed its aim is bold. Raises BenchError."""
    read = {name: _read(path) for name, path in columns.items()}
    keys = dict.fromkeys(key for runs in read.values() for key in runs)
    lines = [f"| scenario | | {' | '.join(read)} |", f"|---|---|{'---|' * len(read)}"]
    for scenario, mode in keys:
        cells = [_cell(runs.get((scenario, mode))) for runs in read.values()]
        lines.append(f"| {scenario} | {mode} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _read(path: Path) -> dict[tuple[str, str], Outcome]:
    try:
        runs = [Outcome(**run) for run in json.loads(path.read_text())["runs"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BenchError(f"{path}: not a file of this program: {error}") from error
    return {(run.scenario, run.mode): run for run in runs}


def _cell(one: Outcome | None) -> str:
    if one is None:
        return ""
    failed = one.requests - one.ok
    text = f"{failed} of {one.requests}, {one.longest:.1f} s"
    text = f"{text}: {errors(one.errors)}" if failed else text
    return f"**{text}**" if one.missed else text


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(PROGRAM, __doc__ or "")
    add = parser.add_argument
    names = list(scenarios())
    add("--short", action="store_true", help="the most telling ones, in about 40 seconds")
    add("--only", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    add("--check", action="store_true", help="exit 1 when an aim is missed")
    add("--json", type=_writable, metavar="FILE", help="also write every run there")
    add("--seconds", type=_seconds, help=f"how long something is broken ({LONG_S:g})")
    add("--seed", type=int, default=1, help="of which engine is broken, and of requests (1)")
    add("--clients", type=_count, default=16, help="each sends one request at a time (16)")
    add("--at-once", type=_count, help=f"runs side by side ({AT_ONCE})")
    add("--kv-protocol", choices=[NIXL, "mooncake", "sglang"], default=NIXL, help="of the engines")
    add("--peer", choices=[*PD_FLAGS, "none"], default="none", help="instead of this router")
    add("--peer-dir", "--peer-venv", type=Path, metavar="DIR", help="its environment")
    add("--router-arg", action="append", default=[], metavar="=FLAG", help="one more for it")
    add("--logs", type=_directory, metavar="DIR", help="keep all output there")
    add("--compare", nargs="+", type=_column, metavar="NAME=FILE", help="a table; breaks nothing")
    return parser


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if math.isfinite(float(text)) and 0.5 <= float(text) <= 60:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.5 to 60")


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text[:9]) <= 256:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to 256")
    return int(text)


def _writable(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written")
    return path


def _directory(text: str) -> Path:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is no directory")
    return Path(text)


def _column(text: str) -> tuple[str, Path]:
    name, is_given, path = text.partition("=")
    if not name or not is_given:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=FILE")
    return name, Path(path)
