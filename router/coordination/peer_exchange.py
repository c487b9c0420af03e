"""Exchanges the reports of `router.coordination.peers` through a stream in Redis.

Every INTERVAL_S each router adds its report (XADD) and reads what the others have added since
(XRANGE), in one round trip. The stream is short and expires soon after the last router has gone. A
new router reads the whole stream, and so learns what caches hold.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from random import uniform
from time import monotonic as now
from typing import Any, Protocol

from prometheus_client import Counter

from router.common.deadlines import Deadlines
from router.common.redis_backend import RedisBackend
from router.coordination.peers import LoadedEngine, PeerRouters
from router.telemetry.logs import LogThrottle

STREAM = "disagg-router:routers"
INTERVAL_S = 0.2
# Routers that report at the same moments choose at the same moments, too.
JITTER = 0.25
MAX_REPORTS = 256
EXPIRE_S = 60
LOG_INTERVAL_S = 60.0
FIELD = b"report"


class Signer(Protocol):
    """Signs reports, so that only routers with the same secret are believed."""

    def sign(self, key: str, value: bytes) -> bytes:
        """Return the value with a signature for `key`."""

    def verify(self, key: str, signed: bytes) -> bytes | None:
        """Return the value, or None if the signature is wrong."""


class ExchangeError(Exception):
    """Redis does not answer."""


class PeerExchange(RedisBackend):
    """Runs until it is cancelled. Without Redis, a router goes by its own requests."""

    error = ExchangeError
    logger = logging.getLogger("disagg_router.routing")
    failed_message = (
        "routers cannot exchange their load through Redis, each goes by its own requests"
    )
    recovered_message = "routers exchange their load again"

    def __init__(
        self,
        peers: PeerRouters,
        engines: Callable[[], Sequence[LoadedEngine]],
        signer: Signer,
        url: str,
        password: Callable[[], str | None],
        timeout: float,
        errors: Counter,
        deadlines: Deadlines,
    ) -> None:
        """`engines` returns the present engines. Raises ValueError for an invalid URL."""
        super().__init__(url, password, timeout, errors, deadlines)
        self._peers, self._engines, self._signer = peers, engines, signer
        self._last_id = b"0"
        self._throttle = LogThrottle(self.logger, LOG_INTERVAL_S)

    async def exchange_forever(self) -> None:
        """Exchange reports until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S * uniform(1 - JITTER, 1 + JITTER))
            try:
                await self.exchange()
            except ExchangeError:
                pass  # RedisBackend has logged it
            except Exception as error:
                self._throttle.warn("a report of another router cannot be used", repr(error))
            self._peers.update(now())

    async def exchange(self) -> None:
        """Send a report, and take those of the other routers. Raises ExchangeError."""
        content = self._signer.sign(STREAM, self._peers.report(self._engines()))
        own_id, entries = await self.run("exchange", lambda: self._send(content), STREAM)
        received, sent_ms = now(), _milliseconds(own_id)
        if _milliseconds(self._last_id) > sent_ms:  # another Redis, whose clock is behind
            self._last_id = b"0"
        for entry_id, fields in entries:
            self._last_id = entry_id
            age = max(0.0, (sent_ms - _milliseconds(entry_id)) / 1000)
            report = self._signer.verify(STREAM, fields.get(FIELD, b""))
            if report is None or not self._peers.take(report, received, age):
                self._errors.labels("exchange", "invalid").inc()
                if report is None:
                    self._throttle.warn(
                        "a report of another router has no valid signature",
                        "all routers need the same --conversation-store-key",
                    )

    def _send(self, content: bytes) -> Awaitable[tuple[bytes, Sequence[tuple[bytes, Any]]]]:
        async def send() -> tuple[bytes, Sequence[tuple[bytes, Any]]]:
            pipe = self._client.pipeline(transaction=False)
            pipe.xadd(STREAM, {FIELD: content}, maxlen=MAX_REPORTS, approximate=True)
            pipe.xrange(STREAM, min=b"(" + self._last_id, count=2 * MAX_REPORTS)
            pipe.expire(STREAM, EXPIRE_S)
            own_id, entries, _ = await pipe.execute()
            return own_id, entries

        return send()


def _milliseconds(entry_id: bytes) -> int:
    """Return the time of an entry, by the clock of Redis."""
    return int(entry_id.partition(b"-")[0])
