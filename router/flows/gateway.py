"""What every flow works with: the engines, the policies, and the books."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from router.fleet.engine import Engine, Role
from router.fleet.fleet import Fleet
from router.flows.errors import EngineError, NoEngineError
from router.policies.round_robin import in_turn
from router.settings import Settings
from router.telemetry.metrics import Metrics
from router.telemetry.throttle import Throttle
from router.upstream.errors import ConnectError, UpstreamError

T = TypeVar("T")
MOST_TRIED = 3


class Gateway:
    """`running` holds the tasks of all requests; `draining` says that no new ones are wanted."""

    def __init__(self, settings: Settings, fleet: Fleet, metrics: Metrics) -> None:
        self.settings = settings
        self.fleet = fleet
        self.metrics = metrics
        self.running: set[asyncio.Task[None]] = set()
        self.draining = False
        self.interrupted = False
        self.throttle = Throttle(logging.getLogger("disagg_router.flows"))
        self._turns = dict.fromkeys(Role, 0)

    def require(self, *roles: Role) -> None:
        """Raises NoEngineError when a role has nobody to ask."""
        for role in roles:
            if not self.fleet.candidates(role):
                raise NoEngineError(f"no {role} engine is healthy")

    async def on_engine(self, role: Role, leg: Callable[[Engine], Awaitable[T]]) -> T:
        """Runs a leg on the engine whose turn it is, or on the next when it cannot be reached.

        Nothing was sent to an engine that cannot be reached, so another may be asked safely. Three
        tries at most: a prefiller's blocks wait for the decoder no longer than their lease.
        """
        turn = self._turns[role]
        self._turns[role] = turn + 1
        failure: Exception = NoEngineError(f"no {role} engine is healthy")
        for engine in in_turn(self.fleet.candidates(role), turn)[:MOST_TRIED]:
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
        raise failure

    def interrupt(self) -> None:
        """Ends every running request; each tells its client so."""
        self.interrupted = True
        for task in list(self.running):
            task.cancel()

    def _note(self, engine: Engine, error: UpstreamError | EngineError) -> None:
        error.role = engine.role
        self.metrics.upstream_errors.labels(engine.role, error.kind).inc()
        self.throttle.warn(f"{engine.role} engine {engine.name} {error.phrase}", str(error))
