"""Legs of a request that has a trace: each is a span of its own, of which its engine is told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from router.fleet.engine import Engine
from router.fleet.engine_spec import DECODE, PREFILL, EngineRole
from router.http_client.deadlines import now
from router.openai.errors import EngineRejectedError
from router.proxy.gateway import Gateway
from router.proxy.leg_bodies import Halves
from router.proxy.legs import ANSWERED, LEG_ERRORS, Came, Legs
from router.proxy.plan import Plan
from router.proxy.prefill_answer import Prefilled
from router.proxy.push import Push
from router.proxy.request import Request
from router.telemetry.trace_context import Trace, TracedLeg

T = TypeVar("T")


def legs_of(request: Request, plan: Plan, gateway: Gateway) -> Legs:
    trace = request.record.trace
    return Legs(request, plan, gateway) if trace is None else Traced(request, plan, gateway, trace)


class Traced(Legs):
    __slots__ = ("_open", "_trace")

    def __init__(self, request: Request, plan: Plan, gateway: Gateway, trace: Trace) -> None:
        super().__init__(request, plan, gateway)
        trace.mode = plan.mode
        self._trace = trace
        # By engine: two legs at once are never at the same.
        self._open: dict[str, TracedLeg] = {}

    async def prefill(
        self,
        engine: Engine,
        body: Halves,
        fresh: bool,
        push: Push | None = None,
        is_offered: bool = False,
    ) -> Prefilled:
        leg = self._begin_leg(PREFILL, engine)
        asked = super().prefill
        prefilled = await self._followed(leg, lambda: asked(engine, body, fresh, push, is_offered))
        leg.usage = prefilled.usage
        return prefilled

    async def decode(
        self,
        engine: Engine,
        body: Halves,
        fresh: bool,
        threshold: float = 0.0,
        push: Push | None = None,
        accept: Callable[[], None] | None = None,
    ) -> Came:
        record, leg = self._request.record, self._begin_leg(DECODE, engine)
        asked = super().decode
        try:
            came = await self._followed(
                leg, lambda: asked(engine, body, fresh, threshold, push, accept)
            )
        finally:
            if record.decoder == engine.name:  # not of several that were asked
                leg.first_byte, leg.usage = record.first_byte, record.usage
        if came is not ANSWERED:
            leg.kind = came.name.lower()
        return came

    def _message(
        self, engine: Engine, body: Halves, push: Push | None, pinned: bytes = b""
    ) -> bytes:
        return super()._message(engine, body, push, pinned + self._open[engine.name].headers)

    def _begin_leg(self, role: EngineRole, engine: Engine) -> TracedLeg:
        leg = self._open[engine.name] = self._trace.add_leg(role, engine.name, now())
        return leg

    async def _followed(self, leg: TracedLeg, ask: Callable[[], Awaitable[T]]) -> T:
        try:
            return await ask()
        except asyncio.CancelledError:
            leg.kind = "cancelled"
            raise
        except LEG_ERRORS as error:
            leg.kind, leg.error = error.kind, str(error)
            raise
        except EngineRejectedError as error:
            leg.kind = leg.error = f"status_{error.status}"
            raise
        except Exception as error:
            leg.kind = leg.error = type(error).__name__
            raise
        finally:
            leg.ended = now()
