"""One line per request, when it has ended."""

from __future__ import annotations

import asyncio
import logging
import time

from router.telemetry.logs import LINES, Line
from router.telemetry.record import Record

logger = logging.getLogger("disagg_router.access")
# Seconds that a line may wait for others: they leave in one write.
LATE = 0.1
MOST = 512


class AccessLog:
    """Gathers what ended and logs it together: one log record for many lines."""

    def __init__(self, late: float = LATE) -> None:
        self._late = late
        self._ended: list[Record] = []
        self._timer: asyncio.TimerHandle | None = None

    def add(self, record: Record) -> None:
        self._ended.append(record)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._late, self.flush)
        elif len(self._ended) >= MOST:
            self.flush()

    def flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        ended, self._ended = self._ended, []
        if ended and logger.isEnabledFor(logging.INFO):
            logger.info("%d requests ended", len(ended), extra={LINES: _lines(ended)})


def _lines(ended: list[Record]) -> list[Line]:
    unix = time.time() - time.monotonic()  # the event loop's clock is the monotonic one
    return [Line(unix + (record.ended or 0.0), "request", fields(record)) for record in ended]


def fields(record: Record) -> dict[str, object]:
    """What is known of the request; stage times in milliseconds since its arrival."""
    known: dict[str, object] = {
        "request_id": record.request_id,
        "endpoint": record.endpoint,
        "status": record.status,
        "outcome": record.outcome,
        "flow": record.flow,
    }
    if record.conversation:
        known["conversation"] = record.conversation
    if record.prefiller:
        known["prefiller"] = record.prefiller
    if record.decoder:
        known["decoder"] = record.decoder
    if record.prefill_done is not None:
        known["prefill_ms"] = _since(record, record.prefill_done)
    if record.first_byte is not None:
        known["first_byte_ms"] = _since(record, record.first_byte)
    if record.ended is not None:
        known["total_ms"] = _since(record, record.ended)
    if record.stage != "done":
        known["stage"] = record.stage
    if record.error:
        known["error"] = repr(record.error)
    return known


def _since(record: Record, moment: float) -> float:
    return round((moment - record.started) * 1000, 1)
