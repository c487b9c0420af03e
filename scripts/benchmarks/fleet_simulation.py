"""A fleet of simulated engines, to compare routing policies: nothing is computed, time passes.

Figures of engines are those of a mid-sized model on one accelerator. Jobs arrive, the router's own
policies choose engines, and all follows from a seed, so that a run can be repeated.
"""

from __future__ import annotations

import heapq
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from time import perf_counter_ns
from typing import Generic, TypeVar

from router.fleet.engine import EngineLoad
from router.routing.chunk_index import ChunkIndex
from router.routing.peers import PeerRouters
from router.routing.policy import LoadBound, Policy, RoutingQuery, in_turn
from router.routing.prompt_chunks import MAX_CHUNKS, TOKENS_PER_CHUNK
from router.routing.route import POLICIES, PREFILL_POLICIES
from scripts.benchmarks.traces import SHAPES, Arrival, Job

# Engines.

PrefillLeg = tuple[Job, RoutingQuery, "Router", "Seen[Prefiller]", "Seen[Decoder]", int]
"""The job, its query, its router and engines, and the tokens that it counts for as load."""
DecodeLeg = tuple[Job, "Seen[Decoder]"]

CACHE_TOKENS = 500_000
MAX_DECODING = 256
BATCH_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Speed:
    """The times of an engine: `batch` and `step` are fixed seconds, `each` is added to a step for
    each sequence."""

    prefill_tokens_per_s: float
    batch: float
    step: float
    each: float
    transfer_tokens_per_s: float = 400_000.0


SPEEDS = {
    # A mid-sized model on one accelerator, round figures.
    "generic": Speed(20_000.0, 0.015, 0.008, 0.00006),
    # Qwen3-32B, tensor parallel over two H200, vLLM 0.24: composed from the operators that
    # aiconfigurator 0.12 lists as measured.
    "qwen3-32b-h200": Speed(16_200.0, 0.015, 0.0106, 0.000385),
}


class PrefixCache:
    """The most recently used chunks (LRU)."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self._most = tokens // TOKENS_PER_CHUNK
        self._chunks: OrderedDict[int, None] = OrderedDict()

    def held(self, chunks: Sequence[int]) -> int:
        """Return the tokens of the longest prefix that is cached."""
        for depth, chunk in enumerate(chunks):
            if chunk not in self._chunks:
                return depth * TOKENS_PER_CHUNK
        return len(chunks) * TOKENS_PER_CHUNK

    def add(self, chunks: Sequence[int]) -> None:
        """Evict ends of prompts before their beginnings, which other prompts may share."""
        kept = self._chunks
        for chunk in reversed(chunks):
            if chunk in kept:
                kept.move_to_end(chunk)
            else:
                kept[chunk] = None
        while len(kept) > self._most:
            kept.popitem(last=False)


@dataclass(slots=True, eq=False)
class Engine:
    """`busy` is the time that it computed; `cached` of the `asked` tokens were in its cache."""

    name: str
    cache: PrefixCache
    speed: Speed
    busy: float = 0.0
    asked: int = 0
    cached: int = 0

    def look_up(self, job: Job) -> int:
        """Return how many tokens are cached; the last one is always computed."""
        cached = min(self.cache.held(job.chunks), job.tokens - 1)
        self.asked += job.tokens
        self.cached += cached
        return cached


@dataclass(slots=True, eq=False)
class Prefiller(Engine):
    """`batch` is what it computes now."""

    waiting: deque[PrefillLeg] = field(default_factory=deque)
    batch: list[tuple[PrefillLeg, int]] = field(default_factory=list)

    def start(self) -> float:
        """Begin a batch of at least one job, and return its seconds."""
        tokens = 0
        while self.waiting:
            job = self.waiting[0][0]
            if self.batch and tokens + job.tokens - self.cache.held(job.chunks) > BATCH_TOKENS:
                break
            cached = self.look_up(job)
            tokens += job.tokens - cached
            self.batch.append((self.waiting.popleft(), cached))
        seconds = self.speed.batch + tokens / self.speed.prefill_tokens_per_s
        self.busy += seconds
        return seconds

    def finish(self) -> list[tuple[PrefillLeg, int]]:
        """End the batch; return its legs, each with the tokens that were cached."""
        done, self.batch = self.batch, []
        for (job, _, _, prefiller, _, tokens), _ in done:
            self.cache.add(job.chunks)
            prefiller.add_load(-1, -tokens)
        return done


@dataclass(slots=True, eq=False)
class Decoder(Engine):
    """An engine whose running jobs share its steps; a job ends after a certain number of them.

    A prefill of its own stops the steps until it is done.
    """

    waiting: deque[DecodeLeg] = field(default_factory=deque)
    running: list[tuple[float, int, DecodeLeg]] = field(default_factory=list)
    steps: float = 0.0
    at: float = 0.0
    stopped_until: float = 0.0
    plan: int = 0
    """The number of the latest planned end; ends that were planned before are void."""
    numbers: count[int] = field(default_factory=count)

    def advance(self, now: float) -> None:
        start = max(self.at, min(now, self.stopped_until))
        if self.running and now > start:
            self.steps += (now - start) / self.step_seconds()
            self.busy += now - start
        self.at = max(self.at, now)

    def step_seconds(self) -> float:
        return self.speed.step + self.speed.each * len(self.running)

    def prefill(self, job: Job, now: float) -> tuple[float, int]:
        """Prefill a job here; return when that is done, and how many tokens were cached."""
        self.advance(now)
        cached = self.look_up(job)
        speed = self.speed
        seconds = speed.batch + (job.tokens - cached) / speed.prefill_tokens_per_s
        self.stopped_until = max(now, self.stopped_until) + seconds
        self.busy += seconds
        return self.stopped_until, cached

    def admit(self, now: float) -> None:
        """Start waiting jobs while there is room; `advance` has been called for `now`."""
        while self.waiting and len(self.running) < MAX_DECODING:
            job, seen = self.waiting.popleft()
            end = self.steps + job.output
            heapq.heappush(self.running, (end, next(self.numbers), (job, seen)))
            job.first_token = max(now, self.stopped_until) + self.step_seconds()
            self.cache.add(job.chunks)

    def ended(self) -> list[Job]:
        done: list[Job] = []
        while self.running and self.running[0][0] <= self.steps + 1e-6:
            job, seen = heapq.heappop(self.running)[2]
            self.cache.add(job.after)
            seen.add_load(-1, -job.tokens)
            done.append(job)
        return done

    def next_end(self) -> float | None:
        if not self.running:
            return None
        left = max(0.0, self.running[0][0] - self.steps)
        return max(self.at, self.stopped_until) + left * self.step_seconds()


# One run.

E = TypeVar("E", bound=Engine)


@dataclass(slots=True, eq=False)
class Seen(EngineLoad, Generic[E]):
    """An engine as a router sees it."""

    engine: E
    name: str

    @property
    def cache_tokens(self) -> int:
        return self.engine.cache.tokens


class Router:
    """The policies of one router, and the engines as it sees them."""

    def __init__(
        self, setup: Setup, prefillers: Sequence[Prefiller], decoders: Sequence[Decoder]
    ) -> None:
        index = ChunkIndex()
        prefill, decode = PREFILL_POLICIES[setup.prefill_policy], POLICIES[setup.decode_policy]
        self.prefill_policy = prefill(setup.prefill_bound, index)
        self.decode_policy = decode(setup.decode_bound, index)
        self.prefillers = tuple(Seen(one, one.name) for one in prefillers)
        self.decoders = tuple(Seen(one, one.name) for one in decoders)
        self.peers = PeerRouters(index)

    def report(self) -> bytes:
        return self.peers.report((*self.prefillers, *self.decoders))


PREFILL_BOUND = LoadBound(1.5, 2)
DECODE_BOUND = LoadBound(1.5, 8)
TRANSFER_S = 0.003
LOOK_S = 0.008
"""Until a decoder's scheduler has looked into its cache: one step."""
WARM_UP_SHARE = 0.2
"""Share of the requests that is not in the figures."""
SAMPLED_ARRIVALS = 2000
# Bursty arrivals: mean seconds of a quiet and of a busy time, and their rates beside the mean.
QUIET, QUIET_RATE = 20.0, 0.5
BURST, BURST_RATE = 5.0, 3.0


@dataclass(frozen=True, slots=True)
class Setup:
    """`load` is of what the prefillers could do if nothing was ever cached. `arrivals` are a
    published trace, instead of `requests` of a shape."""

    shape: str
    prefillers: int
    decoders: int
    requests: int
    prefill_policy: str
    decode_policy: str
    load: float = 0.9
    bursty: bool = False
    min_remote_prefill_tokens: int = 0
    late: bool = False
    """Decode legs count as load once they start, not once their engine is chosen."""
    hedged: int = 0
    """Decoders that a hedged request asks whether they hold `threshold` of its prompt."""
    threshold: float = 0.5
    cache_tokens: int = CACHE_TOKENS
    prefill_bound: LoadBound = PREFILL_BOUND
    decode_bound: LoadBound = DECODE_BOUND
    seed: int = 0
    speed: Speed = SPEEDS["generic"]
    routers: int = 1
    """Each request goes to one by chance."""
    share_interval: float = 0.0
    """Seconds between two reports of a router to the others; 0: they share nothing."""
    arrivals: Sequence[Arrival] = ()


@dataclass(slots=True)
class Outcome:
    """Seconds; `costs` (microseconds of a choice) are the only thing that doesn't replay."""

    prefillers: Sequence[Engine]
    decoders: Sequence[Engine]
    first_tokens: list[float] = field(default_factory=list)
    per_token: list[float] = field(default_factory=list)
    alone: int = 0
    """Jobs that a decode engine did alone."""
    extra: int = 0
    """Hedged legs that answered nothing."""
    prefill_costs: list[float] = field(default_factory=list)
    decode_costs: list[float] = field(default_factory=list)


class Simulation:
    def __init__(self, setup: Setup) -> None:
        self.setup, self._speed = setup, setup.speed
        cache = setup.cache_tokens
        self.prefillers = tuple(
            Prefiller(f"10.1.{number // 256}.{number % 256}:8000", PrefixCache(cache), self._speed)
            for number in range(setup.prefillers)
        )
        self.decoders = tuple(
            Decoder(f"10.2.{number // 256}.{number % 256}:8000", PrefixCache(cache), self._speed)
            for number in range(setup.decoders)
        )
        self.routers = [Router(setup, self.prefillers, self.decoders) for _ in range(setup.routers)]
        self.outcome = Outcome(self.prefillers, self.decoders)
        self._trace = SHAPES[setup.shape](setup.seed, setup.prefillers)
        self._random = random.Random(setup.seed + 1)
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._numbers = count()
        self._now = 0.0
        self._left = len(setup.arrivals) or setup.requests
        self._counted_from, self._total = WARM_UP_SHARE * self._left, self._left
        self._done = 0
        self._turn = 0
        self._phase_ends, self._rate_now = 0.0, 1.0
        tokens_a_second = setup.load * setup.prefillers * setup.speed.prefill_tokens_per_s
        self._rate = tokens_a_second / _tokens_per_arrival(setup.shape, setup.seed)

    def run(self) -> Outcome:
        for at, job in self.setup.arrivals:
            self._at(at, self._ask, job)
        if not self.setup.arrivals:
            self._at(0.0, self._arrive)
        for number, router in enumerate(self.routers if self.setup.share_interval else ()):
            self._at(number / len(self.routers) * self.setup.share_interval, self._share, router)
        events = self._events
        while events:
            self._now, _, act, arguments = heapq.heappop(events)
            act(*arguments)
        return self.outcome

    def _share(self, router: Router) -> None:
        report = router.report()
        for other in self.routers:
            other.peers.take(report, self._now)
            other.peers.update(self._now)
        if self._done < self._total:
            self._at(self._now + self.setup.share_interval, self._share, router)

    def _at(self, when: float, act: Callable[..., None], *arguments: object) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), act, arguments))

    def _arrive(self) -> None:
        if self._left > 0:
            self._ask(self._trace.arrive())
            self._at(self._now + self._pause(), self._arrive)

    def _pause(self) -> float:
        if self.setup.bursty and self._now >= self._phase_ends:
            busy = self._rate_now == QUIET_RATE
            self._rate_now = BURST_RATE if busy else QUIET_RATE
            length = self._random.expovariate(1 / (BURST if busy else QUIET))
            self._phase_ends = self._now + length
        return self._random.expovariate(self._rate * self._rate_now)

    def _ask(self, job: Job) -> None:
        if self._left <= 0:
            return
        self._left -= 1
        self._turn += 1
        job.arrived = self._now
        routers = self.routers
        router = routers[0] if len(routers) == 1 else self._random.choice(routers)
        ask = RoutingQuery(self._turn, job.session, job.chunks[:MAX_CHUNKS], job.tokens)
        policy, costs = router.decode_policy, self.outcome.decode_costs
        decoder = self._choose(policy, router.decoders, ask, costs)
        least = self.setup.min_remote_prefill_tokens
        holder = self._hedge(job, ask, router) if self.setup.hedged else None
        if holder is not None:
            self._at(self._now + LOOK_S, self._stay, job, ask, router, holder)
        elif self.setup.hedged:
            self._at(self._now + LOOK_S, self._send, job, ask, router, decoder)
        elif least and job.tokens - policy.expected_tokens(decoder.name, ask) < least:
            self._stay(job, ask, router, decoder)
        else:
            self._send(job, ask, router, decoder)

    def _hedge(self, job: Job, ask: RoutingQuery, router: Router) -> Seen[Decoder] | None:
        """Return the decoder that accepts first: it lacks least of the prompt."""
        setup = self.setup
        first = router.decode_policy.order(router.decoders, ask)
        others = [one for one in in_turn(router.decoders, self._turn) if one not in first]
        asked = [*first, *others][: setup.hedged]
        held = {one: one.engine.cache.held(job.chunks) for one in asked}
        able = [one for one in asked if held[one] >= setup.threshold * job.tokens]
        self.outcome.extra += len(asked) - bool(able)
        return min(able, key=lambda one: (-held[one], one.engine.stopped_until), default=None)

    def _choose(
        self, policy: Policy, engines: Sequence[Seen[E]], ask: RoutingQuery, costs: list[float]
    ) -> Seen[E]:
        began = perf_counter_ns()
        chosen = policy.order(engines, ask)[0]
        costs.append((perf_counter_ns() - began) / 1000)
        return chosen

    def _stay(self, job: Job, ask: RoutingQuery, router: Router, decoder: Seen[Decoder]) -> None:
        self.outcome.alone += 1
        router.decode_policy.note_sent(decoder.name, ask)
        decoder.add_load(1, job.tokens)
        done, cached = decoder.engine.prefill(job, self._now)
        self._plan(decoder.engine)
        self._at(done, self._computed, job, ask, router, decoder, cached)

    def _send(self, job: Job, ask: RoutingQuery, router: Router, decoder: Seen[Decoder]) -> None:
        policy, costs = router.prefill_policy, self.outcome.prefill_costs
        prefiller = self._choose(policy, router.prefillers, ask, costs)
        tokens = job.tokens - policy.expected_tokens(prefiller.name, ask)
        policy.note_sent(prefiller.name, ask)
        router.decode_policy.note_sent(decoder.name, ask)
        prefiller.add_load(1, tokens)
        if not self.setup.late:
            decoder.add_load(1, job.tokens)
        engine = prefiller.engine
        engine.waiting.append((job, ask, router, prefiller, decoder, tokens))
        if not engine.batch:
            self._at(self._now + engine.start(), self._prefilled, engine)

    def _prefilled(self, engine: Prefiller) -> None:
        for (job, ask, router, prefiller, decoder, _), cached in engine.finish():
            router.prefill_policy.note_cached(prefiller.name, ask, cached)
            if self.setup.late:
                decoder.add_load(1, job.tokens)
            missing = job.tokens - decoder.engine.look_up(job)
            moved = TRANSFER_S + missing / self._speed.transfer_tokens_per_s
            self._at(self._now + moved, self._computed, job, ask, router, decoder, job.tokens)
        if engine.waiting:
            self._at(self._now + engine.start(), self._prefilled, engine)

    def _computed(
        self, job: Job, ask: RoutingQuery, router: Router, decoder: Seen[Decoder], cached: int
    ) -> None:
        """`cached` tokens the decoder had, or was given."""
        router.decode_policy.note_cached(decoder.name, ask, cached)
        engine = decoder.engine
        engine.advance(self._now)
        engine.waiting.append((job, decoder))
        engine.admit(self._now)
        self._plan(engine)

    def _plan(self, decoder: Decoder) -> None:
        decoder.plan += 1
        end = decoder.next_end()
        if end is not None:
            self._at(end, self._ended, decoder, decoder.plan)

    def _ended(self, decoder: Decoder, plan: int) -> None:
        if plan != decoder.plan:
            return
        decoder.advance(self._now)
        for job in decoder.ended():
            self._note(job)
            following = self._trace.follow(job)
            if following is not None:
                pause, next_job = following
                self._at(self._now + pause, self._ask, next_job)
        decoder.admit(self._now)
        self._plan(decoder)

    def _note(self, job: Job) -> None:
        self._done += 1
        if self._done > self._counted_from:
            self.outcome.first_tokens.append(job.first_token - job.arrived)
            self.outcome.per_token.append((self._now - job.first_token) / job.output)


def _tokens_per_arrival(shape: str, seed: int) -> float:
    """Return the prompt tokens of an arrival with all that follows on it."""
    trace = SHAPES[shape](seed, 1)
    tokens = 0
    for _ in range(SAMPLED_ARRIVALS):
        job = trace.arrive()
        tokens += job.tokens
        while (following := trace.follow(job)) is not None:
            job = following[1]
            tokens += job.tokens
    return tokens / SAMPLED_ARRIVALS
