"""Who may come in: a request's key, whose it is, and how much of its limits it may take.

Without a file of keys there is no door, and nothing of this is paid for.
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

from router.auth.api_keys import Key
from router.auth.credential import Header, shown, without
from router.auth.keyring import Keyring
from router.auth.quota_ledger import Held, Ledger, LostError, Verdict

if TYPE_CHECKING:
    from router.auth.redis_quota_ledger import SharedLedger

logger = logging.getLogger("disagg_router.callers")
MISSING, INCORRECT = "missing", "incorrect"
# Ends that Redis has not heard of while it was away: what it keeps of them ends by itself, too.
MOST_OWED = 4096
# In the time of one lease: some of them may fail.
RENEWALS = 3
Spawn = Callable[[Coroutine[Any, Any, None]], object]


@dataclass(slots=True)
class Stay:
    """One request that was let in, until it leaves. `taken`: tokens, by estimate. `held` where
    Redis may know of it, `is_shared` where it surely took them. `passed`: events of its stream."""

    key: Key
    taken: int
    verdict: Verdict
    held: Held | None = None
    is_shared: bool = False
    passed: int = 0


class Door:
    """`spawn` runs what nobody waits for."""

    def __init__(
        self,
        keyring: Keyring,
        tenant_header: str,
        shared: SharedLedger | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.keyring = keyring
        self.spawn: Spawn = lambda work: asyncio.get_running_loop().create_task(work)
        self._tenant_header = tenant_header.lower().encode("latin-1")
        self._shared = shared
        self._clock = clock
        self._ledger = Ledger()
        self._owed: deque[tuple[Held, int]] = deque(maxlen=MOST_OWED)
        # By id: those that run and have a place at Redis, and the renewal of these, if it is told.
        self._places: dict[str, Key] = {}
        self._renewal: asyncio.Task[None] | None = None
        keyring.on_change = self._keep

    def who(self, headers: Sequence[Header]) -> Key | str:
        """The key that is shown, or why there is none: MISSING, INCORRECT."""
        key = shown(headers)
        if key is None:
            return MISSING
        return self.keyring.find(key) or INCORRECT

    def known(self, headers: Sequence[Header], key: Key) -> list[Header]:
        """Without credentials, and with the key's owner where a tenant is looked for: whatever the
        client says there itself counts for nothing."""
        kept = [header for header in without(headers) if header[0] != self._tenant_header]
        kept.append((self._tenant_header, b"key of " + key.owner.encode("ascii")))
        return kept

    def running(self, name: str) -> int:
        """Of requests with that key, in this process."""
        return self._ledger.running(name)

    async def enter(self, key: Key, tokens: int) -> Stay | Verdict:
        """A Stay, which must leave, or a verdict that says why not."""
        limit = key.tokens_per_minute
        taken = 0 if limit is None else min(tokens, limit)
        verdict = self._ledger.take(key, taken, self._clock())
        if verdict.refused:
            return verdict
        stay = Stay(key, taken, verdict)
        if self._shared is None:
            return stay
        stay.held = Held(key, f"{getrandbits(96):024x}")
        taking = asyncio.ensure_future(self._shared.take(stay.held, taken))
        try:
            verdict = await asyncio.shield(taking)
        except LostError:
            self._place(stay)
            return stay  # by what is known here
        except BaseException:
            self.spawn(self._abandon(stay, taking))
            raise
        if self._owed:
            self.spawn(self._pay())
        if verdict.refused:
            self._ledger.undo(key, taken, self._clock())
            return verdict
        stay.verdict, stay.is_shared = verdict, True
        self._place(stay)
        return stay

    def leave(self, stay: Stay, used: int) -> None:
        """It has used so many tokens. To be called once."""
        more = 0 if stay.key.tokens_per_minute is None else used - stay.taken
        self._ledger.end(stay.key, more, self._clock())
        if stay.held is not None:
            self._places.pop(stay.held.id, None)
            self._owed.append((stay.held, more if stay.is_shared else 0))
            self.spawn(self._pay())

    async def keep_places(self) -> None:
        """Renews them while their requests run. Ends only when it is cancelled."""
        while self._shared is not None:
            await asyncio.sleep(self._shared.lease / RENEWALS)
            self._renewal = asyncio.create_task(self._renew(self._shared))
            await self._renewal
            await self._pay()

    async def close(self) -> None:
        if self._shared is not None:
            await self._pay()
            await self._shared.close()

    def _place(self, stay: Stay) -> None:
        if stay.held is not None and stay.key.concurrency is not None:
            self._places[stay.held.id] = stay.key

    async def _renew(self, shared: SharedLedger) -> None:
        by_key: dict[Key, list[str]] = {}
        for name, key in self._places.items():
            by_key.setdefault(key, []).append(name)
        for key, names in by_key.items():
            await shared.renew(key, [name for name in names if name in self._places])

    async def _abandon(self, stay: Stay, taking: asyncio.Future[Verdict]) -> None:
        """Its client left while Redis was asked: what Redis took for it is given back after that,
        or nobody would."""
        with contextlib.suppress(LostError):
            stay.is_shared = not (await taking).refused
        self.leave(stay, 0)

    async def _pay(self) -> None:
        """Tells Redis of what has ended, as long as it listens: after a renewal that is under way,
        which may name it."""
        if self._renewal is not None and not self._renewal.done():
            await asyncio.wait((self._renewal,))
        while self._shared is not None and self._owed:
            owed = self._owed.popleft()
            if not await self._shared.end(*owed):
                self._owed.appendleft(owed)
                return

    def _keep(self) -> None:
        self._ledger.keep({key.name for key in self.keyring.keys.values()})
