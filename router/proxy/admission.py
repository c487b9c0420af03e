"""Requests that wait for room at engines, and the seats that those hold who have it.

A seat is a request's place at one prefiller and one decoder. It is taken before engines are chosen,
moves to those that are, and is given up where a leg is over: what is free then is given on in the
same moment. Whoever was let in is never sent away for want of room: a leg that has to go elsewhere
goes where there is some, else anywhere.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from router.conversations.identity import ConversationResolver
from router.fleet.engine import Engine
from router.fleet.fleet import Fleet
from router.fleet.snapshot import GroupPool
from router.http_client.deadlines import Deadlines, now
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

PRIORITY_HEADER = b"x-vllm-priority"
INTEGER = re.compile(rb"[+-]?[0-9]{1,18}")


class EngineSlot:
    """One request's place at engines. Tokens count where the prompt is computed."""

    __slots__ = ("_admission", "_decoder", "_group", "_hedged", "_prefiller", "_tokens",
                 "_tokens_at_decoder")  # fmt: skip

    def __init__(self, admission: Admission, found: Placement, tokens: int, alone: bool) -> None:
        self._admission = admission
        self._tokens, self._tokens_at_decoder = tokens, tokens if alone else 0
        self._group, self._prefiller, self._decoder = found
        self._hedged: set[Engine] = set()
        if self._prefiller is not None:
            _take(self._prefiller, tokens)
        if self._decoder is not None:
            _take(self._decoder, self._tokens_at_decoder)

    def move_to_route(self, route: Route) -> Route:
        """Moves to the first engines of the route that have room, which then come first. Where
        there are none it stays where it is, unless that is gone."""
        prefillers = self._preferring(route.prefillers, self._prefiller, self._tokens)
        decoders = self._preferring(route.decoders, self._decoder, self._tokens_at_decoder)
        if prefillers is None or decoders is None:
            held = Route(self._group, _only(self._prefiller), _only(self._decoder))
            if not all(engine.is_usable for engine in (*held.prefillers, *held.decoders)):
                prefillers, decoders = route.prefillers, route.decoders
            elif route.group != self._group:
                return held
            else:
                prefillers = prefillers or _ahead(self._prefiller, route.prefillers)
                decoders = decoders or _ahead(self._decoder, route.decoders)
        if self._prefiller is not None and prefillers:
            self.move_prefill_to(prefillers[0])
        if decoders:
            self.move_decode_to(decoders[0])
        self._group = route.group
        return replace(route, prefillers=prefillers, decoders=decoders)

    def first_with_room(self, engines: Sequence[Engine]) -> Engine | None:
        """Of those that may still be asked: the first with room, else the first."""
        limits = self._admission.limits
        with_room = (engine for engine in engines if limits.fits(engine, self._tokens))
        return next(with_room, None) or next(iter(engines), None)

    def move_prefill_to(self, engine: Engine) -> None:
        previous, self._prefiller = self._prefiller, engine
        self._move(previous, engine, self._tokens)

    def move_decode_to(self, engine: Engine) -> None:
        previous, self._decoder = self._decoder, engine
        self._move(previous, engine, self._tokens_at_decoder)

    def release_prefiller(self) -> None:
        """No prefiller is needed any more."""
        previous, self._prefiller = self._prefiller, None
        if previous is not None:
            self._give_back(previous, self._tokens)

    def reserve_hedged(self, engine: Engine) -> bool:
        """Takes a place at one more decoder, for a leg beside others, if there is room for it and
        nobody waits."""
        if engine is self._decoder:
            return True
        limits, tokens = self._admission.limits, self._tokens_at_decoder
        if self._admission.depth or not limits.fits(engine, tokens):
            return False
        _take(engine, tokens)
        self._hedged.add(engine)
        return True

    def release_hedged(self, engines: Iterable[Engine]) -> None:
        """Of those that were visited."""
        previous = self._hedged.intersection(engines)
        self._hedged -= previous
        for engine in previous:
            self._give_back(engine, self._tokens_at_decoder)

    def release(self) -> None:
        self.release_prefiller()
        self.release_hedged(self._hedged)
        previous, self._decoder = self._decoder, None
        if previous is not None:
            self._give_back(previous, self._tokens_at_decoder)

    def _preferring(
        self, order: Sequence[Engine], held: Engine | None, tokens: int
    ) -> Sequence[Engine] | None:
        """The order with an engine first that has room; None where there is none in it."""
        if held is None or not order or order[0] is held:
            return order
        limits = self._admission.limits
        for engine in order:
            if engine is held or limits.fits(engine, tokens):
                return order if engine is order[0] else _ahead(engine, order)
        return None

    def _move(self, previous: Engine | None, engine: Engine, tokens: int) -> None:
        if previous is not engine:
            _take(engine, tokens)
            if previous is not None:
                self._give_back(previous, tokens)

    def _give_back(self, engine: Engine, tokens: int) -> None:
        engine.admitted -= 1
        engine.admitted_tokens -= tokens
        self._admission.admit_waiting()


def _take(engine: Engine, tokens: int) -> None:
    engine.admitted += 1
    engine.admitted_tokens += tokens


def _ahead(engine: Engine | None, order: Sequence[Engine]) -> Sequence[Engine]:
    return [*_only(engine), *(other for other in order if other is not engine)]


def _only(engine: Engine | None) -> Sequence[Engine]:
    return () if engine is None else (engine,)


class QueuedRequest(QueueTicket):
    """`outcome` is a seat, or why there is none."""

    __slots__ = ("_admission", "deadline", "outcome", "queued_at")

    def __init__(self, request: Request, tenant: str, priority: int, admission: Admission) -> None:
        super().__init__(tenant, priority, request.tokens, request.model, bool(request.alone))
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
    """`room` is what one engine has, in this process's eyes: other routers have their own."""

    def __init__(self, settings: Settings, fleet: Fleet, metrics: Metrics) -> None:
        self.limits = EngineLimits(settings.max_engine_requests, settings.max_engine_prefill_tokens)
        self.timeout = settings.queue_timeout
        self._queue: AdmissionQueue[QueuedRequest] = AdmissionQueue(settings.queue_size)
        self._resolver = ConversationResolver((), settings.tenant_header)
        self._heeds_priorities = settings.queue_priorities
        self._fleet = fleet
        self._metrics = metrics
        self._deadlines = Deadlines()
        # How long who was let in last had to wait: so will who comes back.
        self._latest_wait = 0.0
        fleet.on_new_snapshot = self.admit_waiting
        metrics.queue_depth.set_function(lambda: self._queue.depth)

    def tune(self, settings: Settings) -> None:
        """Who waits goes on waiting for as long as it was told to, or is let in now."""
        self.limits = EngineLimits(settings.max_engine_requests, settings.max_engine_prefill_tokens)
        self.timeout = settings.queue_timeout
        self._queue.size = settings.queue_size
        self._heeds_priorities = settings.queue_priorities
        self.admit_waiting()

    @property
    def depth(self) -> int:
        return self._queue.depth

    def admit_at_once(self, request: Request, pools: Sequence[GroupPool]) -> EngineSlot | None:
        """A seat for a request that need not wait. No coroutine: see `wait`."""
        if self._queue.depth:
            return None
        tokens, alone = request.tokens, bool(request.alone)
        found = find_placement(pools, tokens, alone, self.limits)
        return None if found is None else EngineSlot(self, found, tokens, alone)

    async def wait_for_slot(self, request: Request) -> EngineSlot:
        """Raises OverloadError, TenantOverloadError."""
        headers = request.exchange.headers
        priority = priority_of(headers, request.body) if self._heeds_priorities else 0
        queued = QueuedRequest(request, self._resolver.tenant_of(headers), priority, self)
        request.record.stage, request.record.queued = "queue", queued.queued_at
        self._queue.add(queued)
        if not self._queue.is_stuck(queued, self._fleet.snapshot.pools(request.model)):
            self.admit_waiting()
        self._shed(queued)
        if not queued.outcome.done():
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
        """Perhaps: lets in whom it is enough for."""
        queue = self._queue
        while queue.depth and (found := queue.next(self._fleet.snapshot.pools, self.limits)):
            queued, where = found
            if queued.outcome.done():
                continue  # its client left in this moment
            self._latest_wait = now() - queued.queued_at
            self._resolve(queued, EngineSlot(self, where, queued.tokens, queued.decode_only))

    def expire_queued(self, queued: QueuedRequest) -> None:
        if self._queue.remove(queued):
            text = f"no engine had room for this request in {now() - queued.queued_at:.0f} s"
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
            text = "too many of your requests wait already"
            error = TenantOverloadError(text, "tenant_share", seconds)
        else:
            error = OverloadError("too many requests wait already", "queue_full", seconds)
        self._resolve(shed.ticket, error)

    def _resolve(self, queued: QueuedRequest, outcome: EngineSlot | RequestError) -> None:
        self._deadlines.drop(queued)
        if queued.outcome.done():
            return
        self._metrics.queue_seconds.observe(now() - queued.queued_at)
        queued.outcome.set_result(outcome)

    def _cancel(self, queued: QueuedRequest) -> None:
        """Its task was cancelled, perhaps with the outcome already there."""
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
    """As vLLM has it: lower goes first. What makes no sense is left for the engine to refuse."""
    for name, value in headers:
        if name == PRIORITY_HEADER and INTEGER.fullmatch(value):
            return int(value)
    given = body.get("priority")
    return given if type(given) is int else 0


class MemoryBudget:
    """Bytes of request bodies that are held for all requests together; `limit` 0 is none."""

    __slots__ = ("limit", "size")

    def __init__(self, limit: int) -> None:
        self.limit, self.size = limit, 0

    def has_room(self, more: int) -> bool:
        return not self.limit or self.size + more <= self.limit
