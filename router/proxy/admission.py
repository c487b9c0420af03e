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

PRIORITY = b"x-vllm-priority"
INTEGER = re.compile(rb"[+-]?[0-9]{1,18}")


class Seat:
    """One request's place at engines. Tokens count where the prompt is computed."""

    __slots__ = ("_admission", "_decoder", "_group", "_prefiller", "_tokens", "_tokens_at_decoder",
                 "_visited")  # fmt: skip

    def __init__(self, admission: Admission, found: Placement, tokens: int, alone: bool) -> None:
        self._admission = admission
        self._tokens, self._tokens_at_decoder = tokens, tokens if alone else 0
        self._group, self._prefiller, self._decoder = found
        self._visited: set[Engine] = set()
        if self._prefiller is not None:
            _take(self._prefiller, tokens)
        if self._decoder is not None:
            _take(self._decoder, self._tokens_at_decoder)

    def settle(self, route: Route) -> Route:
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
            self.prefill_at(prefillers[0])
        if decoders:
            self.decode_at(decoders[0])
        self._group = route.group
        return replace(route, prefillers=prefillers, decoders=decoders)

    def roomiest(self, engines: Sequence[Engine]) -> Engine | None:
        """Of those that may still be asked: the first with room, else the first."""
        room = self._admission.room
        with_room = (engine for engine in engines if room.fits(engine, self._tokens))
        return next(with_room, None) or next(iter(engines), None)

    def prefill_at(self, engine: Engine) -> None:
        left, self._prefiller = self._prefiller, engine
        self._move(left, engine, self._tokens)

    def decode_at(self, engine: Engine) -> None:
        left, self._decoder = self._decoder, engine
        self._move(left, engine, self._tokens_at_decoder)

    def prefilled(self) -> None:
        """No prefiller is needed any more."""
        left, self._prefiller = self._prefiller, None
        if left is not None:
            self._give_back(left, self._tokens)

    def visit(self, engine: Engine) -> bool:
        """Takes a place at one more decoder, for a leg beside others, if there is room for it and
        nobody waits."""
        if engine is self._decoder:
            return True
        room, tokens = self._admission.room, self._tokens_at_decoder
        if self._admission.depth or not room.fits(engine, tokens):
            return False
        _take(engine, tokens)
        self._visited.add(engine)
        return True

    def depart(self, engines: Iterable[Engine]) -> None:
        """Of those that were visited."""
        left = self._visited.intersection(engines)
        self._visited -= left
        for engine in left:
            self._give_back(engine, self._tokens_at_decoder)

    def leave(self) -> None:
        self.prefilled()
        self.depart(self._visited)
        left, self._decoder = self._decoder, None
        if left is not None:
            self._give_back(left, self._tokens_at_decoder)

    def _preferring(
        self, order: Sequence[Engine], held: Engine | None, tokens: int
    ) -> Sequence[Engine] | None:
        """The order with an engine first that has room; None where there is none in it."""
        if held is None or not order or order[0] is held:
            return order
        room = self._admission.room
        for engine in order:
            if engine is held or room.fits(engine, tokens):
                return order if engine is order[0] else _ahead(engine, order)
        return None

    def _move(self, left: Engine | None, engine: Engine, tokens: int) -> None:
        if left is not engine:
            _take(engine, tokens)
            if left is not None:
                self._give_back(left, tokens)

    def _give_back(self, engine: Engine, tokens: int) -> None:
        engine.admitted -= 1
        engine.admitted_tokens -= tokens
        self._admission.has_room()


def _take(engine: Engine, tokens: int) -> None:
    engine.admitted += 1
    engine.admitted_tokens += tokens


def _ahead(engine: Engine | None, order: Sequence[Engine]) -> Sequence[Engine]:
    return [*_only(engine), *(other for other in order if other is not engine)]


def _only(engine: Engine | None) -> Sequence[Engine]:
    return () if engine is None else (engine,)


class Waiter(QueueTicket):
    """`outcome` is a seat, or why there is none."""

    __slots__ = ("_admission", "deadline", "outcome", "since")

    def __init__(self, request: Request, whose: str, priority: int, admission: Admission) -> None:
        super().__init__(whose, priority, request.tokens, request.model, bool(request.alone))
        self.since = now()
        self.deadline = min(self.since + admission.timeout, request.latest)
        self.outcome: asyncio.Future[Seat | RequestError]
        self.outcome = request.exchange.loop.create_future()
        self._admission = admission

    def expire(self) -> None:
        self._admission.expired(self)


def has_limits(settings: Settings) -> bool:
    return bool(settings.max_engine_requests or settings.max_engine_prefill_tokens)


class Admission:
    """`room` is what one engine has, in this process's eyes: other routers have their own."""

    def __init__(self, settings: Settings, fleet: Fleet, metrics: Metrics) -> None:
        self.room = EngineLimits(settings.max_engine_requests, settings.max_engine_prefill_tokens)
        self.timeout = settings.queue_timeout
        self._queue: AdmissionQueue[Waiter] = AdmissionQueue(settings.queue_size)
        self._resolver = ConversationResolver((), settings.tenant_header)
        self._heeds_priorities = settings.queue_priorities
        self._fleet = fleet
        self._metrics = metrics
        self._deadlines = Deadlines()
        # How long who was let in last had to wait: so will who comes back.
        self._latest_wait = 0.0
        fleet.on_new_snapshot = self.has_room
        metrics.queue_depth.set_function(lambda: self._queue.depth)

    def tune(self, settings: Settings) -> None:
        """Who waits goes on waiting for as long as it was told to, or is let in now."""
        self.room = EngineLimits(settings.max_engine_requests, settings.max_engine_prefill_tokens)
        self.timeout = settings.queue_timeout
        self._queue.size = settings.queue_size
        self._heeds_priorities = settings.queue_priorities
        self.has_room()

    @property
    def depth(self) -> int:
        return self._queue.depth

    def at_once(self, request: Request, pools: Sequence[GroupPool]) -> Seat | None:
        """A seat for a request that need not wait. No coroutine: see `wait`."""
        if self._queue.depth:
            return None
        tokens, alone = request.tokens, bool(request.alone)
        found = find_placement(pools, tokens, alone, self.room)
        return None if found is None else Seat(self, found, tokens, alone)

    async def wait(self, request: Request) -> Seat:
        """Raises OverloadError, TenantOverloadError."""
        headers = request.exchange.headers
        priority = priority_of(headers, request.body) if self._heeds_priorities else 0
        waiter = Waiter(request, self._resolver.tenant_of(headers), priority, self)
        request.record.stage, request.record.queued = "queue", waiter.since
        self._queue.add(waiter)
        if not self._queue.is_stuck(waiter, self._fleet.snapshot.pools(request.model)):
            self.has_room()
        self._shed(waiter)
        if not waiter.outcome.done():
            self._deadlines.watch(waiter)
        try:
            outcome = await waiter.outcome
        except asyncio.CancelledError:
            self._leave(waiter)
            raise
        finally:
            request.record.admitted = now()
        if isinstance(outcome, RequestError):
            raise outcome
        return outcome

    def has_room(self) -> None:
        """Perhaps: lets in whom it is enough for."""
        queue = self._queue
        while queue.depth and (found := queue.next(self._fleet.snapshot.pools, self.room)):
            waiter, where = found
            if waiter.outcome.done():
                continue  # its client left in this moment
            self._latest_wait = now() - waiter.since
            self._tell(waiter, Seat(self, where, waiter.tokens, waiter.decode_only))

    def expired(self, waiter: Waiter) -> None:
        if self._queue.remove(waiter):
            text = f"no engine had room for this request in {now() - waiter.since:.0f} s"
            self._tell(waiter, OverloadError(text, "queue_timeout", self._retry_after()))

    def _shed(self, newcomer: Waiter) -> None:
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
        self._tell(shed.ticket, error)

    def _tell(self, waiter: Waiter, outcome: Seat | RequestError) -> None:
        self._deadlines.drop(waiter)
        if waiter.outcome.done():
            return
        self._metrics.queue_seconds.observe(now() - waiter.since)
        waiter.outcome.set_result(outcome)

    def _leave(self, waiter: Waiter) -> None:
        """Its task was cancelled, perhaps with the outcome already there."""
        self._deadlines.drop(waiter)
        self._queue.remove(waiter)
        if waiter.outcome.cancelled() or not waiter.outcome.done():
            return
        outcome = waiter.outcome.result()
        if isinstance(outcome, Seat):
            outcome.leave()

    def _retry_after(self) -> int:
        return max(1, math.ceil(min(self._latest_wait, self.timeout)))


def priority_of(headers: Sequence[Header], body: Mapping[str, object]) -> int:
    """As vLLM has it: lower goes first. What makes no sense is left for the engine to refuse."""
    for name, value in headers:
        if name == PRIORITY and INTEGER.fullmatch(value):
            return int(value)
    given = body.get("priority")
    return given if type(given) is int else 0


class Held:
    """Bytes of request bodies that are held for all requests together; `limit` 0 is none."""

    __slots__ = ("limit", "size")

    def __init__(self, limit: int) -> None:
        self.limit, self.size = limit, 0

    def has_room(self, more: int) -> bool:
        return not self.limit or self.size + more <= self.limit
