"""The figures of a load, in bounded memory."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SHARES = (0.5, 0.9, 0.99)
MAX_SAMPLES = 100_000
MAX_PROBLEMS = 10


class Sample:
    """A uniform random sample of bounded size (reservoir sampling)."""

    def __init__(self, max_size: int = MAX_SAMPLES, seed: int = 1) -> None:
        self._max_size = max_size
        self._random = random.Random(seed)
        self._kept: list[float] = []
        self.count = 0

    def add(self, value: float) -> None:
        self.count += 1
        if len(self._kept) < self._max_size:
            self._kept.append(value)
        elif (place := self._random.randrange(self.count)) < self._max_size:
            self._kept[place] = value

    def quantiles(self) -> Mapping[str, float] | None:
        """Return quantiles by nearest rank, or None for an empty sample."""
        ordered = sorted(self._kept)
        if not ordered:
            return None
        return {f"p{share * 100:g}": nearest_rank(ordered, share) for share in SHARES}


def nearest_rank(ordered: Sequence[float], share: float) -> float:
    """`ordered` is not empty."""
    return ordered[max(0, -(-round(share * 1000) * len(ordered) // 1000) - 1)]


@dataclass(slots=True)
class Figures:
    """Times in seconds; `first` is TTFT, `gaps` lie between two pieces of text of one answer."""

    answered: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    first: Sample = field(default_factory=Sample)
    gaps: Sample = field(default_factory=Sample)
    whole: Sample = field(default_factory=Sample)
    problems: Counter[str] = field(default_factory=Counter)

    def note_failure(self, problem: str) -> None:
        self.failed += 1
        if problem in self.problems or len(self.problems) < MAX_PROBLEMS:
            self.problems[problem] += 1

    @property
    def ended(self) -> int:
        return self.answered + self.failed

    def content(self, seconds: float) -> dict[str, Any]:
        """Return the JSON report of a load that took `seconds`."""
        return {
            "seconds": seconds,
            "answered": self.answered,
            "failed": self.failed,
            "problems": dict(self.problems),
            "requests_per_second": self.answered / seconds,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "completion_tokens_per_second": self.completion_tokens / seconds,
            "first_token_seconds": self.first.quantiles(),
            "inter_token_seconds": self.gaps.quantiles(),
            "whole_seconds": self.whole.quantiles(),
        }


def table(figures: Figures, seconds: float) -> str:
    """Return the report as text."""
    rows = [
        f"{figures.answered} answered, {figures.failed} failed in {seconds:.1f} s: "
        f"{figures.answered / seconds:.2f} requests/s, "
        f"{figures.completion_tokens / seconds:.1f} tokens/s",
        f"TTFT          {_times(figures.first)}",
        f"ITL           {_times(figures.gaps)}",
        f"end to end    {_times(figures.whole)}",
    ]
    if figures.prompt_tokens:
        share = figures.cached_tokens / figures.prompt_tokens
        rows.append(
            f"cached        {figures.cached_tokens} of {figures.prompt_tokens} prompt tokens "
            f"({share:.0%})"
        )
    rows += [f"{count} times: {problem}" for problem, count in figures.problems.most_common()]
    return "\n".join(rows)


def _times(sample: Sample) -> str:
    found = sample.quantiles()
    if found is None:
        return "-"
    return "  ".join(f"{name} {seconds * 1000:.1f} ms" for name, seconds in found.items())
