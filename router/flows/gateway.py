"""What every flow works with: the engines, the policies, and the books."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any

from router.conversations.conversations import Conversations
from router.fleet.engine import Engine, Role
from router.fleet.fleet import Fleet
from router.flows.errors import EngineError, NoEngineError
from router.flows.limits import Limits
from router.policies.affinity import LoadBound
from router.policies.round_robin import in_turn
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
        self.access = AccessLog() if settings.access_log else None
        self.running: set[asyncio.Task[None]] = set()
        self.draining = False
        self.interrupted = False
        self.throttle = Throttle(logging.getLogger("disagg_router.flows"))
        self._turns = dict.fromkeys(Role, 0)
        self._background: set[asyncio.Task[None]] = set()

    def require(self, *roles: Role) -> None:
        """Raises NoEngineError when a role has nobody to ask."""
        for role in roles:
            if not self.fleet.candidates(role):
                raise NoEngineError(f"no {role} engine is healthy")

    def in_turn(self, role: Role) -> Sequence[Engine]:
        """The engines that may be asked, the one whose turn it is first."""
        turn = self._turns[role]
        self._turns[role] = turn + 1
        return in_turn(self.fleet.candidates(role), turn)

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

    def note_failure(self, engine: Engine, error: UpstreamError | EngineError) -> None:
        """Names the engine's role in the error, counts it, and logs it now and then."""
        error.role = engine.role
        self.metrics.upstream_errors.labels(engine.role, error.kind).inc()
        self.throttle.warn(f"{engine.role} engine {engine.name} {error.phrase}", str(error))
