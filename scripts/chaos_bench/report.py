"""What is printed and written of runs, and the table of several files."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.bench.errors import BenchError
from scripts.chaos_bench.outcome import Run

SCHEMA = 1
HEAD = f"{'scenario':<16}{'mode':<10}{'asked':>6}{'ok':>6}{'longest':>9}{'left alone':>15}  errors"


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def line(run: Run) -> str:
    after = "never" if run.stopped is None else f"{run.stopped:.1f} s"
    alone = "" if run.asked is None else f"{after} ({run.asked})"
    told = f"{run.scenario:<16}{run.mode:<10}{run.requests:>6}{run.ok:>6}{run.longest:>7.1f} s"
    verdict = f"  MISSED: {', '.join(run.missed)}" if run.missed else ""
    return f"{told}{alone:>15}  {errors(run.errors)}{verdict}"


def errors(counted: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {kind}" for kind, number in counted.items()) or "none"


def to_json(machine: dict[str, Any], options: dict[str, Any], runs: Sequence[Run]) -> str:
    content = {
        "schema": SCHEMA,
        "machine": machine,
        "options": options,
        "runs": [run.to_json() for run in runs],
    }
    return json.dumps(content, indent=2) + "\n"


def table(columns: Mapping[str, Path]) -> str:
    """In Markdown; what missed its aim is bold. Raises BenchError."""
    read = {name: _read(path) for name, path in columns.items()}
    keys = dict.fromkeys(key for runs in read.values() for key in runs)
    lines = [f"| scenario | | {' | '.join(read)} |", f"|---|---|{'---|' * len(read)}"]
    for scenario, mode in keys:
        cells = [_cell(runs.get((scenario, mode))) for runs in read.values()]
        lines.append(f"| {scenario} | {mode} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _read(path: Path) -> dict[tuple[str, str], Run]:
    try:
        runs = [Run(**run) for run in json.loads(path.read_text())["runs"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BenchError(f"{path}: not a file of this program: {error}") from error
    return {(run.scenario, run.mode): run for run in runs}


def _cell(run: Run | None) -> str:
    if run is None:
        return ""
    failed = run.requests - run.ok
    told = f"{failed} of {run.requests}, {run.longest:.1f} s"
    told = f"{told}: {errors(run.errors)}" if failed else told
    return f"**{told}**" if run.missed else told
