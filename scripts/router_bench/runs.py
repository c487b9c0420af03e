"""Runs of one case: who ran when, and what may be compared with what."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from scripts.bench.errors import NotInterleavedError


@dataclass(frozen=True, slots=True)
class Run:
    """One contestant, once. Times in seconds; `cpu` of all the router's threads, `peak` in bytes.

    `place` counts all runs of a session, so that it shows who took turns with whom.
    """

    session: str
    place: int
    case: str
    contestant: str
    requests: int
    chunks: int
    elapsed: float
    cpu: float
    peak: int
    first_byte: tuple[float, float]
    whole: tuple[float, float]
    """p50 and p99."""

    @property
    def cpu_us(self) -> float:
        """Per request."""
        return self.cpu / self.requests * 1e6


@dataclass(slots=True)
class Runs:
    """All runs of a case, in the order in which they were made."""

    case: str
    made: list[Run] = field(default_factory=list)

    def of(self, contestant: str) -> list[Run]:
        return [run for run in self.made if run.contestant == contestant]

    def ratio(self, ours: str, peer: str) -> float:
        """The median over rounds of what a request costs us as a share of the peer.

        Raises NotInterleavedError.
        """
        pairs = take_turns(self.of(ours), self.of(peer))
        return statistics.median(one.cpu_us / other.cpu_us for one, other in pairs)

    def to_json(self) -> list[dict[str, Any]]:
        return [asdict(run) for run in self.made]


def take_turns(ours: Sequence[Run], theirs: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Pairs of runs that followed each other. Raises NotInterleavedError for any others."""
    both = sorted([*ours, *theirs], key=lambda run: run.place)
    names = [run.contestant for run in both]
    first, second = names[0::2], names[1::2]
    alternate = len(set(first)) == len(set(second)) == 1 and set(first) != set(second)
    if not alternate or len(first) != len(second) or len({run.session for run in both}) != 1:
        raise NotInterleavedError(
            "these runs did not take turns, so they are not to be compared: run both in one session"
        )
    return list(zip(ours, theirs, strict=True))


def percentiles(values: Sequence[float]) -> tuple[float, float]:
    """p50 and p99 of at least one value."""
    ordered = sorted(values)
    ranks = [max(0, math.ceil(share * len(ordered)) - 1) for share in (0.5, 0.99)]
    return ordered[ranks[0]], ordered[ranks[1]]


def median(values: Sequence[float]) -> float:
    return statistics.median(values)
