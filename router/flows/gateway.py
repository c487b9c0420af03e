"""What every flow works with: the engines, the policies, and the books."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from router.conversations.conversations import Conversations
from router.fleet.engine import Engine, Role
from router.fleet.fleet import Fleet
from router.flows.errors import EngineError, NoEngineError
from router.policies.affinity import LoadBound
from router.policies.round_robin import in_turn
from router.settings import Settings
from router.telemetry.access import AccessLog
from router.telemetry.metrics import Metrics
from router.telemetry.throttle import Throttle
from router.upstream.errors import ConnectError, UpstreamError

T = TypeVar("T")
MOST_TRIED = 3
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
        self.settings = settings
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

    def in_turn(self, role: Role) -> list[Engine]:
        """The engines that may be asked, the one whose turn it is first."""
        turn = self._turns[role]
        self._turns[role] = turn + 1
        return in_turn(self.fleet.candidates(role), turn)

    async def on_engine(
        self,
        role: Role,
        leg: Callable[[Engine], Awaitable[T]],
        order: Sequence[Engine] | None = None,
    ) -> T:
        """Runs a leg on the engine whose turn it is, or on the next when it cannot be reached.

        Nothing was sent to an engine that cannot be reached, so another may be asked safely. Three
        tries at most: a prefiller's blocks wait for the decoder no longer than their lease. `order`
        takes the place of taking turns.
        """
        failure: Exception | None = None
        for engine in (self.in_turn(role) if order is None else order)[:MOST_TRIED]:
            engine.in_flight += 1
            try:
                return await leg(engine)
            except ConnectError as error:
                self._note(engine, error)
                self.fleet.unreachable(engine, str(error))
                failure = error
            except (UpstreamError, EngineError) as error:
                self._note(engine, error)
                raise
            finally:
                engine.in_flight -= 1
        raise failure or NoEngineError(f"no {role} engine is healthy")

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs something that outlives its request; it must end by itself, soon."""
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def close(self) -> None:
        """Lets what outlived its request end, then closes the conversations."""
        if self._background:
            _, late = await asyncio.wait(self._background, timeout=PARTING)
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

    def _note(self, engine: Engine, error: UpstreamError | EngineError) -> None:
        error.role = engine.role
        self.metrics.upstream_errors.labels(engine.role, error.kind).inc()
        self.throttle.warn(f"{engine.role} engine {engine.name} {error.phrase}", str(error))
