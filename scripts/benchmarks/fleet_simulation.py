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
from typing import Protocol, TypeVar

from router.routing.chunk_index import ChunkIndex
from router.routing.policy import LoadBound, Policy, RoutingQuery, in_turn
from router.routing.prompt_chunks import MAX_CHUNKS, TOKENS_PER_CHUNK
from router.routing.route import POLICIES, PREFILL_POLICIES


@dataclass(slots=True)
class Job:
    """`chunks` are those of the prompt, `after` those of prompt and answer."""

    tokens: int
    output: int
    chunks: tuple[int, ...]
    after: tuple[int, ...]
    session: str = ""
    talk: Talk | None = None
    arrived: float = 0.0
    first_token: float = 0.0


class Trace(Protocol):
    def arrive(self) -> Job:
        """Return the job of a new user."""

    def follow(self, job: Job) -> tuple[float, Job] | None:
        """Return the job that follows on an answer and the seconds until then, or None."""


@dataclass(slots=True)
class Talk:
    """A conversation, each of whose prompts begins with the last one."""

    name: str
    chunks: list[int]
    tokens: int
    turns_left: int


class _Shape:
    def __init__(self, seed: int, engines: int) -> None:
        self.random = random.Random(seed)
        self.engines = engines
        self.numbers = count(1)

    def follow(self, job: Job) -> tuple[float, Job] | None:
        return None

    def job(self, chunks: list[int], tokens: int, output: int) -> Job:
        """Return a job; `chunks` is lengthened to what prompt and answer have."""
        while len(chunks) < (tokens + output) // TOKENS_PER_CHUNK:
            chunks.append(next(self.numbers))
        after = tuple(chunks[: (tokens + output) // TOKENS_PER_CHUNK])
        return Job(tokens, output, after[: tokens // TOKENS_PER_CHUNK], after)

    def length(self, median: float, spread: float, most: int) -> int:
        return min(most, max(16, int(median * self.random.lognormvariate(0, spread))))


class Uniform(_Shape):
    """Prompts that have nothing in common."""

    def arrive(self) -> Job:
        return self.job([], self.length(1000, 0.8, 16_000), self.length(200, 0.6, 2000))


class Documents(_Shape):
    """Questions about long documents, half of them about a document of recent questions.

    All prompts of a service begin with the same text; a few services have most of the users.
    """

    services = 50

    def __init__(self, seed: int, engines: int) -> None:
        super().__init__(seed, engines)
        lengths = [self.random.randrange(2, 17) for _ in range(self.services)]
        self.heads = [[next(self.numbers) for _ in range(length)] for length in lengths]
        self.weights = [1 / (rank + 1) for rank in range(self.services)]
        self.recent: deque[list[int]] = deque(maxlen=20 * engines)

    def arrive(self) -> Job:
        if self.recent and self.random.random() < 0.5:
            document = self.random.choice(self.recent)
        else:
            head = self.random.choices(self.heads, self.weights)[0]
            size = self.length(5000, 0.8, 60_000) // TOKENS_PER_CHUNK
            document = [*head, *(next(self.numbers) for _ in range(size))]
            self.recent.append(document)
        tokens = len(document) * TOKENS_PER_CHUNK + self.length(100, 0.5, 1000)
        return self.job(list(document), tokens, self.length(150, 0.6, 2000))


class Chat(_Shape):
    """Conversations: each prompt is the last one, its answer, and a new message."""

    def __init__(self, seed: int, engines: int) -> None:
        super().__init__(seed, engines)
        self.heads = [[next(self.numbers) for _ in range(4)] for _ in range(20)]

    def arrive(self) -> Job:
        turns = 1 + int(self.random.expovariate(1 / 5.5))
        head = list(self.random.choice(self.heads))
        talk = Talk(f"talk-{next(self.numbers)}", head, len(head) * TOKENS_PER_CHUNK, turns)
        return self._turn(talk)

    def follow(self, job: Job) -> tuple[float, Job] | None:
        talk = job.talk
        if talk is None or talk.turns_left <= 0:
            return None
        return 1 + self.random.expovariate(1 / 5), self._turn(talk)

    def _turn(self, talk: Talk) -> Job:
        talk.turns_left -= 1
        tokens = talk.tokens + self.length(120, 0.9, 8000)
        job = self.job(talk.chunks, tokens, self.length(200, 0.6, 2000))
        job.session, job.talk = talk.name, talk
        talk.tokens = tokens + job.output
        return job


SHAPES: dict[str, type[Uniform | Documents | Chat]] = {
    "documents": Documents,
    "chat": Chat,
    "uniform": Uniform,
}


# Engines.

Leg = tuple[Job, RoutingQuery, "Decoder", int]
"""A prefill leg: the job, its query, its decoder, and the tokens that it counts for as load."""

PREFILL_TOKENS_PER_S = 20_000.0
"""Tokens a second."""
BATCH_S = 0.015
"""The fixed time of a batch."""
BATCH_TOKENS = 8192
CACHE_TOKENS = 500_000
STEP_S = 0.008
STEP_S_EACH = 0.00006
"""The time that each sequence adds to a step."""
MAX_DECODING = 256


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
    in_flight: int = 0
    tokens_in_flight: int = 0
    busy: float = 0.0
    asked: int = 0
    cached: int = 0

    @property
    def cache_tokens(self) -> int:
        return self.cache.tokens

    def begin(self, tokens: int) -> None:
        self.in_flight += 1
        self.tokens_in_flight += tokens

    def end(self, tokens: int) -> None:
        self.in_flight -= 1
        self.tokens_in_flight -= tokens

    def look_up(self, job: Job) -> int:
        """Return how many tokens are cached; the last one is always computed."""
        cached = min(self.cache.held(job.chunks), job.tokens - 1)
        self.asked += job.tokens
        self.cached += cached
        return cached


@dataclass(slots=True, eq=False)
class Prefiller(Engine):
    """`batch` is what it computes now."""

    waiting: deque[Leg] = field(default_factory=deque)
    batch: list[tuple[Leg, int]] = field(default_factory=list)

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
        seconds = BATCH_S + tokens / PREFILL_TOKENS_PER_S
        self.busy += seconds
        return seconds

    def finish(self) -> list[tuple[Leg, int]]:
        """End the batch; return its legs, each with the tokens that were cached."""
        done, self.batch = self.batch, []
        for (job, _, _, tokens), _ in done:
            self.cache.add(job.chunks)
            self.end(tokens)
        return done


@dataclass(slots=True, eq=False)
class Decoder(Engine):
    """An engine whose running jobs share its steps; a job ends after a certain number of them.

    A prefill of its own stops the steps until it is done.
    """

    waiting: deque[Job] = field(default_factory=deque)
    running: list[tuple[float, int, Job]] = field(default_factory=list)
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
        return STEP_S + STEP_S_EACH * len(self.running)

    def prefill(self, job: Job, now: float) -> tuple[float, int]:
        """Prefill a job here; return when that is done, and how many tokens were cached."""
        self.advance(now)
        cached = self.look_up(job)
        seconds = BATCH_S + (job.tokens - cached) / PREFILL_TOKENS_PER_S
        self.stopped_until = max(now, self.stopped_until) + seconds
        self.busy += seconds
        return self.stopped_until, cached

    def admit(self, now: float) -> None:
        """Start waiting jobs while there is room; `advance` has been called for `now`."""
        while self.waiting and len(self.running) < MAX_DECODING:
            job = self.waiting.popleft()
            heapq.heappush(self.running, (self.steps + job.output, next(self.numbers), job))
            job.first_token = max(now, self.stopped_until) + self.step_seconds()
            self.cache.add(job.chunks)

    def ended(self) -> list[Job]:
        done: list[Job] = []
        while self.running and self.running[0][0] <= self.steps + 1e-6:
            job = heapq.heappop(self.running)[2]
            self.cache.add(job.after)
            self.end(job.tokens)
            done.append(job)
        return done

    def next_end(self) -> float | None:
        if not self.running:
            return None
        left = max(0.0, self.running[0][0] - self.steps)
        return max(self.at, self.stopped_until) + left * self.step_seconds()


# One run.

E = TypeVar("E", bound=Engine)

PREFILL_BOUND = LoadBound(1.5, 2)
DECODE_BOUND = LoadBound(1.5, 8)
TRANSFER_S = 0.003
LOOK_S = 0.008
"""Until a decoder's scheduler has looked into its cache: one step."""
TRANSFER_TOKENS_PER_S = 400_000.0
"""Tokens a second whose KV is moved."""
WARM_UP_SHARE = 0.2
"""Share of the requests that is not in the figures."""
SAMPLED_ARRIVALS = 2000
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
    """Decode legs count as load once they start, not once their engine is chosen."""
    hedged: int = 0
    """Decoders that a hedged request asks whether they hold `threshold` of its prompt."""
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
    """Jobs that a decode engine did alone."""
    extra: int = 0
    """Hedged legs that answered nothing."""
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
        index = ChunkIndex()
        prefill, decode = PREFILL_POLICIES[setup.prefill_policy], POLICIES[setup.decode_policy]
        self._prefill_policy = prefill(setup.prefill_bound, index)
        self._decode_policy = decode(setup.decode_bound, index)
        self._trace = SHAPES[setup.shape](setup.seed, setup.prefillers)
        self._random = random.Random(setup.seed + 1)
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._numbers = count()
        self._now = 0.0
        self._left = setup.requests
        self._done = 0
        self._turn = 0
        self._phase_ends, self._rate_now = 0.0, 1.0
        tokens_a_second = setup.load * setup.prefillers * PREFILL_TOKENS_PER_S
        self._rate = tokens_a_second / _tokens_per_arrival(setup.shape, setup.seed)

    def run(self) -> Outcome:
        self._at(0.0, self._arrive)
        events = self._events
        while events:
            self._now, _, act, arguments = heapq.heappop(events)
            act(*arguments)
        return self.outcome

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
        ask = RoutingQuery(self._turn, job.session, job.chunks[:MAX_CHUNKS], job.tokens)
        costs = self.outcome.decode_costs
        decoder = self._choose(self._decode_policy, self.decoders, ask, costs)
        least = self.setup.min_remote_prefill_tokens
        holder = self._hedge(job, ask) if self.setup.hedged else None
        if holder is not None:
            self._at(self._now + LOOK_S, self._stay, job, ask, holder)
        elif self.setup.hedged:
            self._at(self._now + LOOK_S, self._send, job, ask, decoder)
        elif least and job.tokens - self._decode_policy.expected_tokens(decoder.name, ask) < least:
            self._stay(job, ask, decoder)
        else:
            self._send(job, ask, decoder)

    def _hedge(self, job: Job, ask: RoutingQuery) -> Decoder | None:
        """Return the decoder that accepts first: it lacks least of the prompt."""
        setup = self.setup
        first = self._decode_policy.order(self.decoders, ask)
        others = [one for one in in_turn(self.decoders, self._turn) if one not in first]
        asked = [*first, *others][: setup.hedged]
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
            moved = TRANSFER_S + missing / TRANSFER_TOKENS_PER_S
            self._at(self._now + moved, self._computed, job, ask, decoder, job.tokens)
        if prefiller.waiting:
            self._at(self._now + prefiller.start(), self._prefilled, prefiller)

    def _computed(self, job: Job, ask: RoutingQuery, decoder: Decoder, cached: int) -> None:
        """`cached` tokens the decoder had, or was given."""
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
        if self._done > WARM_UP_SHARE * self.setup.requests:
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
