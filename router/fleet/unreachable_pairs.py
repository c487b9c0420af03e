"""Pairs of a prefill engine and a decode engine that cannot exchange KV. Pure; time is passed in.

Two healthy engines may be unable to reach each other, for example because of a firewall or
different versions. Neither engine has failed, so no circuit breaker opens. Instead the router
*avoids* the pair for a while, and for twice as long after each further failure. Both engines keep
serving with other partners. After the pause one request *tries* the pair, and other requests still
avoid it. A successful load clears the pair.

A *silent* failure is wrong KV that no engine has noticed (`router.proxy.canary`). Only a load whose
KV was compared clears such a pair. The fault may be in one of many transfers, so the next silent
failure of the pair doubles the last pause all the same.

The caller decides whether to use an avoided pair if no other pair exists.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

FIRST_AVOIDANCE_S = 10.0
MAX_AVOIDANCE_S = 300.0
# At most this many pairs are recorded. The pair with the oldest failure is dropped for a new one.
MAX_PAIRS = 1024
WRONG_KV_CURE = (
    "restart the decode engine, whose prefix cache may hold wrong blocks; compare the versions and "
    "logs of both engines (docs/failures.md#wrong-kv)"
)


@dataclass(slots=True)
class FailingPair:
    pause: float
    """Seconds that the pair is avoided after a failure."""
    until: float
    """The time when it may be tried again."""
    is_tried: bool = False
    """A request tries the pair after a pause, and has not failed yet."""
    keeps_prefiller: bool = False
    """Which engine the last avoiding request kept."""
    is_silent: bool = False
    """Wrong KV was loaded, which no engine has noticed."""


class UnreachablePairs:
    """Pairs of names: the prefill engine's first. False while no pair has failed."""

    def __init__(self, random_share: Callable[[], float] = random.random) -> None:
        self._random = random_share
        self.failing: dict[tuple[str, str], FailingPair] = {}
        # The last pause after a silent failure, in seconds.
        self._silent_pauses: dict[tuple[str, str], float] = {}

    def __bool__(self) -> bool:
        return bool(self.failing)

    def is_avoided(self, prefiller: str, decoder: str, now: float) -> bool:
        failing = self.failing.get((prefiller, decoder))
        return failing is not None and now < failing.until

    def keeps_prefiller(self, prefiller: str, decoder: str) -> bool:
        """Decide which engine of an avoided pair a request keeps: in turn the prefill engine (True)
        and the decode engine, so that both keep serving."""
        failing = self.failing[prefiller, decoder]
        failing.keeps_prefiller = not failing.keeps_prefiller
        return failing.keeps_prefiller

    def note_load_started(self, prefiller: str, decoder: str, now: float) -> None:
        """A request is about to load KV. After a pause it is the one that tries the pair."""
        failing = self.failing.get((prefiller, decoder))
        if failing is not None and now >= failing.until:
            failing.until, failing.is_tried = now + failing.pause, True

    def record_failure(
        self, prefiller: str, decoder: str, now: float, is_silent: bool = False
    ) -> float | None:
        """Return the seconds to avoid the pair; None if the pair is avoided already, since this
        request had begun before."""
        pair = prefiller, decoder
        failing = self.failing.pop(pair, None)
        if failing is not None and now < failing.until and not failing.is_tried:
            self.failing[pair] = failing
            failing.is_silent = failing.is_silent or is_silent
            return None
        last = self._silent_pauses.get(pair, 0.0) if failing is None and is_silent else 0.0
        last = last if failing is None else failing.pause
        longer = min(2 * last, MAX_AVOIDANCE_S) if last else FIRST_AVOIDANCE_S
        pause = longer * (0.75 + self._random() / 2)
        is_silent = is_silent or (failing is not None and failing.is_silent)
        self.failing[pair] = FailingPair(longer, now + pause, is_silent=is_silent)
        if is_silent:
            self._silent_pauses[pair] = longer
        for known in (self.failing, self._silent_pauses):
            if len(known) > MAX_PAIRS:
                del known[next(iter(known))]
        return pause

    def record_success(self, prefiller: str, decoder: str, is_compared: bool = False) -> bool:
        """Return True if the pair had failed before and is cleared by this success. `is_compared`:
        the loaded KV gave the first token that the prefill engine had computed."""
        failing = self.failing.get((prefiller, decoder))
        if failing is None or (failing.is_silent and not is_compared):
            return False
        del self.failing[prefiller, decoder]
        return True

    def is_silent(self, prefiller: str, decoder: str) -> bool:
        """Return True if the failure of an avoided pair was wrong KV."""
        failing = self.failing.get((prefiller, decoder))
        return failing is not None and failing.is_silent

    def forget(self, engine: str) -> None:
        """Clear the pairs of an engine that was removed or lost."""
        for known in (self.failing, self._silent_pauses):
            for pair in [pair for pair in known if engine in pair]:
                del known[pair]

    def avoided(self, now: float) -> Iterator[tuple[str, str]]:
        """Yield the pairs that are avoided. Safe in any thread."""
        for pair, failing in list(self.failing.items()):
            if now < failing.until:
                yield pair
