"""One engine: its description by a source, its capabilities, its circuit breaker and its state."""

from __future__ import annotations

import math
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec
from msgspec import Struct

from router.fleet.kv_facts import KvFacts, cache_tokens_of_ranks, parse_kv_facts, rank_number
from router.fleet.prefill_rate import PrefillRate
from router.fleet.step_model import (
    StepModel,
    max_step_tokens_of_ranks,
    step_limit_of_ranks,
    step_model_of_ranks,
)
from router.http_client.pool import CompleteAnswer, EnginePool
from router.settings import Address

DEFAULT_GROUP = "default"
# After this many answers without evidence of a capability it counts as missing.
MAX_ANSWERS_WITHOUT_EVIDENCE = 3
DP_RANK_MARK = "_dp"
DP_RANK = re.compile(DP_RANK_MARK + r"(\d{1,6})$")


class EngineRole(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"

    def plays(self, role: EngineRole) -> bool:
        return self in (role, EngineRole.BOTH)

    @property
    def engine(self) -> str:
        """The name that texts give to an engine of this role."""
        return "engine" if self is EngineRole.BOTH else f"{self.value} engine"


class Intent(StrEnum):
    """The desired state of an engine."""

    SERVING = "serving"
    DRAINING = "draining"


PREFILL, DECODE, BOTH = EngineRole
# The roles of the legs that a request may have.
LEGS = (PREFILL, DECODE)


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An engine as a source describes it.

    `models` is empty if the engine itself reports its models. KV moves only within a `group`, which
    gets requests in proportion to the `weight` of its engines. `tls`: connect over TLS. `intent`:
    whether to serve with it, or to drain it.
    """

    role: EngineRole
    address: Address
    models: frozenset[str] = frozenset()
    group: str = DEFAULT_GROUP
    weight: float = 1.0
    tls: bool = False
    intent: Intent = Intent.SERVING

    @property
    def name(self) -> str:
        return str(self.address)

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.address}"


class RankEndpoint(Struct, frozen=True):
    """Where a rank of a prefill engine takes registrations for push; fields of
    kv_transfer_params."""

    remote_engine_id: str
    remote_host: str
    remote_port: int
    tp_size: int = 1
    pp_size: int = 1


def strip_dp_rank(engine_id: str) -> str:
    """Return the id without the data-parallel rank that vLLM appends to it."""
    return DP_RANK.sub("", engine_id) if DP_RANK_MARK in engine_id else engine_id


def dp_rank_of(engine_id: str) -> int | None:
    """Return the data-parallel rank; None for an engine without several ranks."""
    found = DP_RANK.search(engine_id)
    return None if found is None else int(found[1])


@dataclass(slots=True)
class EngineCapabilities:
    """The capabilities of one engine process. The fleet replaces them when the engine is lost,
    because another process may return at its address.

    None means unknown. The engine's identity page takes precedence over evidence from answers.
    """

    engine_id: str | None = None
    """The id in its kv_transfer_params, without the data-parallel rank."""
    verifies_prefix: bool = False
    """It proves which prefix of a prompt its KV covers."""
    streams_kv_params: bool | None = None
    """Its streams end with kv_transfer_params if the request asks for them."""
    supports_threshold: bool | None = None
    """It knows `cache_hit_threshold` and rejects a request that would compute more."""
    supports_release: bool = False
    """It has POST /disagg/release, which frees KV that it holds for another engine."""
    is_identity_known: bool = False
    """It has answered the request for its identity page, maybe with 404."""
    lists_capabilities: bool = False
    """Its identity page lists capabilities."""
    has_turns: bool = False
    """It retains an answer's KV if asked to, pulls retained KV, and verifies what it pulls: by its
    own page."""
    lacks_turns: bool = False
    """It neither retains an answer's KV nor pulls another engine's: by its own page."""
    is_lack_logged: bool = False
    """`lacks_turns` was logged."""
    compatibility: str = ""
    """Engines with equal values can read each other's KV: a hash of the model, the KV layout and
    the connector's version, plus the version of our extension if the engine has it. Empty if
    unknown, or if the engine's ranks differ."""
    supports_push: bool = False
    supports_hand_over: bool = False
    """It can hand over a first token that it sampled."""
    supports_resume: bool = False
    """It can continue an answer that another engine began."""
    reports_token_ids: bool = False
    """Its streams carry the ids of their tokens."""
    returns_preempted: bool = False
    """It returns an answer that it would have to preempt, for another engine to continue."""
    shares_kv_loads: bool = False
    """It loads remote KV once for several answers to one prompt."""
    reports_load_failures: bool = False
    """It reports the source and the reason of a failed KV load."""
    render_hashes: Mapping[str, str] = field(default_factory=dict)
    """Hashes of what engines must share to continue each other's answers, by its name."""
    rank_endpoints: Mapping[int, RankEndpoint] = field(default_factory=dict)
    """By data-parallel rank."""
    ranks: Sequence[EngineRank] | None = None
    """Its data-parallel ranks; empty if it has only one."""
    kv: KvFacts = field(default_factory=KvFacts)
    """The facts that are compared with those of other engines."""
    cache_tokens: int = 0
    """Tokens that its KV cache in the accelerator holds; 0 if unknown."""
    step_model: StepModel | None = None
    """The time of its steps, None if unknown."""
    max_step_tokens: int = 0
    """The most prompt tokens that one step computes beside answers; 0 if unknown."""
    step_limit: float = math.inf
    """The longest step in seconds that the engine allows beside answers."""
    trial_prefills: int = 0
    """Prompts that the router has sent as trials, with which the engine measures its steps. Each
    page without a step model allows one more."""
    _streams_without_params: int = 0
    _answers_without_share: int = 0

    def note_engine_id(self, params: dict[str, object]) -> None:
        """Take the engine's id from the kv_transfer_params of its answer."""
        engine_id = params.get("remote_engine_id")
        self.engine_id = strip_dp_rank(engine_id) if isinstance(engine_id, str) else None

    def note_stream_params(self, has_params: bool) -> None:
        """A stream that was to end with kv_transfer_params has ended, with them or without."""
        if has_params:
            self.streams_kv_params, self._streams_without_params = True, 0
        elif self.streams_kv_params is None:
            self._streams_without_params += 1
            if self._streams_without_params >= MAX_ANSWERS_WITHOUT_EVIDENCE:
                self.streams_kv_params = False

    def note_threshold_rejected(self) -> None:
        """The engine rejected a request because of its cache_hit_threshold."""
        self.supports_threshold = True

    def note_threshold_accepted(self, threshold: float, cached_share: float | None) -> bool:
        """The engine accepted a request with this threshold. `cached_share` is the cached part of
        the prompt, None if the answer did not report it.

        An engine that computed more than the threshold allows does not support it. Return True if
        the engine is only assumed not to, because several answers did not report their share; this
        is wrong if everything was cached.
        """
        if self.supports_threshold is not None:
            return False
        if cached_share is not None:
            if cached_share < threshold:
                self.supports_threshold = False
            return False
        self._answers_without_share += 1
        if self._answers_without_share < MAX_ANSWERS_WITHOUT_EVIDENCE:
            return False
        self.supports_threshold = False
        return True

    def note_identity(self, identity: dict[str, object]) -> None:
        """Apply an identity page, whose content may be anything."""
        self.kv = parse_kv_facts(identity)
        names = identity.get("capabilities")
        if isinstance(names, list | dict):
            self.lists_capabilities = True
            self.supports_threshold = "cache_hit_threshold" in names
            self.supports_release = "release" in names
            # Only our engines name prefix_proof; pages of others may not know the name "turns".
            self.has_turns = "prefix_proof" in names and "turns" in names
            self.lacks_turns = "prefix_proof" in names and "turns" not in names
            self.verifies_prefix = self.verifies_prefix or "prefix_proof" in names
            self.supports_hand_over = "hand_over" in names
            self.supports_resume = "begun" in names
            self.reports_token_ids = "tell_token_ids" in names
            self.shares_kv_loads = "shared_loads" in names
            self.returns_preempted = "hand_back" in names
            self.reports_load_failures = "load_failures" in names
            self.render_hashes = _texts_in(identity.get("renders"))
        modes, ranks = identity.get("transfer_modes"), identity.get("ranks")
        if isinstance(modes, list):
            self.supports_push = "push" in modes
        if isinstance(ranks, list):
            self.cache_tokens = cache_tokens_of_ranks(ranks)
            self.step_model = step_model_of_ranks(ranks)
            self.trial_prefills = max(0, self.trial_prefills - 1)
            self.max_step_tokens = max_step_tokens_of_ranks(ranks)
            self.step_limit = step_limit_of_ranks(ranks)
            self.compatibility = _compatibility_of(ranks, identity.get("versions"))
            known = {rank_number(rank): rank_endpoint_in(rank) for rank in ranks}
            self.rank_endpoints = {rank: at for rank, at in known.items() if at is not None}

    def header_value(self, number: int) -> int:
        """Return what the header X-data-parallel-rank calls the rank with this number: vLLM counts
        the ranks behind one server from 0."""
        return number - min(self.rank_endpoints, default=0)

    def note_push_failed(self) -> None:
        """A push failed: another prefill engine may be at the address by now."""
        self.is_identity_known, self.rank_endpoints = False, {}

    def note_kv_params(self, params: Mapping[str, object]) -> None:
        """Take the kv_transfer_params of a prefill engine's answer, which are newer than its
        identity page."""
        mode, at = params.get("transfer_mode"), rank_endpoint_in(params)
        if isinstance(mode, str):
            self.supports_push = mode == "push"
        if at is not None:
            rank = dp_rank_of(at.remote_engine_id) or 0
            self.rank_endpoints = {**self.rank_endpoints, rank: at}


def rank_endpoint_in(params: object) -> RankEndpoint | None:
    """Return the endpoint if `params` has all of its fields with the right types."""
    try:
        return msgspec.convert(params, RankEndpoint)
    except msgspec.ValidationError:
        return None


def _texts_in(given: object) -> dict[str, str]:
    if not isinstance(given, Mapping):
        return {}
    return {name: text for name, text in given.items() if isinstance(text, str)}


def _compatibility_of(ranks: list[object], versions: object) -> str:
    """Engines with different versions of our extension reject each other."""
    hashes = {rank.get("compatibility_hash") if isinstance(rank, dict) else None for rank in ranks}
    extension = _texts_in(versions).get("extension")
    match list(hashes):
        case [str() as one] if one:
            return one if extension is None else f"{one} extension {extension}"
    return ""


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
    engine, until their first token."""
    local_prefill_tokens: int = field(default=0, init=False)
    """The uncached tokens of these prompts."""
    local_prefill_elsewhere: tuple[float, int] = field(default=(0.0, 0), init=False)
    """The seconds and tokens that other routers report of their prompts."""

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
        total = self.total_tokens
        share = self.tokens_in_flight / total if total else 1.0
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
    """Serving and not unhealthy: requests may go there if no available engine is left."""
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
    admitted: int = 0
    """Requests that hold a slot here (router.proxy.admission), with or without a running leg."""
    admitted_tokens: int = 0
    """Estimated prompt tokens that it computes for them."""
    capabilities: EngineCapabilities = field(default_factory=EngineCapabilities)
    models: frozenset[str] | None = None
    """None if unknown: the engine then counts as serving every model."""
    adapters: frozenset[str] = frozenset()
    """The models that the engine reports as LoRA adapters."""
    context_lengths: Mapping[str, int] = field(default_factory=dict)
    """Tokens of prompt and answer together, by model, as far as the engine reports them."""
    lost_at: float = 0.0
    """Unix time when it last became unhealthy: KV that it held before may be lost."""
    group: str = ""
    """KV moves only within a group, which the source or else the engine itself names."""
    compatibility: str = ""
    """The last known EngineCapabilities.compatibility. It outlives a failure, so that a failed
    engine does not change the groups of the others."""
    credential: str = ""
    """The Authorization header for the router's own requests."""
    name: str = field(init=False)
    role: EngineRole = field(init=False)
    intent: Intent = field(init=False)

    def __post_init__(self) -> None:
        self.name, self.models = self.spec.name, self.spec.models or None
        self.update_spec(self.spec)

    @property
    def cache_tokens(self) -> int:
        """Tokens that its KV cache in the accelerator holds; 0 if unknown."""
        return self.capabilities.cache_tokens

    @property
    def prefill_tokens_per_second(self) -> float:
        """The measured prefill rate of all data-parallel ranks together; 0 if unknown."""
        places: Sequence[EngineLoad] = self.capabilities.ranks or (self,)
        paces = [place.prefill_rate.token_seconds for place in places]
        return sum(1 / pace for pace in paces if pace)

    def update_spec(self, spec: EngineSpec) -> None:
        """Replace the description of the engine at this address."""
        if spec.models != self.spec.models:
            self.models = spec.models or None  # models that it reported itself may be outdated
        self.spec, self.role, self.group, self.intent = spec, spec.role, spec.group, spec.intent
        self.update_availability()

    async def get(
        self, path: str, deadline: float, limit: int, credential: str = ""
    ) -> CompleteAnswer:
        """Return the answer to a GET request, of at most `limit` bytes. `credential` is the
        client's, for a router without its own. Raises UpstreamError."""
        lines = [f"GET {path} HTTP/1.1", f"host: {self.name}"]
        if credential := self.credential or credential:
            lines.append(f"authorization: {credential}")
        message = "\r\n".join([*lines, "", ""]).encode("latin-1")
        return await self.pool.fetch(message, deadline, limit)

    @property
    def is_idle(self) -> bool:
        """No request waits for it, so it can be removed if it gets no new ones."""
        return self.in_flight == 0 and self.kv_leases == 0

    def update_availability(self) -> None:
        """Recompute `is_usable` and `is_available`: to be called after each change of the state."""
        self.is_usable = self.health is not Health.UNHEALTHY and self.intent is Intent.SERVING
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
    def failed_recently(self) -> bool:
        return self.engine.failed_recently


Place = Engine | EngineRank
"""The target of a request leg: a data-parallel rank, or an engine whose rank the router does not
choose."""


def engine_of(place: Place) -> Engine:
    return place.engine if isinstance(place, EngineRank) else place
