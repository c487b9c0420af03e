"""Admission control: engine slots, and the queue of the requests that wait for one.

A slot is a request's place at one prefill engine and one decode engine. The router takes it before
it chooses the engines of the request, moves it to the chosen engines, and releases each half when
its leg is over. A release admits the next queued requests at once. An admitted request is never
rejected for lack of room: if a leg has to go to another engine, it goes to one with room, or else
to any engine.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from time import monotonic as now

from msgspec.structs import replace

from router.common.deadlines import Deadlines
from router.conversations.conversations import tenant_of
from router.fleet.engine import Engine
from router.fleet.fleet import Fleet, GroupPool
from router.openai.errors import OverloadError, RequestError, TenantOverloadError
from router.proxy.exchange import Header
from router.proxy.request import Request
from router.routing.admission_queue import (
    AdmissionQueue,
    EngineLimits,
    Placement,
    QueueTicket,
    find_placement,
)
from router.routing.route import Route
from router.settings import Settings
from router.telemetry.metrics import Metrics

PRIORITY_HEADER = b"x-vllm-priority"  # vLLM's name
INTEGER = re.compile(rb"[+-]?[0-9]{1,18}")


class EngineSlot:
    """One request's place at a prefill engine and a decode engine.

    `found` names the engines, `tokens` is the estimated length of the prompt. The tokens count at
    the engine that computes the prompt: the decode engine if `decode_only` is True, else the
    prefill engine.
    """

    __slots__ = ("_admission", "_computes_at_decoder", "_decoder", "_group", "_hedged",
                 "_prefiller", "_tokens", "_tokens_at_decoder")  # fmt: skip

    def __init__(
        self, admission: Admission, found: Placement, tokens: int, decode_only: bool
    ) -> None:
        self._admission = admission
        self._tokens, self._tokens_at_decoder = tokens, tokens if decode_only else 0
        self._group, self._prefiller, self._decoder = found
        self._hedged: set[Engine] = set()
        self._computes_at_decoder = False
        self._move(None, self._prefiller, tokens)
        self._move(None, self._decoder, self._tokens_at_decoder)

    def move_to_route(self, route: Route) -> Route:
        """Move the slot to the first engines of the route that have room.

        Return the route with these engines first. If no engine of the route has room, the slot
        stays where it is, unless its engines have become unusable.
        """
        prefillers = self._with_room_first(route.prefillers, self._prefiller, self._tokens)
        decoders = self._with_room_first(route.decoders, self._decoder, self._tokens_at_decoder)
        if prefillers is None or decoders is None:
            current = Route(self._group, _as_sequence(self._prefiller), _as_sequence(self._decoder))
            if not all(engine.is_usable for engine in (*current.prefillers, *current.decoders)):
                prefillers, decoders = route.prefillers, route.decoders
            elif route.group != self._group:
                return current
            else:
                prefillers = prefillers or _with_first(self._prefiller, route.prefillers)
                decoders = decoders or _with_first(self._decoder, route.decoders)
        if self._prefiller is not None and prefillers:
            self.move_prefill_to(prefillers[0])
        if decoders:
            self.move_decode_to(decoders[0])
        self._group = route.group
        return replace(route, prefillers=prefillers, decoders=decoders)

    def first_with_room(self, engines: Sequence[Engine]) -> Engine | None:
        """Return the first engine that has room, else the first engine, or None if there are no
        engines."""
        limits = self._admission.limits
        with_room = (engine for engine in engines if limits.fits(engine, self._tokens))
        return next(with_room, None) or next(iter(engines), None)

    def move_prefill_to(self, engine: Engine | None) -> None:
        previous, self._prefiller = self._prefiller, engine
        self._move(previous, engine, self._tokens)

    def move_decode_to(self, engine: Engine | None) -> None:
        previous, self._decoder = self._decoder, engine
        self._move(previous, engine, self._tokens_at_decoder)

    def release_prefiller(self) -> None:
        """The prompt is computed."""
        if self._computes_at_decoder:
            self._computes_at_decoder = False
            self._count_at_decoder(0)
            self._admission.admit_waiting()
        self.move_prefill_to(None)

    def compute_at_decoder(self) -> None:
        """Count the prompt at the decode engine, until `release_prefiller`, and not at a prefill
        engine."""
        if self._prefiller is not None:
            self._computes_at_decoder = True
            self._count_at_decoder(self._tokens)
            self.move_prefill_to(None)

    def _count_at_decoder(self, tokens: int) -> None:
        if self._decoder is not None:
            self._decoder.admitted_tokens += tokens - self._tokens_at_decoder
        self._tokens_at_decoder = tokens

    def reserve_hedged(self, engine: Engine) -> bool:
        """Reserve room at one more decode engine, for a hedged leg.

        Return False if the engine has no room, or if requests wait for a slot.
        """
        if engine is self._decoder:
            return True
        limits, tokens = self._admission.limits, self._tokens_at_decoder
        if self._admission.depth or not limits.fits(engine, tokens):
            return False
        self._move(None, engine, tokens)
        self._hedged.add(engine)
        return True

    def release_hedged(self, engines: Iterable[Engine]) -> None:
        """Release the room that was reserved at these engines for hedged legs."""
        released = self._hedged.intersection(engines)
        self._hedged -= released
        for engine in released:
            self._move(engine, None, self._tokens_at_decoder)

    def release(self) -> None:
        self.move_prefill_to(None)
        self.release_hedged(self._hedged)
        self.move_decode_to(None)

    def _with_room_first(
        self, order: Sequence[Engine], current: Engine | None, tokens: int
    ) -> Sequence[Engine] | None:
        """Return the order with an engine first that has room, or None if no engine has room."""
        if current is None or not order or order[0] is current:
            return order
        limits = self._admission.limits
        for engine in order:
            if engine is current or limits.fits(engine, tokens):
                return order if engine is order[0] else _with_first(engine, order)
        return None

    def _move(self, source: Engine | None, target: Engine | None, tokens: int) -> None:
        """Take a place at `target`, then release the one at `source`."""
        if source is target:
            return
        if target is not None:
            target.admitted += 1
            target.admitted_tokens += tokens
        if source is not None:
            source.admitted -= 1
            source.admitted_tokens -= tokens
            self._admission.admit_waiting()


def _with_first(engine: Engine | None, order: Sequence[Engine]) -> Sequence[Engine]:
    return [*_as_sequence(engine), *(other for other in order if other is not engine)]


def _as_sequence(engine: Engine | None) -> Sequence[Engine]:
    return () if engine is None else (engine,)


class QueuedRequest(QueueTicket):
    """A request in the queue. `outcome` resolves to its slot, or to the error that rejects it.

    `queued_at` and `deadline` are loop times in seconds.
    """

    __slots__ = ("_admission", "deadline", "outcome", "queued_at")

    def __init__(self, request: Request, tenant: str, priority: int, admission: Admission) -> None:
        super().__init__(
            tenant, priority, request.tokens, request.model, bool(request.decode_only_reason)
        )
        self.queued_at = now()
        self.deadline = min(self.queued_at + admission.timeout, request.latest)
        self.outcome: asyncio.Future[EngineSlot | RequestError]
        self.outcome = request.exchange.loop.create_future()
        self._admission = admission

    def expire(self) -> None:
        self._admission.expire_queued(self)


def has_engine_limits(settings: Settings) -> bool:
    return bool(settings.max_engine_requests or settings.max_engine_prefill_tokens)


class Admission:
    """Gives slots to requests, and queues the requests for which there is no room.

    The limits hold for each engine and count the requests of this process only.
    """

    def __init__(self, settings: Settings, fleet: Fleet, metrics: Metrics) -> None:
        self.limits = EngineLimits(settings.max_engine_requests, settings.max_engine_prefill_tokens)
        self.timeout = settings.queue_timeout
        self._queue: AdmissionQueue[QueuedRequest] = AdmissionQueue(settings.queue_size)
        self._tenant_header = settings.tenant_header.lower().encode("latin-1")
        self._uses_priorities = settings.queue_priorities
        self._fleet = fleet
        self._metrics = metrics
        self._deadlines = Deadlines()
        # Seconds that the last admitted request waited: the basis of Retry-After.
        self._latest_wait = 0.0
        fleet.on_new_snapshot = self.admit_waiting
        metrics.queue_depth.set_function(lambda: self._queue.depth)

    def tune(self, settings: Settings) -> None:
        """Apply new limits. Queued requests keep their deadlines."""
        self.limits = EngineLimits(settings.max_engine_requests, settings.max_engine_prefill_tokens)
        self.timeout = settings.queue_timeout
        self._queue.size = settings.queue_size
        self._uses_priorities = settings.queue_priorities
        self.admit_waiting()

    @property
    def depth(self) -> int:
        return self._queue.depth

    def admit_at_once(self, request: Request, pools: Sequence[GroupPool]) -> EngineSlot | None:
        """Return a slot, or None if the request has to wait (see `wait_for_slot`)."""
        if self._queue.depth:
            return None
        tokens, decode_only = request.tokens, bool(request.decode_only_reason)
        found = find_placement(pools, tokens, decode_only, self.limits)
        return None if found is None else EngineSlot(self, found, tokens, decode_only)

    async def wait_for_slot(self, request: Request) -> EngineSlot:
        """Queue the request until it gets a slot.

        Raises OverloadError or TenantOverloadError if the queue is full or the wait takes too long.
        """
        headers = request.exchange.headers
        priority = priority_of(headers, request.body) if self._uses_priorities else 0
        tenant = tenant_of(headers, self._tenant_header)
        queued = QueuedRequest(request, tenant, priority, self)
        request.record.stage, request.record.queued = "queue", queued.queued_at
        self._queue.add(queued)
        if not self._queue.is_stuck(queued, self._fleet.snapshot.pools(request.model)):
            self.admit_waiting()
        self._shed(queued)
        if not queued.outcome.done():
            self._deadlines.start(request.exchange.loop)
            self._deadlines.watch(queued)
        try:
            outcome = await queued.outcome
        except asyncio.CancelledError:
            self._cancel(queued)
            raise
        finally:
            request.record.admitted = now()
        if isinstance(outcome, RequestError):
            raise outcome
        return outcome

    def admit_waiting(self) -> None:
        """Give slots to the queued requests for which there is room now."""
        queue = self._queue
        while queue.depth and (found := queue.next(self._fleet.snapshot.pools, self.limits)):
            queued, where = found
            if queued.outcome.done():
                continue  # its client has just disconnected
            self._latest_wait = now() - queued.queued_at
            self._resolve(queued, EngineSlot(self, where, queued.tokens, queued.decode_only))

    def expire_queued(self, queued: QueuedRequest) -> None:
        if self._queue.remove(queued):
            text = f"no engine had room for this request within {now() - queued.queued_at:.0f} s"
            self._resolve(queued, OverloadError(text, "queue_timeout", self._retry_after()))

    def _shed(self, newcomer: QueuedRequest) -> None:
        shed = self._queue.shed(newcomer)
        if shed is None:
            return
        seconds = self._retry_after()
        error: RequestError
        if not self._queue.size:
            error = OverloadError("no engine has room for this request", "no_queue", seconds)
        elif shed.is_outranked:
            text = "a request of higher priority took this one's place in the queue"
            error = OverloadError(text, "outranked", seconds)
        elif shed.is_over_share:
            text = "too many of your requests are queued already"
            error = TenantOverloadError(text, "tenant_share", seconds)
        else:
            error = OverloadError("too many requests are queued already", "queue_full", seconds)
        self._resolve(shed.ticket, error)

    def _resolve(self, queued: QueuedRequest, outcome: EngineSlot | RequestError) -> None:
        self._deadlines.drop(queued)
        if queued.outcome.done():
            return
        self._metrics.requests.queue_seconds.observe(now() - queued.queued_at)
        queued.outcome.set_result(outcome)

    def _cancel(self, queued: QueuedRequest) -> None:
        """Remove a request whose task was cancelled. It may have got its slot already."""
        self._deadlines.drop(queued)
        self._queue.remove(queued)
        if queued.outcome.cancelled() or not queued.outcome.done():
            return
        outcome = queued.outcome.result()
        if isinstance(outcome, EngineSlot):
            outcome.release()

    def _retry_after(self) -> int:
        return max(1, math.ceil(min(self._latest_wait, self.timeout)))


def priority_of(headers: Sequence[Header], body: Mapping[str, object]) -> int:
    """Return the request's priority as vLLM defines it: lower values go first.

    The header takes precedence over the body. An invalid priority counts as 0 here, and the engine
    rejects the request.
    """
    for name, value in headers:
        if name == PRIORITY_HEADER and INTEGER.fullmatch(value):
            return int(value)
    given = body.get("priority")
    return given if type(given) is int else 0
