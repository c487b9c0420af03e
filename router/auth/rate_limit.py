"""How much may still be had of so much a minute: pure arithmetic, with time passed in.

A bucket that holds one minute's worth and is filled all the time. It is kept as one number, the
time when it will be full again (this is GCRA): what is taken puts that off, and it passes by
itself. Nothing has to be done as time goes by, and a bucket nobody touches is a full one.
"""

from __future__ import annotations

import math
from typing import NamedTuple

MINUTE = 60.0
# The farthest that `full_at` is put off: an absurd count of tokens locks nobody out for ever.
LONGEST_DEBT = 3600.0
# Of seconds, for what floating point makes of a minute.
TINY = 1e-6


class Standing(NamedTuple):
    """What a client is told. Seconds: until there is room for what was asked for (0: there was),
    and until all is there again."""

    limit: int
    remaining: int
    reset: float
    wait: float = 0.0


def standing(limit: int, full_at: float, now: float, cost: float = 0.0) -> Standing:
    """Before `cost` is taken, which may be more than there ever is: then all of it is waited
    for."""
    debt = max(0.0, full_at - now)
    remaining = max(0, math.floor(limit * (1 - debt / MINUTE) + TINY))
    wait = debt + _seconds(limit, min(cost, limit)) - MINUTE
    return Standing(limit, remaining, debt, wait if wait > TINY else 0.0)


def taken(limit: int, full_at: float, now: float, cost: float) -> float:
    """The new `full_at`; the cost may be negative, where something is given back."""
    return min(max(full_at, now) + _seconds(limit, cost), now + LONGEST_DEBT)


def settled(limit: int, full_at: float, now: float, more: float) -> float:
    """Where so much `more` was used than had been taken, or less. It is as if that had been known
    then, so what is given back does not count from now."""
    return min(full_at + _seconds(limit, more), now + LONGEST_DEBT)


def _seconds(limit: int, cost: float) -> float:
    return cost * MINUTE / limit


def duration(seconds: float) -> str:
    """As OpenAI writes it: 20ms, 1s, 8.64s, 6m0s, 1h0m0s."""
    milliseconds = math.ceil(seconds * 1000 - TINY)
    if milliseconds < 1000:
        return f"{milliseconds}ms" if milliseconds > 0 else "0s"
    minutes, rest = divmod(milliseconds, 60_000)
    text = f"{rest / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    if not minutes:
        return text
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{text}" if hours else f"{minutes}m{text}"
