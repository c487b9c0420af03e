"""Carries the reports of routers through a stream in Redis.

At intervals each router adds its report (XADD) and reads what the others have added since (XRANGE),
in one round trip. The stream is short and expires soon after the last router has gone. A new router
reads the whole stream, and so learns what caches hold.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from prometheus_client import Counter

from router.common.deadlines import Deadlines
from router.common.redis_backend import RedisBackend
from router.coordination.exchange import ExchangeError, ReportReader

STREAM = "disagg-router:routers"
STREAM_INTERVAL_S = 0.2
MAX_REPORTS = 256
STREAM_EXPIRES_S = 60
FIELD = b"report"


class Signer(Protocol):
    """Signs reports, so that only routers with the same secret are believed."""

    def sign(self, key: str, value: bytes) -> bytes:
        """Return the value with a signature for `key`."""

    def verify(self, key: str, signed: bytes) -> bytes | None:
        """Return the value, or None if the signature is wrong."""


class RedisStream(RedisBackend):
    """A transport; see the top of this file."""

    error = ExchangeError
    logger = logging.getLogger("disagg_router.routing")
    failed_message = (
        "routers cannot exchange their load through Redis, each goes by its own requests"
    )
    recovered_message = "routers exchange their load again"

    def __init__(
        self,
        signer: Signer,
        url: str,
        password: Callable[[], str | None],
        timeout: float,
        errors: Counter,
        deadlines: Deadlines,
    ) -> None:
        """Raises ValueError for an invalid URL."""
        super().__init__(url, password, timeout, errors, deadlines)
        self._signer = signer
        self._last_id = b"0"

    def interval(self, num_peers: int) -> float:
        return STREAM_INTERVAL_S

    def open(self, read: ReportReader) -> None:
        self._read = read

    async def send(self, report: bytes) -> None:
        content = self._signer.sign(STREAM, report)
        own_id, entries = await self.run("exchange", lambda: self._send(content), STREAM)
        sent_ms = _milliseconds(own_id)
        if _milliseconds(self._last_id) > sent_ms:  # another Redis, whose clock is behind
            self._last_id = b"0"
        for entry_id, fields in entries:
            self._last_id = entry_id
            age = max(0.0, (sent_ms - _milliseconds(entry_id)) / 1000)
            found = self._signer.verify(STREAM, fields.get(FIELD, b""))
            unsigned = "no valid signature: all routers need the same --conversation-store-key"
            self._read(found or b"", age, unsigned if found is None else "")

    async def _send(self, content: bytes) -> tuple[bytes, Sequence[tuple[bytes, Any]]]:
        pipe = self._client.pipeline(transaction=False)
        pipe.xadd(STREAM, {FIELD: content}, maxlen=MAX_REPORTS, approximate=True)
        pipe.xrange(STREAM, min=b"(" + self._last_id, count=2 * MAX_REPORTS)
        pipe.expire(STREAM, STREAM_EXPIRES_S)
        own_id, entries, _ = await pipe.execute()
        return own_id, entries


def _milliseconds(entry_id: bytes) -> int:
    """Return the time of an entry, by the clock of Redis."""
    return int(entry_id.partition(b"-")[0])
