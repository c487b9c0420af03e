"""How long to wait before asking again who could not answer."""

from __future__ import annotations

import random
from collections.abc import Callable

FIRST, LONGEST = 0.5, 30.0


class Backoff:
    """Each time about twice as long, with jitter, so that many routers do not ask in one moment."""

    def __init__(self, chance: Callable[[], float] = random.random) -> None:
        self._chance = chance
        self._failures = 0

    def next(self) -> float:
        pause = min(FIRST * 2.0 ** min(self._failures, 16), LONGEST)
        self._failures += 1
        return pause * (0.5 + self._chance() / 2)

    def reset(self) -> None:
        self._failures = 0
