"""A circuit breaker for the failures of one engine. Pure: its caller does the waiting.

*closed* (in use) → *open* (avoided for a while) → *half open* (one trial request) → closed again,
or open for longer. Only failures caused by the engine count: see router.proxy.retry.
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


# Looking up a member of an enum costs ten times as much as a name, and each leg does it.
CLOSED, OPEN, HALF_OPEN = CircuitState


@dataclass(frozen=True, slots=True)
class BreakerRules:
    """The circuit opens after `consecutive_failures`, or when `failure_rate` of at least
    `min_sample` legs failed. Pauses grow from `first_pause_s` to `max_pause_s`."""

    consecutive_failures: int = 5
    failure_rate: float = 0.5
    min_sample: int = 20
    first_pause_s: float = 1.0
    max_pause_s: float = 30.0


class CircuitBreaker:
    """`trial` is the request that tests a half-open circuit. `times_opened` counts openings;
    `failures` counts failures since the last reset, halved now and then."""

    __slots__ = ("_consecutive", "_openings", "_random", "_rules", "_successes", "circuit",
                 "failures", "times_opened", "trial")  # fmt: skip

    def __init__(
        self, rules: BreakerRules, random_share: Callable[[], float] = random.random
    ) -> None:
        self.circuit = CLOSED
        self.trial: object = None
        self.times_opened = 0
        self._rules = rules
        self._random = random_share
        self._consecutive = self._openings = self._successes = self.failures = 0

    @property
    def allows_requests(self) -> bool:
        return self.circuit is CLOSED or (self.circuit is HALF_OPEN and self.trial is None)

    def record_success(self) -> bool:
        """Return True if the success has closed the circuit."""
        self._successes += 1
        self._consecutive = 0
        if self.circuit is CLOSED:
            return False
        self.reset()
        return True

    def record_failure(self) -> float | None:
        """Return the seconds to avoid the engine if the failure has opened the circuit."""
        self.failures += 1
        self._consecutive += 1
        if self.circuit is OPEN or (self.circuit is CLOSED and not self._is_too_much()):
            return None
        return self._open()

    def _open(self) -> float:
        pause = min(self._rules.first_pause_s * 2.0**self._openings, self._rules.max_pause_s)
        self._openings = min(self._openings + 1, 16)
        self.circuit, self.trial = OPEN, None
        self.times_opened += 1
        # The jitter keeps many routers from returning at the same moment.
        return pause * (0.75 + self._random() / 2)

    def half_open(self) -> None:
        """Allow a trial request, because the pause is over."""
        if self.circuit is OPEN:
            self.circuit, self.trial = HALF_OPEN, None

    def reset(self) -> None:
        """Close the circuit and forget the past."""
        self.circuit, self.trial = CLOSED, None
        self._consecutive = self._openings = self._successes = self.failures = 0

    def _is_too_much(self) -> bool:
        rules = self._rules
        if self._consecutive >= rules.consecutive_failures:
            return True
        total = self._successes + self.failures
        is_too_much = total >= rules.min_sample and self.failures >= rules.failure_rate * total
        while self._successes + self.failures > 2 * rules.min_sample:  # the past fades
            self._successes, self.failures = self._successes // 2, self.failures // 2
        return is_too_much
