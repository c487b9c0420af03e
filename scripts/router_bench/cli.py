"""The command line of scripts/bench_router.py."""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.bench.errors import BenchError
from scripts.bench.machine import describe
from scripts.router_bench import compare, saturate
from scripts.router_bench.cases import IDLE_STREAMS, Case, cases
from scripts.router_bench.contestants import PEERS, prepare
from scripts.router_bench.report import Report
from scripts.router_bench.runs import Run, Runs
from scripts.router_bench.session import DIRECT, OURS, Session, measure, measure_idle, opened

PROGRAM = "bench_router"
IDLE = "idle"
DESCRIPTION = """\
Measures the router's CPU time per request beside a peer and beside no router at all. All routers
have the same core, mock engines and load the others; rounds take turns, and figures are medians.
A peer lives in a virtual environment of its own: --peer-venv names one, which is made and filled by
pip if it is not there (vllm-router: pip install vllm-router). The peer "checkout" is this router at
another commit: --peer-venv names its work tree (git worktree add --detach DIR COMMIT). Others are
this checkout: "ui" with its page, "page" while somebody looks at it, "traces" with a collector.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """0: measured; 1: could not measure, or not to be compared; 2: wrong options; 3: --strict, and
    above a goal."""
    options = _parser().parse_args(arguments)
    try:
        if options.compare:
            return compare.main(*options.compare)
        if options.saturate:
            saturate.require_wrk()
        return _measure(options)
    except BenchError as error:
        sys.stderr.write(f"{PROGRAM}: error: {error}\n")
        return 1


def _measure(options: argparse.Namespace) -> int:
    peer = None if options.peer == "none" else options.peer
    report = Report(describe("uvloop"), _plain(options), OURS, peer, DIRECT)
    report.header()
    environment = options.peer_venv or Path(".venv-peers") / options.peer
    if peer is not None:
        report.say(f"preparing {peer} in {environment}")
        prepare(peer, environment)
    with tempfile.TemporaryDirectory() as directory:
        logs = options.logs or Path(directory)
        with opened(peer, environment.absolute(), logs) as session:
            asyncio.run(_run_all(session, report, options))
    if options.json is not None:
        options.json.write_text(report.to_json())
    for name in report.missed:
        report.say(f"above its goal: {name}")
    return 3 if options.strict and report.missed else 0


async def _run_all(session: Session, report: Report, options: argparse.Namespace) -> None:
    if options.saturate:
        await _saturate(session, report, options)
        return
    known = cases()
    for name in options.only or [*known, IDLE]:
        made: list[Run] = []
        if name == IDLE:
            case = Case(IDLE, known["unary"].requests, IDLE_STREAMS)
            runs = measure_idle(session, IDLE_STREAMS, options.rounds)
        else:
            case = known[name]
            runs = measure(session, case, options.rounds, options.share)
        async for run in runs:
            report.note(run)
            made.append(run)
        report.add(case, Runs(case.name, made))


async def _saturate(session: Session, report: Report, options: argparse.Namespace) -> None:
    for name, case in saturate.saturated().items():
        if name not in (options.only or saturate.FULL):
            continue
        made: list[Run] = []
        seconds = saturate.SECONDS * options.share
        async for run in saturate.measure_full(session, case, options.rounds, seconds):
            report.note(run)
            if run.cpu < saturate.BUSY * run.elapsed:
                report.say(f"  its core was {run.cpu / run.elapsed:.0%} busy: not saturated")
            made.append(run)
        report.add(case, Runs(case.name, made))


def _plain(options: argparse.Namespace) -> dict[str, Any]:
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(options).items()
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [*cases(), IDLE]
    add = parser.add_argument
    add("--peer", choices=[*PEERS, "none"], default="none", help="the router to compare with")
    add("--peer-venv", type=Path, metavar="DIR", help="its environment (.venv-peers/NAME)")
    add("--only", nargs="+", choices=names, metavar="CASE", help=", ".join(names))
    add("--rounds", type=_positive, default=5, help="runs of each contestant and case (5)")
    add("--share", type=float, default=1.0, help="of the usual number of requests (1)")
    add("--saturate", action="store_true", help="with the routers' core full, asked by wrk")
    add("--json", type=Path, metavar="FILE", help="also write every run there")
    add("--logs", type=Path, metavar="DIR", help="keep the routers' output there")
    add("--strict", action="store_true", help="exit 3 when a case is above its goal")
    add("--compare", nargs=2, type=Path, metavar="FILE", help="two JSON files; measures nothing")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text[:9]) > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text[:9])
