"""One engine: its description by a source, its circuit breaker, its load and its state."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median

from router.fleet.capabilities import EngineCapabilities
from router.fleet.kv_protocol import KvProtocol
from router.http_client.pool import CompleteAnswer, EnginePool
from router.settings import Address

DEFAULT_GROUP = "default"
# Of PrefillRate: the tokens of a sample, and how many samples count.
SAMPLE_TOKENS = 8192
MAX_SAMPLES = 32
MIN_SAMPLES = 8
# An idle engine that computed fewer tokens shows its overhead, not its speed.
MIN_TOKENS = 512
# A pace expires this many seconds after the last leg: an engine that was slow may receive no leg
# that would correct it.
STALE_S = 60.0


class EngineRole(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"

    def plays(self, role: EngineRole) -> bool:
        return self in (role, EngineRole.BOTH)

    @property
    def other(self) -> EngineRole:
        """The role of a request's other leg."""
        return EngineRole.DECODE if self is EngineRole.PREFILL else EngineRole.PREFILL

    @property
    def engine(self) -> str:
        """The name that texts give to an engine of this role."""
        return "engine" if self is EngineRole.BOTH else f"{self.value} engine"


class Intent(StrEnum):
    """The desired state of an engine."""

    SERVING = "serving"
    DRAINING = "draining"


SERVING = Intent.SERVING
PREFILL, DECODE, BOTH = EngineRole
# The roles of the legs that a request may have.
LEGS = (PREFILL, DECODE)


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An engine as a source describes it.

    `models` is empty if the engine itself reports its models. KV moves only within a `group`, which
    gets requests in proportion to the `weight` of its engines. `tls`: connect over TLS. `intent`:
    whether to serve with it, or to drain it. `kv_protocol` and `bootstrap_port`: see
    router.fleet.kv_protocol; None and 0 if the source says nothing about them.
    """

    role: EngineRole
    address: Address
    models: frozenset[str] = frozenset()
    group: str = DEFAULT_GROUP
    weight: float = 1.0
    tls: bool = False
    intent: Intent = Intent.SERVING
    kv_protocol: KvProtocol | None = None
    bootstrap_port: int = 0

    @property
    def name(self) -> str:
        return str(self.address)

    @property
    def pairing(self) -> tuple[object, ...]:
        """The fields that select the engines with which it exchanges KV, and the protocol."""
        return self.role, self.group, self.kv_protocol, self.bootstrap_port

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.address}"


class CircuitState(StrEnum):
    """*Closed* (in use), then *open* (avoided for a while), then *half open* (one trial request),
    then closed again or open for longer."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


# Looking up a member of an enum costs ten times as much as a name, and each leg does it.
CLOSED, OPEN, HALF_OPEN = CircuitState


@dataclass(frozen=True, slots=True)
class BreakerRules:
    """The circuit opens after `consecutive_failures`, or when `failure_rate` of at least
    `min_sample` legs failed. Pauses grow from `first_pause_s` to `max_pause_s`."""

    consecutive_failures: int = 5
    failure_rate: float = 0.5
    min_sample: int = 20
    first_pause_s: float = 1.0
    max_pause_s: float = 30.0


class CircuitBreaker:
    """Avoids an engine that fails. Pure: its caller does the waiting, and reports only failures
    that the engine caused (see router.proxy.retry).

    `trial` is the request that tests a half-open circuit. `times_opened` counts openings;
    `failures` counts failures since the last reset, halved now and then."""

    def __init__(
        self, rules: BreakerRules | None = None, random_share: Callable[[], float] = random.random
    ) -> None:
        self.circuit = CLOSED
        self.trial: object = None
        self.times_opened = 0
        self._rules = rules or BreakerRules()
        self._random = random_share
        self._consecutive = self._openings = self._successes = self.failures = 0

    @property
    def allows_requests(self) -> bool:
        return self.circuit is CLOSED or (self.circuit is HALF_OPEN and self.trial is None)

    def record_success(self) -> bool:
        """Return True if the success has closed the circuit."""
        self._successes += 1
        self._consecutive = 0
        if self.circuit is CLOSED:
            return False
        self.reset()
        return True

    def record_failure(self) -> float | None:
        """Return the seconds to avoid the engine if the failure has opened the circuit."""
        self.failures += 1
        self._consecutive += 1
        if self.circuit is OPEN or (self.circuit is CLOSED and not self._is_too_much()):
            return None
        pause = min(self._rules.first_pause_s * 2.0**self._openings, self._rules.max_pause_s)
        self._openings = min(self._openings + 1, 16)
        self.circuit, self.trial = OPEN, None
        self.times_opened += 1
        # The jitter keeps many routers from returning at the same moment.
        return pause * (0.75 + self._random() / 2)

    def half_open(self) -> None:
        """Allow a trial request, because the pause is over."""
        if self.circuit is OPEN:
            self.circuit, self.trial = HALF_OPEN, None

    def reset(self) -> None:
        """Close the circuit and forget the past."""
        self.circuit, self.trial = CLOSED, None
        self._consecutive = self._openings = self._successes = self.failures = 0

    def _is_too_much(self) -> bool:
        rules = self._rules
        if self._consecutive >= rules.consecutive_failures:
            return True
        total = self._successes + self.failures
        is_too_much = total >= rules.min_sample and self.failures >= rules.failure_rate * total
        while self._successes + self.failures > 2 * rules.min_sample:  # the past fades
            self._successes, self.failures = self._successes // 2, self.failures // 2
        return is_too_much


class Health(StrEnum):
    """The result of the last probes."""

    UNKNOWN = "unknown"
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"


class PrefillRate:
    """The prefill rate of an engine, measured by the prefill legs that it answers. Times are any
    monotonic clock's.

    An engine with legs computes. So the seconds since its last answer (or since the leg was sent,
    if the engine had none before) were spent on the tokens that it computed for the leg. In a sum
    this holds for all queues and batches. Where other routers have legs on the engine, this
    router's share of the queued tokens is its share of the seconds.

    A sample is the pace of SAMPLE_TOKENS tokens or more, and the median of the last samples counts:
    a leg that hung, or an engine that once answered at once, spoils one of them. The few tokens of
    a mostly cached prompt on an idle engine are no sample, because they show only what each leg
    costs.
    """

    __slots__ = ("_paces", "_seconds", "_tokens", "busy_s", "computed", "ended", "token_seconds")

    def __init__(self) -> None:
        self.token_seconds = 0.0
        """Seconds per prompt token; 0 if unknown."""
        self.computed = 0
        """Prompt tokens that the engine has computed for this router."""
        self.busy_s = 0.0
        """Seconds in which it has computed them."""
        self._paces: deque[float] = deque(maxlen=MAX_SAMPLES)
        self._tokens = 0
        self._seconds = 0.0
        self.ended = 0.0
        """The time at which the last leg ended."""

    def pace_at(self, moment: float) -> float:
        """Return `token_seconds`, or 0 if no leg has ended for STALE_S at that moment."""
        return self.token_seconds if moment - self.ended < STALE_S else 0.0

    def note_leg(self, sent: float, ended: float, computed: int | None, share: float = 1.0) -> None:
        """A prefill leg has ended, for which the engine computed this many tokens; None if it has
        failed. `share`: this router's part of the engine's load."""
        if computed is None:
            return  # the seconds belong to the legs that run beside it
        self.computed += computed
        was_idle = sent >= self.ended
        seconds, self.ended = ended - max(sent, self.ended), ended
        self.busy_s += seconds * share
        if was_idle and computed < MIN_TOKENS:
            return
        self._tokens += computed
        self._seconds += seconds * share
        if self._tokens * share * share >= SAMPLE_TOKENS:
            self._paces.append(self._seconds / self._tokens)
            self._tokens, self._seconds = 0, 0.0
            if len(self._paces) >= MIN_SAMPLES:
                self.token_seconds = median(self._paces)


@dataclass(slots=True, eq=False)
class EngineLoad:
    """The load of an engine: this router's own, and in the totals what other routers report."""

    in_flight: int = field(default=0, init=False)
    """Request legs that run on it."""
    tokens_in_flight: int = field(default=0, init=False)
    """Estimated prompt tokens of these legs."""
    total_legs: int = field(default=0, init=False)
    """`in_flight` and the legs that other routers have reported."""
    total_tokens: int = field(default=0, init=False)
    """`tokens_in_flight` and the tokens that other routers have reported."""
    prefill_rate: PrefillRate = field(default_factory=PrefillRate, init=False)
    local_prefill_s: float = field(default=0.0, init=False)
    """Estimated seconds of work for this router's prompts that the engine computes as a decode
    engine, until their first token. At an engine of both roles those of prefill legs count here,
    too, and not in `tokens_in_flight`, so that the load of prompts and of answers can be told
    apart."""
    local_prefill_tokens: int = field(default=0, init=False)
    """The uncached tokens of these prompts."""
    local_prefill_elsewhere: tuple[float, int] = field(default=(0.0, 0), init=False)
    """The seconds and tokens that other routers report of their prompts."""
    offered_prefill_s: float = field(default=0.0, init=False)
    """Seconds of work of all prompts that have ever counted in `local_prefill_s`, on an engine
    without answers."""

    def add_local_prefill(self, seconds: float, tokens: int) -> None:
        """Count a prompt that it computes as a decode engine."""
        self.local_prefill_tokens += tokens
        # Sums of floats drift.
        self.local_prefill_s = max(0.0, self.local_prefill_s + seconds)

    @property
    def total_local_prefill(self) -> tuple[float, int]:
        """Seconds and tokens of all local prefills, with those of other routers."""
        seconds, tokens = self.local_prefill_elsewhere
        return self.local_prefill_s + seconds, self.local_prefill_tokens + tokens

    def note_prefill(self, sent: float, ended: float, computed: int | None) -> None:
        """Learn the engine's speed from a prefill leg that still counts as load; see
        PrefillRate."""
        own = self.tokens_in_flight + self.local_prefill_tokens
        total = self.total_tokens + self.total_local_prefill[1]
        share = own / total if total else 1.0
        self.prefill_rate.note_leg(sent, ended, computed, share)

    def add_load(self, legs: int, tokens: int) -> None:
        """Count legs of this router, with their prompt tokens."""
        self.in_flight += legs
        self.tokens_in_flight += tokens
        self.total_legs += legs
        self.total_tokens += tokens

    def set_load_elsewhere(
        self, legs: int, tokens: int, local_prefill_s: float = 0.0, local_prefill_tokens: int = 0
    ) -> None:
        """Take the load that other routers have reported."""
        self.total_legs = self.in_flight + legs
        self.total_tokens = self.tokens_in_flight + tokens
        self.local_prefill_elsewhere = local_prefill_s, local_prefill_tokens


@dataclass(slots=True, eq=False)
class Engine(EngineLoad):
    """An engine. Only its Fleet changes it, apart from the load, which requests count."""

    spec: EngineSpec
    pool: EnginePool
    """Its connections."""
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)
    health: Health = Health.UNKNOWN
    is_usable: bool = field(init=False)
    """Serving, not unhealthy and not unread: requests may go there if no available engine is
    left."""
    is_available: bool = field(init=False)
    """Healthy, serving, and neither cold, cooling down nor behind an open circuit."""
    is_cold: bool = False
    """New, while the router warms it up: see router.proxy.warmup."""
    is_cooling: bool = False
    """Overloaded, by its own answer (Retry-After)."""
    failed_recently: bool = False
    """Other engines are preferred for a second, since an engine that fails fast looks idle."""
    reason: str = "not probed yet"
    """Why the engine is not healthy."""
    health_since: float = field(default_factory=time.time)
    """Unix time when `health` became what it is."""
    circuit_reason: str = ""
    """The failure that opened its circuit last."""
    failed_probes: int = 0
    """Consecutive failed probes."""
    kv_leases: int = 0
    """Requests whose KV it holds until a decode engine has read it."""
    kv_lease_tokens: int = 0
    """Estimated prompt tokens of these requests."""
    admitted: int = 0
    """Requests that hold a slot here (router.proxy.admission), with or without a running leg."""
    admitted_tokens: int = 0
    """Estimated prompt tokens that it computes for them."""
    capabilities: EngineCapabilities = field(default_factory=EngineCapabilities)
    ranks: Sequence[EngineRank] | None = None
    """The data-parallel ranks of its process; empty if it has only one, None if unknown."""
    models: frozenset[str] | None = None
    """None if unknown: the engine then may serve any model, unless it `is_unread`."""
    base_models: tuple[str, ...] = ()
    """The names of the model that a request without a model's name gets; empty if the engine's
    models are unknown, or if it serves several beside LoRA adapters."""
    models_problem: str = "/v1/models was not read yet"
    """Why its models are unknown."""
    is_unread: bool = False
    """Its models are unknown, but those of other engines of its group are known: it gets no legs,
    because it may serve another model than they do."""
    adapters: frozenset[str] = frozenset()
    """The models that the engine reports as LoRA adapters."""
    context_lengths: Mapping[str, int] = field(default_factory=dict)
    """Tokens of prompt and answer together, by model, as far as the engine reports them."""
    lost_at: float = 0.0
    """Unix time when it last became unhealthy: KV that it held before may be lost."""
    leg_lost_at: float = 0.0
    """Unix time when a leg last failed in a way that may be a crash of the engine."""
    group: str = ""
    """KV moves only within a group, which the source or else the engine itself names."""
    compatibility: str = ""
    """The last known EngineCapabilities.compatibility. It outlives a failure, so that a failed
    engine does not change the groups of the others."""
    credential: str = ""
    """The Authorization header for the router's own requests."""
    preferred_role: EngineRole = field(init=False)
    """The role of its new legs, as long as there are others for the other role; see
    `Fleet.prefer_roles`. It differs from `role` only for engines of both roles."""
    role_reason: str = ""
    """Why it prefers that role; empty if there is no choice."""
    name: str = field(init=False)
    role: EngineRole = field(init=False)
    intent: Intent = field(init=False)

    def __post_init__(self) -> None:
        self.name = self.spec.name
        self.take_models(self.spec.models or None)
        self.preferred_role = self.spec.role
        self.update_spec(self.spec)

    @property
    def cache_tokens(self) -> int:
        """Tokens that its KV cache in the accelerator holds; 0 if unknown."""
        return self.capabilities.cache_tokens

    @property
    def kv_protocol(self) -> KvProtocol:
        return self.capabilities.kv_peer.protocol

    @property
    def prefill_tokens_per_second(self) -> float:
        """The measured prefill rate of all data-parallel ranks together; 0 if unknown."""
        places: Sequence[EngineLoad] = self.ranks or (self,)
        paces = [place.prefill_rate.token_seconds for place in places]
        return sum(1 / pace for pace in paces if pace)

    def update_spec(self, spec: EngineSpec) -> None:
        """Replace the description of the engine at this address."""
        if spec.models != self.spec.models:
            self.take_models(spec.models or None)  # what it reported itself may be outdated
        if spec.role is not self.spec.role:
            self.preferred_role, self.role_reason = spec.role, ""
        self.spec, self.role, self.group, self.intent = spec, spec.role, spec.group, spec.intent
        self.update_availability()

    def take_models(
        self,
        models: frozenset[str] | None,
        context_lengths: Mapping[str, int] | None = None,
        adapters: frozenset[str] = frozenset(),
        base_models: tuple[str, ...] = (),
    ) -> bool:
        """Replace what is known of its models. Return False if all of that was known."""
        own = (models or frozenset()) - adapters
        base_models = base_models or (tuple(own) if len(own) == 1 else ())
        taken = (models, context_lengths or {}, adapters, base_models)
        if taken == (self.models, self.context_lengths, self.adapters, self.base_models):
            return False
        self.models, self.context_lengths, self.adapters, self.base_models = taken
        return True

    async def get(
        self, path: str, deadline: float, limit: int, credential: str = ""
    ) -> CompleteAnswer:
        """Return the answer to a GET request, of at most `limit` bytes. `credential` is the
        client's, for a router without its own. Raises UpstreamError."""
        message = self.get_message(path, credential)
        return await self.pool.fetch(message, deadline, limit)

    def get_message(self, path: str, credential: str = "") -> bytes:
        """Return a GET request; see `get`."""
        return _get_message(path, self.name, self.credential or credential)

    async def get_at_port(
        self, port: int, path: str, deadline: float, limit: int
    ) -> CompleteAnswer:
        """Return the answer of another server on the engine's host, which uses no TLS and gets no
        credential. Raises UpstreamError."""
        pool = self.pool.at_port(port)
        try:
            message = _get_message(path, str(Address(pool.host, port)), "")
            return await pool.fetch(message, deadline, limit)
        finally:
            pool.close()

    @property
    def is_idle(self) -> bool:
        """No request waits for it, so it can be removed if it gets no new ones."""
        return self.in_flight == 0 and self.kv_leases == 0

    @property
    def may_lend(self) -> bool:
        """It may lend prefixes of its cache. An engine that drains still may."""
        return self.capabilities.lends and (self.is_available or self.is_draining)

    @property
    def is_draining(self) -> bool:
        """It drains, and its streams still run."""
        return self.intent is Intent.DRAINING and self.health is Health.HEALTHY

    def update_availability(self) -> None:
        """Recompute `is_usable` and `is_available`: to be called after each change of the state."""
        self.is_usable = (
            self.health is not Health.UNHEALTHY
            and self.intent is Intent.SERVING
            and not self.is_unread
        )
        self.is_available = (
            self.is_usable
            and self.health is Health.HEALTHY
            and not self.is_cooling
            and not self.is_cold
            and self.breaker.allows_requests
        )


@dataclass(slots=True, eq=False)
class EngineRank(EngineLoad):
    """A data-parallel rank of an engine, with a queue and a prefix cache of its own. Its load is a
    part of the engine's, which is counted apart."""

    engine: Engine
    number: int
    """The rank's number in engine ids. A server's first rank may have any number."""
    header: int
    """The value of the header X-data-parallel-rank that selects this rank."""
    cache_tokens: int
    """Tokens that its KV cache in the accelerator holds; 0 if unknown."""
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = f"{self.engine.name}#{self.header}"

    def add_load(self, legs: int, tokens: int) -> None:
        """Count legs as load of the rank and of its engine."""
        EngineLoad.add_load(self, legs, tokens)
        self.engine.add_load(legs, tokens)

    @property
    def role(self) -> EngineRole:
        return self.engine.role

    @property
    def preferred_role(self) -> EngineRole:
        return self.engine.preferred_role

    @property
    def failed_recently(self) -> bool:
        return self.engine.failed_recently


Place = Engine | EngineRank
"""The target of a request leg: a data-parallel rank, or an engine whose rank the router does not
choose."""


def engine_of(place: Place) -> Engine:
    return place.engine if isinstance(place, EngineRank) else place


def _get_message(path: str, host: str, credential: str) -> bytes:
    lines = [f"GET {path} HTTP/1.1", f"host: {host}", "accept-encoding: identity"]
    if credential:
        lines.append(f"authorization: {credential}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1")
