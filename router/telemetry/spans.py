"""Records as spans of the OpenTelemetry SDK, with the semantic conventions for GenAI and HTTP.

    SERVER    POST /v1/chat/completions   from arrival to end
    INTERNAL  queue                       waiting for a slot at an engine
    INTERNAL  choose                      until the first leg is sent
    CLIENT    prefill, decode             each leg, including failed ones; with its first byte

The engines' own spans are children of the legs.
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

from router.telemetry.logs import LogThrottle
from router.telemetry.record import Record
from router.telemetry.token_usage import tokens_in, tokens_of
from router.telemetry.trace_context import ParentSpan, Trace, TracedLeg, new_id

logger = logging.getLogger("disagg_router.traces")
Attributes = dict[str, AttributeValue]
NAME = "disagg-router"
OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}
GOOD = frozenset(("ok", "refused", "disconnected"))
FIRST_BYTE = "first byte"
MAX_ERROR_CHARS = 256


class OtelSdk:
    """The SDK as configured by OTEL_* variables: resource, sampler, batches, exporter."""

    def __init__(self) -> None:
        """Raises what the SDK raises for invalid variables."""
        provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        self._resource, self._sampler = provider.resource, provider.sampler
        self._scope = InstrumentationScope(NAME, version(NAME))
        # ThrottledExporter logs failures instead.
        for chatty in ("opentelemetry.exporter", "opentelemetry.trace"):
            logging.getLogger(chatty).setLevel(logging.CRITICAL)
        self._batches = BatchSpanProcessor(ThrottledExporter(OTLPSpanExporter()))

    def samples(self, parent: ParentSpan | None, trace_id: int, name: str) -> bool:
        known = None
        if parent is not None:
            state = TraceState.from_header([parent.state]) if parent.state else None
            flags = TraceFlags(parent.flags)
            context = SpanContext(parent.trace_id, parent.span_id, True, flags, state)
            known = set_span_in_context(NonRecordingSpan(context))
        result = self._sampler.should_sample(known, trace_id, name, SpanKind.SERVER)
        return result.decision is Decision.RECORD_AND_SAMPLE

    def add_records(self, ended: Sequence[Record], unix_offset_ns: int) -> None:
        for record in ended:
            for span in spans_of(record, unix_offset_ns, self._resource, self._scope):
                self._batches.on_end(span)

    def close(self) -> None:
        self._batches.shutdown()  # type: ignore[no-untyped-call]


class ThrottledExporter(SpanExporter):
    """Wraps an exporter and logs its failures at most twice a minute."""

    def __init__(self, to: SpanExporter) -> None:
        self._to = to
        self._throttle = LogThrottle(logger)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            result = self._to.export(spans)
        except Exception as error:
            self._throttle.warn("the collector rejects spans", f"{type(error).__name__}: {error}")
            return SpanExportResult.FAILURE
        if result is not SpanExportResult.SUCCESS:
            self._throttle.warn("the collector rejects spans", f"{len(spans)} are lost")
        return result

    def shutdown(self) -> None:
        self._to.shutdown()


def _resource() -> Resource:
    """Return the resource; service.name is ours unless a variable sets another."""
    made = Resource.create({"service.version": version(NAME)})
    name = str(made.attributes.get(SERVICE_NAME, ""))
    return (
        made.merge(Resource({SERVICE_NAME: NAME})) if name.startswith("unknown_service") else made
    )


class SpanPart(NamedTuple):
    """A span without the attributes that all spans of a request share. Times as in a Record."""

    name: str
    span_id: int
    start: float
    end: float
    kind: SpanKind
    attributes: Attributes
    error: str = ""
    first_byte: float | None = None


def spans_of(
    record: Record, unix_offset_ns: int, resource: Resource, scope: InstrumentationScope
) -> Iterator[ReadableSpan]:
    """Yield the spans of an ended request, children first."""
    trace = record.trace
    assert trace is not None
    flags = TraceFlags(trace.flags)
    state = TraceState.from_header([trace.state]) if trace.state else None

    def at(moment: float) -> int:
        return unix_offset_ns + int(moment * 1e9)

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


def parts_of(record: Record, trace: Trace) -> Iterator[SpanPart]:
    """Yield the parts of an ended request, children first."""
    ended = record.ended if record.ended is not None else record.started
    if record.queued is not None:
        admitted = record.admitted if record.admitted is not None else ended
        yield SpanPart("queue", new_id(64), record.queued, admitted, SpanKind.INTERNAL, {})
    first = trace.legs[0].started if trace.legs else None
    if first is not None:
        since = record.admitted if record.admitted is not None else trace.began
        yield SpanPart("choose", new_id(64), since, first, SpanKind.INTERNAL, _choice(record))
    for leg in trace.legs:
        end = leg.ended if leg.ended is not None else ended  # a push may outlast the request
        yield SpanPart(
            leg.role,
            leg.span_id,
            leg.started,
            end,
            SpanKind.CLIENT,
            _of_leg(record, leg),
            _short(f"{leg.kind}: {leg.error}") if leg.error else "",
            leg.first_byte,
        )
    yield SpanPart(
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
    return _known({"disagg.flow": record.flow, "disagg.group": record.group})


def _of_request(record: Record, trace: Trace) -> Attributes:
    prompt, completion, cached = tokens_of(record)
    return _known(
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


def _of_leg(record: Record, leg: TracedLeg) -> Attributes:
    host, _, port = leg.engine.rpartition(":")
    prompt, completion, cached = tokens_in(leg.usage)
    return _known(
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


def _known(attributes: dict[str, AttributeValue | None]) -> Attributes:
    """Return the attributes that have a value."""
    return {name: value for name, value in attributes.items() if value not in (None, "")}


def _short(text: str) -> str:
    return " ".join(text.split())[:MAX_ERROR_CHARS].encode(errors="replace").decode()
