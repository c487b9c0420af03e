"""A fleet of simulated engines, to compare routing policies.

Jobs arrive, the router's own policies choose engines, and all follows from a seed, so that a run
can be repeated.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import ceil
from time import perf_counter_ns
from typing import NamedTuple

from router.fleet.engine import EngineLoad
from router.routing.chunk_index import ChunkIndex
from router.routing.peers import PeerRouters
from router.routing.policy import LoadBound, Policy, RoutingQuery, in_turn
from router.routing.prompt_chunks import MAX_CHUNKS
from router.routing.route import POLICIES, PREFILL_POLICIES
from scripts.benchmarks.simulated_engine import SPEEDS, Engine, PrefixCache, Speed, Task
from scripts.benchmarks.traces import SHAPES, Arrival, Job

CACHE_TOKENS = 500_000
TRANSFER_S = 0.003
LOOK_S = 0.008
"""Until a decoder's scheduler has looked into its cache: one step."""
HELD_SHARE = 0.5
"""Share of a prompt that a hedged decoder must hold."""
WARM_UP_SHARE = 0.2
"""Share of a shape's requests that is not in the figures."""
SAMPLED_ARRIVALS = 2000
# Bursty arrivals: mean seconds of a quiet and of a busy time, and their rates beside the mean.
QUIET, QUIET_RATE = 20.0, 0.5
BURST, BURST_RATE = 5.0, 3.0


@dataclass(slots=True, eq=False)
class Seen(EngineLoad):
    """An engine as a router sees it."""

    engine: Engine
    name: str

    @property
    def cache_tokens(self) -> int:
        return self.engine.cache.tokens


class Router:
    """The policies of one router, and the engines as it sees them."""

    def __init__(
        self, setup: Setup, prefillers: Sequence[Engine], decoders: Sequence[Engine]
    ) -> None:
        index = ChunkIndex()
        prefill, decode = PREFILL_POLICIES[setup.prefill_policy], POLICIES[setup.decode_policy]
        self.prefill_policy = prefill(LoadBound(1.5, 2), index)
        self.decode_policy = decode(LoadBound(1.5, 8), index)
        self.prefillers = tuple(Seen(one, one.name) for one in prefillers)
        self.decoders = tuple(Seen(one, one.name) for one in decoders)
        self.peers = PeerRouters(index)

    def report(self) -> bytes:
        return self.peers.report((*self.prefillers, *self.decoders))


@dataclass(frozen=True, slots=True)
class Setup:
    """`load` is of what the prefillers could do if nothing was ever cached. `arrivals` come at
    their own times, instead of `requests` of a shape."""

    shape: str
    prefillers: int
    decoders: int
    requests: int
    prefill_policy: str
    decode_policy: str
    load: float = 0.9
    bursty: bool = False
    min_remote_prefill_tokens: int = 0
    hedged: int = 0
    """Decoders that a hedged request asks whether they hold HELD_SHARE of its prompt."""
    cache_tokens: int = CACHE_TOKENS
    step_tokens: int = 256
    """Of a decoder."""
    step_s: float = 0.0
    seed: int = 0
    speed: Speed = SPEEDS["generic"]
    routers: int = 1
    """Each request goes to one by chance."""
    share_interval: float = 0.0
    """Seconds between two reports of a router to the others; 0: they share nothing."""
    arrivals: Sequence[Arrival] = ()


class Latency(NamedTuple):
    """Of one answer, in seconds. `gap` is the 99th percentile between two tokens, `worst` all."""

    ttft: float
    tpot: float
    gap: float
    worst: float


@dataclass(slots=True)
class Outcome:
    """`costs` (microseconds of a choice) are the only thing that doesn't replay."""

    prefillers: Sequence[Engine]
    decoders: Sequence[Engine]
    answers: list[Latency] = field(default_factory=list)
    alone: int = 0
    """Jobs that a decode engine did alone."""
    extra: int = 0
    """Hedged legs that answered nothing."""
    prefill_costs: list[float] = field(default_factory=list)
    decode_costs: list[float] = field(default_factory=list)


class Simulation:
    def __init__(self, setup: Setup) -> None:
        self.setup, speed = setup, setup.speed
        self.prefillers = tuple(
            Engine(f"10.1.{n // 256}.{n % 256}:8000", PrefixCache(setup.cache_tokens), speed)
            for n in range(setup.prefillers)
        )
        budget = (setup.step_tokens, setup.step_s)
        self.decoders = tuple(
            Engine(
                f"10.2.{n // 256}.{n % 256}:8000", PrefixCache(setup.cache_tokens), speed, *budget
            )
            for n in range(setup.decoders)
        )
        self.routers = [Router(setup, self.prefillers, self.decoders) for _ in range(setup.routers)]
        self.outcome = Outcome(self.prefillers, self.decoders)
        self._trace = SHAPES[setup.shape](setup.seed, setup.prefillers)
        self._random = random.Random(setup.seed + 1)
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._numbers = count()
        self._now = 0.0
        self._left = self._total = len(setup.arrivals) or setup.requests
        self._counted_from = 0.0 if setup.arrivals else WARM_UP_SHARE * self._left
        self._done = 0
        self._turn = 0
        self._phase_ends, self._rate_now = 0.0, 1.0
        tokens_a_second = setup.load * setup.prefillers / speed.token
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
        task = Task(job, ask, router, decoder)
        least = self.setup.min_remote_prefill_tokens
        holder = self._hedge(job, ask, router) if self.setup.hedged else None
        if holder is not None:
            task.decoder = holder
            self._at(self._now + LOOK_S, self._stay, task)
        elif self.setup.hedged:
            self._at(self._now + LOOK_S, self._send, task)
        elif least and job.tokens - policy.expected_tokens(decoder.name, ask) < least:
            self._stay(task)
        else:
            self._send(task)

    def _hedge(self, job: Job, ask: RoutingQuery, router: Router) -> Seen | None:
        """Return the decoder that accepts first: it lacks least of the prompt."""
        setup = self.setup
        first = router.decode_policy.order(router.decoders, ask)
        others = [one for one in in_turn(router.decoders, self._turn) if one not in first]
        asked = [*first, *others][: setup.hedged]
        held = {one: one.engine.cache.held(job.chunks) for one in asked}
        able = [one for one in asked if held[one] >= HELD_SHARE * job.tokens]
        self.outcome.extra += len(asked) - bool(able)
        return min(able, key=lambda one: (-held[one], len(one.engine.waiting)), default=None)

    def _choose(
        self, policy: Policy, engines: Sequence[Seen], ask: RoutingQuery, costs: list[float]
    ) -> Seen:
        began = perf_counter_ns()
        chosen = policy.order(engines, ask)[0]
        costs.append((perf_counter_ns() - began) / 1000)
        return chosen

    def _stay(self, task: Task) -> None:
        self.outcome.alone += 1
        decoder = task.decoder
        task.router.decode_policy.note_sent(decoder.name, task.query)
        decoder.add_load(1, task.job.tokens)
        decoder.engine.waiting.append(task)
        self._wake(decoder.engine)

    def _send(self, task: Task) -> None:
        router, ask = task.router, task.query
        policy, costs = router.prefill_policy, self.outcome.prefill_costs
        task.prefiller = prefiller = self._choose(policy, router.prefillers, ask, costs)
        task.load = ask.tokens - policy.expected_tokens(prefiller.name, ask)
        policy.note_sent(prefiller.name, ask)
        prefiller.add_load(1, task.load)
        prefiller.engine.waiting.append(task)
        self._wake(prefiller.engine)

    def _wake(self, engine: Engine) -> None:
        end = engine.cut(self._now) if engine.is_busy else engine.begin(self._now)
        if end is not None:
            engine.plan += 1
            self._at(end, self._end_steps, engine, engine.plan)

    def _end_steps(self, engine: Engine, plan: int) -> None:
        if plan != engine.plan:
            return
        computed, answered = engine.end()
        for task in computed:
            if task.prefiller is None:
                task.router.decode_policy.note_cached(task.decoder.name, task.query, task.cached)
                engine.answer(task, self._now)
            else:
                self._computed(task, task.prefiller)
        for task in answered:
            self._answered(task)
        while engine.blocked and self._transfer(engine.blocked[0]):
            engine.blocked.popleft()
        self._wake(engine)

    def _computed(self, task: Task, prefiller: Seen) -> None:
        router, ask, decoder, job = task.router, task.query, task.decoder, task.job
        prefiller.note_prefill(job.arrived, self._now, job.tokens - task.cached)
        prefiller.add_load(-1, -task.load)
        router.prefill_policy.note_cached(prefiller.name, ask, task.cached)
        router.decode_policy.note_sent(decoder.name, ask)
        decoder.add_load(1, task.job.tokens)
        if decoder.engine.blocked or not self._transfer(task):
            decoder.engine.blocked.append(task)

    def _transfer(self, task: Task) -> bool:
        """Begin the transfer to the decoder, unless it has no room. One transfer at a time moves
        through each engine's network interface."""
        assert task.prefiller is not None
        source, engine, job = task.prefiller.engine, task.decoder.engine, task.job
        if not engine.reserve(job.tokens + job.output):
            return False
        missing = job.tokens - engine.look_up(job)
        end = max(self._now, source.nic_free_at, engine.nic_free_at)
        end += missing / self.setup.speed.nic_tokens_per_s
        source.nic_free_at = engine.nic_free_at = end
        self._at(end + TRANSFER_S, self._moved, task, source)
        return True

    def _moved(self, task: Task, source: Engine) -> None:
        task.router.decode_policy.note_cached(task.decoder.name, task.query, task.job.tokens)
        source.used -= task.job.tokens
        self._wake(source)
        task.decoder.engine.ready.append(task)
        self._wake(task.decoder.engine)

    def _answered(self, task: Task) -> None:
        job = task.job
        task.decoder.add_load(-1, -job.tokens)
        self._done += 1
        if self._done > self._counted_from:
            gaps = sorted(task.gaps, reverse=True)
            left = sum(steps for _, steps in gaps)
            left -= ceil(0.99 * left)
            gap = next(seconds for seconds, steps in gaps if (left := left - steps) < 0)
            tpot = (self._now - job.first_token) / max(1, job.output - 1)
            self.outcome.answers.append(
                Latency(job.first_token - job.arrived, tpot, gap, gaps[0][0])
            )
        following = self._trace.follow(job)
        if following is not None:
            pause, next_job = following
            self._at(self._now + pause, self._ask, next_job)


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
