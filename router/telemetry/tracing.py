"""Traces: a span for each request and leg, sent to an OpenTelemetry collector (extra `otel`).

The standard OTEL_* variables alone configure it; without an endpoint there is no tracer and no
cost. The ids of a request's span and of its legs are sent to engines and must exist before the legs
end (`record.Trace`). A separate thread makes the spans from the request's record when it has ended,
and passes them to the SDK's batches (`spans`). If the thread cannot keep up, spans are dropped and
counted: a slow or dead collector delays no request.

W3C Trace Context: https://www.w3.org/TR/trace-context/
"""

from __future__ import annotations

import contextlib
import logging
import queue
import re
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from router.common.user_info import without_user_info
from router.telemetry.logs import LogThrottle
from router.telemetry.record import SAMPLED, ParentSpan, Record, Trace, new_id

if TYPE_CHECKING:
    from router.telemetry.spans import OtelSdk

Header = tuple[bytes, bytes]
logger = logging.getLogger("disagg_router.traces")
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
NEEDED = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http")
FLUSH_TIMEOUT_S = 2.0
# Each waiting batch has at most some hundreds of records.
MAX_WAITING_BATCHES = 16
TRACEPARENT, TRACESTATE = b"traceparent", b"tracestate"
TRACE_HEADERS = frozenset((TRACEPARENT, TRACESTATE))
SHAPE = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
MEMBER = re.compile(r"[a-z0-9][a-z0-9_*/@-]{0,255}=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{1,256}")
RANDOM = 0x02
# Longer tracestates are dropped. The standard requires propagating at least 512 bytes.
MAX_STATE_BYTES, MAX_STATE_MEMBERS = 2048, 32


class Tracer:
    """Makes the spans of requests. The event loop calls `begin` and `add_records`, and the sampler
    in `sdk`; a thread calls the other methods of `sdk`."""

    def __init__(self, sdk: OtelSdk) -> None:
        self._sdk = sdk
        self._waiting: queue.Queue[Sequence[Record] | None] = queue.Queue(MAX_WAITING_BATCHES)
        self._throttle = LogThrottle(logger)
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def begin(self, headers: Sequence[Header], endpoint: str, moment: float) -> Trace:
        """Return the span of a new request, under the client's span if the headers name one."""
        parent = parent_in(headers)
        trace_id = new_id(128) if parent is None else parent.trace_id
        flags = 0 if parent is None else parent.flags & ~1
        flags |= self._samples(parent, trace_id, endpoint)
        return Trace(
            trace_id, new_id(64), parent, flags, "" if parent is None else parent.state, moment
        )

    def _samples(self, parent: ParentSpan | None, trace_id: int, endpoint: str) -> bool:
        try:
            return self._sdk.samples(parent, trace_id, f"POST {endpoint}")
        except Exception as error:  # a fault in sampling must not fail the request
            self._throttle.warn("no sampling", f"{type(error).__name__}: {error}")
            return False

    def add_records(self, ended: Sequence[Record]) -> None:
        """Queue the sampled requests to become spans."""
        found = [one for one in ended if one.trace is not None]
        if not found:
            return
        try:
            self._waiting.put_nowait(found)
        except queue.Full:
            self.dropped += len(found)
            self._throttle.warn("spans are dropped", "their thread cannot keep up")

    def close(self, timeout_s: float) -> None:
        """Send the remaining spans for at most `timeout_s` seconds. Blocks."""
        end = time.monotonic() + timeout_s
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=timeout_s)
        self._thread.join(max(0.0, end - time.monotonic()))
        if self._thread.is_alive():
            logger.warning("the collector did not accept the last spans within %.0f s", timeout_s)

    def _run(self) -> None:
        while (found := self._waiting.get()) is not None:
            try:
                self._sdk.add_records(found, time.time_ns() - time.monotonic_ns())
            except Exception:
                logger.exception("spans of %d requests could not be made", len(found))
        self._sdk.close()


def is_configured(environ: Mapping[str, str]) -> bool:
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    if environ.get("OTEL_TRACES_EXPORTER", "otlp").strip() not in ("", "otlp"):
        return False
    return any(environ.get(name, "").strip() for name in ENDPOINTS)


def tracer_of(environ: Mapping[str, str]) -> Tracer | None:
    """Return a tracer, or None if no collector is configured or the extra is not installed."""
    if not is_configured(environ) or is_missing():
        return None
    from router.telemetry.spans import OtelSdk  # slow to import, and seldom needed

    try:
        return Tracer(OtelSdk())
    except Exception as error:  # a value of a variable that the SDK does not like
        text = without_user_info(f"{type(error).__name__}: {error}")
        logger.warning("no traces: invalid OTEL_* variable: %s", text)
        return None


def warn_if_missing(environ: Mapping[str, str]) -> None:
    """Log a warning if a collector is configured and the extra is not installed."""
    if is_configured(environ) and is_missing():
        logger.warning(
            "no traces, although a collector is configured: in a checkout, pip install '.[otel]'"
        )


def is_missing() -> bool:
    """Return True if the extra is not installed."""
    try:
        return not all(map(find_spec, NEEDED))
    except ModuleNotFoundError:  # a parent package is missing
        return True


def parent_in(headers: Iterable[Header]) -> ParentSpan | None:
    """Return the client's span, or None if its traceparent is missing or invalid."""
    found_headers = [header for header in headers if header[0] in TRACE_HEADERS]
    if not found_headers:
        return None
    given = [value for name, value in found_headers if name == TRACEPARENT]
    found = SHAPE.fullmatch(given[0].strip().decode("latin-1")) if len(given) == 1 else None
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == "ff" or (version == "00" and more):
        return None
    if not (int(trace_id, 16) and int(span_id, 16)):
        return None
    state = b",".join(value.strip() for name, value in found_headers if name == TRACESTATE)
    known = int(flags, 16) & (SAMPLED | RANDOM)
    return ParentSpan(int(trace_id, 16), int(span_id, 16), known, _valid_state(state))


def _valid_state(state: bytes) -> str:
    """Return the tracestate unchanged, or "" if it does not follow the standard."""
    text = state.decode("latin-1")
    members = [member.strip(" \t") for member in text.split(",")]
    members = [member for member in members if member]
    if len(state) > MAX_STATE_BYTES or len(members) > MAX_STATE_MEMBERS:
        return ""
    keys = {member.partition("=")[0] for member in members if MEMBER.fullmatch(member)}
    return ",".join(members) if len(keys) == len(members) else ""
