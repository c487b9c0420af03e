"""Records as spans of the OpenTelemetry SDK, whose words (GenAI, HTTP) are used where they exist.

    SERVER    POST /v1/chat/completions   from arrival to end
    INTERNAL  queue                       waiting for room at engines
    INTERNAL  choose                      until the first engine is asked
    CLIENT    prefill, decode             each leg, those that failed too; with its first byte

What the engines' own spans hang under are the legs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import NamedTuple

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)
from opentelemetry.util.types import AttributeValue

from router.telemetry.log_throttle import Throttle
from router.telemetry.record import Record
from router.telemetry.token_usage import tokens_in, tokens_of
from router.telemetry.trace_context import Leg, Parent, Trace, new_id

logger = logging.getLogger("disagg_router.traces")
Attributes = dict[str, AttributeValue]
NAME = "disagg-router"
OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}
GOOD = frozenset(("ok", "refused", "disconnected"))
FIRST_BYTE = "first byte"
# Of texts that come from elsewhere.
LONGEST = 256


class Sdk:
    """Set up by OTEL_* variables: resource, sampler, batches, exporter."""

    def __init__(self) -> None:
        """Raises what the SDK raises for variables that make no sense."""
        provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        self._resource, self._sampler = provider.resource, provider.sampler
        self._scope = InstrumentationScope(NAME, version(NAME))
        for chatty in ("opentelemetry.exporter", "opentelemetry.trace"):
            logging.getLogger(chatty).setLevel(logging.CRITICAL)  # we say it, now and then
        self._batches = BatchSpanProcessor(Exporter(OTLPSpanExporter()))

    def samples(self, parent: Parent | None, trace_id: int, name: str) -> bool:
        known = None
        if parent is not None:
            state = TraceState.from_header([parent.state]) if parent.state else None
            flags = TraceFlags(parent.flags)
            context = SpanContext(parent.trace_id, parent.span_id, True, flags, state)
            known = set_span_in_context(NonRecordingSpan(context))
        told = self._sampler.should_sample(known, trace_id, name, SpanKind.SERVER)
        return told.decision is Decision.RECORD_AND_SAMPLE

    def take(self, ended: Sequence[Record], unix: int) -> None:
        for record in ended:
            for span in spans_of(record, unix, self._resource, self._scope):
                self._batches.on_end(span)

    def close(self) -> None:
        self._batches.shutdown()  # type: ignore[no-untyped-call]


class Exporter(SpanExporter):
    """Another one, whose failures are said once in a while instead of each time."""

    def __init__(self, to: SpanExporter) -> None:
        self._to = to
        self._throttle = Throttle(logger)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            told = self._to.export(spans)
        except Exception as error:
            self._throttle.warn("the collector takes no spans", f"{type(error).__name__}: {error}")
            return SpanExportResult.FAILURE
        if told is not SpanExportResult.SUCCESS:
            self._throttle.warn("the collector takes no spans", f"{len(spans)} are lost")
        return told

    def shutdown(self) -> None:
        self._to.shutdown()


def _resource() -> Resource:
    """service.name is ours, unless a variable says another."""
    made = Resource.create({"service.version": version(NAME)})
    told = str(made.attributes.get(SERVICE_NAME, ""))
    return (
        made.merge(Resource({SERVICE_NAME: NAME})) if told.startswith("unknown_service") else made
    )


class Part(NamedTuple):
    """A span, less what all of one request share. Times as in a Record."""

    name: str
    span_id: int
    start: float
    end: float
    kind: SpanKind
    attributes: Attributes
    error: str = ""
    first_byte: float | None = None


def spans_of(
    record: Record, unix: int, resource: Resource, scope: InstrumentationScope
) -> Iterator[ReadableSpan]:
    """Of a record that has ended; children first, as they end."""
    trace = record.trace
    assert trace is not None
    flags = TraceFlags(trace.flags)
    state = TraceState.from_header([trace.state]) if trace.state else None

    def at(moment: float) -> int:
        return unix + int(moment * 1e9)

    def context_of(span_id: int) -> SpanContext:
        return SpanContext(trace.trace_id, span_id, False, flags, state)

    own, above = context_of(trace.span_id), None
    if trace.parent is not None:
        above = SpanContext(trace.trace_id, trace.parent.span_id, True, flags, state)
    for part in parts_of(record, trace):
        is_own = part.span_id == trace.span_id
        events = [] if part.first_byte is None else [Event(FIRST_BYTE, {}, at(part.first_byte))]
        yield ReadableSpan(
            part.name,
            own if is_own else context_of(part.span_id),
            above if is_own else own,
            resource,
            part.attributes,
            events,
            kind=part.kind,
            status=Status(StatusCode.ERROR, part.error) if part.error else Status(),
            start_time=at(part.start),
            end_time=at(max(part.start, part.end)),
            instrumentation_scope=scope,
        )


def parts_of(record: Record, trace: Trace) -> Iterator[Part]:
    """Children first."""
    ended = record.ended if record.ended is not None else record.started
    if record.queued is not None:
        seated = record.seated if record.seated is not None else ended
        yield Part("queue", new_id(64), record.queued, seated, SpanKind.INTERNAL, {})
    first = trace.legs[0].started if trace.legs else None
    if first is not None:
        since = record.seated if record.seated is not None else trace.began
        yield Part("choose", new_id(64), since, first, SpanKind.INTERNAL, _choice(record))
    for leg in trace.legs:
        end = leg.ended if leg.ended is not None else ended  # a pushing prefiller may be late
        yield Part(
            leg.role,
            leg.span_id,
            leg.started,
            end,
            SpanKind.CLIENT,
            _of_leg(record, leg),
            _short(f"{leg.kind}: {leg.error}") if leg.error else "",
            leg.first_byte,
        )
    yield Part(
        f"POST {record.endpoint}",
        trace.span_id,
        record.started,
        ended,
        SpanKind.SERVER,
        _of_request(record, trace),
        "" if record.outcome in GOOD else _short(record.error or record.outcome),
        record.first_byte,
    )


def _choice(record: Record) -> Attributes:
    return _some({"disagg.flow": record.flow, "disagg.group": record.group})


def _of_request(record: Record, trace: Trace) -> Attributes:
    prompt, completion, cached = tokens_of(record)
    return _some(
        {
            "http.request.method": "POST",
            "http.route": record.endpoint,
            "url.path": record.endpoint,
            "http.response.status_code": record.status or None,
            "error.type": _error_type(record),
            "gen_ai.operation.name": OPERATIONS.get(record.endpoint),
            "gen_ai.request.model": record.model,
            "gen_ai.usage.input_tokens": prompt,
            "gen_ai.usage.output_tokens": completion,
            "gen_ai.usage.cache_read.input_tokens": cached,
            "disagg.request.id": record.request_id,
            "disagg.outcome": record.outcome,
            "disagg.stage": record.stage,
            "disagg.flow": record.flow,
            "disagg.transfer.mode": trace.mode,
            "disagg.group": record.group,
            "disagg.prefill.engine": record.prefiller,
            "disagg.decode.engine": record.decoder,
            "disagg.conversation.outcome": record.conversation,
            "disagg.retries": record.retries,
        }
    )


def _of_leg(record: Record, leg: Leg) -> Attributes:
    host, _, port = leg.engine.rpartition(":")
    prompt, completion, cached = tokens_in(leg.usage)
    return _some(
        {
            "server.address": host.strip("[]"),
            "server.port": int(port) if port.isdigit() else None,
            "error.type": leg.kind if leg.error else "",
            "gen_ai.operation.name": OPERATIONS.get(record.endpoint),
            "gen_ai.request.model": record.model,
            "gen_ai.usage.input_tokens": prompt,
            "gen_ai.usage.output_tokens": completion,
            "gen_ai.usage.cache_read.input_tokens": cached,
            "disagg.engine": leg.engine,
            "disagg.role": leg.role,
            "disagg.leg.outcome": leg.kind or "ok",
        }
    )


def _error_type(record: Record) -> str:
    if record.outcome in GOOD and record.status < 400:
        return ""
    return record.error.partition(":")[0] or str(record.status or record.outcome)


def _some(attributes: dict[str, AttributeValue | None]) -> Attributes:
    """Those that say something."""
    return {name: value for name, value in attributes.items() if value not in (None, "")}


def _short(text: str) -> str:
    return " ".join(text.split())[:LONGEST].encode(errors="replace").decode()
