"""What every flow works with: the engines, the policies, and the books."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

from router.conversations.conversations import Conversations
from router.fleet.engine import Engine
from router.fleet.fleet import Fleet
from router.fleet.snapshot import Pool
from router.fleet.spec import LEGS, Role
from router.flows.attempts import RetryBudget
from router.flows.errors import EngineError, NoEngineError, UnknownModelError
from router.flows.limits import Limits
from router.flows.request import Request
from router.policies.affinity import LoadBound
from router.policies.candidate import Ask
from router.policies.registry import make_policy
from router.policies.route import Route, route
from router.settings import Settings
from router.telemetry.access import AccessLog
from router.telemetry.metrics import Metrics
from router.telemetry.throttle import Throttle
from router.upstream.errors import UpstreamError

PARTING = 2.0


class Gateway:
    """`running` holds the tasks of all requests; `draining` says that no new ones are wanted."""

    def __init__(
        self,
        settings: Settings,
        fleet: Fleet,
        metrics: Metrics,
        conversations: Conversations | None = None,
    ) -> None:
        self.limits = Limits.of(settings)
        self.fleet = fleet
        self.metrics = metrics
        self.conversations = conversations
        self.load_bound = LoadBound(settings.affinity_load_factor, settings.affinity_load_floor)
        self.budget = RetryBudget()
        self.access = AccessLog() if settings.access_log else None
        self.running: set[asyncio.Task[None]] = set()
        self.draining = False
        self.interrupted = False
        self.throttle = Throttle(logging.getLogger("disagg_router.flows"))
        self._policies = {
            Role.PREFILL: make_policy(settings.prefill_policy, self.load_bound),
            Role.DECODE: make_policy(settings.decode_policy, self.load_bound),
        }
        self._turns = dict.fromkeys(LEGS, 0)
        self._background: set[asyncio.Task[None]] = set()

    def route(self, request: Request, home: Engine | None = None) -> Route:
        """Who may serve this request, in order of preference; the decoder `home` before others.

        Raises UnknownModelError, NoEngineError.
        """
        pools = self.pools(request.model)
        session = "" if request.turn is None else request.turn.conversation.session
        turns = self._turns
        ask = Ask(turns[Role.PREFILL], request.tokens, session)
        if not request.alone:
            turns[Role.PREFILL] += 1
        ask_decoder = Ask(turns[Role.DECODE], request.tokens, session)
        turns[Role.DECODE] += 1
        policies = self._policies
        return route(pools, policies[Role.PREFILL], policies[Role.DECODE], (ask, ask_decoder), home)

    def others(self, request: Request, planned: Route, role: Role) -> Iterable[Engine]:
        """Who else of the planned group may be asked, as things are now."""
        for pool in self.fleet.snapshot.pools(request.model):
            if pool.group == planned.group:
                yield from pool.prefillers if role is Role.PREFILL else pool.decoders

    def pools(self, model: object) -> Sequence[Pool]:
        """Raises UnknownModelError, NoEngineError."""
        pools = self.fleet.snapshot.pools(model)
        if pools:
            return pools
        if self.fleet.may_serve(model):
            raise NoEngineError("no decode engine is healthy")
        raise UnknownModelError(model)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs something that outlives its request; it must end by itself, soon."""
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def close(self) -> None:
        """Lets what still runs and what outlived its request end, then closes the conversations."""
        if left := self.running | self._background:
            _, late = await asyncio.wait(left, timeout=PARTING)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        if self.conversations is not None:
            await self.conversations.close()
        if self.access is not None:
            self.access.flush()

    def interrupt(self) -> None:
        """Ends every running request; each tells its client so."""
        self.interrupted = True
        for task in list(self.running):
            task.cancel()

    def note_failure(self, engine: Engine, role: Role, error: UpstreamError | EngineError) -> None:
        """Names the engine's role in the error, counts it, and logs it now and then."""
        error.role = role
        self.metrics.upstream_errors.labels(role, error.kind).inc()
        self.throttle.warn(f"{role} engine {engine.name} {error.phrase}", str(error))
