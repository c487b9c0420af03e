"""What was measured: rows of figures, as a table to read and as JSON to compare."""

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TextIO

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Aim:
    """What a figure of the row should be: at least or at most `bound`."""

    figure: str
    bound: float
    at_least: bool = False

    def is_met(self, figures: Mapping[str, float]) -> bool:
        value = figures[self.figure]
        return value >= self.bound if self.at_least else value <= self.bound

    def __str__(self) -> str:
        return f"{self.figure} {'>=' if self.at_least else '<='} {self.bound:g}"


@dataclass(frozen=True, slots=True)
class Row:
    """One case. The names of figures carry their unit."""

    section: str
    case: str
    figures: dict[str, float]
    rounds: int
    spread: float
    """Quartile distance over median of the figure that matters."""
    aim: Aim | None = None


@dataclass(slots=True)
class Report:
    """Rows are shown as they come; progress goes to stderr, so that stdout stays a table."""

    machine: dict[str, Any]
    options: dict[str, Any]
    max_spread: float
    out: TextIO = field(default_factory=lambda: sys.stdout)
    progress: TextIO = field(default_factory=lambda: sys.stderr)
    rows: list[Row] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    """Sections that could not be measured, or not all of them."""

    def say(self, text: str) -> None:
        print(text, file=self.progress, flush=True)

    def header(self) -> None:
        facts = ", ".join(f"{key} {value}" for key, value in self.machine.items())
        print(f"machine: {facts}", file=self.out, flush=True)

    def add(self, row: Row) -> None:
        if not self.rows or self.rows[-1].section != row.section:
            print(f"\n{row.section}", file=self.out)
        self.rows.append(row)
        print(self._line(row), file=self.out, flush=True)

    @property
    def noisy(self) -> list[Row]:
        return list(filter(self._is_noisy, self.rows))

    @property
    def misses(self) -> list[Row]:
        return [row for row in self.rows if row.aim and not row.aim.is_met(row.figures)]

    def to_json(self) -> str:
        rows = [self._row(row) for row in self.rows]
        content = {
            "schema": SCHEMA,
            "machine": self.machine,
            "options": self.options,
            "max_spread": self.max_spread,
            "noisy": bool(self.noisy),
            "failed": self.failed,
            "rows": rows,
        }
        return json.dumps(content, indent=2) + "\n"

    def _row(self, row: Row) -> dict[str, Any]:
        return {
            **asdict(row),
            "noisy": self._is_noisy(row),
            "aim": str(row.aim) if row.aim else None,
            "met": row.aim.is_met(row.figures) if row.aim else None,
        }

    def _is_noisy(self, row: Row) -> bool:
        return row.spread > self.max_spread

    def _line(self, row: Row) -> str:
        figures = "  ".join(f"{name} {value:.4g}" for name, value in row.figures.items())
        line = f"  {row.case:<34} {figures}  ({row.rounds} rounds, spread {row.spread:.0%})"
        if self._is_noisy(row):
            line += "  NOISY"
        if row.aim is not None:
            verdict = "met" if row.aim.is_met(row.figures) else "MISSED"
            line += f"  [aim {row.aim}: {verdict}]"
        return line
