"""Pairs of a prefill engine and a decode engine that cannot exchange KV. Pure; time is passed in.

Two healthy engines may be unable to reach each other, for example because of a firewall or
different versions. Neither engine has failed, so no circuit breaker opens. Instead the router
*avoids* the pair for a while, and for twice as long after each further failure. Both engines keep
serving with other partners. After the pause one request *tries* the pair, and other requests still
avoid it. A successful load clears the pair.

The caller decides whether to use an avoided pair if no other pair exists.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

# Seconds.
FIRST_PAUSE = 10.0
LONGEST_PAUSE = 300.0
# Pairs that are remembered, at most; the one that has failed longest ago makes room.
MOST_PAIRS = 1024


@dataclass(slots=True)
class FailingPair:
    pause: float
    until: float
    """When it may be tried again."""
    is_tried: bool = False
    """A request that began after a pause has it, and has not ended in a failure."""
    keeps_prefiller: bool = False
    """What became of the last request that the policies would have given to the pair."""


class UnreachablePairs:
    """Names of engines: of the prefiller first. False while nothing has failed."""

    def __init__(self, chance: Callable[[], float] = random.random) -> None:
        self._random = chance
        self._failing: dict[tuple[str, str], FailingPair] = {}

    def __bool__(self) -> bool:
        return bool(self._failing)

    def is_avoided(self, prefiller: str, decoder: str, now: float) -> bool:
        failing = self._failing.get((prefiller, decoder))
        return failing is not None and now < failing.until

    def keeps_prefiller(self, prefiller: str, decoder: str) -> bool:
        """Of an avoided pair, every second request stays with the prefiller and the others with the
        decoder, so that both go on working."""
        failing = self._failing[prefiller, decoder]
        failing.keeps_prefiller = not failing.keeps_prefiller
        return failing.keeps_prefiller

    def note_load_started(self, prefiller: str, decoder: str, now: float) -> None:
        """A request is about to load. After a pause it is the one that tries."""
        failing = self._failing.get((prefiller, decoder))
        if failing is not None and now >= failing.until:
            failing.until, failing.is_tried = now + failing.pause, True

    def record_failure(self, prefiller: str, decoder: str, now: float) -> float | None:
        """The seconds to avoid the pair from now on; None where it is avoided already, and this
        request was under way by then."""
        failing = self._failing.pop((prefiller, decoder), None)
        if failing is not None and now < failing.until and not failing.is_tried:
            self._failing[prefiller, decoder] = failing
            return None
        longer = FIRST_PAUSE if failing is None else min(2 * failing.pause, LONGEST_PAUSE)
        pause = longer * (0.75 + self._random() / 2)
        self._failing[prefiller, decoder] = FailingPair(longer, now + pause)
        if len(self._failing) > MOST_PAIRS:
            del self._failing[next(iter(self._failing))]
        return pause

    def record_success(self, prefiller: str, decoder: str) -> bool:
        """True: the pair was avoided, and is not any more."""
        return self._failing.pop((prefiller, decoder), None) is not None

    def forget(self, engine: str) -> None:
        """It is gone, or another process by now."""
        for pair in [pair for pair in self._failing if engine in pair]:
            del self._failing[pair]

    def avoided(self, now: float) -> Iterator[tuple[str, str]]:
        """May be asked from any thread."""
        for pair, failing in list(self._failing.items()):
            if now < failing.until:
                yield pair
