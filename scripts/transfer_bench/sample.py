"""Repeated measurements of one thing, and whether they agree well enough to be believed."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sample:
    """At least one measurement, in the order they were taken."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> "Sample":
        return cls(tuple(values))

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def spread(self) -> float:
        """Distance between the quartiles over the median: 0 for a quiet machine."""
        if len(self.values) < 4 or not self.median:
            return 0.0
        low, _, high = statistics.quantiles(self.values, n=4)
        return (high - low) / self.median

    def percentile(self, percent: float) -> float:
        """The smallest value that `percent` of the values do not exceed."""
        ordered = sorted(self.values)
        rank = max(1, math.ceil(percent / 100 * len(ordered)))
        return ordered[rank - 1]


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> Sample:
    """Pairwise: both were measured in the same round, so the machine's mood cancels out."""
    return Sample.of([one / other for one, other in zip(ours, theirs, strict=True)])
