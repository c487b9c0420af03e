"""Sends spans of ended requests to an OpenTelemetry collector (extra `otel`).

The standard OTEL_* variables alone configure it; without an endpoint there is no tracer and no
cost. Each leg's span id is sent to the engine ahead (`trace_context`). A separate thread makes the
spans from the request's record when it has ended, and passes them to the SDK's batches. If the
thread cannot keep up, spans are dropped and counted: a slow or dead collector delays no request.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

from router.telemetry.logs import LogThrottle
from router.telemetry.record import Record
from router.telemetry.trace_context import Header, ParentSpan, Trace, new_id, parent_in

if TYPE_CHECKING:
    from router.telemetry.spans import OtelSdk

logger = logging.getLogger("disagg_router.traces")
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
NEEDED = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http")
FLUSH_TIMEOUT_S = 2.0
# Each waiting batch has at most some hundreds of records.
MAX_WAITING_BATCHES = 16


class SpanSink(Protocol):
    """Takes spans: the SDK, except in tests. The event loop calls `samples`, the traces' thread
    the other methods."""

    def samples(self, parent: ParentSpan | None, trace_id: int, name: str) -> bool: ...
    def add_records(self, ended: Sequence[Record], unix_offset_ns: int) -> None:
        """`unix_offset_ns` plus a monotonic time in nanoseconds is Unix time."""

    def close(self) -> None: ...


class Tracer:
    def __init__(self, sink: SpanSink) -> None:
        self._sink = sink
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
            return self._sink.samples(parent, trace_id, f"POST {endpoint}")
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
            logger.warning("the collector did not take the last spans in %.0f s", timeout_s)

    def _run(self) -> None:
        while (found := self._waiting.get()) is not None:
            try:
                self._sink.add_records(found, time.time_ns() - time.monotonic_ns())
            except Exception:
                logger.exception("spans of %d requests could not be made", len(found))
        self._sink.close()


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
    try:
        return Tracer(_sdk())
    except Exception as error:  # a value of a variable that the SDK does not like
        logger.warning("no traces: invalid OTEL_* variable: %s: %s", type(error).__name__, error)
        return None


def warn_if_missing(environ: Mapping[str, str]) -> None:
    """Log a warning if a collector is configured and the extra is not installed."""
    if is_configured(environ) and is_missing():
        logger.warning(
            "no traces, although a collector is configured: run pip install 'disagg-router[otel]'"
        )


def is_missing() -> bool:
    """Return True if the extra is not installed."""
    try:
        return not all(map(find_spec, NEEDED))
    except ModuleNotFoundError:  # a parent package is missing
        return True


def _sdk() -> OtelSdk:
    from router.telemetry.spans import OtelSdk  # slow to import, and seldom needed

    return OtelSdk()
