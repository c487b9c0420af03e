"""What a request's record says to who looks: pure."""

from __future__ import annotations

from typing import NamedTuple

from pydantic import BaseModel

from router.telemetry.record import Record
from router.telemetry.token_usage import tokens_of, tokens_so_far

LONGEST_ERROR = 500


class RequestTimings(BaseModel):
    """Milliseconds since the request came; null: it did not get there."""

    prefill_started: float | None
    prefill_done: float | None
    decode_started: float | None
    first_byte: float | None
    ended: float | None


class RequestSummary(BaseModel):
    """`at` is Unix time. `cached`: of the prompt, what nobody computed for this request."""

    key: str
    id: str
    at: float
    endpoint: str
    flow: str
    stage: str
    outcome: str
    status: int
    prefiller: str
    decoder: str
    conversation: str
    reused_from: str
    ms: RequestTimings
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None
    failures: list[str]
    error: str


class Origin(NamedTuple):
    """`name` tells this process from its siblings; `unix` is when its monotonic clock began."""

    name: str
    unix: float


def summarize_request(record: Record, origin: Origin) -> RequestSummary:
    """Of a request that has ended, or runs."""
    has_ended = record.ended is not None
    prompt, completion, cached = tokens_of(record) if has_ended else tokens_so_far(record)
    return RequestSummary(
        key=f"{origin.name}-{id(record):x}-{record.started:.6f}",
        id=record.request_id,
        at=round(origin.unix + record.started, 3),
        endpoint=record.endpoint,
        flow=record.flow,
        stage=record.stage,
        outcome=record.outcome if has_ended else "running",
        status=record.status,
        prefiller=record.prefiller,
        decoder=record.decoder,
        conversation=record.conversation,
        reused_from=record.reused_from,
        ms=_spans(record),
        prompt_tokens=prompt,
        completion_tokens=completion,
        cached_tokens=cached,
        failures=list(record.failures),
        error=" ".join(record.error.split())[:LONGEST_ERROR],
    )


def _spans(record: Record) -> RequestTimings:
    def since(moment: float | None) -> float | None:
        return None if moment is None else round((moment - record.started) * 1000, 1)

    return RequestTimings(
        prefill_started=since(record.prefill_started),
        prefill_done=since(record.prefill_done),
        decode_started=since(record.decode_started),
        first_byte=since(record.first_byte),
        ended=since(record.ended),
    )
