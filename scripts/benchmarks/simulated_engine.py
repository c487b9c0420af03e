"""Simulated engines: nothing is computed, time passes.

An engine works in steps, as vLLM's do. A step computes the next token of each running answer, and
beside them chunks of prompts, up to a budget. Steps without prompts follow each other until an
answer ends or something arrives, and are counted in closed form: their time grows evenly with the
contexts.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from math import ceil, sqrt
from typing import TYPE_CHECKING

from router.fleet.engine import PREFILL, EngineRole
from router.fleet.step_model import StepModel
from router.routing.prompt_chunks import TOKENS_PER_CHUNK

if TYPE_CHECKING:
    from router.routing.holders import NamedHolders
    from router.routing.policy import RoutingQuery
    from scripts.benchmarks.fleet_simulation import Router, Seen
    from scripts.benchmarks.traces import Job

MAX_DECODING = 256
BATCH_TOKENS = 8192
MIN_CHUNK = 64


@dataclass(frozen=True, slots=True)
class Speed:
    """Times of an engine in seconds; docs/performance.md has the formula and the sources."""

    base: float
    """A step reads the weights once."""
    token: float
    """For each prompt token. Reading and computing overlap: the larger one counts."""
    token_context: float
    """For each prompt token and token of context before it."""
    context: float
    """For each token of context of a running answer."""
    sequence: float
    """For each running answer."""
    kv_tokens: int
    """Tokens of running requests that the accelerator's memory holds."""
    nic_tokens_per_s: float
    mixing: float = 0.0
    """Weight reads that a step with prompts and answers takes beyond its parts."""

    def step(self, tokens: int, attention: float, sequences: int, contexts: int) -> float:
        """Return the seconds of a step. `attention` is the sum of each prompt token's context."""
        seconds = self.base
        if tokens:
            seconds = (self.base**4 + (self.token * tokens) ** 4) ** 0.25
            seconds += self.token_context * attention + self.mixing * self.base * bool(sequences)
        return seconds + self.sequence * sequences + self.context * contexts


SPEEDS = {
    # A mid-sized model on one accelerator, in round figures.
    "generic": Speed(8e-3, 50e-6, 0.0, 0.0, 60e-6, 500_000, 400_000),
    # Qwen3-32B, tensor parallel over two H200, vLLM 0.24: fitted to the operators that
    # aiconfigurator 0.12 lists as measured. With 32 answers it has 11.3/13.3/16.6/28.0/98.1 ms for
    # chunks of 64/128/256/512/2,048 tokens without attention; this has 10.6/11.5/15.8/28.4/108.
    "qwen3-32b-h200": Speed(10.6e-3, 52e-6, 1.65e-9, 32.1e-9, 10e-6, 690_000, 300_000),
}


class PrefixCache:
    """The most recently used chunks (LRU)."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self._most = tokens // TOKENS_PER_CHUNK
        self._chunks: OrderedDict[int, None] = OrderedDict()
        self.on_change: Callable[[Sequence[tuple[int, int | None]], list[int]], None] | None = None
        """Called with the added chunks, each with the one before it, and the evicted ones."""

    def held(self, chunks: Sequence[int]) -> int:
        """Return the tokens of the longest prefix that is cached."""
        for depth, chunk in enumerate(chunks):
            if chunk not in self._chunks:
                return depth * TOKENS_PER_CHUNK
        return len(chunks) * TOKENS_PER_CHUNK

    def add(self, chunks: Sequence[int]) -> None:
        """Evict ends of prompts before their beginnings, which other prompts may share."""
        kept = self._chunks
        pairs = zip(chunks, (None, *chunks), strict=False) if self.on_change else ()
        added = [pair for pair in pairs if pair[0] not in kept]
        for chunk in reversed(chunks):
            if chunk in kept:
                kept.move_to_end(chunk)
            else:
                kept[chunk] = None
        evicted = [kept.popitem(last=False)[0] for _ in range(len(kept) - self._most)]
        if self.on_change is not None:
            self.on_change(added, evicted)


@dataclass(slots=True, eq=False)
class Task:
    """A request at its engines. Without a prefiller the decoder does all of it."""

    job: Job
    query: RoutingQuery
    router: Router
    decoder: Seen
    prefiller: Seen | None = None
    load: int = 0
    """The tokens for which the prompt counts as load, and below the seconds."""
    load_s: float = 0.0
    cached: int = 0
    loan: NamedHolders[Seen] | None = None
    borrowed: int = 0
    """Prompt tokens that came from another engine's cache."""
    done: int = 0
    """Prompt tokens that were cached or borrowed, or are computed."""
    answer_from: int = 0
    """Index in the engine's `gaps` of the first step of the answer."""
    gaps: list[tuple[float, int]] = field(default_factory=list)
    """Pairs of the seconds between two tokens, and the number of such gaps."""


@dataclass(eq=False)
class Engine:
    """`step_tokens`: the most prompt tokens of a step. With `step_s`, a step with running answers
    has only as many as it can compute in this time."""

    name: str
    cache: PrefixCache
    speed: Speed
    step_tokens: int = BATCH_TOKENS
    step_s: float = 0.0
    role: EngineRole = PREFILL
    busy: float = 0.0
    """The seconds in which the engine computed."""
    asked: int = 0
    cached: int = 0
    """The number of `asked` tokens that were in the cache."""
    borrowed: int = 0
    """The number of `asked` tokens that came from other engines' caches."""
    borrow: Callable[[Task], bool] = lambda task: False
    """Begins the loan of a prompt, which waits for it; False if it gets none."""
    waiting: deque[Task] = field(default_factory=deque)
    prefilling: list[Task] = field(default_factory=list)
    blocked: deque[Task] = field(default_factory=deque)
    """Transfers that wait for room."""
    ready: deque[Task] = field(default_factory=deque)
    """The requests whose KV has arrived."""
    running: list[tuple[int, int, Task]] = field(default_factory=list)
    """The running answers, each with the number of the step that ends it."""
    used: int = 0
    """Tokens of KV that running requests need."""
    nic_free_at: float = 0.0
    contexts: int = 0
    gaps: list[tuple[float, int]] = field(default_factory=list)
    """Pairs of the seconds of a step with running answers, and the number of such steps."""
    plan: int = 0
    """The number of the latest planned end; ends that were planned before are void."""
    _steps: int = 0
    _planned: int = 0
    _began: float = 0.0
    _first: float = 0.0
    _growth: float = 0.0
    _chunks: list[tuple[Task, int]] = field(default_factory=list)
    _numbers: count[int] = field(default_factory=count)

    @cached_property
    def step_model(self) -> StepModel:
        """The reported model: the line through a step without prompts and a full step."""
        speed, tokens = self.speed, self.step_tokens
        token = (speed.step(tokens, 0, 0, 0) - speed.base) / tokens
        factors = (speed.base + speed.sequence, token, speed.token_context, speed.context)
        return StepModel(*factors, speed.mixing)

    @property
    def is_busy(self) -> bool:
        return self._planned > 0

    def look_up(self, job: Job) -> int:
        """Return how many tokens are cached; the last one is always computed."""
        cached = min(self.cache.held(job.chunks), job.tokens - 1)
        self.asked += job.tokens
        self.cached += cached
        return cached

    def reserve(self, tokens: int) -> bool:
        """Reserve room for the KV of a request. An engine without requests accepts any."""
        fits = not self.used or self.used + tokens <= self.speed.kv_tokens
        if fits:
            self.used += tokens
        return fits

    def begin(self, now: float) -> float | None:
        """Begin a step; without prompts, all steps until an answer ends. Return when they end, None
        if there is nothing to do."""
        while self.ready and len(self.running) < MAX_DECODING:
            self.answer(self.ready.popleft(), now)
        self._chunks = []
        tokens, attention = self._fill()
        running = len(self.running)
        if not tokens and not running:
            return None
        self._began = now
        self._first = self.speed.step(tokens, attention, running, self.contexts)
        self._growth = self.speed.context * running
        self._planned = 1 if tokens else self.running[0][0] - self._steps
        return now + self._seconds(self._planned)

    def answer(self, task: Task, now: float) -> None:
        """Begin the answer of a prompt whose KV is here."""
        job = task.job
        job.first_token = now
        task.answer_from = len(self.gaps)
        self.contexts += job.tokens
        end = self._steps + max(1, job.output - 1)
        heapq.heappush(self.running, (end, next(self._numbers), task))
        self.cache.add(job.chunks)

    def cut(self, now: float) -> float | None:
        """Something has arrived: end after the present step. Return when that is; None if it ends
        then anyway, or if no step runs."""
        steps = self._steps_begun(now)
        if steps >= self._planned:
            return None
        self._planned = steps
        return self._began + self._seconds(steps)

    def step_end(self, now: float) -> float:
        """Return when the running step ends, `now` if none runs."""
        return max(now, self._began + self._seconds(self._steps_begun(now)))

    def _steps_begun(self, now: float) -> int:
        """Return how many of the planned steps have begun."""
        if self._planned < 2:
            return self._planned
        passed, half = now - self._began, self._growth / 2
        steps = passed / self._first
        if half:
            linear = self._first - half
            steps = (sqrt(linear * linear + 4 * half * passed) - linear) / (2 * half)
        return min(self._planned, max(1, ceil(steps - 1e-6)))

    def end(self) -> tuple[list[Task], list[Task]]:
        """End the steps. Return the tasks whose prompt is computed, and those whose answer is."""
        steps, seconds = self._planned, self._seconds(self._planned)
        self._planned = 0
        self.busy += seconds
        if self.running:
            self._steps += steps
            self.contexts += steps * len(self.running)
            self.gaps.append((seconds / steps, steps))
        for task, chunk in self._chunks:
            task.done += chunk
        computed = [task for task, _ in self._chunks if task.done >= task.job.tokens]
        for task in computed:
            self.prefilling.remove(task)
            self.cache.add(task.job.chunks)
        answered: list[Task] = []
        while self.running and self.running[0][0] <= self._steps:
            task = heapq.heappop(self.running)[2]
            job = task.job
            task.gaps = self.gaps[task.answer_from :]
            self.contexts -= job.tokens + max(1, job.output - 1)
            self.used -= job.tokens + job.output
            self.cache.add(job.after)
            answered.append(task)
        return computed, answered

    def _seconds(self, steps: int) -> float:
        return steps * self._first + self._growth * steps * (steps - 1) / 2

    def _fill(self) -> tuple[int, float]:
        """Choose the chunks of a step; return their tokens and attention."""
        tokens, attention = 0, 0.0
        if not self.prefilling and not self.waiting:
            return tokens, attention
        for task in self._next_prompts():
            chunk = min(self.step_tokens - tokens, task.job.tokens - task.done)
            if self.step_s and self.running:
                chunk = self._fitting(chunk, tokens, attention, task.done)
            if chunk:
                tokens += chunk
                attention += chunk * (task.done + chunk / 2)
                self._chunks.append((task, chunk))
            if task.done + chunk < task.job.tokens or tokens >= self.step_tokens:
                break
        return tokens, attention

    def _next_prompts(self) -> Iterator[Task]:
        yield from [*self.prefilling]
        while self.waiting:
            task = self.waiting[0]
            if not self.reserve(task.job.tokens + (task.prefiller is None) * task.job.output):
                return
            self.waiting.popleft()
            task.cached = task.done = self.look_up(task.job)
            if task.loan is not None and self.borrow(task):
                continue
            self.prefilling.append(task)
            yield task

    def _fitting(self, most: int, tokens: int, attention: float, done: int) -> int:
        """Return how long a chunk may be for a step of `step_s`."""
        low, high = (0 if tokens else min(most, MIN_CHUNK)), most
        running, contexts = len(self.running), self.contexts
        while low < high:
            chunk = (low + high + 1) // 2
            more = attention + chunk * (done + chunk / 2)
            if self.speed.step(tokens + chunk, more, running, contexts) <= self.step_s:
                low = chunk
            else:
                high = chunk - 1
        return low
