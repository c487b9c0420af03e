"""An estimate of the latencies that P prefill and D decode engines give the requests of a trace.

Prefill engines are a queue with P servers: each computes one prompt at a time, in the order of
arrival, in the seconds that the step model says. Decode engines share all running answers evenly:
a step of each takes `base` and `context` for its part of the contexts. A request waits until its
KV has room and a slot is free.

So nothing of the estimate knows policies, batches or engines with more load than others. How far it
is off is on docs/sizing.md.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from router.commands.plan.trace import TracedRequest, with_cache
from router.coordination.demand import BUSY_SHARE, NEEDED_SHARE, STEP_SHARE
from router.fleet.step_model import StepModel

TRANSFER_S = 0.003


@dataclass(frozen=True, slots=True)
class EngineCosts:
    """The costs of each engine. `chunk` is the most prompt tokens of a step, `kv_tokens` what the
    KV of running requests may have, `cache_tokens` the prefix cache with its host's, and
    `transfer_rate` the tokens whose KV moves per second."""

    model: StepModel
    chunk: int
    kv_tokens: int
    cache_tokens: int
    max_num_seqs: int
    transfer_rate: float

    def prefill_s(self, request: TracedRequest) -> float:
        uncached = request.prompt - request.cached
        return self.model.prefill_seconds(uncached, request.prompt, self.chunk)


class Prefilled(NamedTuple):
    """Requests by when their KV has been moved; `busy` is the busy part of the engines' time."""

    ends: Sequence[tuple[float, TracedRequest]]
    seconds: Sequence[float]
    """The seconds to compute each prompt, in the order of arrival."""
    busy: float


def prefill(requests: Sequence[TracedRequest], engines: int, costs: EngineCosts) -> Prefilled:
    free_at, ends, seconds = [0.0] * engines, [], []
    for request in with_cache(requests, engines * costs.cache_tokens):
        took = costs.prefill_s(request)
        end = max(request.at, free_at[0]) + took
        heapq.heapreplace(free_at, end)
        ends.append((end + TRANSFER_S + request.prompt / costs.transfer_rate, request))
        seconds.append(took)
    ends.sort(key=lambda one: one[0])
    span = max(max(free_at), requests[-1].at)
    return Prefilled(ends, seconds, sum(seconds) / engines / span)


class Latencies(NamedTuple):
    """The latencies of one request in seconds; `itl` is the mean time between two tokens."""

    ttft: float
    itl: float


class Decoded(NamedTuple):
    latencies: Sequence[Latencies]
    contexts: Sequence[tuple[float, float, int]]
    """Samples: the time, and the context tokens and number of all running answers."""
    used: float
    """The mean part of the room for KV, or of the slots, that is in use, whichever is larger."""


class _Answers:
    """The running answers of all decode engines. Each gets its next token at the same time, so one
    count of `tokens` since the beginning tells when an answer ends."""

    def __init__(self, engines: int, costs: EngineCosts) -> None:
        self._engines, self._costs = engines, costs
        self.now = self.tokens = self.contexts = 0.0
        self._reserved = 0
        self._running: list[tuple[float, int, float, TracedRequest]] = []
        self._waiting: deque[TracedRequest] = deque()
        self._count = 0
        self.latencies: list[Latencies] = []

    def __len__(self) -> int:
        return len(self._running)

    def add(self, request: TracedRequest) -> None:
        self._waiting.append(request)
        self._admit()

    def run_until(self, moment: float) -> None:
        """Let time pass."""
        while self._running:
            step = self._costs.model.decode_step(round(self.contexts / self._engines))
            end = self.now + (self._running[0][0] - self.tokens) * step
            if end > moment:
                self._pass(moment - self.now, step)
                break
            self._pass(end - self.now, step)
            _, _, began, request = heapq.heappop(self._running)
            itl = (self.now - began) / max(1, request.output - 1)
            self.latencies.append(Latencies(began - request.at, itl))
            self.contexts -= request.prompt + max(1, request.output - 1)
            self._reserved -= request.prompt + request.output
            self._admit()
        self.now = max(self.now, moment) if moment < float("inf") else self.now

    def _pass(self, seconds: float, step: float) -> None:
        self.now += seconds
        self.tokens += seconds / step
        self.contexts += seconds / step * len(self._running)

    def _admit(self) -> None:
        engines, costs = self._engines, self._costs
        while self._waiting and len(self._running) < engines * costs.max_num_seqs:
            request = self._waiting[0]
            need = request.prompt + request.output
            if self._running and self._reserved + need > engines * costs.kv_tokens:
                break
            self._waiting.popleft()
            self._reserved += need
            self.contexts += request.prompt
            self._count += 1
            end = self.tokens + max(1, request.output - 1)
            heapq.heappush(self._running, (end, self._count, self.now, request))


def decode(prefilled: Prefilled, engines: int, costs: EngineCosts) -> Decoded:
    answers, contexts, used, before = _Answers(engines, costs), [], 0.0, 0.0
    for moment, request in prefilled.ends:
        answers.run_until(moment)
        room = answers.contexts / costs.kv_tokens
        share = max(room, len(answers) / costs.max_num_seqs) / engines
        used, before = used + share * (moment - before), moment
        answers.add(request)
        contexts.append((moment, answers.contexts, len(answers)))
    answers.run_until(float("inf"))
    return Decoded(answers.latencies, contexts, used / before)


class EnginesNeeded(NamedTuple):
    """Engines that a part of the trace needs, as disagg_router_engines_needed counts them."""

    prefill: float
    decode: float


def needs(
    requests: Sequence[TracedRequest],
    prefilled: Prefilled,
    decoded: Decoded,
    costs: EngineCosts,
    target_itl: float,
    parts: int,
) -> list[EnginesNeeded]:
    """Return the need in each of so many equal parts of the trace."""
    length = max(requests[-1].at, prefilled.ends[-1][0]) / parts
    work, tokens, legs, seen = ([0.0] * parts for _ in range(4))
    for request, seconds in zip(requests, prefilled.seconds, strict=True):
        work[min(parts - 1, int(request.at / length))] += seconds
    for moment, contexts, answers in decoded.contexts:
        part = min(parts - 1, int(moment / length))
        tokens[part], legs[part] = tokens[part] + contexts, legs[part] + answers
        seen[part] += 1
    left = STEP_SHARE * target_itl - costs.model.base
    found = []
    for part in range(parts):
        mean, running = (one[part] / max(1.0, seen[part]) for one in (tokens, legs))
        steps = mean * costs.model.context / left if left > 0 else 0.0
        room, slots = mean / costs.kv_tokens, running / costs.max_num_seqs
        decoders = max(room / NEEDED_SHARE, slots / NEEDED_SHARE, steps)
        found.append(EnginesNeeded(work[part] / length / BUSY_SHARE, decoders))
    return found
