"""Rows of figures, as a table to read and as JSON to compare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Aim:
    """A figure of the row should be at least or at most `bound`."""

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
    """One case. The names of figures carry their unit; `spread` is that of the main one."""

    section: str
    case: str
    figures: dict[str, float]
    rounds: int
    spread: float
    aim: Aim | None = None

    @property
    def is_missed(self) -> bool:
        return self.aim is not None and not self.aim.is_met(self.figures)


@dataclass(slots=True)
class Report:
    """Prints rows as they come. `failed` are sections that could not be measured completely."""

    max_spread: float
    rows: list[Row] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def add(self, row: Row) -> None:
        if not self.rows or self.rows[-1].section != row.section:
            print(f"\n{row.section}")
        self.rows.append(row)
        figures = "  ".join(f"{name} {value:.4g}" for name, value in row.figures.items())
        line = f"  {row.case:<34} {figures}  ({row.rounds} rounds, spread {row.spread:.0%})"
        line += "  NOISY" if row.spread > self.max_spread else ""
        if row.aim is not None:
            line += f"  [aim {row.aim}: {'MISSED' if row.is_missed else 'met'}]"
        print(line, flush=True)

    @property
    def noisy(self) -> list[Row]:
        return [row for row in self.rows if row.spread > self.max_spread]

    def plain_rows(self) -> list[dict[str, Any]]:
        """Return the rows as JSON can hold them."""
        return [
            {
                **asdict(row),
                "noisy": row in self.noisy,
                "aim": str(row.aim) if row.aim else None,
                "met": not row.is_missed if row.aim else None,
            }
            for row in self.rows
        ]
