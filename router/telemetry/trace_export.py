"""Spans of requests that have ended, sent to an OpenTelemetry collector (extra `otel`).

Set up by the standard OTEL_* variables, and by nothing else; without an endpoint there is no
tracer, and requests cost what they cost. A request tells its engines ahead which span is its leg's
(`trace`); spans are made of its record when it has ended, by a thread of their own, which hands
them to the SDK's batches. What that thread cannot keep up with is dropped and counted: a collector
that is slow, gone or silent costs no request anything.
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

from router.telemetry.log_throttle import Throttle
from router.telemetry.record import Record
from router.telemetry.trace_context import Header, Parent, Trace, new_id, parent_in

if TYPE_CHECKING:
    from router.telemetry.spans import Sdk

logger = logging.getLogger("disagg_router.traces")
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
NEEDED = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http")
# Seconds that the last spans may take.
PATIENCE = 2.0
# Batches of ended requests that wait for the thread, each of some hundreds at most.
MOST_WAITING = 16


class Sink(Protocol):
    """Where spans go: the SDK, in all but tests. `samples` is asked by the event loop, the others
    by the thread of the traces."""

    def samples(self, parent: Parent | None, trace_id: int, name: str) -> bool: ...
    def take(self, ended: Sequence[Record], unix: int) -> None:
        """`unix`: nanoseconds between the monotonic clock's beginning and that of Unix time."""

    def close(self) -> None: ...


class Tracer:
    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._waiting: queue.Queue[Sequence[Record] | None] = queue.Queue(MOST_WAITING)
        self._throttle = Throttle(logger)
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def begin(self, headers: Sequence[Header], endpoint: str, moment: float) -> Trace:
        """The place of a new request, behind its client's span if that told of one."""
        parent = parent_in(headers)
        trace_id = new_id(128) if parent is None else parent.trace_id
        flags = 0 if parent is None else parent.flags & ~1
        flags |= self._samples(parent, trace_id, endpoint)
        return Trace(
            trace_id, new_id(64), parent, flags, "" if parent is None else parent.state, moment
        )

    def _samples(self, parent: Parent | None, trace_id: int, endpoint: str) -> bool:
        try:
            return self._sink.samples(parent, trace_id, f"POST {endpoint}")
        except Exception as error:  # no request fails for it
            self._throttle.warn("no sampling", f"{type(error).__name__}: {error}")
            return False

    def take(self, ended: Sequence[Record]) -> None:
        """Those that are sampled become spans, soon."""
        found = [one for one in ended if one.trace is not None]
        if not found:
            return
        try:
            self._waiting.put_nowait(found)
        except queue.Full:
            self.dropped += len(found)
            self._throttle.warn("spans are dropped", "their thread cannot keep up")

    def close(self, patience: float) -> None:
        """Sends what there is, for so many seconds at most. Blocks."""
        end = time.monotonic() + patience
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=patience)
        self._thread.join(max(0.0, end - time.monotonic()))
        if self._thread.is_alive():
            logger.warning("the collector did not take the last spans in %.0f s", patience)

    def _run(self) -> None:
        while (found := self._waiting.get()) is not None:
            try:
                self._sink.take(found, time.time_ns() - time.monotonic_ns())
            except Exception:
                logger.exception("spans of %d requests could not be made", len(found))
        self._sink.close()


def is_wanted(environ: Mapping[str, str]) -> bool:
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    if environ.get("OTEL_TRACES_EXPORTER", "otlp").strip() not in ("", "otlp"):
        return False
    return any(environ.get(name, "").strip() for name in ENDPOINTS)


def tracer_of(environ: Mapping[str, str]) -> Tracer | None:
    """None where no collector is named, or what it takes to reach one is not there."""
    if not is_wanted(environ) or missing():
        return None
    try:
        return Tracer(_sdk())
    except Exception as error:  # a value of a variable that the SDK does not like
        logger.warning("no traces: OTEL_* makes no sense: %s: %s", type(error).__name__, error)
        return None


def say_if_missing(environ: Mapping[str, str]) -> None:
    """Once for all processes of a router."""
    if is_wanted(environ) and missing():
        logger.warning(
            "no traces, though a collector is named: they need pip install 'disagg-router[otel]'"
        )


def missing() -> bool:
    """Whether the extra is not installed."""
    try:
        return not all(map(find_spec, NEEDED))
    except ModuleNotFoundError:  # a part of the path is not there
        return True


def _sdk() -> Sdk:
    from router.telemetry.spans import Sdk  # slow to import, and seldom needed

    return Sdk()
