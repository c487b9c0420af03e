"""One line per request, when it has ended."""

from __future__ import annotations

import logging

from router.telemetry.logs import FIELDS
from router.telemetry.record import Record

logger = logging.getLogger("disagg_router.access")


def log_access(record: Record) -> None:
    logger.info("request", extra={FIELDS: fields(record)})


def fields(record: Record) -> dict[str, object]:
    """What is known of the request; stage times in milliseconds since its arrival."""
    known: dict[str, object] = {
        "request_id": record.request_id,
        "endpoint": record.endpoint,
        "status": record.status,
        "outcome": record.outcome,
        "flow": record.flow,
        "conversation": record.conversation or None,
        "prefiller": record.prefiller or None,
        "decoder": record.decoder or None,
        "prefill_ms": _since(record, record.prefill_done),
        "first_byte_ms": _since(record, record.first_byte),
        "total_ms": _since(record, record.ended),
        "stage": None if record.stage == "done" else record.stage,
        "error": repr(record.error) if record.error else None,
    }
    return {name: value for name, value in known.items() if value is not None}


def _since(record: Record, moment: float | None) -> float | None:
    return None if moment is None else round((moment - record.started) * 1000, 1)
