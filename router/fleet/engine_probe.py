"""The probing of one engine, and the quiet probes that suffice while nothing changes.

A full probe runs in the engine's task (`router.fleet.probes`). After it, a healthy engine is only
watched: a *quiet probe* sends GET /health on a kept connection, without a task, and when they are
due asks for the pages that name the engine's models and its identity. Status 200, and pages with
the same bytes as those that were read last, are nothing new. All else ends the watch, and the
engine's task probes in full.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from random import Random
from time import monotonic as now

from router.fleet.engine import Engine, Health
from router.fleet.kv_facts import IDENTITY_PATH
from router.fleet.kv_protocol import MODELS_PATH
from router.http_client.engine_answer import EngineAnswer
from router.http_client.errors import SilenceError, StaleConnectionError, UpstreamError

HEALTH_PATH = "/health"
MAX_ANSWER_BYTES = 1024 * 1024
# Models and identity are fetched again after this time: adapters come and go, and a quick restart
# may go unnoticed.
REFETCH_AFTER_S = 10.0
# The transfers of an engine with traffic are read again after this time. An answer costs it about
# one step.
TRANSFERS_INTERVAL_S = 20.0
# Each interval is multiplied by a factor of this range, and ends at a tick.
VARIATION, TICK_S = (0.9, 1.1), 0.03
# At most this many times the mean number of quiet probes begin within a tick, or LEAST_BOUND.
CROWDING, LEAST_BOUND = 2.0, 32
_vary = Random().uniform


class ProbePace:
    """Bounds the quiet probes that begin within a tick: after a pause of the process all are due
    at once, and would hold up requests. `most` is that bound."""

    def __init__(self) -> None:
        self.most = LEAST_BOUND
        self._tick = self._begun = 0

    def allows(self) -> bool:
        """Count a probe that is about to begin; return False if it has to begin later."""
        tick = int(now() / TICK_S)
        if tick != self._tick:
            self._tick, self._begun = tick, 0
        self._begun += 1
        return self._begun <= self.most


@dataclass(slots=True, eq=False)
class EngineProbe:
    """The probing of one engine: the times of the last probe and of the last look at its transfers.
    `has_result`: a probe has ended. `pages` has the hash of each page and when it was read. A quiet
    probe waits for `timeout` seconds at most, and `interval` seconds are between two of them."""

    engine: Engine
    timeout: float
    pace: ProbePace
    interval: float = 0.0
    probed_at: float = field(default_factory=now)
    transfers_at: float = -math.inf
    task: asyncio.Task[None] | None = None
    models_task: asyncio.Task[None] | None = None
    has_result: asyncio.Event = field(default_factory=asyncio.Event)
    pages: dict[str, tuple[int, float]] = field(default_factory=dict)
    _reads: int = -1
    """The reads of the engine's connections at the last quiet probe or check."""
    _end: asyncio.Future[UpstreamError | None] | None = None
    _timer: asyncio.TimerHandle | None = None

    def note_page(self, path: str, body: bytes) -> None:
        self.pages[path] = hash(body), now()

    def is_due(self, path: str) -> bool:
        """Return True if the page has to be read again."""
        return path not in self.pages or now() - self.pages[path][1] > REFETCH_AFTER_S

    async def watch(self) -> UpstreamError | None:
        """Probe quietly until the engine's task has to probe in full. Return the error of a quiet
        probe that failed."""
        self._end = asyncio.get_running_loop().create_future()
        self._wait()
        try:
            return await self._end
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self._end = self._timer = None

    def check(self) -> None:
        """Called now and then while requests run on the engine. End the watch if the engine was
        silent since the last check or quiet probe, unless a quiet probe is under way."""
        if self._timer is not None:
            reads, self._reads = self._reads, self.engine.pool.reads
            if reads == self._reads:
                self._stop()

    def _stop(self, error: UpstreamError | None = None) -> None:
        if self._end is not None and not self._end.done():
            self._end.set_result(error)

    def _wait(self) -> None:
        """Wait for the next quiet probe."""
        self._reads = self.engine.pool.reads
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(spread(self.interval), self._begin)

    def _begin(self) -> None:
        if not self.pace.allows():
            delay = spread(_vary(0, self.interval))
            self._timer = asyncio.get_running_loop().call_later(delay, self._begin)
            return
        self._timer, engine = None, self.engine
        has_traffic = engine.pool.reads != self._reads or not engine.is_idle
        if has_traffic and now() - self.transfers_at > TRANSFERS_INTERVAL_S:
            self._stop()
        else:
            self._ask(HEALTH_PATH)

    def _ask(self, path: str) -> None:
        pool, self._reads = self.engine.pool, self.engine.pool.reads
        answer = pool.send_on_idle(self.engine.get_message(path), now() + self.timeout)
        if answer is None:
            self._stop()
        else:
            answer.memory = None
            answer.ready().add_done_callback(lambda _: self._note_answer(path, answer))

    def _note_answer(self, path: str, answer: EngineAnswer) -> None:
        error, engine = answer.error, self.engine
        is_answered = error is None and answer.status == 200
        body = answer.take_if_complete(MAX_ANSWER_BYTES) if is_answered else None
        answer.close()
        if self._end is None or self._end.done():
            return
        if body is None:
            # The engine may be busy, or may have closed a kept connection: a full probe finds out.
            is_busy = isinstance(error, SilenceError) and engine.pool.reads != self._reads
            self._stop(None if is_busy or isinstance(error, StaleConnectionError) else error)
            return
        is_new = path != HEALTH_PATH and self.pages.get(path, (0, 0))[0] != hash(body)
        is_known = engine.capabilities.is_identity_known and not engine.is_unread
        if is_new or not is_known or engine.failed_probes or engine.health is not Health.HEALTHY:
            self._stop()
            return
        self.probed_at = now()
        self.note_page(path, body)
        if not engine.spec.models and self.is_due(MODELS_PATH):
            self._ask(MODELS_PATH)
        elif engine.capabilities.lists_capabilities and self.is_due(IDENTITY_PATH):
            self._ask(IDENTITY_PATH)
        else:
            self._wait()


def spread(seconds: float) -> float:
    """Vary a time a little, so that it ends at a tick: probes of the same tick cost less than each
    alone, which wakes the process."""
    moment = now()
    return math.ceil((moment + seconds * _vary(*VARIATION)) / TICK_S) * TICK_S - moment
