"""Token bucket arithmetic for limits per minute: pure functions, with the time as argument.

A bucket holds one minute's worth and refills continuously. It is stored as one number, `full_at`:
the time when it will be full again (the generic cell rate algorithm, GCRA). Taking from the bucket
moves `full_at` into the future. An unused bucket needs no work and is full.
"""

from __future__ import annotations

import math
from typing import NamedTuple

MINUTE_S = 60.0
# `full_at` is at most this far ahead, so an absurd token count cannot lock a key out for ever.
MAX_DEBT_S = 3600.0
# Tolerance for rounding errors of floating point numbers.
EPSILON_S = 1e-6


class LimitStatus(NamedTuple):
    """The state of one limit, as reported to a client.

    `reset` is the time in seconds until the bucket is full, `wait` that until the requested amount
    is available, 0 if it is.
    """

    limit: int
    remaining: int
    reset: float
    wait: float = 0.0


def limit_status(limit: int, full_at: float, now: float, cost: float = 0.0) -> LimitStatus:
    """Return the state before `cost` is taken. A cost above the limit waits for a full bucket."""
    debt = max(0.0, full_at - now)
    remaining = max(0, math.floor(limit * (1 - debt / MINUTE_S) + EPSILON_S))
    wait = debt + _seconds(limit, min(cost, limit)) - MINUTE_S
    return LimitStatus(limit, remaining, debt, wait if wait > EPSILON_S else 0.0)


def take(limit: int, full_at: float, now: float, cost: float) -> float:
    """Return `full_at` after taking `cost`."""
    return min(max(full_at, now) + _seconds(limit, cost), now + MAX_DEBT_S)


def settle(limit: int, full_at: float, now: float, difference: float) -> float:
    """Return `full_at` after a correction of an earlier cost by `difference`.

    The result is the same as if the right cost had been taken at first.
    """
    return min(full_at + _seconds(limit, difference), now + MAX_DEBT_S)


def _seconds(limit: int, cost: float) -> float:
    return cost * MINUTE_S / limit


def format_duration(seconds: float) -> str:
    """Format a duration as OpenAI does: 20ms, 1s, 8.64s, 6m0s, 1h0m0s."""
    milliseconds = math.ceil(seconds * 1000 - EPSILON_S)
    if milliseconds < 1000:
        return f"{milliseconds}ms" if milliseconds > 0 else "0s"
    minutes, rest = divmod(milliseconds, 60_000)
    text = f"{rest / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    if not minutes:
        return text
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{text}" if hours else f"{minutes}m{text}"
