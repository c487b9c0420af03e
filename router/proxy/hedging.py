"""Hedged decode legs: the same leg at several decode engines, each with a cache threshold.

The first engine that accepts answers the request, and the other legs are cancelled. So the router
need not know which engine's cache holds the prompt. An acceptance shows in the first event of a
stream. Therefore only streams are hedged (`plan`): of another answer nothing shows before the
engine has computed all of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from time import monotonic as now
from typing import NamedTuple

from router.fleet.engine import Engine
from router.proxy.legs import DecodeLegResult, DecodeOutcome, LegFailure, LegRefusal, decode_leg
from router.proxy.resume import DecodeParams
from router.proxy.run import Run

# Seconds that the other legs have after the first one has ended without an answer. A look at a
# cache is quick, and a busy or frozen engine should not delay the prefill leg.
OTHER_LEGS_TIMEOUT_S = 2.0
# Label values of the metric for legs that did not win.
REFUSED, FAILED, STOPPED = "rejected", "failed", "stopped"


class Hedged(NamedTuple):
    """How hedged legs have ended.

    `failure` is that of the leg that had accepted, or of the last leg if none has rejected.
    `others` failed as well, and the answer does not depend on them.
    """

    others: Sequence[LegFailure]
    failure: LegFailure | None = None
    is_rejected: bool = False


def select_hedged_decoders(run: Run) -> Sequence[Engine]:
    """Return the planned engines that can get a hedged leg now, or () if fewer than two can.

    Hedged legs are the first ones to be saved when engines fail.
    """
    able = [engine for engine in run.plan.hedged_decoders if engine.is_available]
    if len(able) < 2 or not run.gateway.budget.is_left(now()):
        return ()
    slot = run.slot
    if slot is None:
        return able
    found = [engine for engine in able if slot.reserve_hedged(engine)]
    if len(found) > 1:
        return found
    slot.release_hedged(found)
    return ()


class HedgedLegs:
    """The hedged legs of one request, and the request's places at their engines."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._params: dict[Engine, DecodeParams] = {}
        self._legs: dict[Engine, asyncio.Task[DecodeOutcome]] = {}
        self._winner: Engine | None = None

    def add(self, engine: Engine, params: DecodeParams) -> None:
        """Add a leg. Its resume buffer is the request's if the leg wins."""
        self._params[engine] = params

    async def run(self, threshold: float) -> Hedged:
        """Run the legs until the client has its answer or every leg has ended without one.

        Raises EngineRejectedError if that is all that the engines answered.
        """
        self._run.request.record.stage = "decode"
        for engine, params in self._params.items():
            accept = partial(self._accept, engine)
            leg = decode_leg(self._run, engine, params, threshold, accept=accept)
            self._legs[engine] = self._run.request.exchange.loop.create_task(leg)
        try:
            await self._decided()
        finally:
            for task in self._legs.values():
                task.cancel()
            await asyncio.gather(*self._legs.values(), return_exceptions=True)
            self._count()
            if self._run.slot is not None:
                self._run.slot.release_hedged(self._legs)
        return self._result()

    def _accept(self, engine: Engine) -> None:
        """Let the first leg that accepts win, and end the others in the same turn of the loop."""
        self._winner = engine
        for other, leg in self._legs.items():
            if other is not engine:
                leg.cancel()
        if self._run.slot is not None:  # its own place first, or another request takes it
            self._run.slot.move_decode_to(engine)
            self._run.slot.release_hedged(self._legs)

    async def _decided(self) -> None:
        running, latest = set(self._legs.values()), None
        while running and self._winner is None:
            left = None if latest is None else max(0, latest - now())
            ended, running = await asyncio.wait(
                running, timeout=left, return_when=asyncio.FIRST_COMPLETED
            )
            if not ended and self._winner is None:
                return
            latest = latest or now() + OTHER_LEGS_TIMEOUT_S
        if self._winner is not None:
            await asyncio.wait((self._legs[self._winner],))

    def _result(self) -> Hedged:
        failures: dict[Engine, LegFailure] = {}
        refusal, is_rejected = None, False
        for engine, leg in self._legs.items():
            if leg.cancelled():
                continue
            outcome = leg.result()  # raises what is a fault of the router's own
            if isinstance(outcome, LegFailure):
                failures[engine] = outcome
            elif isinstance(outcome, LegRefusal):
                refusal = outcome.error
            else:
                is_rejected = is_rejected or outcome is DecodeLegResult.REJECTED
        if self._winner is not None:
            failure = failures.pop(self._winner, None)
            return Hedged([*failures.values()], failure)
        if is_rejected:
            return Hedged([*failures.values()], is_rejected=True)
        if refusal is not None:
            raise refusal
        *others, last = failures.values()
        return Hedged(others, last)

    def _count(self) -> None:
        for engine, leg in self._legs.items():
            if engine is self._winner:
                outcome = "won"
            elif leg.cancelled():
                outcome = STOPPED
            elif leg.exception() is not None or isinstance(leg.result(), LegFailure | LegRefusal):
                outcome = FAILED
            else:
                outcome = REFUSED
            self._run.gateway.metrics.scattered.add((outcome,))
