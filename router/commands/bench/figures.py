"""What the clients of a load saw, in numbers: bounded, however long it runs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SHARES = (0.5, 0.9, 0.99)
MOST_KEPT = 100_000
MOST_PROBLEMS = 10


class Sample:
    """Of many numbers as many as fit, each as likely as any other to be among them."""

    def __init__(self, most: int = MOST_KEPT, seed: int = 1) -> None:
        self._most = most
        self._random = random.Random(seed)
        self._kept: list[float] = []
        self.count = 0

    def add(self, value: float) -> None:
        self.count += 1
        if len(self._kept) < self._most:
            self._kept.append(value)
        elif (place := self._random.randrange(self.count)) < self._most:
            self._kept[place] = value

    def quantiles(self) -> Mapping[str, float] | None:
        """By nearest rank; None of nothing."""
        ordered = sorted(self._kept)
        if not ordered:
            return None
        return {f"p{share * 100:g}": nearest_rank(ordered, share) for share in SHARES}


def nearest_rank(ordered: Sequence[float], share: float) -> float:
    """`ordered` is not empty."""
    return ordered[max(0, -(-round(share * 1000) * len(ordered) // 1000) - 1)]


@dataclass(slots=True)
class Figures:
    """Times in seconds. `gaps` are those between two pieces of text of one answer."""

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
        if problem in self.problems or len(self.problems) < MOST_PROBLEMS:
            self.problems[problem] += 1

    @property
    def ended(self) -> int:
        return self.answered + self.failed

    def content(self, seconds: float) -> dict[str, Any]:
        """As JSON has it, after so many `seconds`."""
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
    """For people."""
    rows = [
        f"{figures.answered} answered, {figures.failed} failed in {seconds:.1f} s: "
        f"{figures.answered / seconds:.2f} requests/s, "
        f"{figures.completion_tokens / seconds:.1f} tokens/s",
        f"first token   {_times(figures.first)}",
        f"between two   {_times(figures.gaps)}",
        f"whole answer  {_times(figures.whole)}",
    ]
    if figures.prompt_tokens:
        share = figures.cached_tokens / figures.prompt_tokens
        rows.append(
            f"reused        {figures.cached_tokens} of {figures.prompt_tokens} prompt tokens "
            f"({share:.0%})"
        )
    rows += [f"{count} times: {problem}" for problem, count in figures.problems.most_common()]
    return "\n".join(rows)


def _times(sample: Sample) -> str:
    found = sample.quantiles()
    if found is None:
        return "-"
    return "  ".join(f"{name} {seconds * 1000:.1f} ms" for name, seconds in found.items())
