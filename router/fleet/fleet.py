"""All engines, and the only place where their state changes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from router.fleet.engine import Engine, Role, State
from router.fleet.learned import Learned

logger = logging.getLogger("disagg_router.fleet")


class Fleet:
    def __init__(
        self,
        engines: list[Engine],
        tolerated_failures: int,
        on_change: Callable[[Engine], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.engines = tuple(engines)
        self._by_role = {role: tuple(e for e in engines if e.role is role) for role in Role}
        self._candidates = {role: _candidates(found) for role, found in self._by_role.items()}
        self._tolerated_failures = tolerated_failures
        self._on_change = on_change
        self._clock = clock

    def candidates(self, role: Role) -> Sequence[Engine]:
        """The engines that may be asked: the healthy ones, or else those not probed yet."""
        return self._candidates[role]

    def named(self, role: Role, name: str) -> Engine | None:
        """The engine of that name, if it may be asked."""
        return next((engine for engine in self.candidates(role) if engine.name == name), None)

    def missing(self) -> dict[Role, str]:
        """For each role without a healthy engine: why."""
        return {
            role: ", ".join(f"{engine.name}: {engine.reason}" for engine in engines) or "none known"
            for role, engines in self._by_role.items()
            if not any(engine.state is State.HEALTHY for engine in engines)
        }

    def probe_passed(self, engine: Engine) -> None:
        engine.failures = 0
        self._enter(engine, State.HEALTHY, "")

    def probe_failed(self, engine: Engine, reason: str) -> None:
        """One slow probe of a busy engine is no outage; several in a row are."""
        engine.failures += 1
        if engine.state is not State.HEALTHY or engine.failures >= self._tolerated_failures:
            self._enter(engine, State.UNHEALTHY, reason)

    def unreachable(self, engine: Engine, reason: str) -> None:
        """No connection was possible: not to be asked until a probe passes."""
        self._enter(engine, State.UNHEALTHY, reason)

    def close(self) -> None:
        for engine in self.engines:
            engine.pool.close()

    def _enter(self, engine: Engine, state: State, reason: str) -> None:
        engine.reason = reason
        if engine.state is state:
            return
        engine.state = state
        self._candidates[engine.role] = _candidates(self._by_role[engine.role])
        if state is State.UNHEALTHY:
            engine.lost_at, engine.learned = self._clock(), Learned()
        level = logging.WARNING if state is State.UNHEALTHY else logging.INFO
        detail = f": {reason}" if reason else ""
        logger.log(level, "%s engine %s is %s%s", engine.role, engine.name, state, detail)
        self._on_change(engine)


def _candidates(engines: Sequence[Engine]) -> tuple[Engine, ...]:
    healthy = tuple(engine for engine in engines if engine.state is State.HEALTHY)
    return healthy or tuple(engine for engine in engines if engine.state is State.UNKNOWN)
