"""All engines, and the only place where what is known of them changes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from router.fleet.capabilities import EngineCapabilities
from router.fleet.circuit_breaker import BreakerRules, CircuitBreaker, CircuitState
from router.fleet.engine import Engine, Health
from router.fleet.engine_spec import LEGS, EngineRole, EngineSpec, Intent
from router.fleet.kv_groups import assign_groups
from router.fleet.snapshot import EngineTuples, build_snapshot
from router.fleet.unreachable_pairs import UnreachablePairs
from router.http_client.errors import EngineLostError
from router.http_client.pool import EnginePool

logger = logging.getLogger("disagg_router.fleet")

Later = Callable[[float, Callable[[], None]], object]
# Seconds: the longest that an engine's "Retry-After" is believed.
LONGEST_COOLING = 30.0
# That others are asked before an engine that has failed a leg.
AVOIDED = 1.0
NO_CONTEXTS: Mapping[str, int] = {}


class Fleet:
    """`later` calls something after a time.

    Engines may be added and removed at any time; a request that runs keeps those it has.
    """

    def __init__(
        self,
        specs: Iterable[EngineSpec],
        make_pool: Callable[[EngineSpec], EnginePool],
        tolerated_failures: int,
        breaker_rules: BreakerRules | None = None,
        clock: Callable[[], float] = time.time,
        later: Later | None = None,
        credential: str = "",
    ) -> None:
        self._credential = credential
        self._make_pool = make_pool
        self._tolerated_failures = tolerated_failures
        self._rules = breaker_rules or BreakerRules()
        self._clock = clock
        self._later = later or _call_later
        self._engines: dict[str, Engine] = {}
        self.on_lost: Callable[[Engine], None] = lambda engine: None
        """Told of an engine that is found unhealthy, or was removed, or plays another role or in
        another group from now on: what it held is gone."""
        self.unreachable_pairs = UnreachablePairs()
        self._members = EngineTuples()
        self._gone: set[Engine] = set()
        self._is_changing = self._is_due = False
        self.on_new_snapshot: Callable[[], None] = lambda: None
        self.on_new_groups: Callable[[], None] = lambda: None
        """Told when `groups` are others than before, by whatever that came."""
        self.engines: Sequence[Engine] = ()
        self.groups: frozenset[str] = frozenset()
        self.snapshot = build_snapshot((), self._members)
        self.starts_engines_cold = False
        """Engines that are found healthy are not asked before `is_warm`, if there are others."""
        self.group_weights: Mapping[str, float] = {}
        """Of those groups that do not go by their engines' weights."""
        with self.batch_changes():
            for spec in specs:
                self.add(spec)

    def find_alive(self, name: str) -> Engine | None:
        """The engine of that name, unless it is dead; what drains still has what it holds."""
        engine = self._engines.get(name)
        return None if engine is None or engine.health is Health.UNHEALTHY else engine

    def usable_engines(self, role: EngineRole) -> Sequence[Engine]:
        """Whoever of that role may be asked for something."""
        return tuple(engine for pool in self.snapshot.any_model for engine in pool.by_role(role))

    def may_serve(self, model: object) -> bool:
        """Whether an engine, dead or alive, is known to serve the model, or may for all we know."""
        if not self._engines or not isinstance(model, str) or not model:
            return True
        return any(e.models is None or model in e.models for e in self._engines.values())

    def unavailable_roles(self) -> dict[EngineRole, str]:
        """For each role without a healthy engine: why."""
        able = {role: [e for e in self.engines if e.role.plays(role)] for role in LEGS}
        return {
            role: ", ".join(f"{e.name}: {e.reason or e.intent}" for e in engines) or "none known"
            for role, engines in able.items()
            if not any(e.health is Health.HEALTHY and e.is_usable for e in engines)
        }

    # Who is there.

    @contextlib.contextmanager
    def batch_changes(self) -> Iterator[None]:
        """Whatever happens within becomes visible at once, at its end: a snapshot costs as much for
        a thousand changes as for one. Nothing may be awaited within, nor this be nested."""
        assert not self._is_changing
        self._is_changing = True
        try:
            yield
        finally:
            self._is_changing = False
            self._refresh()

    def find(self, name: str) -> Engine | None:
        """The engine of that name, whether it may be asked or not."""
        return self._engines.get(name)

    def add(self, spec: EngineSpec, intent: Intent = Intent.SERVING) -> Engine:
        """Its name must be new."""
        engine = Engine(spec, self._make_pool(spec), CircuitBreaker(self._rules), intent=intent)
        engine.credential = self._credential
        assert engine.name not in self._engines, engine.name
        self._engines[engine.name] = engine
        self._refresh()
        return engine

    def remove(self, name: str) -> None:
        """It is not there any more: its legs end, and go through the table of failures."""
        engine = self._engines.pop(name, None)
        if engine is not None:
            engine.intent = Intent.DRAINING  # for requests that had it in their plan
            engine.update_availability()
            self._gone.add(engine)
            self._refresh()
            engine.pool.fail_legs(EngineLostError(f"{name} was removed"))
            engine.pool.close()

    def drain(self, engine: Engine) -> None:
        """No new legs; those that run go on."""
        engine.intent = Intent.DRAINING
        self._refresh()

    def resume(self, engine: Engine) -> None:
        """As if it had never drained."""
        engine.intent = Intent.SERVING
        self._refresh()

    def change_spec(self, engine: Engine, spec: EngineSpec) -> None:
        """The same process, described anew: its connections, health and legs stay. In another role
        or group it holds nothing that anyone may rely on, and is asked again what it is."""
        if engine.spec == spec:
            return
        if (engine.spec.role, engine.spec.group) != (spec.role, spec.group):
            self.on_lost(engine)
            engine.capabilities = EngineCapabilities()
        if engine.spec.tls != spec.tls:
            engine.pool.close()  # of what is idle; legs that run end where they began
            engine.pool = self._make_pool(spec)
        engine.update_spec(spec)
        self._refresh()

    def set_group_weights(self, weights: Mapping[str, float]) -> None:
        """From now on these groups get requests by these weights, the others by their engines'."""
        self.group_weights = dict(weights)
        self._refresh()

    # What probes find.

    def note_probe_passed(self, engine: Engine) -> None:
        engine.failed_probes = 0
        self._enter(engine, Health.HEALTHY, "")

    def note_probe_failed(self, engine: Engine, reason: str, is_silent: bool = False) -> None:
        """One slow probe of a busy engine is no outage; several in a row are.

        `is_silent`: it has said nothing at all, on any connection, all the while. Then its legs are
        as dead as it is. Who answers "no" may still finish what it has begun.
        """
        engine.failed_probes += 1
        if engine.health is Health.HEALTHY and engine.failed_probes < self._tolerated_failures:
            return
        self._enter(engine, Health.UNHEALTHY, reason)
        if is_silent:
            engine.pool.fail_legs(EngineLostError(f"{engine.name} is silent: {reason}"))

    def note_busy(self, engine: Engine) -> None:
        """It answers others and not the probe: no word of health, and none of death."""
        engine.failed_probes = 0

    def note_unreachable(self, engine: Engine, reason: str) -> None:
        """It refuses connections: not to be asked until a probe passes.

        Its legs are left alone: those of a process that is gone end by themselves, and one that is
        draining has closed its listener and still answers them. If it does not: see LEAVING in
        router.fleet.probes.
        """
        self._enter(engine, Health.UNHEALTHY, reason)

    def note_models(
        self,
        engine: Engine,
        models: frozenset[str],
        contexts: Mapping[str, int] = NO_CONTEXTS,
    ) -> None:
        """What the engine says of itself; what its source said stays."""
        if engine.spec.models or (engine.models == models and engine.context_lengths == contexts):
            return
        engine.models, engine.context_lengths = models, contexts
        self._refresh_soon()

    def note_warm(self, engine: Engine) -> None:
        """It may be asked like any other."""
        if engine.is_cold:
            engine.is_cold = False
            engine.update_availability()
            self._refresh_soon()

    def note_identity(self, engine: Engine) -> None:
        """It has said what it is, perhaps something else than before."""
        if engine.capabilities.compatibility not in ("", engine.compatibility):
            self._refresh_soon()

    # What requests find.

    def note_leg_started(self, engine: Engine, trial: object) -> None:
        """A leg begins at an engine whose circuit is half open: the only one for now, unless there
        is nobody else to ask."""
        if engine.breaker.trial is None:
            engine.breaker.trial = trial
            self._refresh()

    def note_recovered(self, engine: Engine) -> None:
        """It did what it was asked for, and its circuit has closed by that."""
        logger.info("%s engine %s works again", engine.role, engine.name)
        self._refresh()

    def note_leg_failed(self, engine: Engine, reason: str) -> None:
        """A leg failed, and it was the engine's fault."""
        if not engine.failed_recently:
            engine.failed_recently = True
            self._later(AVOIDED, lambda: _forgive(engine))
        pause = engine.breaker.record_failure()
        if pause is None:
            return
        name = engine.name
        logger.warning("%s engine %s is left alone %.1f s: %s", engine.role, name, pause, reason)
        self._refresh()
        opened = engine.breaker.times_opened
        self._later(pause, lambda: self._try_again(engine, opened))

    def note_trial_abandoned(self, engine: Engine) -> None:
        """The one leg of a half-open circuit ended without showing anything."""
        engine.breaker.trial = None
        self._refresh()

    def cool_down(self, engine: Engine, seconds: float) -> None:
        """It asked to be left alone for so long."""
        if seconds > 0 and not engine.is_cooling:
            engine.is_cooling = True
            self._refresh()
            self._later(min(seconds, LONGEST_COOLING), lambda: self._warm(engine))

    def close(self) -> None:
        for engine in self.engines:
            engine.pool.close()

    def _try_again(self, engine: Engine, opened: int) -> None:
        """Unless it has closed and opened anew since: that pause is another one."""
        if engine.breaker.times_opened == opened:
            engine.breaker.half_open()
            self._refresh()

    def _warm(self, engine: Engine) -> None:
        engine.is_cooling = False
        self._refresh()

    def _enter(self, engine: Engine, health: Health, reason: str) -> None:
        engine.reason = reason
        if engine.health is health:
            return
        engine.health = health
        if health is Health.UNHEALTHY:
            engine.lost_at, engine.capabilities = self._clock(), EngineCapabilities()
            self.on_lost(engine)
        else:
            engine.is_cold = self.starts_engines_cold
            # Another may have come at its address, which says something else, or nothing.
            engine.compatibility = engine.capabilities.compatibility
            if engine.breaker.circuit is not CircuitState.CLOSED:
                engine.breaker.half_open()  # it lives again: no need to wait for the pause
        engine.update_availability()
        self._refresh_soon()
        level = logging.WARNING if health is Health.UNHEALTHY else logging.INFO
        detail = f": {reason}" if reason else ""
        logger.log(level, "%s engine %s is %s%s", engine.role, engine.name, health, detail)

    def _refresh_soon(self) -> None:
        """When what has arrived is read: the probes of a thousand engines come in together, and a
        snapshot for each would keep requests waiting for seconds."""
        if not self._is_due:
            self._is_due = True
            self._later(0.0, self._refresh)

    def _refresh(self) -> None:
        self._is_due = False
        if self._is_changing:
            return
        self.engines = tuple(self._engines.values())
        assign_groups(self.engines)
        before, self.groups = self.groups, frozenset([engine.group for engine in self.engines])
        for engine in self.engines:
            engine.update_availability()
        gone, self._gone = self._gone, set()
        if gone:
            self._members.forget(gone)
        self.snapshot = build_snapshot(self.engines, self._members, self.group_weights)
        for engine in gone:
            self.on_lost(engine)
        if self.groups != before:
            self.on_new_groups()
        self.on_new_snapshot()


def _forgive(engine: Engine) -> None:
    engine.failed_recently = False


def _call_later(seconds: float, call: Callable[[], None]) -> object:
    return asyncio.get_running_loop().call_later(seconds, call)
