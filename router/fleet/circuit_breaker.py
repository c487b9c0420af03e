"""Whether an engine's own failures speak against asking it: pure, time is passed in.

*closed* (asked) → *open* (left alone for a while) → *half open* (one request may try) → closed, or
open for longer. Only what the engine did is told here: see the rules in router.proxy.retry.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class CircuitState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


# To look up a member of an enum costs ten times as much as a name, and each leg asks for them.
CLOSED, OPEN, HALF_OPEN = CircuitState


@dataclass(frozen=True, slots=True)
class BreakerRules:
    """`in_a_row` failures open it, or `rate` of at least `sample` legs; pauses are seconds."""

    consecutive_failures: int = 5
    failure_rate: float = 0.5
    min_sample: int = 20
    first_pause_s: float = 1.0
    max_pause_s: float = 30.0


class CircuitBreaker:
    """`trial`: whose request it is that tries a half-open circuit; `opened` counts how often it
    has opened."""

    __slots__ = ("_bad", "_good", "_in_a_row", "_openings", "_random", "_rules", "circuit",
                 "times_opened", "trial")  # fmt: skip

    def __init__(
        self,
        rules: BreakerRules,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.circuit = CLOSED
        self.trial: object = None
        self.times_opened = 0
        self._rules = rules
        self._random = chance
        self._in_a_row = 0
        self._openings = 0
        self._good = 0
        self._bad = 0

    @property
    def allows_requests(self) -> bool:
        """Whether an engine may be asked, as far as its failures go."""
        return self.circuit is CLOSED or (self.circuit is HALF_OPEN and self.trial is None)

    def record_success(self) -> bool:
        """An engine did what it was asked for. True when the circuit has closed by it."""
        self._good += 1
        self._in_a_row = 0
        if self.circuit is CLOSED:
            return False
        self.reset()
        return True

    def record_failure(self) -> float | None:
        """The engine's fault. The seconds to leave it alone, when the circuit opens by it."""
        self._bad += 1
        self._in_a_row += 1
        if self.circuit is OPEN:
            return None
        if self.circuit is CLOSED and not self._is_too_much():
            return None
        return self._open()

    def half_open(self) -> None:
        """The pause is over."""
        if self.circuit is OPEN:
            self.circuit, self.trial = HALF_OPEN, None

    def reset(self) -> None:
        """What is past says nothing any more: another process, or it has shown that it works."""
        self.circuit, self.trial = CLOSED, None
        self._in_a_row = self._openings = self._good = self._bad = 0

    def _is_too_much(self) -> bool:
        if self._in_a_row >= self._rules.consecutive_failures:
            return True
        seen = self._good + self._bad
        is_enough = seen >= self._rules.min_sample and self._bad >= self._rules.failure_rate * seen
        while self._good + self._bad > 2 * self._rules.min_sample:  # the past fades
            self._good, self._bad = self._good // 2, self._bad // 2
        return is_enough

    def _open(self) -> float:
        """With jitter, so that many routers do not come back in one moment."""
        pause = min(self._rules.first_pause_s * 2.0**self._openings, self._rules.max_pause_s)
        self._openings = min(self._openings + 1, 16)
        self.circuit, self.trial = OPEN, None
        self.times_opened += 1
        return pause * (0.75 + self._random() / 2)
