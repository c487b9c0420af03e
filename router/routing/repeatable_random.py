"""Chance that replays: a number that looks random, and a sample that follows from one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

MASK = 2**64 - 1
SAMPLE = 64


def mix(number: int) -> int:
    """64 bits that depend on every bit of the number (splitmix64)."""
    mixed = (number + 1) * 0x9E3779B97F4A7C15 & MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & MASK
    return mixed ^ mixed >> 31


def sample(items: Sequence[T], chance: int) -> Sequence[T]:
    """SAMPLE of the items, evenly spaced from a random place on, or all of them if there are fewer.

    Two slices, the second where the first runs over the end: a thousand items cost no more than a
    hundred. Any two items may meet in a sample, so load spreads over all of them.
    """
    size = len(items)
    if size <= SAMPLE:
        return items
    start = chance % size
    step = 1 + (chance >> 32) % (size // SAMPLE)
    end = start + SAMPLE * step
    picked = items[start:end:step]
    missing = SAMPLE - len(picked)
    return [*picked, *items[end - missing * step - size : end - size : step]] if missing else picked
