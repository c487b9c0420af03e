"""The result of `disagg-router demo --compare`, and its report: text with bars, and JSON.

`compare` measures, `comparison_chart` draws the same figures as SVG.
"""

from __future__ import annotations

import platform
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from router.commands.bench.chats import Figures, Sample
from router.commands.console import time_text

ALONE, SPLIT = "one engine", "1 prefill + 1 decode"
SETUPS = (ALONE, SPLIT)
# Names that fit into a narrow terminal.
SHORT_NAMES = {ALONE: "one engine", SPLIT: "1P + 1D"}
SHARES = ("p50", "p99")
# Above this share of one core, a process that only passes bytes on delays them.
SATURATED = 0.8
LATE_S = 0.1
# Tokens that arrive in one piece have no time between them.
SHORTEST_S = 1e-6
MIN_WIDTH, MAX_WIDTH = 40, 100


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """Cores and threads of each engine."""

    cores: Sequence[int]
    threads: int
    """Threads of each of the two engines. The single engine has as many as both together."""

    @property
    def threads_alone(self) -> int:
        return min(2 * self.threads, len(self.cores))

    def cores_of(self, name: str) -> Sequence[int]:
        """Return the cores of the engine `ALONE`, "prefill" or "decode"."""
        both = self.cores[: self.threads_alone]
        if name == ALONE or len(both) < 2:
            return both
        return both[: self.threads] if name == "prefill" else both[self.threads :]

    def text(self) -> str:
        """Say what equal CPU means."""
        each, all_threads = _counted(self.threads, "thread"), _counted(self.threads_alone, "thread")
        if len(self.cores_of(ALONE)) < 2:
            return f"Equal CPU: all engines have {each} on the only core, {self.cores[0]}."
        return (
            f"Equal CPU: one engine has {all_threads} on cores {_listed(self.cores_of(ALONE))}; "
            f"the prefill engine has {each} on {_listed(self.cores_of('prefill'))}, the decode "
            f"engine {each} on {_listed(self.cores_of('decode'))}. Router and load generator are "
            "not pinned."
        )


@dataclass(frozen=True, slots=True)
class CompareLoad:
    """The load of one round: moments in seconds, lengths in words and tokens."""

    round_s: float
    short_interval_s: float
    long_interval_s: float
    short_words: int
    short_tokens: int
    long_words: int
    long_tokens: int


@dataclass(slots=True)
class RoundFigures:
    """The figures of one setup in one round, or in all. CPU times in seconds."""

    short: Figures = field(default_factory=Figures)
    long: Figures = field(default_factory=Figures)
    seconds: float = 0.0
    late: float = 0.0
    """By how many seconds a request was sent too late, at most."""
    engine_cpu: float = 0.0
    router_cpu: float = 0.0
    generator_cpu: float = 0.0

    def add(self, other: RoundFigures) -> None:
        self.short.add(other.short)
        self.long.add(other.long)
        self.seconds += other.seconds
        self.late = max(self.late, other.late)
        self.engine_cpu += other.engine_cpu
        self.router_cpu += other.router_cpu
        self.generator_cpu += other.generator_cpu

    def samples(self) -> dict[str, Sample]:
        return {
            "TTFT of short chats": self.short.first,
            "ITL of short chats": self.short.gaps,
            "TTFT of long prompts": self.long.first,
        }


@dataclass(frozen=True, slots=True)
class ComparedFigure:
    """One percentile of one latency. `alone` and `split` are of all rounds, in seconds;
    `rounds_alone` and `rounds_split` of each."""

    name: str
    share: str
    alone: float
    split: float
    rounds_alone: Sequence[float]
    rounds_split: Sequence[float]

    @property
    def is_clear(self) -> bool:
        """True if each round of one setup was faster than each round of the other."""
        return max(self.rounds_split) < min(self.rounds_alone) or self.is_worse

    @property
    def is_worse(self) -> bool:
        return min(self.rounds_split) > max(self.rounds_alone)

    @property
    def spread(self) -> float:
        """By how much the slowest round of a setup exceeds its fastest, as a share."""
        both = (self.rounds_alone, self.rounds_split)
        return max(max(rounds) / max(min(rounds), SHORTEST_S) - 1 for rounds in both)

    @property
    def change(self) -> str:
        """The effect of 1 prefill + 1 decode engine."""
        if not self.is_clear:
            return "no clear change"
        return f"{abs(self.change_share):.0%} {'higher' if self.is_worse else 'lower'}"

    @property
    def change_share(self) -> float:
        return self.split / max(self.alone, SHORTEST_S) - 1


@dataclass(frozen=True, slots=True)
class Comparison:
    """A whole measurement. `rounds` has the figures of each round, in order, by setup."""

    cpu: CpuPlan
    load: CompareLoad
    model: str
    rounds: dict[str, list[RoundFigures]]
    busy: float
    """The machine's load average before the start."""
    machine: str = field(default_factory=lambda: describe_machine())
    date: str = field(default_factory=lambda: datetime.now(UTC).date().isoformat())

    def total(self, setup: str) -> RoundFigures:
        total = RoundFigures()
        for one in self.rounds[setup]:
            total.add(one)
        return total

    def figures(self) -> list[ComparedFigure]:
        alone, split = (_quantiles(self.total(setup)) for setup in SETUPS)
        rounds = {setup: list(map(_quantiles, self.rounds[setup])) for setup in SETUPS}
        return [
            ComparedFigure(
                *key,
                alone[key],
                split[key],
                rounds_alone=[one[key] for one in rounds[ALONE]],
                rounds_split=[one[key] for one in rounds[SPLIT]],
            )
            for key in alone
        ]

    def load_text(self) -> str:
        total, load = self.total(SPLIT), self.load
        tokens = round(total.long.prompt_tokens / max(1, total.long.answered), -1)
        return (
            f"Load: {len(self.rounds[SPLIT])} rounds of {load.round_s:.0f} s for each, in turns, "
            f"with the same requests at the same moments: {total.short.answered} short chats (one "
            f"in {load.short_interval_s:.1f} s, {load.short_words} words, answers of "
            f"{load.short_tokens} tokens) while {total.long.answered} long prompts arrive (one in "
            f"{load.long_interval_s:.1f} s, about {tokens:.0f} tokens). All answers stream. p99 of "
            "fewer than 100 values is the highest one."
        )

    def machine_text(self) -> str:
        text = f"{self.machine}, {_counted(len(self.cpu.cores), 'core')}; {self.model}; {self.date}"
        if self.is_busy:
            text += f"; busy with other work (load average {self.busy:.1f})"
        return text

    @property
    def is_busy(self) -> bool:
        return self.busy > len(self.cpu.cores) / 2

    def verdict(self) -> str:
        figures = self.figures()
        worse = sum(one.is_worse for one in figures)
        better = sum(one.is_clear for one in figures) - worse
        return (
            f"{SPLIT}: better in {better}, worse in {worse} of {len(figures)} figures; "
            f"{len(figures) - better - worse} without a clear change."
        )

    def stability_text(self) -> str:
        spreads = {
            share: max(one.spread for one in self.figures() if one.share == share)
            for share in SHARES
        }
        each = ", ".join(f"{spread:.0%} in {share}" for share, spread in spreads.items())
        return f"Rounds of one setup differ by up to {each}."

    def notes(self) -> tuple[str, ...]:
        """Return how it was measured."""
        return self.machine_text(), self.cpu.text(), self.load_text(), self.stability_text()

    def content(self) -> dict[str, Any]:
        """Return the JSON report."""
        return {
            "date": self.date,
            "machine": {
                "cpu": self.machine,
                "cores": len(self.cpu.cores),
                "load_average": self.busy,
            },
            "model": self.model,
            "equal_cpu": self.cpu.text(),
            "load": asdict(self.load),
            "figures": [
                {**asdict(one), "clear": one.is_clear, "change": one.change_share}
                for one in self.figures()
            ],
            "rounds": {
                setup: [
                    {
                        "seconds": one.seconds,
                        "short_chats": one.short.content(one.seconds),
                        "long_prompts": one.long.content(one.seconds),
                        "engine_cpu_seconds": one.engine_cpu,
                        "router_cpu_seconds": one.router_cpu if setup == SPLIT else None,
                        "load_generator_cpu_seconds": one.generator_cpu,
                        "latest_request_seconds": one.late,
                    }
                    for one in self.rounds[setup]
                ]
                for setup in SETUPS
            },
        }


def _quantiles(figures: RoundFigures) -> dict[tuple[str, str], float]:
    return {
        (name, share): sample_quantiles[share]
        for name, sample in figures.samples().items()
        if (sample_quantiles := sample.quantiles()) is not None
        for share in SHARES
    }


def report(comparison: Comparison, width: int, bar: str = "█") -> Iterator[str]:
    """Yield the lines for a person: the table, the bars, and how it was measured."""
    width = max(MIN_WIDTH, min(MAX_WIDTH, width))
    figures = comparison.figures()
    yield ""
    yield f"{'':24}{SHORT_NAMES[ALONE]:>10}{SHORT_NAMES[SPLIT]:>8}"
    before = ""
    for one in figures:
        name, before = "" if one.name == before else one.name, one.name
        times = f"{time_text(one.alone):>10}{time_text(one.split):>8}"
        yield f"{name:20} {one.share}{times}  {one.change}"
    yield ""
    yield from _bars(figures, width, bar)
    for text in (comparison.verdict(), *_circumstances(comparison)):
        yield from textwrap.wrap(text, width, subsequent_indent="  ")


def _bars(figures: Sequence[ComparedFigure], width: int, bar: str) -> Iterator[str]:
    """Yield bars whose lengths compare within one latency."""
    label = max(map(len, SHORT_NAMES.values()))
    room = width - label - len("p50  ") - len(" 10.00 s")
    for name in dict.fromkeys(one.name for one in figures):
        rows = [one for one in figures if one.name == name]
        longest = max(SHORTEST_S, *(max(one.alone, one.split) for one in rows))
        yield name
        for one in rows:
            for setup, value in ((ALONE, one.alone), (SPLIT, one.split)):
                share = one.share if setup == ALONE else ""
                drawn = bar * max(1, round(value / longest * room))
                yield f"{share:3} {SHORT_NAMES[setup]:{label}} {drawn} {time_text(value)}"
        yield ""


def _circumstances(comparison: Comparison) -> Iterator[str]:
    alone, split = (comparison.total(setup) for setup in SETUPS)
    yield f"Machine: {comparison.machine_text()}."
    yield comparison.cpu.text()
    yield comparison.load_text()
    yield (
        f"CPU time that the engines used: {alone.engine_cpu:.0f} s alone, "
        f"{split.engine_cpu:.0f} s as prefill and decode engine."
    )
    share = split.router_cpu / split.seconds
    state = "saturated: its figures are too high" if share > SATURATED else "not saturated"
    yield f"Router (in front of the two engines only): {share:.0%} of a core, {state}."
    late = max(alone.late, split.late)
    share = max(one.generator_cpu / one.seconds for one in (alone, split))
    text = f"Load generator: {share:.0%} of a core, at most {late * 1000:.0f} ms late."
    yield text + (" That delays TTFT: free some cores and repeat." if late > LATE_S else "")
    yield comparison.stability_text()
    yield (
        "Lower is better. A change is clear if every round of one was faster than every round of "
        "the other."
    )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _listed(cores: Sequence[int]) -> str:
    return ", ".join(map(str, cores))


def describe_machine() -> str:
    """Return the CPU's name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
