"""disagg-router demo --compare: the same load on one engine, and on 1 prefill + 1 decode engine.

Short chats stream while long prompts arrive. All engines run from the start; rounds alternate
between the two setups, and a setup that has no round is idle. First the one engine is measured
without load: prompts are made so long, and requests sent so often, that machines of any speed are
neither idle nor overloaded. In each round both setups get the same texts at the same moments,
whether earlier requests have been answered or not.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

from router.commands.bench.chats import ChatLoad, Figures, LoadPlan, Target
from router.commands.console import (
    CommandError,
    TerminalLine,
    UsageError,
    columns_of,
    run_with_progress,
)
from router.commands.demo.comparison import (
    ALONE,
    SETUPS,
    SPLIT,
    CompareLoad,
    Comparison,
    CpuPlan,
    RoundFigures,
    report,
)
from router.commands.demo.comparison_chart import chart
from router.commands.demo.engines import (
    MAX_THREADS,
    EngineBuilder,
    free_ports,
    print_now,
    router_command,
    usable_cores,
    wait_until_ready,
)
from router.commands.router_client import first_model_in, send
from router.common.child_processes import ChildProcess, ChildProcesses, handling_signals
from router.openai.answers import parse_object

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
ANSWER_TIMEOUT_S = 300.0
ROUND_S = 14.0
SHORT_WORDS, SHORT_TOKENS = 30, 40
LONG_TOKENS = 4
# The one engine, otherwise idle, should compute a long prompt in this time. There is one such
# prompt each LONG_SPACING times, so a prefill engine with half the cores is idle half of the time.
LONG_PROMPT_S = 0.8
LONG_SPACING = 5.0
LONG_TOKENS_RANGE = (256, 1500)
# Short chats that stream at a time, if nothing delays them.
STREAMS = 2.0
MIN_SHORT_INTERVAL_S, MIN_LONG_INTERVAL_S = 0.2, 1.0
CALIBRATION_WORDS = 150


@dataclass(frozen=True, slots=True)
class CompareOptions:
    rounds: int
    json: Path | None
    svg: Path | None
    round_s: float = ROUND_S
    """The shortest round."""

    def check(self) -> None:
        """Raises UsageError for a path that cannot be written, before anything is started."""
        for option, path in (("--json", self.json), ("--svg", self.svg)):
            if path is None:
                continue
            is_new = not path.exists()
            try:
                path.open("a").close()
                if is_new:
                    path.unlink()
            except OSError as error:
                raise UsageError(f"{option} {path}: {error.strerror or error}") from None


def compare(processes: ChildProcesses, builder: EngineBuilder, wanted: CompareOptions) -> None:
    """Measure and print the report. Raises CommandError, ChildEndedError and KeyboardInterrupt."""
    busy, model, cores = os.getloadavg()[0], builder.model.name, usable_cores()
    cpu = CpuPlan(cores, max(1, min(MAX_THREADS, len(cores)) // 2))
    print_now(cpu.text())
    print_now(f"Starting three engines with {model}, and a router.")
    setups = _start(processes, builder, cpu)
    measurement = Measurement(setups, processes.children, model, wanted)
    load, rounds = run_until_signal(measurement.run)
    comparison = Comparison(cpu, load, model, rounds, busy)
    for line in report(comparison, columns_of(sys.stdout) - 1, _bar()):
        print_now(line)
    for path, text in (
        (wanted.json, json.dumps(comparison.content(), indent=1) + "\n"),
        (wanted.svg, chart(comparison)),
    ):
        if path is not None:
            path.write_text(text, encoding="utf-8")
            print_now(f"\nwritten: {path}")


def _bar() -> str:
    try:
        "█".encode(sys.stdout.encoding or "ascii")
    except UnicodeError:
        return "#"
    return "█"


@dataclass(frozen=True, slots=True)
class Setup:
    """The target of a setup's requests, and the processes of the setup."""

    target: Target
    engines: Sequence[ChildProcess]
    routers: Sequence[ChildProcess] = ()


def _start(processes: ChildProcesses, builder: EngineBuilder, cpu: CpuPlan) -> dict[str, Setup]:
    ports = free_ports(7)
    builder = replace(builder, threads=cpu.threads)
    alone_builder = replace(builder, threads=cpu.threads_alone, is_alone=True)
    started = []
    for name, one in ((ALONE, alone_builder), ("prefill", builder), ("decode", builder)):
        title = name if name == ALONE else f"{name} engine"
        started.append(one.start(processes, title, ports, cpu.cores_of(name)))
    with TerminalLine(sys.stderr) as progress:  # the report may be piped
        wait_until_ready(started, "/health", started, progress.show)
        alone, prefiller, decoder = started
        port = next(ports)
        command = router_command("127.0.0.1", port, [prefiller], [decoder])
        url = f"http://127.0.0.1:{port}"
        router = processes.start("router", [*command, "--log-level", "warning"], url)
        wait_until_ready([router], "/ready", [*started, router], progress.show)
    return {
        ALONE: Setup(_target(alone), [alone]),
        SPLIT: Setup(_target(router), [prefiller, decoder], [router]),
    }


def _target(child: ChildProcess) -> Target:
    return Target("127.0.0.1", int(child.url.rpartition(":")[2]))


def run_until_signal(work: Callable[[], Any]) -> Any:
    """Run a coroutine function; a signal cancels it and raises KeyboardInterrupt."""

    async def main() -> Any:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def cancel(number: int, frame: object) -> None:
            loop.call_soon_threadsafe(task.cancel)

        with handling_signals(SIGNALS, cancel):
            return await work()

    try:
        return asyncio.run(main())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


@dataclass(slots=True)
class Measurement:
    """Measures the setups. `children` must live meanwhile."""

    setups: dict[str, Setup]
    children: Sequence[ChildProcess]
    model: str
    wanted: CompareOptions
    _seeds: Iterator[int] = field(default_factory=count)
    _step: str = "warming up"
    _ends_at: float | None = None

    async def run(self) -> tuple[CompareLoad, dict[str, list[RoundFigures]]]:
        """Raises CommandError if a request fails, ChildEndedError if a process ends."""
        return await run_with_progress(self._measure(), self._progress, self._check_children)

    def _check_children(self) -> None:
        for child in self.children:
            child.check()

    def _progress(self) -> str:
        if self._ends_at is None:
            return self._step
        left = max(0.0, self._ends_at - time.monotonic())
        return f"{self._step}, about {left:.0f} s left"

    async def _measure(self) -> tuple[CompareLoad, dict[str, list[RoundFigures]]]:
        load = await self._calibrate()
        rounds: dict[str, list[RoundFigures]] = {setup: [] for setup in SETUPS}
        left = 2 * self.wanted.rounds
        for number in range(self.wanted.rounds):
            seed = next(self._seeds)
            # Who comes first alternates: a machine may slow down or be used by others.
            for setup in SETUPS if number % 2 == 0 else reversed(SETUPS):
                self._step = f"round {number + 1} of {self.wanted.rounds}, {setup}"
                self._ends_at = time.monotonic() + left * (load.round_s + 2)
                rounds[setup].append(await self._round(self.setups[setup], load, seed))
                left -= 1
        return load, rounds

    async def _calibrate(self) -> CompareLoad:
        for setup in self.setups.values():  # the first requests load code and connect engines
            await self._ask(setup, CALIBRATION_WORDS, 8)
            await self._ask(setup, SHORT_WORDS, 8)
        self._step = "measuring one engine without load"
        alone = self.setups[ALONE]
        long, short = Figures(), Figures()
        for _ in range(2):
            long.add(await self._ask(alone, 2 * CALIBRATION_WORDS, LONG_TOKENS))
            short.add(await self._ask(alone, SHORT_WORDS, SHORT_TOKENS))
        prompt_tokens = long.prompt_tokens / long.answered
        tokens_per_word = prompt_tokens / (2 * CALIBRATION_WORDS)
        rate = prompt_tokens / _median(long, "first")
        least, most = LONG_TOKENS_RANGE
        longest = await self._context() * 3 / 4
        tokens = max(min(least, longest), min(most, longest, rate * LONG_PROMPT_S))
        every = max(MIN_LONG_INTERVAL_S, LONG_SPACING * tokens / rate)
        return CompareLoad(
            round_s=max(self.wanted.round_s, 2 * every),
            short_interval_s=max(MIN_SHORT_INTERVAL_S, _median(short, "whole") / STREAMS),
            long_interval_s=every,
            short_words=SHORT_WORDS,
            short_tokens=SHORT_TOKENS,
            long_words=max(1, round(tokens / tokens_per_word)),
            long_tokens=LONG_TOKENS,
        )

    async def _context(self) -> float:
        """Return how many tokens a prompt and its answer may have."""
        target = self.setups[ALONE].target
        answer = await send("GET", f"http://{target.host}:{target.port}/v1/models")
        most = first_model_in(parse_object(answer.content)).get("max_model_len")
        return float(most) if isinstance(most, int) and most > 0 else float("inf")

    async def _ask(self, setup: Setup, words: int, tokens: int) -> Figures:
        figures = Figures()
        await self._load(setup, words, tokens, next(self._seeds), figures, [0.0])
        return figures

    async def _round(self, setup: Setup, load: CompareLoad, seed: int) -> RoundFigures:
        found = RoundFigures()
        engine_cpu, router_cpu = _cpu_of(setup.engines), _cpu_of(setup.routers)
        own, started = time.process_time(), time.monotonic()
        # Texts of short chats and long prompts begin differently, so no cache helps.
        text_seed = 10_000 + 2 * seed
        at = moments(load.round_s, load.short_interval_s, seed)
        short = self._load(setup, load.short_words, load.short_tokens, text_seed, found.short, at)
        at = moments(load.round_s, load.long_interval_s, seed)
        long = self._load(setup, load.long_words, load.long_tokens, text_seed + 1, found.long, at)
        found.late = max(await asyncio.gather(short, long))
        found.seconds = time.monotonic() - started
        found.generator_cpu = time.process_time() - own
        found.engine_cpu = _cpu_of(setup.engines) - engine_cpu
        found.router_cpu = _cpu_of(setup.routers) - router_cpu
        return found

    async def _load(
        self, setup: Setup, words: int, tokens: int, seed: int, figures: Figures, at: list[float]
    ) -> float:
        # Every answer has the same length, in tokens that have text.
        fields = {"ignore_eos": True, "min_tokens": tokens}
        plan = LoadPlan(self.model, len(at), 1, words, tokens, seed, fields)
        load = ChatLoad(setup.target, plan, ANSWER_TIMEOUT_S, figures)
        late = await load.run_at(at, uuid4().hex[:8])
        if figures.failed:
            (problem, _), *_ = figures.problems.most_common(1)
            raise CommandError(f"{figures.failed} of {len(at)} requests failed: {problem}")
        return late


def moments(seconds: float, interval: float, seed: int) -> list[float]:
    """Return when requests are sent: one in each interval, at a random moment of its first half."""
    chance = random.Random(seed)
    number = max(1, round(seconds / interval))
    return [interval * (place + chance.random() / 2) for place in range(number)]


def _median(figures: Figures, name: str) -> float:
    quantiles = getattr(figures, name).quantiles()
    if quantiles is None:
        raise CommandError("the model's answers have no text, so nothing can be measured")
    return max(float(quantiles["p50"]), 1e-4)


def _cpu_of(children: Sequence[ChildProcess]) -> float:
    """Return the CPU time of these processes in seconds, without those that have ended."""
    ticks = 0
    for child in children:
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{child.process.pid}/stat").read_text()
            ticks += sum(map(int, stat.rpartition(")")[2].split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")
