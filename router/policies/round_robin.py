"""Each engine in turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def in_turn(candidates: Sequence[T], turn: int) -> Sequence[T]:
    """All candidates, starting with the one whose turn it is; the rest are its stand-ins."""
    start = turn % len(candidates) if candidates else 0
    return [*candidates[start:], *candidates[:start]] if start else candidates
