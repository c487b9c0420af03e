"""The command line of scripts/chaos.py."""

import argparse
import asyncio
import contextlib
import math
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from router.commands.arguments import Parser
from router.common.child_processes import Family
from scripts.bench.errors import BenchError
from scripts.bench.machine import describe
from scripts.benchmarks.contestants import install_vllm_router
from scripts.chaos_bench.outcome import Run
from scripts.chaos_bench.report import HEAD, line, say, table, to_json
from scripts.chaos_bench.routers import OURS, Contestant
from scripts.chaos_bench.scenarios import SHORT, Mode, Scenario, scenarios
from scripts.chaos_bench.session import Plan, Session

PROGRAM = "chaos"
PEER = "vllm-router"
DESCRIPTION = """\
Breaks engines and routers under load and counts what clients see of it. Three prefill and three
decode engines that answer as vLLM does, then one and two reference engines whose tokens are
compared with those of one engine alone; every one a process. Each run has a router of its own.
"""
SHORT_SECONDS, SECONDS = 2.0, 3.0
SHORT_AT_ONCE, AT_ONCE = 4, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """0: done; 1: it could not be done, or with --check an aim was missed; 2: wrong options."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if not _todo(options):
        parser.error("nothing of --only is in the short form")
    try:
        if options.compare:
            say(table(dict(options.compare)))
            return 0
        return _run(options)
    except BenchError as error:
        parser.exit(1, f"{PROGRAM}: error: {error}\n")
    except KeyboardInterrupt:
        return 130


def _run(options: argparse.Namespace) -> int:
    machine, plan, made = describe(), _plan(options), list[Run]()

    def note(run: Run) -> None:
        made.append(run)
        say(line(run))

    say(HEAD)
    with tempfile.TemporaryDirectory(prefix="chaos-") as directory:
        family = Family(options.logs or Path(directory))
        try:
            asyncio.run(_until_told(Session(family, plan, note)))
        finally:
            family.stop()
    if options.json is not None:
        options.json.write_text(to_json(machine, _plain(options), _in_order(made, plan)))
    missed = [f"{run.scenario} {run.mode}" for run in made if run.missed]
    say(f"aims missed: {', '.join(missed)}" if missed else "every aim is met")
    return 1 if missed and options.check else 0


async def _until_told(session: Session) -> None:
    """Also by SIGTERM and SIGHUP: engines and routers end before this process does."""
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


def _plan(options: argparse.Namespace) -> Plan:
    environment = None
    if options.peer == PEER:
        environment = (options.peer_venv or Path(".venv-peers") / PEER).absolute()
        install_vllm_router(environment)
    name = OURS if environment is None else PEER
    return Plan(
        Contestant(name, tuple(options.router_arg), environment),
        _todo(options),
        options.clients,
        options.seconds or (SHORT_SECONDS if options.short else SECONDS),
        options.seed,
        options.at_once or (SHORT_AT_ONCE if options.short else AT_ONCE),
    )


def _todo(options: argparse.Namespace) -> list[tuple[Scenario, Mode]]:
    known = scenarios()
    every = [(known[name], mode) for name in known for mode in known[name].modes]
    todo = [(known[name], mode) for name, mode in SHORT] if options.short else every
    return [one for one in todo if not options.only or one[0].name in options.only]


def _in_order(made: Sequence[Run], plan: Plan) -> list[Run]:
    places = [(scenario.name, mode) for scenario, mode in plan.todo]
    return sorted(made, key=lambda run: places.index((run.scenario, Mode(run.mode))))


def _plain(options: argparse.Namespace) -> dict[str, Any]:
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(options).items()
    }


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=PROGRAM,
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    names = list(scenarios())
    add("--short", action="store_true", help="the most telling ones, in about 40 seconds")
    add("--only", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    add("--check", action="store_true", help="exit 1 when an aim is missed")
    add("--json", type=_writable, metavar="FILE", help="also write every run there")
    add("--seconds", type=_seconds, help=f"how long something is broken ({SECONDS:g})")
    add("--seed", type=int, default=1, help="of who is broken, and of requests (1)")
    add("--clients", type=_count, default=16, help="each asks one request at a time (16)")
    add("--at-once", type=_count, help=f"runs side by side ({AT_ONCE})")
    add("--peer", choices=[PEER, "none"], default="none", help="break this router's fleet instead")
    add("--peer-venv", type=Path, metavar="DIR", help="its environment (.venv-peers/NAME)")
    add(
        "--router-arg", action="append", default=[], metavar="=FLAG", help="one more for the router"
    )
    add("--logs", type=_directory, metavar="DIR", help="keep everybody's output there")
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
