"""The usage of each key's limits in this process, and decisions about further requests."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace
from typing import NamedTuple

from router.auth.api_keys import ApiKey
from router.auth.rate_limit import LimitStatus, limit_status, settle, take

REQUESTS, TOKENS, CONCURRENCY = "requests", "tokens", "concurrency"
# The end of a running request cannot be predicted, so clients retry after this time.
CONCURRENCY_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class KeyUsage:
    """The usage of one key: two buckets (see `rate_limit`) and the number of running requests."""

    requests_full_at: float = 0.0
    tokens_full_at: float = 0.0
    running: int = 0


class QuotaDecision(NamedTuple):
    """A decision about a request; `wait` is in seconds.

    `refused` is the limit that refuses the request, empty if the request is granted.
    """

    requests: LimitStatus | None
    tokens: LimitStatus | None
    refused: str = ""
    wait: float = 0.0


class LedgerUnavailableError(Exception):
    """The shared ledger does not answer at present."""


class SharedPermit(NamedTuple):
    """A running request in the shared ledger, with its key as it was at the start."""

    key: ApiKey
    id: str


def decide(key: ApiKey, usage: KeyUsage, tokens: int, now: float) -> QuotaDecision:
    """Decide about a request of `tokens` tokens without taking anything."""
    requests = used = None
    if key.requests_per_minute is not None:
        requests = limit_status(key.requests_per_minute, usage.requests_full_at, now, 1)
    if key.tokens_per_minute is not None:
        used = limit_status(key.tokens_per_minute, usage.tokens_full_at, now, tokens)
    if requests is not None and requests.wait:
        return QuotaDecision(requests, used, REQUESTS, requests.wait)
    if used is not None and used.wait:
        return QuotaDecision(requests, used, TOKENS, used.wait)
    if key.concurrency is not None and usage.running >= key.concurrency:
        return QuotaDecision(requests, used, CONCURRENCY, CONCURRENCY_RETRY_S)
    return QuotaDecision(requests, used)


def charge(key: ApiKey, usage: KeyUsage, tokens: int, now: float) -> KeyUsage:
    """Return the usage after a granted request."""
    requests_full_at, tokens_full_at = usage.requests_full_at, usage.tokens_full_at
    if key.requests_per_minute is not None:
        requests_full_at = take(key.requests_per_minute, requests_full_at, now, 1)
    if key.tokens_per_minute is not None:
        tokens_full_at = take(key.tokens_per_minute, tokens_full_at, now, tokens)
    return KeyUsage(requests_full_at, tokens_full_at, usage.running + 1)


class QuotaLedger:
    """The usage of this process' requests, in memory."""

    def __init__(self) -> None:
        self._usage: dict[str, KeyUsage] = {}

    def __len__(self) -> int:
        return len(self._usage)

    def running(self, name: str) -> int:
        return self._usage.get(name, KeyUsage()).running

    def take(self, key: ApiKey, tokens: int, now: float) -> QuotaDecision:
        """Decide about a request, and charge it if it is granted; it then runs until `end`.

        A refused request consumes no quota, so that retries do not lock a key out. `tokens` is at
        most the key's limit.
        """
        usage = self._usage.get(key.name) or KeyUsage()
        decision = decide(key, usage, tokens, now)
        if decision.refused:
            return decision
        after = self._usage[key.name] = charge(key, usage, tokens, now)
        left = decide(key, after, 0, now)
        return QuotaDecision(left.requests, left.tokens)

    def undo(self, key: ApiKey, tokens: int, now: float) -> None:
        """Take back a grant, because the shared ledger refused the request."""
        self.end(key, -tokens, now)
        limit, usage = key.requests_per_minute, self._usage.get(key.name)
        if limit is not None and usage is not None:
            full_at = settle(limit, usage.requests_full_at, now, -1)
            self._usage[key.name] = replace(usage, requests_full_at=full_at)

    def end(self, key: ApiKey, difference: int, now: float) -> None:
        """End a running request that used `difference` more tokens than it was charged.

        `key` is the key as it was at the request's start.
        """
        usage = self._usage.get(key.name)
        if usage is None:
            return
        full_at = usage.tokens_full_at
        if key.tokens_per_minute is not None and difference:
            full_at = settle(key.tokens_per_minute, full_at, now, difference)
        running = max(0, usage.running - 1)
        self._usage[key.name] = replace(usage, tokens_full_at=full_at, running=running)

    def keep(self, names: Container[str]) -> None:
        """Forget keys that are not in `names` and have no running request."""
        for name, usage in list(self._usage.items()):
            if name not in names and not usage.running:
                del self._usage[name]
