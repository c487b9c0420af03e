"""What each key has used of its limits at several routers together: in Redis, by three scripts.

The clock is Redis' own, so it is one. A request that runs has a place in a sorted set, which its
router renews all the time: should that die, the place is free within half a minute, however long
the request might have run. The arithmetic is allowance.py's, written again in Lua: only there is
reading and writing one step.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from redis.exceptions import RedisClusterException, RedisError

from router.auth.api_keys import Key
from router.auth.quota_ledger import Account, Held, LostError, Verdict, charged, judged
from router.auth.rate_limit import LONGEST_DEBT
from router.common.redis_url import connect

logger = logging.getLogger("disagg_router.callers")
NAMESPACE = "disagg-router:limits:"
# Seconds for which Redis is left alone when it has failed.
PAUSE = 5.0
# For which a place is kept without being renewed; renewals may fail for a while, or a router hang.
LEASE = 30.0
# ARGV: requests and tokens a minute, concurrency (0: no limit), tokens, id, seconds of its lease.
# Gives whether it was granted, and what was there before: seconds until each is full, who runs.
TAKE = """
local clock = redis.call('TIME')
local now = clock[1] + clock[2] / 1000000
local r, t, c = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local held = redis.call('HMGET', KEYS[1], 'r', 't')
local rdebt = math.max(0, (tonumber(held[1]) or 0) - now)
local tdebt = math.max(0, (tonumber(held[2]) or 0) - now)
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
local running = redis.call('ZCARD', KEYS[2])
local rafter, tafter = rdebt, tdebt
if r > 0 then rafter = rdebt + 60 / r end
if t > 0 then tafter = tdebt + tonumber(ARGV[4]) * 60 / t end
local limit = 60.000001
local ok = (r == 0 or rafter <= limit) and (t == 0 or tafter <= limit)
  and (c == 0 or running < c)
if ok then
  redis.call('HSET', KEYS[1], 'r', string.format('%.6f', now + rafter),
    't', string.format('%.6f', now + tafter))
  redis.call('EXPIRE', KEYS[1], math.ceil(math.max(rafter, tafter)) + 60)
  if c > 0 then
    redis.call('ZADD', KEYS[2], now + tonumber(ARGV[6]), ARGV[5])
    redis.call('EXPIRE', KEYS[2], math.ceil(tonumber(ARGV[6])) + 60)
  end
end
return {ok and 1 or 0, string.format('%.6f', rdebt), string.format('%.6f', tdebt), running}
"""
# ARGV: seconds of the lease, ids. What Redis has forgotten it learns again.
RENEW = """
local clock = redis.call('TIME')
local ends = clock[1] + clock[2] / 1000000 + tonumber(ARGV[1])
for i = 2, #ARGV do redis.call('ZADD', KEYS[2], ends, ARGV[i]) end
redis.call('EXPIRE', KEYS[2], math.ceil(tonumber(ARGV[1])) + 60)
return 1
"""
# ARGV: tokens a minute (0: no limit), how many more were used, id, the longest debt.
END = """
local clock = redis.call('TIME')
local now = clock[1] + clock[2] / 1000000
local t, more = tonumber(ARGV[1]), tonumber(ARGV[2])
redis.call('ZREM', KEYS[2], ARGV[3])
if t > 0 and more ~= 0 then
  local full = tonumber(redis.call('HGET', KEYS[1], 't')) or now
  full = math.min(full + more * 60 / t, now + tonumber(ARGV[4]))
  redis.call('HSET', KEYS[1], 't', string.format('%.6f', full))
  local seconds = math.ceil(math.max(0, full - now)) + 60
  if redis.call('TTL', KEYS[1]) < seconds then redis.call('EXPIRE', KEYS[1], seconds) end
end
return 1
"""


class SharedLedger:
    """No operation lasts longer than `timeout` seconds. `failed` is told of each that got no
    answer, and of each that was not tried because of one before."""

    def __init__(
        self,
        url: str,
        password: str | None,
        timeout: float,
        failed: Callable[[str, str], None],
        clock: Callable[[], float] = time.monotonic,
        lease: float = LEASE,
    ) -> None:
        """Raises ValueError for a URL that makes no sense."""
        self.lease = lease
        self._client, self._others = connect(url, password, timeout)
        self._timeout = timeout
        self._failed = failed
        self._clock = clock
        self._lost_until: float | None = None

    async def take(self, held: Held, tokens: int) -> Verdict:
        """What it takes of concurrency is its for `lease` seconds, unless it is renewed. Raises
        LostError."""
        key = held.key
        limits = key.requests_per_minute or 0, key.tokens_per_minute or 0, key.concurrency or 0
        answer = await self._ask("take", TAKE, key, *limits, tokens, held.id, self.lease)
        try:
            granted, requests, used, running = answer
            before = Account(float(requests), float(used), int(running))
        except (TypeError, ValueError) as error:
            raise self._lost("take", error) from error
        if not granted:
            verdict = judged(key, before, tokens, 0.0)
            # Where rounding would have granted it: Redis has the last word.
            return verdict if verdict.refused else verdict._replace(refused="requests", wait=0.001)
        told = judged(key, charged(key, before, tokens, 0.0), 0, 0.0)
        return Verdict(told.requests, told.tokens)

    async def end(self, held: Held, more: int) -> bool:
        """Whether Redis heard of it."""
        limit = held.key.tokens_per_minute or 0
        try:
            await self._ask("end", END, held.key, limit, more, held.id, LONGEST_DEBT)
        except LostError as error:
            logger.debug("a key's use is not told to Redis: %s", error)
            return False
        return True

    async def renew(self, key: Key, ids: Iterable[str]) -> None:
        """Of requests that run with this key, which limits how many."""
        try:
            await self._ask("renew", RENEW, key, self.lease, *ids)
        except LostError as error:
            logger.debug("a key's places are not renewed in Redis: %s", error)

    async def close(self) -> None:
        for client in (self._client, *self._others):
            try:
                await client.aclose()
            except (RedisError, OSError) as error:
                logger.debug("closing Redis: %s", error)

    async def _ask(self, what: str, script: str, key: Key, *values: object) -> Any:
        """Raises LostError."""
        moment = self._clock()
        if self._lost_until is not None:
            if moment < self._lost_until:
                self._failed(what, "skipped")
                raise LostError("it failed a moment ago")
            self._lost_until = moment + PAUSE  # one tries, and the others do not wait for it
        # Braces: both on the same node of a cluster.
        name = f"{NAMESPACE}{{{key.name}}}"
        arguments = [str(value) for value in values]
        answer: Awaitable[Any] = self._client.eval(script, 2, name, f"{name}:running", *arguments)
        try:
            async with asyncio.timeout(self._timeout):
                told = await answer
        except TimeoutError as error:
            raise self._lost(what, f"no answer within {self._timeout:g} s") from error
        except (RedisError, RedisClusterException, OSError) as error:
            raise self._lost(what, f"{type(error).__name__}: {error}") from error
        if self._lost_until is not None:
            self._lost_until = None
            logger.info("Redis counts keys' limits again")
        return told

    def _lost(self, what: str, why: object) -> LostError:
        if self._lost_until is None:
            logger.warning("Redis does not count keys' limits, each router counts alone: %s", why)
        self._lost_until = self._clock() + PAUSE
        self._failed(what, "failed")
        return LostError(str(why))
