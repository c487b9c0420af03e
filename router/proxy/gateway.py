"""The objects that all requests of a router process share."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from router.auth.api_keys import ApiKey
from router.auth.authenticator import Authenticator
from router.conversations.conversations import Conversations
from router.fleet.engine import Engine
from router.fleet.engine_spec import EngineRole
from router.fleet.fleet import Fleet
from router.http_client.answer_memory import MemoryBudget
from router.http_client.errors import UpstreamError
from router.openai.errors import EngineError
from router.proxy.admission import Admission, has_engine_limits
from router.proxy.request_limits import RequestLimits
from router.proxy.request_tasks import RequestTasks
from router.proxy.retry import RetryBudget
from router.proxy.route_finder import RouteFinder
from router.settings import Settings
from router.telemetry.access_log import write_lines
from router.telemetry.logs import LogThrottle, is_short
from router.telemetry.metrics import Metrics
from router.telemetry.record import Record, RecordBatches, RecordReader
from router.telemetry.trace_export import FLUSH_TIMEOUT_S, Tracer


class RequestWatch(Protocol):
    """The dashboard, which follows requests from their begin to their end."""

    def opened(self, record: Record) -> None: ...
    def closed(self, record: Record) -> None: ...


@dataclass(slots=True)
class MemoryLimits:
    """The limits on memory that all requests hold together."""

    bodies: MemoryBudget
    answers: MemoryBudget
    resume_buffers: MemoryBudget


class Gateway:
    """The parts that requests share, each with one owner: `routes` finds engines, `tasks` are the
    running requests, `admission` and `budget` limit what engines get, `memory` what requests hold.

    `settings` are those in force. `watch` is None while the dashboard is not open.
    """

    def __init__(
        self,
        settings: Settings,
        fleet: Fleet,
        metrics: Metrics,
        conversations: Conversations | None = None,
        tracer: Tracer | None = None,
        authenticator: Authenticator | None = None,
        answers: MemoryBudget | None = None,
    ) -> None:
        """Raises SettingsError for an engine's key that cannot be read."""
        self.settings = settings
        self.watch: RequestWatch | None = None
        self.limits = RequestLimits.of(settings)
        self.fleet = fleet
        self.metrics = metrics
        self.conversations = conversations
        self.authenticator = authenticator
        secret = settings.engine_secret()
        # The credential for engines; and whether clients' credentials are for the router alone.
        shown = b"" if secret is None else secret.encode()
        self.engine_line = b"authorization: Bearer %b\r\n" % shown if shown else b""
        self.hides_credentials = authenticator is not None or secret is not None
        self.tasks = RequestTasks()
        self.routes = RouteFinder(settings, fleet)
        if authenticator is not None:
            authenticator.spawn = self.tasks.spawn
        self.budget = RetryBudget()
        self.admission = (
            Admission(settings, fleet, metrics) if has_engine_limits(settings) else None
        )
        self.memory = MemoryLimits(
            bodies=MemoryBudget(settings.max_held_bodies),
            answers=MemoryBudget(settings.max_held_answers) if answers is None else answers,
            resume_buffers=MemoryBudget(settings.max_resume_memory),
        )
        readers: list[RecordReader] = [metrics.by_model.add_records]
        if settings.access_log:
            readers.append(write_lines)
        if tracer is not None:
            readers.append(tracer.add_records)
        # The short access log reports how much KV was moved, from the params of each request.
        self.logs_moved_blocks = settings.access_log and is_short(settings.log_format)
        self.tracer = tracer
        self.records = RecordBatches(readers)
        self.throttle = LogThrottle(logging.getLogger("disagg_router.proxy"))

    def tune(self, settings: Settings) -> None:
        """Apply the settings that may change while requests run. They hold for new requests."""
        self.settings = settings
        self.limits = replace(
            self.limits,
            max_body_size=settings.max_body_size,
            max_connections=settings.max_connections,
        )
        self.memory.bodies.limit = settings.max_held_bodies
        self.memory.answers.limit = settings.max_held_answers
        self.memory.resume_buffers.limit = settings.max_resume_memory
        if self.admission is not None:
            self.admission.tune(settings)
        elif has_engine_limits(settings):
            self.admission = Admission(settings, self.fleet, self.metrics)

    def identify(self, headers: Sequence[tuple[bytes, bytes]]) -> ApiKey | str | None:
        """Return the API key of a request, MISSING or INCORRECT for a request without a valid one,
        or None if the router has no API keys."""
        return None if self.authenticator is None else self.authenticator.identify(headers)

    async def close(self) -> None:
        """Wait for what still runs, then close conversations, limits, records and traces."""
        await self.tasks.close()
        if self.conversations is not None:
            await self.conversations.close()
        if self.authenticator is not None:
            await self.authenticator.close()
        self.records.flush()
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close, FLUSH_TIMEOUT_S)

    def note_failure(
        self, engine: Engine, role: EngineRole, error: UpstreamError | EngineError
    ) -> None:
        """Name the engine's role in the error, count it, and log it at most once per period."""
        error.role = role
        self.metrics.upstream_errors.labels(role, error.kind).inc()
        self.throttle.warn(f"{role} engine {engine.name} {error.phrase}", str(error))
