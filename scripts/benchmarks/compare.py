"""TTFT and ITL of one engine, and of a prefill and a decode engine with as many threads in total.

Short chats stream while long prompts arrive. First the one engine is measured without load, and
requests are sent so often that it is neither idle nor overloaded. In each round both setups get the
same texts at the same moments, whether earlier requests have been answered or not.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from router.commands.bench.chats import ChatLoad, Figures, LoadPlan, Target
from router.commands.console import CommandError, time_text
from router.common.child_processes import ChildEndedError, ChildProcesses
from scripts.benchmarks.common import (
    BenchError,
    bench_parser,
    describe,
    positive,
    report_progress,
    write_report,
)
from scripts.benchmarks.latency import ANSWER_TIMEOUT_S, MODEL, Launcher, Server

LONG_SPACING = 5.0  # times an unloaded engine's TTFT, so a prefill engine is idle half of the time
STREAMS = 2.0  # short chats that stream at a time, if nothing delays them


class Kind(NamedTuple):
    words: int
    tokens: int


KINDS = {"short chats": Kind(30, 40), "long prompts": Kind(250, 4)}
SHOWN = (("short chats", "first"), ("short chats", "gaps"), ("long prompts", "first"))


async def ask(server: Server, kind: Kind, seed: int, figures: Figures, after_s: float = 0) -> None:
    """Send one chat. Every answer has the same length. Raises BenchError."""
    await asyncio.sleep(after_s)
    target = Target("127.0.0.1", int(server.child.url.rpartition(":")[2]))
    fields = {"ignore_eos": True, "min_tokens": kind.tokens}
    plan = LoadPlan(MODEL, 1, 1, kind.words, kind.tokens, seed, fields)
    await ChatLoad(target, plan, ANSWER_TIMEOUT_S, figures).run(1, f"compare-{seed}")
    if figures.failed:
        raise BenchError(f"{server.child.name}: {next(iter(figures.problems))}")


async def compare(launcher: Launcher, rounds: int, round_s: float) -> dict[str, Any]:
    """Return the figures of both setups. `launcher` has its model."""
    prefill, decode = launcher.engine("prefill"), launcher.engine("decode")
    servers = {
        "one engine": launcher.engine("one engine", "--num-threads", "2"),
        "1 prefill + 1 decode": launcher.router("router", prefill, decode),
    }
    chance, idle = random.Random(1), {name: Figures() for name in KINDS}
    for server in reversed(servers.values()):  # the first requests load code and connect engines
        for name, kind in KINDS.items():
            await ask(server, kind, chance.getrandbits(40), Figures())
            idle[name] = Figures()
            await ask(server, kind, chance.getrandbits(40), idle[name])
    (whole,), (first,) = idle["short chats"].whole.values, idle["long prompts"].first.values
    interval = {"short chats": whole / STREAMS, "long prompts": first * LONG_SPACING}
    found = {name: {kind: Figures() for kind in KINDS} for name in servers}
    for number in range(rounds):
        requests = [
            (name, chance.getrandbits(40), interval[name] * (place + chance.random() / 2))
            for name in KINDS
            for place in range(max(1, round(round_s / interval[name])))
        ]
        # Who comes first alternates: a machine may slow down or be used by others.
        for setup in sorted(servers, reverse=number % 2 == 0):
            report_progress(f"round {number + 1} of {rounds}, {setup}: {len(requests)} requests")
            server, all_figures = servers[setup], found[setup]
            await asyncio.gather(*(
                ask(server, KINDS[name], seed, all_figures[name], at) for name, seed, at in requests
            ))  # fmt: skip
    return found


def main(arguments: Sequence[str]) -> int:
    parser = bench_parser("compare", __doc__)
    parser.add_argument("--rounds", type=positive, default=3, help="of each setup (3)")
    parser.add_argument("--seconds", type=positive, default=14, help="of each round (14)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    options = parser.parse_args(arguments)
    machine = describe()
    with tempfile.TemporaryDirectory(prefix="bench-compare-") as directory:
        launcher = Launcher(ChildProcesses(Path(directory)))
        try:
            launcher.make_chat_model()
            found = asyncio.run(compare(launcher, options.rounds, options.seconds))
        except (BenchError, ChildEndedError, CommandError) as error:
            print(f"bench compare: error: {error}", file=sys.stderr)
            return 1
        finally:
            launcher.family.stop()
    for kind, name in SHOWN:
        for setup, figures in found.items():
            times = getattr(figures[kind], name).quantiles() or {}
            shown = "  ".join(f"{share} {time_text(value)}" for share, value in times.items())
            print(f"{'ITL' if name == 'gaps' else 'TTFT'} of {kind:<13} {setup:<21} {shown}")
    rows = {s: {k: one.content(1.0) for k, one in kinds.items()} for s, kinds in found.items()}
    write_report(options, machine=machine, benchmark="compare", figures=rows)
    return 0
