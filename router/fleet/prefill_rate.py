"""The prefill rate of an engine, measured by the prefill legs that it answers.

An engine with legs computes. So the seconds since its last answer (or since the leg was sent, if
the engine had none before) were spent on the tokens that it computed for the leg. In a sum this
holds for all queues and batches. Where other routers have legs on the engine, this router's share
of the queued tokens is its share of the seconds.

A sample is the pace of SAMPLE_TOKENS tokens or more, and the median of the last samples counts: a
leg that hung, or an engine that once answered at once, spoils one of them. The few tokens of a
mostly cached prompt on an idle engine are no sample, because they show only what each leg costs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import fmean, median

SAMPLE_TOKENS = 8192
MAX_SAMPLES = 32
MIN_SAMPLES = 8
# An idle engine that computed fewer tokens shows its overhead, not its speed.
MIN_TOKENS = 512
# Sorted by pace, engines are told apart where one is this many times as slow as the one before.
# Equal engines differ by up to 1.2, because they get different prompts.
CLEAR_DIFFERENCE = 1.25
MAX_SLOWNESS = 8.0
# A pace expires this many seconds after the last leg: an engine that was slow may receive no leg
# that would correct it.
STALE_S = 60.0


class PrefillRate:
    """The rate of one engine; see the top of this file. Times are any monotonic clock's."""

    __slots__ = ("_paces", "_seconds", "_tokens", "ended", "token_seconds")

    def __init__(self) -> None:
        self.token_seconds = 0.0
        """Seconds per prompt token; 0 if unknown."""
        self._paces: deque[float] = deque(maxlen=MAX_SAMPLES)
        self._tokens = 0
        self._seconds = 0.0
        self.ended = 0.0
        """The time at which the last leg ended."""

    def pace_at(self, moment: float) -> float:
        """Return `token_seconds`, or 0 if no leg has ended for STALE_S at that moment."""
        return self.token_seconds if moment - self.ended < STALE_S else 0.0

    def note_leg(self, sent: float, ended: float, computed: int | None, share: float = 1.0) -> None:
        """A prefill leg has ended, for which the engine computed this many tokens; None if it has
        failed. `share`: this router's part of the engine's load."""
        if computed is None:
            return  # the seconds belong to the legs that run beside it
        was_idle = sent >= self.ended
        seconds, self.ended = ended - max(sent, self.ended), ended
        if was_idle and computed < MIN_TOKENS:
            return
        self._tokens += computed
        self._seconds += seconds * share
        if self._tokens * share * share >= SAMPLE_TOKENS:
            self._paces.append(self._seconds / self._tokens)
            self._tokens, self._seconds = 0, 0.0
            if len(self._paces) >= MIN_SAMPLES:
                self.token_seconds = median(self._paces)


def slowness_of(paces: Sequence[float]) -> Sequence[float]:
    """Return how slow engines with these seconds per token (0: unknown) are, beside their mean.

    Engines without a clear difference are equally slow; empty if all are.
    """
    classes: list[list[float]] = []
    for pace in sorted(filter(None, paces)):
        if classes and pace < CLEAR_DIFFERENCE * classes[-1][-1]:
            classes[-1].append(pace)
        else:
            classes.append([pace])
    if len(classes) < 2:
        return ()
    mean = fmean(filter(None, paces))
    slowness = {
        pace: min(max(fmean(equal) / mean, 1 / MAX_SLOWNESS), MAX_SLOWNESS)
        for equal in classes
        for pace in equal
    }
    return [slowness.get(pace, 1.0) for pace in paces]
