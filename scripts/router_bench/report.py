"""Figures of a session, as a table to read and as JSON to keep."""

import json
import sys
from dataclasses import dataclass, field
from typing import Any, TextIO

from scripts.router_bench.cases import Case
from scripts.router_bench.runs import Run, Runs, median

SCHEMA = 1
MEBIBYTE = 1024 * 1024


@dataclass(slots=True)
class Report:
    """The table goes to stdout, progress to stderr."""

    machine: dict[str, Any]
    options: dict[str, Any]
    ours: str
    peer: str | None
    direct: str
    out: TextIO = field(default_factory=lambda: sys.stdout)
    progress: TextIO = field(default_factory=lambda: sys.stderr)
    cases: list[dict[str, Any]] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)

    def say(self, text: str) -> None:
        print(text, file=self.progress, flush=True)

    def note(self, run: Run) -> None:
        rate = run.requests / run.elapsed
        self.say(f"  {run.case}: {run.contestant}: {run.cpu_us:.1f} us, {rate:.0f} requests/s")

    def header(self) -> None:
        facts = ", ".join(f"{key} {value}" for key, value in self.machine.items())
        print(f"machine: {facts}", file=self.out, flush=True)

    def add(self, case: Case, runs: Runs) -> None:
        print(f"\n{case.name}", file=self.out)
        names = list(dict.fromkeys(run.contestant for run in runs.made))
        figures = {name: self._figures(runs, name) for name in names}
        for name in names:
            print(f"  {name:<14}{_line(figures[name])}", file=self.out)
        ratio = None
        if self.peer is not None:
            ratio = runs.ratio(self.ours, self.peer)
            print(f"  ratio to {self.peer}: {ratio:.2f}{self._verdict(case, ratio)}", file=self.out)
        self.out.flush()
        self.cases.append(
            {
                "case": case.name,
                "goal": case.goal,
                "ratio": ratio,
                "figures": figures,
                "runs": runs.to_json(),
            }
        )

    def to_json(self) -> str:
        content = {
            "schema": SCHEMA,
            "machine": self.machine,
            "options": self.options,
            "cases": self.cases,
        }
        return json.dumps(content, indent=2) + "\n"

    def _verdict(self, case: Case, ratio: float) -> str:
        if case.goal is None or self.peer != "vllm-router":
            return ""
        if ratio <= case.goal:
            return f" (goal {case.goal:g}: met)"
        self.missed.append(case.name)
        return f" (goal {case.goal:g}: MISSED)"

    def _figures(self, runs: Runs, name: str) -> dict[str, float]:
        """Medians over rounds; CPU in microseconds, latency in milliseconds, memory in MiB."""
        made, base = runs.of(name), runs.of(self.direct)
        figures = {
            "requests/s": median([run.requests / run.elapsed for run in made]),
            "cpu_us": median([run.cpu_us for run in made]),
            "cpu_us_low": min(run.cpu_us for run in made),
            "cpu_us_high": max(run.cpu_us for run in made),
            "cpu_share": median([run.cpu / run.elapsed for run in made]),
            "peak_mib": max(run.peak for run in made) / MEBIBYTE,
        }
        if made[0].chunks > 1:
            figures["cpu_us_per_chunk"] = figures["cpu_us"] / made[0].chunks
        if name == self.direct:
            figures = {"requests/s": figures["requests/s"]} | _latency(made, [])
        elif base:
            figures |= _latency(made, base)
        return figures


def _latency(made: list[Run], base: list[Run]) -> dict[str, float]:
    """With `base`, what is added to it."""

    def milliseconds(index: int, name: str) -> float:
        own = median([getattr(run, name)[index] for run in made])
        return (own - (median([getattr(run, name)[index] for run in base]) if base else 0)) * 1e3

    prefix = "added_" if base else ""
    return {
        f"{prefix}ttfb_p50_ms": milliseconds(0, "first_byte"),
        f"{prefix}ttfb_p99_ms": milliseconds(1, "first_byte"),
        f"{prefix}p50_ms": milliseconds(0, "whole"),
        f"{prefix}p99_ms": milliseconds(1, "whole"),
    }


def _line(figures: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in figures.items())
