"""Several decoders are asked at once, each with a threshold: the first that accepts answers, and
the others are left. So nobody needs to know whose cache holds what.

Every leg has an id of its own. What has accepted shows in the first event of a stream, so others
than streams are not asked for like this (see router.proxy.plan): engines would compute all of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from router.fleet.engine import Engine
from router.fleet.engine_spec import DECODE, EngineRole
from router.http_client.deadlines import now
from router.openai.errors import EngineRejectedError
from router.proxy.gateway import Gateway
from router.proxy.leg_bodies import Halves
from router.proxy.legs import LEG_ERRORS, REJECTED, Came, LegError, Legs
from router.proxy.request import Request
from router.proxy.resume_buffer import ResumeBuffer

# Seconds for the others once one is out: a look at a cache is quick, and an engine that is busy or
# frozen holds no request up that a prefiller could have by now.
PATIENCE = 2.0

Failure = tuple[LegError, Engine, EngineRole]
# Of a leg, for the books: where it is not one that won.
REFUSED, FAILED, LEFT = "rejected", "failed", "left"


class Ended(NamedTuple):
    """`failure` is of the one that had accepted, or of the last where none has rejected. `others`
    failed as well, and nobody waits for them."""

    others: Sequence[Failure]
    failure: Failure | None = None
    is_rejected: bool = False


def places(engines: Sequence[Engine], request: Request, gateway: Gateway) -> Sequence[Engine]:
    """Who of them may be asked at once, as things are now; nobody, where it is only one.

    Legs that are asked for on a chance are the first to be spared where engines fail."""
    seat, able = request.seat, [one for one in engines if one.is_available]
    if len(able) < 2 or not gateway.budget.is_left(now()):
        return ()
    if seat is None:
        return able
    found = [engine for engine in able if seat.visit(engine)]
    if len(found) > 1:
        return found
    seat.depart(found)
    return ()


class Scatter:
    """The legs of one request, and its places at their engines."""

    def __init__(self, request: Request, gateway: Gateway) -> None:
        self._request = request
        self._gateway = gateway
        self._bodies: dict[Engine, Halves] = {}
        self._buffers: dict[Engine, ResumeBuffer | None] = {}
        self._legs: dict[Engine, asyncio.Task[Came]] = {}
        self._winner: Engine | None = None

    def add(self, engine: Engine, body: Halves) -> None:
        """Will be asked. The buffer that its body asks it to fill is the request's if it wins."""
        self._bodies[engine] = body
        self._buffers[engine], self._request.resume_buffer = self._request.resume_buffer, None

    async def run(self, legs: Legs, fresh: bool, threshold: float) -> Ended:
        """Until the client has its answer, or nobody is left to wait for. Raises
        EngineRejectedError where that is all that was said."""
        self._request.record.stage = "decode"
        for engine, body in self._bodies.items():
            accept = partial(self._accept, engine)
            asked = legs.decode(engine, body, fresh, threshold, accept=accept)
            self._legs[engine] = self._request.exchange.loop.create_task(asked)
        try:
            await self._decided()
        finally:
            for leg in self._legs.values():
                leg.cancel()
            await asyncio.gather(*self._legs.values(), return_exceptions=True)
            self._count()
            if self._request.seat is not None:
                self._request.seat.depart(self._legs)
        return self._result()

    def _accept(self, engine: Engine) -> None:
        """The first one: in the turn of the loop in which it says so the others end."""
        self._winner = engine
        self._request.resume_buffer = self._buffers[engine]
        for other, leg in self._legs.items():
            if other is not engine:
                leg.cancel()
        if self._request.seat is not None:  # its own place first, or another takes that
            self._request.seat.decode_at(engine)
            self._request.seat.depart(self._legs)

    async def _decided(self) -> None:
        running, patience = set(self._legs.values()), None
        while running and self._winner is None:
            left = None if patience is None else max(0, patience - now())
            ended, running = await asyncio.wait(
                running, timeout=left, return_when=asyncio.FIRST_COMPLETED
            )
            if not ended and self._winner is None:
                return
            patience = patience or now() + PATIENCE
        if self._winner is not None:
            await asyncio.wait((self._legs[self._winner],))

    def _result(self) -> Ended:
        failures: dict[Engine, Failure] = {}
        refusal, rejected = None, False
        for engine, leg in self._legs.items():
            error = None if leg.cancelled() else leg.exception()
            if isinstance(error, LEG_ERRORS):
                failures[engine] = (error, engine, DECODE)
            elif isinstance(error, EngineRejectedError):
                refusal = error
            elif error is not None:
                raise error
            elif not leg.cancelled():
                rejected = rejected or leg.result() is REJECTED
        if self._winner is not None:
            failure = failures.pop(self._winner, None)
            return Ended([*failures.values()], failure)
        if rejected:
            return Ended([*failures.values()], is_rejected=True)
        if refusal is not None:
            raise refusal
        *others, last = failures.values()
        return Ended(others, last)

    def _count(self) -> None:
        for engine, leg in self._legs.items():
            if engine is self._winner:
                outcome = "won"
            elif leg.cancelled():
                outcome = LEFT
            else:
                outcome = FAILED if leg.exception() is not None else REFUSED
            self._gateway.metrics.scattered.add((outcome,))
