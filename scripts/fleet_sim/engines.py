"""Engines that only take time. Figures are those of a mid-sized model on one accelerator."""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from router.routing.policy import RoutingQuery
from router.routing.prompt_chunks import TOKENS_PER_CHUNK
from scripts.fleet_sim.traces import Job

Leg = tuple[Job, RoutingQuery, "Decoder", int]
"""At a prefiller: whose turn at which decoder it is for, and the tokens it counts for as load."""

PREFILL_RATE = 20_000.0
"""Tokens a second."""
BATCH_SECONDS = 0.015
"""What a batch takes besides its tokens."""
BATCH_TOKENS = 8192
CACHE_TOKENS = 500_000
STEP_SECONDS = 0.008
STEP_SECONDS_EACH = 0.00006
"""What each sequence adds to a step."""
MOST_DECODING = 256


class PrefixCache:
    """The chunks used last, as many as fit."""

    def __init__(self, tokens: int) -> None:
        self._most = tokens // TOKENS_PER_CHUNK
        self._chunks: OrderedDict[int, None] = OrderedDict()

    def held(self, chunks: Sequence[int]) -> int:
        """Tokens of the longest beginning that is here."""
        for depth, chunk in enumerate(chunks):
            if chunk not in self._chunks:
                return depth * TOKENS_PER_CHUNK
        return len(chunks) * TOKENS_PER_CHUNK

    def add(self, chunks: Sequence[int]) -> None:
        """The end goes first when space is needed: a beginning may be useful to others."""
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
    """`busy` is the time it computed; `cached` of the `asked` tokens were in its cache."""

    name: str
    cache: PrefixCache
    in_flight: int = 0
    tokens_in_flight: int = 0
    busy: float = 0.0
    asked: int = 0
    cached: int = 0

    def begin(self, tokens: int) -> None:
        self.in_flight += 1
        self.tokens_in_flight += tokens

    def end(self, tokens: int) -> None:
        self.in_flight -= 1
        self.tokens_in_flight -= tokens

    def look_up(self, job: Job) -> int:
        """Tokens that are cached; the last one is always computed."""
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
        """Takes a batch, at least one job; the seconds it takes."""
        tokens = 0
        while self.waiting:
            job = self.waiting[0][0]
            if self.batch and tokens + job.tokens - self.cache.held(job.chunks) > BATCH_TOKENS:
                break
            cached = self.look_up(job)
            tokens += job.tokens - cached
            self.batch.append((self.waiting.popleft(), cached))
        seconds = BATCH_SECONDS + tokens / PREFILL_RATE
        self.busy += seconds
        return seconds

    def finish(self) -> list[tuple[Leg, int]]:
        """The batch, and what of each prompt was cached."""
        done, self.batch = self.batch, []
        for (job, _, _, tokens), _ in done:
            self.cache.add(job.chunks)
            self.end(tokens)
        return done


@dataclass(slots=True, eq=False)
class Decoder(Engine):
    """All that run share its steps: `steps` is how many it has made, a job ends at a certain one.
    A prefill of its own stops the steps until it is done."""

    waiting: deque[Job] = field(default_factory=deque)
    running: list[tuple[float, int, Job]] = field(default_factory=list)
    steps: float = 0.0
    at: float = 0.0
    stopped_until: float = 0.0
    plan: int = 0
    """The number of the plan that counts: an older one's end is no end any more."""
    numbers: count[int] = field(default_factory=count)

    def advance(self, now: float) -> None:
        start = max(self.at, min(now, self.stopped_until))
        if self.running and now > start:
            self.steps += (now - start) / self.step_seconds()
            self.busy += now - start
        self.at = max(self.at, now)

    def step_seconds(self) -> float:
        return STEP_SECONDS + STEP_SECONDS_EACH * len(self.running)

    def prefill(self, job: Job, now: float) -> tuple[float, int]:
        """When its own prefill of the job is done, and how many tokens were cached."""
        self.advance(now)
        cached = self.look_up(job)
        seconds = BATCH_SECONDS + (job.tokens - cached) / PREFILL_RATE
        self.stopped_until = max(now, self.stopped_until) + seconds
        self.busy += seconds
        return self.stopped_until, cached

    def admit(self, now: float) -> None:
        """Lets waiting jobs run, as far as there is room; time has been advanced."""
        while self.waiting and len(self.running) < MOST_DECODING:
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
