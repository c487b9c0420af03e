"""A histogram of plain numbers that can be added up."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple


class Bucket(NamedTuple):
    times: int
    total: float
    """The sum of the values. A reader that sees only differences can repeat them without the single
    values: the mean, so many times, lies in the same bucket."""


EMPTY = Bucket(0, 0.0)


class Histogram:
    """One thread observes, any may read: each bucket is replaced as a whole.

    A value lies in the first bucket whose bound is not below it; the last bucket has no bound.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self._buckets = [EMPTY] * (len(self.bounds) + 1)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Histogram) and self.buckets() == other.buckets()

    __hash__ = None  # type: ignore[assignment] # it changes

    def observe(self, value: float) -> None:
        place = bisect_left(self.bounds, value)
        times, total = self._buckets[place]
        self._buckets[place] = Bucket(times + 1, total + value)

    def buckets(self) -> tuple[Bucket, ...]:
        """Return the buckets, one more than there are bounds."""
        return tuple(self._buckets)

    def copy(self) -> "Histogram":
        other = Histogram(self.bounds)
        other._buckets = list(self._buckets)
        return other
