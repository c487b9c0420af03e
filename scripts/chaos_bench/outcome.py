"""What came of a run, and what of it is not as it should be."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from scripts.chaos_bench.answers import OK, WRONG
from scripts.chaos_bench.client import Result
from scripts.chaos_bench.scenarios import Aim, Mode, Scenario

PASSED_OVER = 20
"""Requests after which one that had none of them is left alone: it is one of three."""


@dataclass(slots=True)
class Run:
    """Seconds since the harm, or of a wait.

    `asked` are the requests that came to the broken, None where nobody can know; `stopped` is when
    they were left alone, None where they never were.
    """

    scenario: str
    mode: str
    requests: int
    ok: int
    errors: dict[str, int]
    longest: float
    silence: float
    last_error: float | None
    asked: int | None
    stopped: float | None
    router_cpu: float
    """Share of one core."""
    missed: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def summary(
    scenario: Scenario,
    mode: Mode,
    results: Sequence[Result],
    began: float,
    mended: float,
    asked_at: Sequence[float] | None,
) -> Run:
    counted = Counter(result.kind for result in results)
    errors = [result for result in results if result.kind != OK]
    run = Run(
        scenario=scenario.name,
        mode=mode,
        requests=len(results),
        ok=counted.pop(OK, 0),
        errors=dict(counted.most_common()),
        longest=max((result.waited for result in results), default=0.0),
        silence=max((result.silence for result in results), default=0.0),
        last_error=max((error.ended - began for error in errors), default=None),
        asked=None if asked_at is None else len(asked_at),
        stopped=None,
        router_cpu=0.0,
    )
    if asked_at is not None:
        during = [result.started for result in results if began < result.started < mended]
        run.stopped = left_alone([at - began for at in asked_at], [at - began for at in during])
    run.missed = misses(run, scenario.aim_in(mode))
    return run


def left_alone(asked_at: Sequence[float], started: Sequence[float]) -> float | None:
    """When the broken had their last request before so many others passed them over.

    A later one is a trial. None if that never was: clients who all wait ask nobody either.
    """
    came = [0.0, *sorted(asked_at)]
    for at, following in zip(came, [*came[1:], math.inf], strict=True):
        if sum(at < start < following for start in started) > PASSED_OVER:
            return at
    return None


def misses(run: Run, aim: Aim | None) -> list[str]:
    """What is not as it should be; empty when all is."""
    found = [f"{run.errors[WRONG]} WRONG"] if WRONG in run.errors else []
    if not run.ok:
        found.append("no right answer")
    if aim is None:
        return found
    bad = {kind: n for kind, n in run.errors.items() if kind != WRONG}
    found += [f"{number} {kind}" for kind, number in bad.items()]
    if aim.longest is not None and run.longest > aim.longest:
        found.append(f"a client waited {run.longest:.1f} s")
    if aim.silence is not None and run.silence > aim.silence:
        found.append(f"a stream stood still for {run.silence:.1f} s")
    return found
