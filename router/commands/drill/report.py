"""The result of a drill on one page: as text, Markdown or JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from router.commands.console import GREEN, RED, YELLOW, Paint, no_paint, time_text
from router.commands.drill.streams import Tally, Verdict

HEAD = ("step", "result", "legs", *Verdict, "longest pause", "noticed", "ready again")
COLOURS = {"passed": GREEN, "skipped": YELLOW, "FAILED": RED}


@dataclass(slots=True)
class Step:
    """The result of one step. `legs` is how many ran at the engine when it began. Times are in
    seconds since then, None if that did not happen: `noticed_s` until no router used the engine, or
    until it was drained; `ready_s` until as many engines were ready as before."""

    name: str
    skipped: str = ""
    """The reason, if the step was not run."""
    legs: int = 0
    noticed_s: float | None = None
    ready_s: float | None = None
    problem: str = ""
    tally: Tally = field(default_factory=Tally)

    @property
    def result(self) -> str:
        if self.skipped:
            return "skipped"
        return "passed" if self.tally.is_right and not self.problem else "FAILED"

    def content(self) -> dict[str, Any]:
        """Return the step for a JSON report."""
        known = {"step": self.name, "result": self.result}
        if self.skipped:
            return known | {"reason": self.skipped}
        return known | {
            "legs": self.legs,
            **{verdict.name.lower(): self.tally.counts[verdict] for verdict in Verdict},
            "longest_pause_seconds": self.tally.longest_pause,
            "noticed_seconds": self.noticed_s,
            "ready_seconds": self.ready_s,
            "problem": self.problem,
            "problems": dict(self.tally.problems),
        }

    def row(self) -> Sequence[str]:
        if self.skipped:
            return (self.name, self.result, *[""] * (len(HEAD) - 2))
        times = (self.tally.longest_pause, self.noticed_s, self.ready_s)
        counts = (self.legs, *(self.tally.counts[verdict] for verdict in Verdict))
        shown = ("-" if seconds is None else time_text(seconds) for seconds in times)
        return (self.name, self.result, *map(str, counts), *shown)

    def remarks(self) -> Iterator[str]:
        for text in filter(None, (self.skipped, self.problem)):
            yield f"{self.name}: {text}"
        for problem, count in self.tally.problems.most_common():
            yield f"{self.name}: {count} times: {problem}"


@dataclass(frozen=True, slots=True)
class Report:
    """`subject` says of which engine and through which router."""

    subject: str
    steps: Sequence[Step]

    @property
    def has_passed(self) -> bool:
        return all(step.result != "FAILED" for step in self.steps)

    def show(self, form: str, painted: Paint = no_paint) -> str:
        """Return the page in one of the formats `text`, `markdown` and `json`."""
        if form == "json":
            steps = [step.content() for step in self.steps]
            content = {"ok": self.has_passed, "drill": self.subject, "steps": steps}
            return json.dumps(content, indent=2)
        title = f"{'passed' if self.has_passed else 'FAILED'}: {self.subject}"
        rows = [step.row() for step in self.steps]
        remarks = [remark for step in self.steps for remark in step.remarks()]
        if form == "markdown":
            table = [HEAD, ["---"] * len(HEAD), *rows]
            lines = [f"## Drill {title}", "", *(f"| {' | '.join(row)} |" for row in table), ""]
            return "\n".join([*lines, *(f"* {_escaped(remark)}" for remark in remarks)])
        widths = [max(map(len, column)) for column in zip(HEAD, *rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in (HEAD, *rows)
        ]
        lines[1:] = [
            line.replace(step.result, painted(step.result, COLOURS[step.result]), 1)
            for line, step in zip(lines[1:], self.steps, strict=True)
        ]
        return "\n".join([painted(title, GREEN if self.has_passed else RED), *lines, *remarks])


def _escaped(text: str) -> str:
    """Return text as Markdown that shows it, in a code span that it cannot end."""
    return f"`{text.replace('`', chr(39))}`"
