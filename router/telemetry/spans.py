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
from router.telemetry.record import ParentSpan, Record, Tokens, Trace, TracedLeg, new_id
from router.telemetry.request_metrics import tokens_in

logger = logging.getLogger("disagg_router.traces")
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
        """`unix_offset_ns` plus a monotonic time in nanoseconds is Unix time."""
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
    has_name = not str(made.attributes.get(SERVICE_NAME, "")).startswith("unknown_service")
    return made if has_name else made.merge(Resource({SERVICE_NAME: NAME}))


def spans_of(
    record: Record, unix_offset_ns: int, resource: Resource, scope: InstrumentationScope
) -> Iterator[ReadableSpan]:
    """Yield the spans of an ended request, children first."""
    trace = record.trace
    assert trace is not None
    flags = TraceFlags(trace.flags)
    state = TraceState.from_header([trace.state]) if trace.state else None

    def context(span_id: int, is_remote: bool = False) -> SpanContext:
        return SpanContext(trace.trace_id, span_id, is_remote, flags, state)

    def at(moment: float) -> int:
        return unix_offset_ns + int(moment * 1e9)

    def span(
        name: str,
        span_id: int,
        parent: SpanContext | None,
        kind: SpanKind,
        times: tuple[float, float],
        attributes: dict[str, AttributeValue | None],
        error: str = "",
        first_byte: float | None = None,
    ) -> ReadableSpan:
        start, end = times
        error = " ".join(error.split())[:MAX_ERROR_CHARS].encode(errors="replace").decode()
        return ReadableSpan(
            name,
            context(span_id),
            parent,
            resource,
            {name: value for name, value in attributes.items() if value not in (None, "")},
            [] if first_byte is None else [Event(FIRST_BYTE, {}, at(first_byte))],
            kind=kind,
            status=Status(StatusCode.ERROR, error) if error else Status(),
            start_time=at(start),
            end_time=at(max(start, end)),
            instrumentation_scope=scope,
        )

    own = context(trace.span_id)
    ended = record.ended if record.ended is not None else record.started
    if record.queued is not None:
        times = record.queued, record.admitted if record.admitted is not None else ended
        yield span("queue", new_id(64), own, SpanKind.INTERNAL, times, {})
    if trace.legs:
        since = record.admitted if record.admitted is not None else trace.began
        times = since, trace.legs[0].started
        choice = {"disagg.flow": record.flow, "disagg.group": record.group}
        yield span("choose", new_id(64), own, SpanKind.INTERNAL, times, {**choice})
    for leg in trace.legs:
        # A push may outlast the request.
        times = leg.started, leg.ended if leg.ended is not None else ended
        error = f"{leg.kind}: {leg.error}" if leg.error else ""
        attributes = _of_leg(record, leg)
        client = SpanKind.CLIENT
        yield span(leg.role, leg.span_id, own, client, times, attributes, error, leg.first_byte)
    yield span(
        f"POST {record.endpoint}",
        trace.span_id,
        None if trace.parent is None else context(trace.parent.span_id, is_remote=True),
        SpanKind.SERVER,
        (record.started, ended),
        _of_request(record, trace),
        "" if record.outcome in GOOD else record.error or record.outcome,
        record.first_byte,
    )


def _of_request(record: Record, trace: Trace) -> dict[str, AttributeValue | None]:
    is_good = record.outcome in GOOD and record.status < 400
    error_type = record.error.partition(":")[0] or str(record.status or record.outcome)
    return {
        **_generation(record, record.tokens),
        "http.request.method": "POST",
        "http.route": record.endpoint,
        "url.path": record.endpoint,
        "http.response.status_code": record.status or None,
        "error.type": "" if is_good else error_type,
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


def _of_leg(record: Record, leg: TracedLeg) -> dict[str, AttributeValue | None]:
    host, _, port = leg.engine.rpartition(":")
    return {
        **_generation(record, tokens_in(leg.usage)),
        "server.address": host.strip("[]"),
        "server.port": int(port) if port.isdigit() else None,
        "error.type": leg.kind if leg.error else "",
        "disagg.engine": leg.engine,
        "disagg.role": leg.role,
        "disagg.leg.outcome": leg.kind or "ok",
    }


def _generation(record: Record, tokens: Tokens) -> dict[str, AttributeValue | None]:
    return {
        "gen_ai.operation.name": OPERATIONS.get(record.endpoint),
        "gen_ai.request.model": record.model,
        "gen_ai.usage.input_tokens": tokens.prompt,
        "gen_ai.usage.output_tokens": tokens.completion,
        "gen_ai.usage.cache_read.input_tokens": tokens.cached,
    }
