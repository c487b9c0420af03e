"""Authenticates requests by API key and applies the key's limits.

Without a file of keys there is no authenticator and no cost. A key with limits needs a permit for
each request: `acquire` takes requests, tokens (by estimate) and a concurrency slot, `release`
settles the tokens that were really used. With a shared ledger in Redis the router also holds a
lease there while the request runs, and reports the end afterwards, as soon as Redis answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from random import getrandbits
from typing import TYPE_CHECKING, Any

from router.auth.api_keys import ApiKey, Header, Keyring, read_key, without_credentials
from router.auth.quota_ledger import LedgerUnavailableError, QuotaDecision, QuotaLedger
from router.auth.streamed_usage import StreamedUsage

if TYPE_CHECKING:
    from router.auth.redis_quota_ledger import RedisQuotaLedger

logger = logging.getLogger("disagg_router.auth")
MISSING, INCORRECT = "missing", "incorrect"
# Ends of requests that are kept while Redis does not answer. Leases of dropped ones expire.
MAX_UNREPORTED_ENDS = 4096
# Some renewals may fail before the lease ends.
RENEWALS_PER_LEASE = 3
Spawn = Callable[[Coroutine[Any, Any, None]], object]


@dataclass(slots=True)
class QuotaPermit:
    """A running request's share of its key's limits.

    `taken` is the estimated number of tokens that was charged. `redis_id` is set if Redis may have
    the request, `is_charged_in_redis` if Redis surely charged it. `usage` counts the tokens of a
    stream, if the key's tokens are limited.
    """

    key: ApiKey
    taken: int
    decision: QuotaDecision
    redis_id: str = ""
    is_charged_in_redis: bool = False
    usage: StreamedUsage | None = None


class Authenticator:
    """Finds the key of a request and grants permits. `spawn` runs coroutines in the background."""

    def __init__(
        self,
        keyring: Keyring,
        tenant_header: str,
        shared: RedisQuotaLedger | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.keyring = keyring
        self.spawn: Spawn = lambda work: asyncio.get_running_loop().create_task(work)
        self._tenant_header = tenant_header.lower().encode("latin-1")
        self._shared = shared
        self._clock = clock
        self._ledger = QuotaLedger()
        self._unreported: deque[tuple[ApiKey, str, int]] = deque(maxlen=MAX_UNREPORTED_ENDS)
        # Running requests with a lease in Redis, by id, and the renewal in progress.
        self._leases: dict[str, ApiKey] = {}
        self._renewal: asyncio.Task[None] | None = None
        keyring.on_change = lambda: self._ledger.keep({key.name for key in keyring.keys.values()})

    def identify(self, headers: Sequence[Header]) -> ApiKey | str:
        """Return the key of a request, or why there is none: MISSING or INCORRECT."""
        key = read_key(headers)
        if key is None:
            return MISSING
        return self.keyring.find(key) or INCORRECT

    def current(self, key: ApiKey) -> ApiKey | str:
        """Return a key as the file has it now, or INCORRECT if the file no longer has it."""
        return self.keyring.keys.get(bytes.fromhex(key.sha256)) or INCORRECT

    def with_owner(self, headers: Sequence[Header], key: ApiKey) -> list[Header]:
        """Return the headers without credentials, and with the key's owner as the tenant.

        The client's own tenant header is removed.
        """
        kept = [h for h in without_credentials(headers) if h[0] != self._tenant_header]
        kept.append((self._tenant_header, b"key of " + key.owner.encode("ascii")))
        return kept

    def running(self, name: str) -> int:
        """Return the number of this process' running requests with the key `name`."""
        return self._ledger.running(name)

    async def acquire(self, key: ApiKey, tokens: int) -> QuotaPermit | QuotaDecision:
        """Return a permit, which must be released, or the decision that refuses the request."""
        limit = key.tokens_per_minute
        taken = 0 if limit is None else min(tokens, limit)
        decision = self._ledger.take(key, taken, self._clock())
        if decision.refused:
            return decision
        permit = QuotaPermit(key, taken, decision)
        if self._shared is None:
            return permit
        permit.redis_id = f"{getrandbits(96):024x}"
        taking = asyncio.ensure_future(self._shared.take(key, permit.redis_id, taken))
        try:
            decision = await asyncio.shield(taking)
        except LedgerUnavailableError:
            self._add_lease(permit)
            return permit  # granted by this process alone
        except BaseException:
            self.spawn(self._abandon(permit, taking))
            raise
        if self._unreported:
            self.spawn(self._report_ends())
        if decision.refused:
            self._ledger.end(key, -taken, self._clock(), requests=-1)
            return decision
        permit.decision, permit.is_charged_in_redis = decision, True
        self._add_lease(permit)
        return permit

    def release(self, permit: QuotaPermit, used: int) -> None:
        """End a request that used `used` tokens. Call it once for each permit."""
        difference = 0 if permit.key.tokens_per_minute is None else used - permit.taken
        self._ledger.end(permit.key, difference, self._clock())
        if permit.redis_id:
            self._leases.pop(permit.redis_id, None)
            charged = difference if permit.is_charged_in_redis else 0
            self._unreported.append((permit.key, permit.redis_id, charged))
            self.spawn(self._report_ends())

    @property
    def failure(self) -> str:
        """The present failure of the shared ledger; empty if the ledger works."""
        return "" if self._shared is None else self._shared.failure

    async def renew_leases(self) -> None:
        """Renew the leases of running requests until this task is cancelled."""
        while self._shared is not None:
            await asyncio.sleep(self._shared.lease / RENEWALS_PER_LEASE)
            self._renewal = asyncio.create_task(self._renew(self._shared))
            await self._renewal
            await self._report_ends()

    async def close(self) -> None:
        if self._shared is not None:
            await self._report_ends()
            await self._shared.close()

    def _add_lease(self, permit: QuotaPermit) -> None:
        if permit.key.concurrency is not None:
            self._leases[permit.redis_id] = permit.key

    async def _renew(self, shared: RedisQuotaLedger) -> None:
        by_key: dict[ApiKey, list[str]] = {}
        for lease, key in self._leases.items():
            by_key.setdefault(key, []).append(lease)
        for key, leases in by_key.items():
            await shared.renew(key, [lease for lease in leases if lease in self._leases])

    async def _abandon(self, permit: QuotaPermit, taking: asyncio.Future[QuotaDecision]) -> None:
        """Release a permit whose client disconnected while Redis decided, after the decision."""
        with contextlib.suppress(LedgerUnavailableError):
            permit.is_charged_in_redis = not (await taking).refused
        self.release(permit, 0)

    async def _report_ends(self) -> None:
        """Report ended requests to Redis until it fails.

        Waits for a renewal in progress, which would restore the lease of a request that has ended.
        """
        if self._renewal is not None and not self._renewal.done():
            await asyncio.wait((self._renewal,))
        while self._shared is not None and self._unreported:
            ended = self._unreported.popleft()
            if not await self._shared.end(*ended):
                self._unreported.appendleft(ended)
                return
