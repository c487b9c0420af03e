"""What each key has used of its limits, in this process; and what comes of asking for more."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace
from typing import NamedTuple

from router.auth.api_keys import Key
from router.auth.rate_limit import Standing, settled, standing, taken

REQUESTS, TOKENS, CONCURRENCY = "requests", "tokens", "concurrency"
# Seconds until one of those that run may have ended: nobody knows.
SOON = 1.0


@dataclass(frozen=True, slots=True)
class Account:
    """Times are those of allowance.py, of whatever clock."""

    requests_full_at: float = 0.0
    tokens_full_at: float = 0.0
    running: int = 0


class Verdict(NamedTuple):
    """`refused`: by which limit, empty where it is granted; `wait`: seconds until it may be."""

    requests: Standing | None
    tokens: Standing | None
    refused: str = ""
    wait: float = 0.0


class LostError(Exception):
    """The ledger that is shared cannot be asked now."""


class Held(NamedTuple):
    """What a shared ledger keeps of a request that runs. `key` as it was when it began."""

    key: Key
    id: str


def judged(key: Key, account: Account, tokens: int, now: float) -> Verdict:
    """Before anything is taken."""
    requests = used = None
    if key.requests_per_minute is not None:
        requests = standing(key.requests_per_minute, account.requests_full_at, now, 1)
    if key.tokens_per_minute is not None:
        used = standing(key.tokens_per_minute, account.tokens_full_at, now, tokens)
    if requests is not None and requests.wait:
        return Verdict(requests, used, REQUESTS, requests.wait)
    if used is not None and used.wait:
        return Verdict(requests, used, TOKENS, used.wait)
    if key.concurrency is not None and account.running >= key.concurrency:
        return Verdict(requests, used, CONCURRENCY, SOON)
    return Verdict(requests, used)


def charged(key: Key, account: Account, tokens: int, now: float) -> Account:
    requests_full_at, tokens_full_at = account.requests_full_at, account.tokens_full_at
    if key.requests_per_minute is not None:
        requests_full_at = taken(key.requests_per_minute, requests_full_at, now, 1)
    if key.tokens_per_minute is not None:
        tokens_full_at = taken(key.tokens_per_minute, tokens_full_at, now, tokens)
    return Account(requests_full_at, tokens_full_at, account.running + 1)


class Ledger:
    """Of requests that run here. Nothing in it waits for anything."""

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}

    def __len__(self) -> int:
        return len(self._accounts)

    def running(self, name: str) -> int:
        return self._accounts.get(name, Account()).running

    def take(self, key: Key, tokens: int, now: float) -> Verdict:
        """What is granted is taken, and one more runs until `end`. What is refused costs nothing,
        so who keeps asking is not locked out by that. `tokens` is at most the limit."""
        account = self._accounts.get(key.name) or Account()
        verdict = judged(key, account, tokens, now)
        if verdict.refused:
            return verdict
        after = self._accounts[key.name] = charged(key, account, tokens, now)
        told = judged(key, after, 0, now)
        return Verdict(told.requests, told.tokens)

    def undo(self, key: Key, tokens: int, now: float) -> None:
        """What was granted here was refused elsewhere."""
        self.end(key, -tokens, now)
        limit, account = key.requests_per_minute, self._accounts.get(key.name)
        if limit is not None and account is not None:
            full_at = settled(limit, account.requests_full_at, now, -1)
            self._accounts[key.name] = replace(account, requests_full_at=full_at)

    def end(self, key: Key, more: int, now: float) -> None:
        """One runs no more; it used so many tokens more than were taken for it, or less. `key` as
        it was then: by now the file may say something else of it."""
        account = self._accounts.get(key.name)
        if account is None:
            return
        full_at = account.tokens_full_at
        if key.tokens_per_minute is not None and more:
            full_at = settled(key.tokens_per_minute, full_at, now, more)
        running = max(0, account.running - 1)
        self._accounts[key.name] = replace(account, tokens_full_at=full_at, running=running)

    def keep(self, names: Container[str]) -> None:
        """Nothing of keys that are gone, once nothing of theirs runs."""
        for name, account in list(self._accounts.items()):
            if name not in names and not account.running:
                del self._accounts[name]
