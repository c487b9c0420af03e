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
from router.telemetry.record import (
    ParentSpan,
    Record,
    Trace,
    TracedLeg,
    new_id,
    tokens_in,
)

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


def spans_of(
    record: Record, unix_offset_ns: int, resource: Resource, scope: InstrumentationScope
) -> Iterator[ReadableSpan]:
    """Yield the spans of an ended request, children first."""
    trace = record.trace
    assert trace is not None
    flags = TraceFlags(trace.flags)
    state = TraceState.from_header([trace.state]) if trace.state else None
    own = SpanContext(trace.trace_id, trace.span_id, False, flags, state)

    def at(moment: float) -> int:
        return unix_offset_ns + int(moment * 1e9)

    def span(
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        kind: SpanKind,
        times: tuple[float, float],
        attributes: Attributes,
        error: str = "",
        first_byte: float | None = None,
    ) -> ReadableSpan:
        start, end = times
        return ReadableSpan(
            name,
            context,
            parent,
            resource,
            attributes,
            [] if first_byte is None else [Event(FIRST_BYTE, {}, at(first_byte))],
            kind=kind,
            status=Status(StatusCode.ERROR, error) if error else Status(),
            start_time=at(start),
            end_time=at(max(start, end)),
            instrumentation_scope=scope,
        )

    def child(span_id: int) -> SpanContext:
        return SpanContext(trace.trace_id, span_id, False, flags, state)

    ended = record.ended if record.ended is not None else record.started
    if record.queued is not None:
        times = record.queued, record.admitted if record.admitted is not None else ended
        yield span("queue", child(new_id(64)), own, SpanKind.INTERNAL, times, {})
    if trace.legs:
        since = record.admitted if record.admitted is not None else trace.began
        times = since, trace.legs[0].started
        choice = _known({"disagg.flow": record.flow, "disagg.group": record.group})
        yield span("choose", child(new_id(64)), own, SpanKind.INTERNAL, times, choice)
    for leg in trace.legs:
        # A push may outlast the request.
        times = leg.started, leg.ended if leg.ended is not None else ended
        error = _short(f"{leg.kind}: {leg.error}") if leg.error else ""
        attributes = _of_leg(record, leg)
        context = child(leg.span_id)
        yield span(
            leg.role, context, own, SpanKind.CLIENT, times, attributes, error, leg.first_byte
        )
    parent = None
    if trace.parent is not None:
        parent = SpanContext(trace.trace_id, trace.parent.span_id, True, flags, state)
    yield span(
        f"POST {record.endpoint}",
        own,
        parent,
        SpanKind.SERVER,
        (record.started, ended),
        _of_request(record, trace),
        "" if record.outcome in GOOD else _short(record.error or record.outcome),
        record.first_byte,
    )


def _of_request(record: Record, trace: Trace) -> Attributes:
    prompt, completion, cached = record.tokens
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
