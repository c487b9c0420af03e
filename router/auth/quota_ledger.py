"""The usage of each key's limits in this process, and decisions about further requests.

A limit per minute is a token bucket. It holds one minute's worth and refills continuously. It is
stored as one number, `full_at`: the time when it will be full again (the generic cell rate
algorithm, GCRA). Taking from the bucket moves `full_at` into the future. An unused bucket needs no
work and is full. Times are arguments, in seconds of any clock.
"""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass
from typing import NamedTuple

from router.auth.api_keys import ApiKey

REQUESTS, TOKENS, CONCURRENCY = "requests", "tokens", "concurrency"
# The end of a running request cannot be predicted, so clients retry after this time.
CONCURRENCY_RETRY_S = 1.0
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


class QuotaDecision(NamedTuple):
    """A decision about a request, or what a granted one has left; `wait` is in seconds.

    `refused` is the limit that refuses the request, empty if the request is granted.
    """

    requests: LimitStatus | None
    tokens: LimitStatus | None
    refused: str = ""
    wait: float = 0.0


class LedgerUnavailableError(Exception):
    """The shared ledger does not answer at present."""


@dataclass(slots=True)
class KeyUsage:
    """The usage of one key: two buckets and the number of running requests."""

    requests_full_at: float = 0.0
    tokens_full_at: float = 0.0
    running: int = 0

    def decide(self, key: ApiKey, tokens: int, now: float) -> QuotaDecision:
        """Decide about a request of `tokens` tokens without taking anything."""
        requests = used = None
        if key.requests_per_minute is not None:
            requests = limit_status(key.requests_per_minute, self.requests_full_at, now, 1)
        if key.tokens_per_minute is not None:
            used = limit_status(key.tokens_per_minute, self.tokens_full_at, now, tokens)
        if requests is not None and requests.wait:
            return QuotaDecision(requests, used, REQUESTS, requests.wait)
        if used is not None and used.wait:
            return QuotaDecision(requests, used, TOKENS, used.wait)
        if key.concurrency is not None and self.running >= key.concurrency:
            return QuotaDecision(requests, used, CONCURRENCY, CONCURRENCY_RETRY_S)
        return QuotaDecision(requests, used)

    def charge(self, key: ApiKey, tokens: int, now: float) -> QuotaDecision:
        """Charge a request that is granted, and return what is left."""
        self.running += 1
        if key.requests_per_minute is not None:
            self.requests_full_at = take(key.requests_per_minute, self.requests_full_at, now, 1)
        if key.tokens_per_minute is not None:
            self.tokens_full_at = take(key.tokens_per_minute, self.tokens_full_at, now, tokens)
        left = self.decide(key, 0, now)
        return QuotaDecision(left.requests, left.tokens)


class QuotaLedger:
    """The usage of this process' requests, in memory."""

    def __init__(self) -> None:
        self._usage: dict[str, KeyUsage] = {}

    def __len__(self) -> int:
        return len(self._usage)

    def running(self, name: str) -> int:
        return self._usage[name].running if name in self._usage else 0

    def take(self, key: ApiKey, tokens: int, now: float) -> QuotaDecision:
        """Decide about a request, and charge it if it is granted; it then runs until `end`.

        A refused request consumes no quota, so that retries do not lock a key out. `tokens` is at
        most the key's limit.
        """
        usage = self._usage.setdefault(key.name, KeyUsage())
        decision = usage.decide(key, tokens, now)
        return decision if decision.refused else usage.charge(key, tokens, now)

    def end(self, key: ApiKey, tokens: int, now: float, requests: int = 0) -> None:
        """End a running request. `tokens` and `requests` correct what it was charged.

        `key` is the key as it was at the request's start.
        """
        usage = self._usage.get(key.name)
        if usage is None:
            return
        usage.running = max(0, usage.running - 1)
        if key.tokens_per_minute is not None and tokens:
            usage.tokens_full_at = settle(key.tokens_per_minute, usage.tokens_full_at, now, tokens)
        if key.requests_per_minute is not None and requests:
            full_at = usage.requests_full_at
            usage.requests_full_at = settle(key.requests_per_minute, full_at, now, requests)

    def keep(self, names: Container[str]) -> None:
        """Forget keys that are not in `names` and have no running request."""
        for name, usage in list(self._usage.items()):
            if name not in names and not usage.running:
                del self._usage[name]
