"""One run: jobs come, policies choose engines, time passes; from a seed, so it replays."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from time import perf_counter_ns
from typing import TypeVar

from router.routing.load_policies import LoadBound, in_turn
from router.routing.policy import (
    Policy,
    RoutingQuery,
)
from router.routing.prompt_chunks import MAX_CHUNKS
from router.routing.route import make_policy
from scripts.fleet_sim.engines import (
    CACHE_TOKENS,
    PREFILL_RATE,
    Decoder,
    Engine,
    Prefiller,
    PrefixCache,
)
from scripts.fleet_sim.traces import SHAPES, Job

E = TypeVar("E", bound=Engine)

PREFILL_BOUND = LoadBound(1.5, 2)
DECODE_BOUND = LoadBound(1.5, 8)
TRANSFER_SECONDS = 0.003
LOOK_SECONDS = 0.008
"""Until a decoder's scheduler has looked into its cache: a step of those that run."""
TRANSFER_RATE = 400_000.0
"""Tokens a second whose KV is moved."""
WARM_UP = 0.2
"""Of the requests; they are not in the times."""
SAMPLED = 2000
# Bursty arrivals: mean seconds of a quiet and of a busy time, and their rates beside the mean.
QUIET, QUIET_RATE = 20.0, 0.5
BURST, BURST_RATE = 5.0, 3.0


@dataclass(frozen=True, slots=True)
class Setup:
    """`load` is of what the prefillers could do if nothing was ever cached."""

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
    """Legs count from when they start, not from when their engine is chosen."""
    scatter: int = 0
    """Decoders that are asked at once whether they hold `threshold` of a prompt."""
    threshold: float = 0.5
    cache_tokens: int = CACHE_TOKENS
    prefill_bound: LoadBound = PREFILL_BOUND
    decode_bound: LoadBound = DECODE_BOUND
    seed: int = 0


@dataclass(slots=True)
class Outcome:
    """Seconds; `costs` (microseconds of a choice) are the only thing that doesn't replay."""

    prefillers: Sequence[Engine]
    decoders: Sequence[Engine]
    first_tokens: list[float] = field(default_factory=list)
    per_token: list[float] = field(default_factory=list)
    alone: int = 0
    """Jobs that a decoder did by itself."""
    extra: int = 0
    """Legs at decoders that answered nothing."""
    prefill_costs: list[float] = field(default_factory=list)
    decode_costs: list[float] = field(default_factory=list)


class Simulation:
    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        cache = setup.cache_tokens
        self.prefillers = tuple(
            Prefiller(f"10.1.{number // 256}.{number % 256}:8000", PrefixCache(cache))
            for number in range(setup.prefillers)
        )
        self.decoders = tuple(
            Decoder(f"10.2.{number // 256}.{number % 256}:8000", PrefixCache(cache))
            for number in range(setup.decoders)
        )
        self.outcome = Outcome(self.prefillers, self.decoders)
        self._prefill_policy = make_policy(setup.prefill_policy, setup.prefill_bound)
        self._decode_policy = make_policy(setup.decode_policy, setup.decode_bound)
        self._trace = SHAPES[setup.shape](setup.seed, setup.prefillers)
        self._random = random.Random(setup.seed + 1)
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._numbers = count()
        self._now = 0.0
        self._left = setup.requests
        self._done = 0
        self._turn = 0
        self._phase_ends, self._rate_now = 0.0, 1.0
        tokens_a_second = setup.load * setup.prefillers * PREFILL_RATE
        self._rate = tokens_a_second / _tokens_per_arrival(setup.shape, setup.seed)

    def run(self, tell: Callable[[int], None] = lambda done: None) -> Outcome:
        """`tell` hears now and then how many jobs are done."""
        self._at(0.0, self._arrive)
        events = self._events
        for step in count():
            if not events:
                return self.outcome
            self._now, _, act, arguments = heapq.heappop(events)
            act(*arguments)
            if step % 4096 == 0:
                tell(self._done)
        raise AssertionError

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
        ask = RoutingQuery(self._turn, job.tokens, job.session, job.chunks[:MAX_CHUNKS])
        costs = self.outcome.decode_costs
        decoder = self._choose(self._decode_policy, self.decoders, ask, costs)
        least = self.setup.min_remote_prefill_tokens
        holder = self._scatter(job, ask) if self.setup.scatter else None
        if holder is not None:
            self._at(self._now + LOOK_SECONDS, self._stay, job, ask, holder)
        elif self.setup.scatter:
            self._at(self._now + LOOK_SECONDS, self._send, job, ask, decoder)
        elif least and job.tokens - self._decode_policy.expected_tokens(decoder.name, ask) < least:
            self._stay(job, ask, decoder)
        else:
            self._send(job, ask, decoder)

    def _scatter(self, job: Job, ask: RoutingQuery) -> Decoder | None:
        """The first that accepts: it lacks least, so its first token is there before others'."""
        setup = self.setup
        first = self._decode_policy.order(self.decoders, ask)
        others = [one for one in in_turn(self.decoders, self._turn) if one not in first]
        asked = [*first, *others][: setup.scatter]
        held = {one: one.cache.held(job.chunks) for one in asked}
        able = [one for one in asked if held[one] >= setup.threshold * job.tokens]
        self.outcome.extra += len(asked) - bool(able)
        return min(able, key=lambda one: (-held[one], one.stopped_until), default=None)

    def _choose(
        self, policy: Policy, engines: Sequence[E], ask: RoutingQuery, costs: list[float]
    ) -> E:
        began = perf_counter_ns()
        chosen = policy.order(engines, ask)[0]
        costs.append((perf_counter_ns() - began) / 1000)
        return chosen

    def _stay(self, job: Job, ask: RoutingQuery, decoder: Decoder) -> None:
        self.outcome.alone += 1
        self._decode_policy.note_sent(decoder.name, ask)
        decoder.begin(job.tokens)
        done, cached = decoder.prefill(job, self._now)
        self._plan(decoder)
        self._at(done, self._computed, job, ask, decoder, cached)

    def _send(self, job: Job, ask: RoutingQuery, decoder: Decoder) -> None:
        costs = self.outcome.prefill_costs
        prefiller = self._choose(self._prefill_policy, self.prefillers, ask, costs)
        expected = self._prefill_policy.expected_tokens(prefiller.name, ask)
        self._prefill_policy.note_sent(prefiller.name, ask)
        self._decode_policy.note_sent(decoder.name, ask)
        prefiller.begin(job.tokens - expected)
        if not self.setup.late:
            decoder.begin(job.tokens)
        prefiller.waiting.append((job, ask, decoder, job.tokens - expected))
        if not prefiller.batch:
            self._at(self._now + prefiller.start(), self._prefilled, prefiller)

    def _prefilled(self, prefiller: Prefiller) -> None:
        for (job, ask, decoder, _), cached in prefiller.finish():
            self._prefill_policy.note_cached(prefiller.name, ask, cached)
            if self.setup.late:
                decoder.begin(job.tokens)
            missing = job.tokens - decoder.look_up(job)
            moved = TRANSFER_SECONDS + missing / TRANSFER_RATE
            self._at(self._now + moved, self._computed, job, ask, decoder, job.tokens)
        if prefiller.waiting:
            self._at(self._now + prefiller.start(), self._prefilled, prefiller)

    def _computed(self, job: Job, ask: RoutingQuery, decoder: Decoder, cached: int) -> None:
        """`cached` of it the decoder had, or was given."""
        self._decode_policy.note_cached(decoder.name, ask, cached)
        self._decode(job, decoder)

    def _decode(self, job: Job, decoder: Decoder) -> None:
        decoder.advance(self._now)
        decoder.waiting.append(job)
        decoder.admit(self._now)
        self._plan(decoder)

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
        if self._done > WARM_UP * self.setup.requests:
            self.outcome.first_tokens.append(job.first_token - job.arrived)
            self.outcome.per_token.append((self._now - job.first_token) / job.output)


def _tokens_per_arrival(shape: str, seed: int) -> float:
    """Of prompts, with all that follows on one arrival."""
    trace = SHAPES[shape](seed, 1)
    tokens = 0
    for _ in range(SAMPLED):
        job = trace.arrive()
        tokens += job.tokens
        while (following := trace.follow(job)) is not None:
            job = following[1]
            tokens += job.tokens
    return tokens / SAMPLED
