"""The usage of keys' limits at several routers together, in Redis, by three Lua scripts.

All times are of Redis' clock. A running request has a lease in a sorted set, which its router
renews: if the router dies, the slot is free within half a minute. The arithmetic is that of
`quota_ledger`, written again in Lua, because only a script reads and writes in one step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from router.auth.api_keys import ApiKey
from router.auth.quota_ledger import (
    MAX_DEBT_S,
    REQUESTS,
    KeyUsage,
    LedgerUnavailableError,
    QuotaDecision,
)
from router.common.redis_backend import RedisBackend

NAMESPACE = "disagg-router:limits:"
# Long enough for some failed renewals, or for a router that hangs for a while.
LEASE_S = 30.0
# ARGV: requests and tokens a minute, concurrency (0: no limit), tokens, id, seconds of its lease.
# Returns whether the request is granted, and the state before: seconds until each bucket is full,
# and the number of running requests.
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
# ARGV: seconds of the lease, ids. Restores leases that Redis has lost.
RENEW = """
local clock = redis.call('TIME')
local ends = clock[1] + clock[2] / 1000000 + tonumber(ARGV[1])
for i = 2, #ARGV do redis.call('ZADD', KEYS[2], ends, ARGV[i]) end
redis.call('EXPIRE', KEYS[2], math.ceil(tonumber(ARGV[1])) + 60)
return 1
"""
# ARGV: tokens a minute (0: no limit), tokens used above the charge, id, the longest debt.
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


class RedisQuotaLedger(RedisBackend):
    """Counts usage in Redis. A slot lasts for `lease` seconds, unless it is renewed."""

    error = LedgerUnavailableError
    logger = logging.getLogger("disagg_router.auth")
    failed_message = "Redis cannot count usage for keys' limits: each router counts on its own"
    recovered_message = "Redis counts usage for keys' limits again"
    lease = LEASE_S

    async def take(self, key: ApiKey, id: str, tokens: int) -> QuotaDecision:
        """Decide about a request, and charge it if it is granted. Raises LedgerUnavailableError."""
        limits = key.requests_per_minute or 0, key.tokens_per_minute or 0, key.concurrency or 0
        answer = await self._run_script("take", TAKE, key, *limits, tokens, id, self.lease)
        try:
            granted, requests, used, running = answer
            before = KeyUsage(float(requests), float(used), int(running))
        except (TypeError, ValueError) as error:
            raise self._failed("take", error) from error
        if not granted:
            decision = before.decide(key, tokens, 0.0)
            # Rounding may differ here; Redis has the last word.
            return decision if decision.refused else decision._replace(refused=REQUESTS, wait=0.001)
        return before.charge(key, tokens, 0.0)

    async def end(self, key: ApiKey, id: str, difference: int) -> bool:
        """End a request that used `difference` more tokens than it was charged.

        Returns False if Redis did not answer.
        """
        limit = key.tokens_per_minute or 0
        try:
            await self._run_script("end", END, key, limit, difference, id, MAX_DEBT_S)
        except LedgerUnavailableError as error:
            self.logger.debug("the end of a request is not recorded in Redis: %s", error)
            return False
        return True

    async def renew(self, key: ApiKey, ids: Iterable[str]) -> None:
        """Renew the leases of running requests with this key."""
        try:
            await self._run_script("renew", RENEW, key, self.lease, *ids)
        except LedgerUnavailableError as error:
            self.logger.debug("the leases of a key are not renewed in Redis: %s", error)

    async def _run_script(self, operation: str, script: str, key: ApiKey, *values: object) -> Any:
        """Return the script's result. Raises LedgerUnavailableError."""
        # The braces put both keys on the same node of a cluster.
        name = f"{NAMESPACE}{{{key.name}}}"
        arguments = [str(value) for value in values]
        return await self.run(
            operation,
            lambda: self._client.eval(script, 2, name, f"{name}:running", *arguments),
            name,
        )
