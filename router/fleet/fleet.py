"""All engines, and the only place that changes what is known of them.

After each change, which is rare, the fleet publishes an immutable `Snapshot` of the usable engines,
which each request reads once.

The fleet also names the group of each engine, within which KV moves. A source may do so. The
engines whose source does not are grouped by the compatibility that they report: equal values are
one group, named after the value, so that all routers use the same name and a group keeps its name
when another one appears. Engines that report none, such as stock engines, belong to the only group
there is. With two or more groups it is unknown which of them they could read, so they form their
own. Engines that report that they have no KV connector have groups without the other role, so that
no prompt is computed twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import msgspec

from router.fleet.capabilities import EngineCapabilities
from router.fleet.engine import (
    CLOSED,
    DEFAULT_GROUP,
    LEGS,
    Engine,
    EngineRank,
    EngineRole,
    EngineSpec,
    Health,
    Intent,
    Place,
    PrefillRate,
    engine_of,
)
from router.fleet.kv_facts import RankFacts, short_text
from router.fleet.pair_rates import PairRates
from router.fleet.partners import (
    NOTHING_FOUND,
    EngineFacts,
    FleetReport,
    compare_engines,
    find_duplicate_ids,
)
from router.fleet.unreachable_pairs import UnreachablePairs
from router.http_client.errors import EngineLostError
from router.http_client.pool import EnginePool

logger = logging.getLogger("disagg_router.fleet")

# An engine's Retry-After is limited to this.
MAX_COOLING_S = 30.0
# Other engines are preferred for this long to one that has failed a leg.
RECENT_FAILURE_S = 1.0
# The legs of a silent engine without a substitute fail after this multiple of the tolerated probes.
NO_SUBSTITUTE_FACTOR = 3
# An engine that is listed again within this time may be the same process, with its cache.
MAX_ABSENCE_S = 60.0
# The characters of a compatibility value in a group's name, if that distinguishes the groups.
SHOWN_CHARS = 8
MAX_TUPLES = 64
P = TypeVar("P", bound=Place)


@dataclass(frozen=True, slots=True)
class GroupPool:
    """The engines of one group that serve one model. One of the roles may be empty."""

    group: str
    weight: float
    prefillers: Sequence[Engine]
    decoders: Sequence[Engine]
    prefill_places: Sequence[Place] = ()
    decode_places: Sequence[Place] = ()
    """The engines of a role, with the data-parallel ranks of those that have several; empty if none
    has."""
    is_free: bool = False
    """Each engine computes prompts and answers, by cost; see router.routing.free_placement."""

    def by_role(self, role: EngineRole) -> Sequence[Engine]:
        return self.prefillers if role is EngineRole.PREFILL else self.decoders


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The usable engines by model and group."""

    by_model: Mapping[str, Sequence[GroupPool]]
    any_model: Sequence[GroupPool]
    """All of them."""
    unknown_models: Sequence[GroupPool]
    """Groups of engines whose models are all unknown: they may serve models that no other engine
    serves, and requests without a model if no engine's models are known."""
    context_lengths: Mapping[str, int] = field(default_factory=dict)
    """By model, the longest context of its decode engines in tokens, if all have reported it."""
    adapters: frozenset[str] = frozenset()
    """Models that are LoRA adapters."""
    ambiguous_adapters: frozenset[str] = frozenset()
    """Names that adapters of several base models have. Only the engines of one base model serve
    each, because the KV of the others is that of another model."""
    default_model: str | None = None
    """The name of the only model that engines serve beside adapters; empty if there are several,
    and None if the models of no engine are known."""
    has_turns: bool = False
    """A prefill engine may pull what a decode engine retains, and verifies what it pulls."""
    lenders: Sequence[Place] = ()
    """The engines, or their data-parallel ranks, that lend prefixes of their caches. Some may be
    draining."""

    def pools(self, model: object) -> Sequence[GroupPool]:
        """Return the pools for a request's model; empty if no usable engine serves it."""
        found = self.by_model.get(model) if isinstance(model, str) else None
        return self.unknown_models if found is None else found


class ProcessIdentity(NamedTuple):
    """Identifies the process of an engine, as an earlier one had its address; empty if unknown."""

    engine_ids: frozenset[str] = frozenset()
    started: str = ""
    """The Unix time of its start, as its metrics have it."""


class Fleet:
    """The engines of the router; at first there are none.

    Engines may be added and removed at any time; a running request keeps the engines it has. After
    each change `snapshot`, `engines` and `groups` are replaced as a whole, so that other threads
    may read them.

    Callbacks: `on_stale_models` is called with an engine whose models should be read again at once;
    `on_lost` is called with an engine that has restarted, stays removed, or plays
    another role or belongs to another group now, so that its cache is lost; `on_new_snapshot` after
    each change; `on_new_groups` when `groups` has changed. An engine that did not answer for a
    while, or was not listed, may still be the same process. Its identity page and its start time
    show that; the `cached_tokens` of its answers correct what the router remembers in any case.

    `make_pool` makes the connections of an engine. An engine is unhealthy after
    `tolerated_failures` failed probes. `credential` is the Authorization header of the router's own
    requests.
    """

    def __init__(
        self,
        make_pool: Callable[[EngineSpec], EnginePool],
        tolerated_failures: int,
        credential: str = "",
    ) -> None:
        self._credential = credential
        self._make_pool = make_pool
        self._tolerated_failures = tolerated_failures
        self._engines: dict[str, Engine] = {}
        self._tuples = EngineTuples()
        self._processes: dict[str, ProcessIdentity] = {}
        self._in_batch = self._is_refresh_due = False
        self.unreachable_pairs = UnreachablePairs()
        self.pair_rates = PairRates()
        self.on_stale_models: Callable[[Engine], None] = lambda engine: None
        self.on_lost: Callable[[Engine], None] = lambda engine: None
        self.on_new_snapshot: Callable[[], None] = lambda: None
        self.on_new_groups: Callable[[], None] = lambda: None
        self.engines: Sequence[Engine] = ()
        self.groups: frozenset[str] = frozenset()
        self.snapshot = build_snapshot((), self._tuples)
        self.starts_engines_cold = False
        """Engines that become healthy are avoided until `note_warm`, if there are others."""
        self.group_weights: Mapping[str, float] = {}
        """The weights of groups that do not use their engines' weights."""
        self.free_groups: Set[str] = frozenset()
        """The groups where each engine computes prompts and answers, by cost."""
        self.form_reasons: Mapping[str, str] = {}
        """By group with engines of both roles, why they work by cost or not: one of a few texts."""
        self.role_changes: Counter[str] = Counter()
        """By group, how often an engine of both roles began to prefer another role."""
        self.report = NOTHING_FOUND
        """Why some engines exchange no KV, as last compared; see `compare`."""
        self._is_compared = True
        self.probed_roles: Set[EngineRole] = frozenset()
        """The roles of which an engine was found healthy or not, ever."""

    def places(self) -> Sequence[Place]:
        """Return all engines, and all data-parallel ranks of those that have several."""
        ranks = [rank for engine in self.engines for rank in engine.ranks or ()]
        return [*self.engines, *ranks]

    def find(self, name: str) -> Engine | None:
        """Return the engine of that name, in whatever state it is."""
        return self._engines.get(name)

    def find_alive(self, name: str) -> Engine | None:
        """Return the engine of that name unless it is unhealthy; a draining one still has its
        KV."""
        engine = self._engines.get(name)
        return None if engine is None or engine.health is Health.UNHEALTHY else engine

    def usable_engines(self, role: EngineRole) -> Sequence[Engine]:
        """Return all engines to which requests for that role may go."""
        return tuple(engine for pool in self.snapshot.any_model for engine in pool.by_role(role))

    def may_serve(self, model: object) -> bool:
        """Return True if an engine, healthy or not, serves the model or does not report its
        models."""
        if not self._engines or not isinstance(model, str) or not model:
            return True
        return any(e.models is None or model in e.models for e in self._engines.values())

    def reports_model(self, model: str) -> bool:
        """Return True if an engine, healthy or not, reports that it serves the model."""
        return any(e.models is not None and model in e.models for e in self._engines.values())

    def unavailable_roles(self) -> dict[EngineRole, str]:
        """Map each role without a healthy engine to the reasons."""
        able = {role: [e for e in self.engines if e.role.plays(role)] for role in LEGS}
        return {
            role: ", ".join(f"{e.name}: {_why_unusable(e)}" for e in engines) or "none known"
            for role, engines in able.items()
            if not any(e.health is Health.HEALTHY and e.is_usable for e in engines)
        }

    def compare(self) -> FleetReport:
        """Compare the healthy engines, unless nothing has changed, and return the report."""
        if not self._is_compared:
            self._is_compared = True
            healthy = [
                e
                for e in self.engines
                if (e.is_usable or e.is_unread) and e.health is Health.HEALTHY
            ]
            shared = find_duplicate_ids(healthy)
            self.report = compare_engines(map(facts_of, healthy), shared)
        return self.report

    # Which engines there are.

    @contextlib.contextmanager
    def batch_changes(self) -> Iterator[None]:
        """Publish all changes within as one snapshot at the end: a snapshot costs the same for a
        thousand changes as for one. No await within, and no nesting."""
        assert not self._in_batch
        self._in_batch = True
        try:
            yield
        finally:
            self._in_batch = False
            self._refresh()

    def add(self, spec: EngineSpec) -> Engine:
        """Add an engine, whose name must be new."""
        assert spec.name not in self._engines, spec.name
        engine = Engine(spec, self._make_pool(spec), credential=self._credential)
        self._engines[engine.name] = engine
        self._refresh()
        return engine

    def remove(self, name: str) -> None:
        """Remove an engine, if it is there. Its running legs fail with EngineLostError."""
        engine = self._engines.pop(name, None)
        if engine is not None:
            engine.intent = Intent.DRAINING  # for requests whose plan names it
            engine.update_availability()
            self.unreachable_pairs.forget(name)
            self.pair_rates.forget(name)
            self._refresh()
            _call_later(MAX_ABSENCE_S, lambda: self._forget_removed(engine))
            engine.pool.fail_legs(EngineLostError(f"{name} was removed"))
            engine.pool.close()

    def _forget_removed(self, engine: Engine) -> None:
        if engine.name not in self._engines:
            self._processes.pop(engine.name, None)
            self.on_lost(engine)

    def set_intent(self, engine: Engine, intent: Intent) -> None:
        """Serve with the engine, or drain it: it gets no new legs, and running ones continue."""
        self.change_spec(engine, replace(engine.spec, intent=intent))

    def change_spec(self, engine: Engine, spec: EngineSpec) -> None:
        """Replace the description of the same process, whose connections, health and legs stay. In
        another role or group, or with another KV protocol, its KV counts as lost, and its
        capabilities are fetched again."""
        if engine.spec == spec:
            return
        if engine.spec.pairing != spec.pairing:
            self.on_lost(engine)
            engine.capabilities, engine.prefill_rate = EngineCapabilities(), PrefillRate()
        if engine.spec.tls != spec.tls:
            engine.pool.close()  # the idle connections; running legs keep theirs
            engine.pool = self._make_pool(spec)
        engine.update_spec(spec)
        self._refresh()

    def prefer_roles(self, roles: Mapping[str, tuple[EngineRole, str]], free: Set[str]) -> None:
        """Give engines of both roles a preferred role with its reason, by name, from now on: their
        running legs go on. In the groups `free`, requests choose by cost."""
        is_new_form, self.free_groups = free != self.free_groups, free
        has_changed = False
        for name, (role, reason) in roles.items():
            engine = self._engines.get(name)
            if engine is None or engine.role is not EngineRole.BOTH:
                continue
            if engine.preferred_role is not role:
                why = reason or "it is the only usable engine"
                logger.info("engine %s now prefers %s legs: %s", name, role, why)
                # Without a reason, the engine had no preference before.
                self.role_changes[engine.group] += bool(engine.role_reason)
                has_changed = True
            engine.preferred_role, engine.role_reason = role, reason
        if has_changed or is_new_form:
            self._refresh()

    def set_group_weights(self, weights: Mapping[str, float]) -> None:
        """Use these weights of groups; the other groups use their engines' weights."""
        self.group_weights = dict(weights)
        self._refresh()

    # Findings of the prober.

    def note_probe_passed(self, engine: Engine) -> None:
        engine.failed_probes = 0
        self._set_health(engine, Health.HEALTHY, "")

    def note_probe_failed(self, engine: Engine, reason: str, is_silent: bool = False) -> None:
        """Count a failed probe; several in a row make the engine unhealthy, since one slow probe of
        a busy engine means nothing.

        `is_silent`: no byte came from the engine on any connection during the probe. Then its
        running legs fail, too. An engine that answers its probe with an error may finish its legs.
        If no other engine could retry the legs, they fail after more failed probes, because the
        engine may recover.
        """
        engine.failed_probes += 1
        is_healthy = engine.health is Health.HEALTHY
        if is_healthy and engine.failed_probes < self._tolerated_failures:
            return
        self._set_health(engine, Health.UNHEALTHY, reason)
        most = self._tolerated_failures * NO_SUBSTITUTE_FACTOR
        if is_silent and (self._has_substitute(engine) or engine.failed_probes >= most):
            engine.pool.fail_legs(EngineLostError(f"{engine.name} is silent: {reason}"))

    def _has_substitute(self, engine: Engine) -> bool:
        """Return True if another usable engine of the group can decode. A decode engine answers
        requests without a prefill engine, too."""
        return any(
            other.is_usable and other.role.plays(EngineRole.DECODE)
            for other in self._engines.values()
            if other is not engine and other.group == engine.group
        )

    def note_busy(self, engine: Engine) -> None:
        """The engine answers other requests but not the probe, which proves neither health nor
        failure."""
        engine.failed_probes = 0

    def note_unreachable(self, engine: Engine, reason: str) -> None:
        """The engine refuses connections: avoid it until a probe passes.

        Its legs are not ended. Those of a dead process fail, and a draining one has
        closed its listener but still answers them; see LEG_GRACE_S in router.fleet.probes.
        """
        self._set_health(engine, Health.UNHEALTHY, reason)

    def note_models(
        self,
        engine: Engine,
        models: frozenset[str],
        context_lengths: Mapping[str, int],
        adapters: frozenset[str] = frozenset(),
        base_models: tuple[str, ...] = (),
    ) -> None:
        """Take the models that the engine reports, unless its source names its models. See
        Engine.base_models."""
        if not engine.spec.models and engine.take_models(
            models, context_lengths, adapters, base_models
        ):
            self._is_compared = False
            self._refresh_soon()

    def note_no_models(self, engine: Engine, reason: str) -> None:
        """The engine's models are unknown, unless its source names them."""
        if not engine.spec.models and (engine.models_problem != reason or engine.models):
            engine.models_problem = reason
            engine.take_models(None)
            self._is_compared = False
            self._refresh()

    def note_model_rejected(self, engine: Engine, model: str) -> None:
        """The engine has answered that it does not serve a model: if it had listed the model, its
        list is outdated, and it gets no requests for this model until the list was read again."""
        if engine.spec.models or model not in (engine.models or ()):
            return
        if left := (engine.models or frozenset()) - {model}:
            base = tuple([name for name in engine.base_models if name != model])
            engine.take_models(left, engine.context_lengths, engine.adapters - {model}, base)
            self._is_compared = False
            self._refresh()
        else:
            self.note_no_models(engine, f"it no longer serves {short_text(model)}")
        self.on_stale_models(engine)

    def note_warm(self, engine: Engine) -> None:
        """The engine is warmed up and may be used like any other."""
        if engine.is_cold:
            engine.is_cold = False
            engine.update_availability()
            self._refresh_soon()

    def note_identity(self, engine: Engine) -> None:
        """The engine's identity page was read; it may belong to another group now."""
        self._is_compared = False
        capabilities = engine.capabilities
        has_moved = capabilities.compatibility not in ("", engine.compatibility)
        is_alone = engine.group == group_without_kv(engine)
        has_changed = has_moved or is_alone is capabilities.kv.has_connector
        if capabilities.lends and not has_changed:
            lenders = self.snapshot.lenders
            has_changed = not any(engine_of(place) is engine for place in lenders)
        if has_changed or (capabilities.has_turns and not self.snapshot.has_turns):
            self._refresh_soon()

    def note_process(self, engine: Engine, found: ProcessIdentity) -> None:
        """The engine's pages were read. A process with another identity has an empty cache."""
        known = self._processes.get(engine.name, found)
        if any(old and new and old != new for old, new in zip(known, found, strict=True)):
            logger.info("%s %s has restarted", engine.role.engine, engine.name)
            self.on_lost(engine)
        self.pair_rates.note_ids(engine.name, found.engine_ids)
        self._processes[engine.name] = ProcessIdentity(
            found.engine_ids or known.engine_ids, found.started or known.started
        )

    def note_ranks(self, engine: Engine, facts: Sequence[RankFacts]) -> None:
        """The engine's pages were read: it has these data-parallel ranks, in the order of the
        header's values; without `facts` the known ones stay. One rank is as good as none."""
        if not self._tuples.is_current(engine):
            self._refresh_soon()
        known, several = engine.ranks, facts if len(facts) > 1 else ()
        if known is None or (
            facts and [(r.number, r.cache_tokens) for r in known] != [tuple(r) for r in several]
        ):
            engine.ranks = tuple(
                EngineRank(engine, number, at, tokens)
                for at, (number, tokens) in enumerate(several)
            )
            if known or several:
                self._refresh_soon()

    # Findings of requests.

    def note_leg_started(self, engine: Engine, trial: object) -> None:
        """A leg of the request `trial` starts at an engine with a half-open circuit: the only one
        for now, unless no other engine is left."""
        if engine.breaker.trial is None:
            engine.breaker.trial = trial
            self._refresh()

    def note_trial_abandoned(self, engine: Engine) -> None:
        """The trial leg of a half-open circuit ended without a result."""
        engine.breaker.trial = None
        self._refresh()

    def note_leg_answered(self, engine: Engine) -> None:
        """The engine has answered a leg. A justified 4xx is an answer, too."""
        if engine.breaker.record_success():
            logger.info("%s %s works again", engine.role.engine, engine.name)
            self._refresh()

    def note_leg_failed(self, engine: Engine, reason: str) -> None:
        """A leg failed because of the engine."""
        if not engine.failed_recently:
            engine.failed_recently = True
            _call_later(RECENT_FAILURE_S, lambda: setattr(engine, "failed_recently", False))
        pause = engine.breaker.record_failure()
        if pause is None:
            return
        name, engine.circuit_reason = engine.name, reason
        logger.warning("%s %s is avoided for %.1f s: %s", engine.role.engine, name, pause, reason)
        self._refresh()
        times_opened = engine.breaker.times_opened
        _call_later(pause, lambda: self._end_pause(engine, times_opened))

    def _end_pause(self, engine: Engine, times_opened: int) -> None:
        """If the circuit has closed and opened again meanwhile, another pause is running."""
        if engine.breaker.times_opened == times_opened:
            engine.breaker.half_open()
            self._refresh()

    def cool_down(self, engine: Engine, seconds: float) -> None:
        """Avoid the engine for that long, as it has asked for."""

        def end() -> None:
            engine.is_cooling = False
            self._refresh()

        if seconds > 0 and not engine.is_cooling:
            engine.is_cooling = True
            self._refresh()
            _call_later(min(seconds, MAX_COOLING_S), end)

    def close(self) -> None:
        for engine in self.engines:
            engine.pool.close()

    def _set_health(self, engine: Engine, health: Health, reason: str) -> None:
        engine.reason = reason
        if engine.health is health:
            return
        engine.health, engine.health_since = health, time.time()
        if health is Health.UNHEALTHY:
            engine.lost_at = engine.health_since
            engine.prefill_rate = PrefillRate()
            self.unreachable_pairs.forget(engine.name)
            self.pair_rates.forget(engine.name)
            # Another process of the same kind probably comes back, with other ids.
            kv_peer = msgspec.structs.replace(engine.capabilities.kv_peer, engine_ids={})
            engine.capabilities = EngineCapabilities(kv_peer=kv_peer)
        else:
            engine.is_cold = self.starts_engines_cold
            # Another process, which reports other values or none, may be at the address now.
            engine.compatibility = engine.capabilities.compatibility
            if engine.breaker.circuit is not CLOSED:
                engine.breaker.half_open()  # it lives again: no need to wait for the pause
        engine.update_availability()
        self.probed_roles = self.probed_roles | {r for r in LEGS if engine.role.plays(r)}
        self._refresh_soon()
        level = logging.WARNING if health is Health.UNHEALTHY else logging.INFO
        detail = f": {reason}" if reason else ""
        logger.log(level, "%s %s is %s%s", engine.role.engine, engine.name, health, detail)

    def _refresh_soon(self) -> None:
        """Refresh once for all events that have arrived together: the probes of a thousand engines
        do, and one snapshot for each would delay requests for seconds."""
        if not self._is_refresh_due:
            self._is_refresh_due = True
            _call_later(0.0, self._refresh)

    def _refresh(self) -> None:
        """Publish a new snapshot, and call the callbacks."""
        self._is_refresh_due = self._is_compared = False
        if self._in_batch:
            return
        self.engines = tuple(self._engines.values())
        assign_groups(self.engines)
        find_unread(self.engines)
        before, self.groups = self.groups, frozenset([engine.group for engine in self.engines])
        for engine in self.engines:
            engine.update_availability()
        self._tuples.renew(self.engines)
        self.snapshot = build_snapshot(
            self.engines, self._tuples, self.group_weights, self.free_groups
        )
        if self.groups != before:
            self.on_new_groups()
        self.on_new_snapshot()


def _call_later(seconds: float, call: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(seconds, call)


def _why_unusable(engine: Engine) -> str:
    unread = f"its models are unknown: {engine.models_problem}" if engine.is_unread else ""
    return engine.reason or unread or str(engine.intent)


def facts_of(engine: Engine) -> EngineFacts:
    group, models = engine.spec.group, engine.models
    kv, unread = engine.capabilities.kv, engine.models_problem if engine.is_unread else ""
    return EngineFacts(engine.name, engine.role, group, engine.group, models, kv, unread)


def find_unread(engines: Sequence[Engine]) -> None:
    """Set `is_unread` of each engine."""
    known = {engine.group for engine in engines if engine.models is not None}
    for engine in engines:
        engine.is_unread = engine.models is None and engine.group in known


def assign_groups(engines: Iterable[Engine]) -> None:
    unassigned: list[Engine] = []
    for engine in engines:
        if engine.spec.group != DEFAULT_GROUP:
            continue
        if engine.capabilities.kv.has_connector:
            unassigned.append(engine)
        else:
            engine.group = group_without_kv(engine)
    for engine in unassigned:
        engine.compatibility = engine.capabilities.compatibility or engine.compatibility
    names = _group_names({engine.compatibility for engine in unassigned} - {""})
    other = next(iter(names.values())) if len(names) == 1 else DEFAULT_GROUP
    for engine in unassigned:
        engine.group = names.get(engine.compatibility, other)


def group_without_kv(engine: Engine) -> str:
    """Return the group of an engine without a KV connector, in which there is no partner for it."""
    only = engine.name if engine.role is EngineRole.BOTH else engine.role
    return f"{DEFAULT_GROUP}-{only}-without-kv"


def _group_names(values: Set[str]) -> Mapping[str, str]:
    """Return a name for each value; values with an equal beginning are distinguished by a hash."""
    counts = Counter([value[:SHOWN_CHARS] for value in values])
    names: dict[str, str] = {}
    for value in values:
        names[value] = f"{DEFAULT_GROUP}-{value[:SHOWN_CHARS]}"
        if counts[value[:SHOWN_CHARS]] > 1:
            text = value.encode("utf-8", "surrogatepass")
            names[value] += f"-{hashlib.blake2b(text, digest_size=8).hexdigest()}"
    return names


class EngineTuples:
    """Returns the same tuple object for the same engines, in the pools of all models and later on,
    so that policies can recognize a set of engines by the identity of the tuple, and look at each
    engine's preferred role and cache only once. If one of these changes, the tuples are new."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self._facts: dict[Engine, tuple[EngineRole, int]] = {}

    def get(self, engines: Iterable[P]) -> tuple[P, ...]:
        made = tuple(engines)
        known = self._known.pop(made, made)
        self._known[known] = known  # the last one is the most recently used
        if len(self._known) > MAX_TUPLES:
            del self._known[next(iter(self._known))]
        return known

    def is_current(self, engine: Engine) -> bool:
        """Return False if the engine's tuples would be new after `renew`."""
        return self._facts.get(engine) == (engine.preferred_role, engine.cache_tokens)

    def renew(self, engines: Sequence[Engine]) -> None:
        """Forget the tuples with engines that are gone, or that prefer another role or report
        another size of their cache than at the last call. There are these `engines` now."""
        old = self._facts.keys() - {one for one in engines if self.is_current(one)}
        self._facts = {one: (one.preferred_role, one.cache_tokens) for one in engines}
        for known in [known for known in self._known if not old.isdisjoint(map(engine_of, known))]:
            del self._known[known]


def build_snapshot(
    engines: Iterable[Engine],
    tuples: EngineTuples | None = None,
    weights: Mapping[str, float] | None = None,
    free: Set[str] = frozenset(),
) -> Snapshot:
    """Make a snapshot. `weights` of groups take precedence over the weights of their engines. In
    the groups `free`, requests choose engines by cost."""
    tuples, weights, engines = tuples or EngineTuples(), weights or {}, tuple(engines)
    usable = [engine for engine in engines if engine.is_usable]
    unknown = [engine for engine in usable if engine.models is None]
    serving: dict[str, list[Engine]] = {}
    for engine in usable:
        for model in engine.models or ():
            serving.setdefault(model, []).append(engine)
    adapters = frozenset().union(*[engine.adapters for engine in usable])
    ambiguous: set[str] = set()
    for name in adapters:
        if len(same := _of_one_base(serving[name])) < len(serving[name]):
            serving[name] = same
            ambiguous.add(name)
    return Snapshot(
        {model: _pools(named, tuples, weights, free) for model, named in serving.items()},
        _pools(usable, tuples, weights, free),
        _pools(unknown, tuples, weights, free),
        _context_lengths(serving),
        adapters,
        frozenset(ambiguous),
        _default_model(engines),
        all(_any_has_turns(usable, role) for role in (EngineRole.PREFILL, EngineRole.DECODE)),
        tuples.get(
            place
            for engine in engines
            if engine.capabilities.lends and (engine.is_usable or engine.may_lend)
            for place in engine.ranks or (engine,)
        ),
    )


def _of_one_base(engines: list[Engine]) -> list[Engine]:
    """Return the engines of the base model with the first name, and those with unknown ones."""
    first = min((one.base_models for one in engines if one.base_models), default=())
    return [one for one in engines if not one.base_models or {*one.base_models} & {*first}]


def _default_model(engines: Iterable[Engine]) -> str | None:
    """Return the first name that all engines have for their only model: see Snapshot. An engine
    that is lost for now counts, because it may return with another model."""
    known = [one for one in engines if one.models is not None and one.intent is Intent.SERVING]
    if not known:
        return None
    first = known[0].base_models
    return next((name for name in first if all(name in one.base_models for one in known)), "")


def _any_has_turns(engines: Iterable[Engine], role: EngineRole) -> bool:
    return any(one.capabilities.has_turns for one in engines if one.role.plays(role))


def _context_lengths(serving: Mapping[str, Sequence[Engine]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for model, engines in serving.items():
        decoders = [engine for engine in engines if engine.role.plays(EngineRole.DECODE)]
        lengths = [engine.context_lengths.get(model, 0) for engine in decoders]
        if lengths and all(lengths):
            found[model] = max(lengths)
    return found


def _pools(
    engines: Sequence[Engine], tuples: EngineTuples, weights: Mapping[str, float], free: Set[str]
) -> tuple[GroupPool, ...]:
    groups: dict[str, list[Engine]] = {}
    for engine in engines:
        groups.setdefault(engine.group, []).append(engine)
    pools: list[GroupPool] = []
    for group, members in groups.items():
        prefillers = tuples.get(_best(members, EngineRole.PREFILL))
        decoders = tuples.get(_best(members, EngineRole.DECODE))
        # An engine of both roles counts, whichever it prefers: a move shifts no traffic to or from
        # the group.
        weighed = _usable(members, EngineRole.DECODE) or prefillers
        weight = weights.get(group, sum([e.spec.weight for e in weighed]))
        places = (_places(prefillers, tuples), _places(decoders, tuples))
        pools.append(GroupPool(group, weight, prefillers, decoders, *places, group in free))
    return tuple(pools)


def _places(engines: Sequence[Engine], tuples: EngineTuples) -> Sequence[Place]:
    if not any(engine.ranks for engine in engines):
        return ()
    return tuples.get(place for one in engines for place in one.ranks or (one,))


def _best(members: Sequence[Engine], role: EngineRole) -> Sequence[Engine]:
    """Return the usable engines that prefer the role, or else all usable ones."""
    usable = _usable(members, role)
    preferred = [e for e in usable if e.is_available and e.preferred_role.plays(role)]
    return preferred or usable


def _usable(members: Sequence[Engine], role: EngineRole) -> Sequence[Engine]:
    """Return the available engines that play the role, or else the healthy ones, or else those not
    probed yet. So an open circuit or an overload never leaves a role without any engine."""
    able = [engine for engine in members if engine.role.plays(role)]
    available = [engine for engine in able if engine.is_available]
    return available or [engine for engine in able if engine.health is Health.HEALTHY] or able
