"""A fleet of simulated engines, to compare routing policies.

Jobs arrive, the router's own policies choose engines, and all follows from a seed, so that a run
can be repeated.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from math import ceil, inf
from typing import Any, NamedTuple
from zlib import crc32

from router.coordination.peers import PeerRouters
from router.coordination.role_balance import INTERVAL_S, EngineState, RoleBalancer
from router.fleet.engine import BOTH, DECODE, LEGS, PREFILL, EngineLoad, EngineRole
from router.fleet.pair_rates import PairRates, TransferTotals
from router.routing.chunk_index import ChunkIndex
from router.routing.costs import PlaceLoad
from router.routing.free_placement import Choice, place_freely
from router.routing.holders import MIN_BORROWED_TOKENS, HolderFinder, NamedHolders
from router.routing.local_prefill import find_cheapest
from router.routing.pair_choice import choose_pair
from router.routing.policy import Candidate, LoadBound, Policy, RoutingQuery
from router.routing.prompt_chunks import MAX_CHUNKS
from router.routing.route import POLICIES, PREFILL_POLICIES
from scripts.benchmarks.simulated_engine import (
    BATCH_TOKENS,
    SPEEDS,
    Engine,
    PrefixCache,
    Speed,
    Task,
)
from scripts.benchmarks.traces import SHAPES, Arrival, Job, Pauses

CACHE_TOKENS = 500_000
TRANSFER_S = 0.003
LOAN_TIMEOUT_S = 1.0  # the default of loan_timeout
WARM_UP_SHARE = 0.2
"""Share of a shape's requests that is not in the figures."""
SAMPLED_ARRIVALS = 2000
# Seconds between two reports of what engines have moved: as the prober reads them.
TRANSFERS_INTERVAL_S = 20.0


@dataclass(slots=True, eq=False)
class Seen(EngineLoad):
    """An engine as a router sees it."""

    engine: Engine
    name: str
    role: EngineRole
    preferred_role: EngineRole
    transfers: int = 0
    """Prompts of this router whose KV is on its way to or from the engine."""
    waiting_tokens: int = 0
    """The tokens of those whose KV is there."""
    offered_s: float = 0.0
    """Seconds of work of all prompts that this router has sent there."""

    @property
    def cache_tokens(self) -> int:
        return self.engine.speed.kv_tokens

    @property
    def contexts(self) -> tuple[int, int]:
        """Tokens of the prompts whose answers run there: this router's, and all."""
        return (0, 0) if self.role is PREFILL else (self.tokens_in_flight, self.total_tokens)

    @property
    def queued(self) -> tuple[float, int]:
        """Seconds and tokens of the prompts that the engine has to compute."""
        if self.role is not PREFILL:
            return self.total_local_prefill
        pace = self.prefill_rate.token_seconds or self.engine.step_model.token
        return self.total_tokens * pace, self.total_tokens

    def load(self) -> PlaceLoad:
        engine = self.engine
        known = (engine.step_model, engine.step_tokens, engine.speed.kv_tokens)
        return PlaceLoad(*known, self.contexts[1], *self.queued, step_limit=engine.step_s or inf)

    def state(self, is_measured: bool) -> EngineState:
        """Return the state that a RoleBalancer sees. `is_measured`: with the mixing penalty."""
        engine, model = self.engine, self.engine.step_model
        return EngineState(
            self.name,
            self.role,
            self.preferred_role,
            model if is_measured else replace(model, mixing=None),
            bool(engine.step_s),
            self.cache_tokens,
            *self.contexts,
            self.total_legs,
            self.offered_s,
            self.queued[0],
            max_num_seqs=256,
        )


class Router:
    """The policies of one router, and the engines as it sees them."""

    def __init__(self, setup: Setup, engines: Sequence[Engine]) -> None:
        host_tokens = max(0, setup.cache_tokens - setup.speed.kv_tokens)
        index = ChunkIndex(host_tokens=host_tokens)
        prefill, decode = PREFILL_POLICIES[setup.prefill_policy], POLICIES[setup.decode_policy]
        self.prefill_policy = prefill(LoadBound(1.5, 2), index)
        self.decode_policy = decode(LoadBound(1.5, 8), index)
        self.engines = tuple(Seen(one, one.name, one.role, one.role) for one in engines)
        known = [(one.name, one.cache_tokens, one.role) for one in self.engines]
        index.register(*zip(*known, strict=True))
        self.peers = PeerRouters(index)
        self.finder = HolderFinder(index)
        self.rates = PairRates()
        self.turn = 0
        self._form = setup.form
        self._balancer = RoleBalancer(setup.target_itl)
        self.is_free = setup.form == "free"
        new = self.engines[setup.prefillers : setup.prefillers + setup.restarts]
        self.absent = {one.name for one in new}
        """Engines that get no prompts: those that are not there yet, or that leave."""
        self._prefer({})

    def policy_of(self, engine: Candidate) -> Policy:
        return self.prefill_policy if engine.role is PREFILL else self.decode_policy

    def balance(self, now: float) -> None:
        """Decide which roles the engines prefer."""
        states = [one.state(self._form == "auto") for one in self.present]
        found = None if self._form == "free" else self._balancer.update(states, now)
        if found is not None:
            self.is_free = found.is_free
            self._prefer(found.roles)

    def _prefer(self, roles: Mapping[str, EngineRole]) -> None:
        for one in self.engines:
            one.preferred_role = roles.get(one.name, one.role)
        self.present = [one for one in self.engines if one.name not in self.absent]
        self.prefillers, self.decoders = (
            tuple(one for one in self.present if one.preferred_role.plays(leg)) for leg in LEGS
        )

    def replace(self, old: Sequence[Engine]) -> None:
        """The new engines get prompts from here on, and the old ones get none."""
        self.absent = {one.name for one in old}
        self._prefer({one.name: one.preferred_role for one in self.engines})

    def place(
        self, query: RoutingQuery, chance: Callable[[], float] | None
    ) -> tuple[Seen, Sequence[Seen]]:
        """Return the engine for the prompt, and those for the answer."""
        if not self.is_free:
            orders = (
                self.prefill_policy.order(self.prefillers, query),
                self.decode_policy.order(self.decoders, query),
            )
            if self.rates.slow:
                policies = self.prefill_policy, self.decode_policy
                p, d = (partial(one.expected_tokens, query=query) for one in policies)
                ask = query.tokens, query.turn, self.rates.slowness
                orders = choose_pair(orders, *ask, (p, d))
            return orders[0][0], orders[1]
        choices = []
        for one in self.present:
            load, uncached = one.load(), self.uncached(one, query)
            held = one.transfers, one.waiting_tokens
            choices.append(Choice(one, load, uncached, one.total_legs, *held))
        prefillers, decoders = place_freely(
            choices,
            query.tokens,
            chance=chance,
            slowness=lambda source, target: self.rates.slowness(source.name, target.name),
        )
        return prefillers[0], decoders

    def uncached(self, engine: Seen, query: RoutingQuery) -> int:
        cached = self.policy_of(engine).expected_tokens(engine.name, query)
        return max(1, query.tokens - cached)

    def find_loan(self, task: Task, reader: Seen, now: float) -> None:
        """Name the holders of a prompt. What the reader borrows is no load."""

        def expected(engine: Candidate) -> int:
            return self.policy_of(engine).expected_tokens(engine.name, task.query)

        task.loan = self.finder.find(reader, self.engines, task.query, expected, now)
        if task.loan is not None:
            self.finder.note_named(task.loan, now)
            task.load = max(1, task.load - task.loan.tokens)

    def note_loan(self, task: Task, loan: NamedHolders[Seen], now: float) -> None:
        """A prompt with a loan is computed."""
        had = task.cached + task.borrowed
        computed, seconds = task.job.tokens - had, now - task.job.arrived
        self.finder.note_transfer(loan, task.borrowed, computed, seconds, now)
        self.finder.note_answer(loan, task.query, had)

    def forget(self, engine: Engine) -> None:
        (seen,) = (one for one in self.engines if one.engine is engine)
        self.policy_of(seen).forget(seen.name)
        self.finder.forget(seen.name)

    def report(self) -> bytes:
        return self.peers.report(self.engines)


@dataclass(frozen=True, slots=True)
class Setup:
    """`load` is of what the prefillers could do if nothing was ever cached. `arrivals` come at
    their own times, instead of `requests` of a shape; in a closed loop only the first one of each
    session, and the others in their pauses after the answers."""

    shape: str
    prefillers: int
    decoders: int
    requests: int
    prefill_policy: str
    decode_policy: str
    both: int = 0
    """Engines of both roles."""
    form: str = "auto"
    """How these are used: `free`, `boundary`, or `auto` (see router.coordination.role_balance)."""
    load: float = 0.9
    rhythm: str = ""
    """The rhythm in which requests arrive; see traces.Pauses."""
    min_remote_prefill_tokens: int = 0
    target_itl: float = 0.0
    cache_tokens: int = CACHE_TOKENS
    step_tokens: int = 256
    """The most prompt tokens in a step of a decode engine."""
    step_s: float = 0.0
    seed: int = 0
    speed: Speed = SPEEDS["generic"]
    routers: int = 1
    by_conversation: bool = False
    """A conversation's requests go to one router, all others to one by chance."""
    share_interval: float = 0.0
    """Seconds between two reports of a router to the others; 0: they share nothing."""
    loans: bool = False
    """The router names holders, from whose prefix caches engines borrow."""
    restarts: int = 0
    """The number of prefill engines that new ones replace at half of the arrivals."""
    lend_s: float = 0.0
    """Seconds for which the old ones still lend."""
    arrivals: Sequence[Arrival] = ()
    closed_loop: bool = False
    slow_pair: float = 1.0
    """KV moves so many times as slowly from the first prefill engine to the first decode engine."""
    pair_rates: bool = True
    """The routers measure how fast KV moves between each two engines."""


class Answer(NamedTuple):
    """The latencies of one answer in seconds. `gap` is the 99th percentile of the times between two
    tokens, `worst` the longest of them."""

    ttft: float
    tpot: float
    gap: float
    worst: float
    tokens: int
    """The number of tokens in the prompt."""
    arrived: float


@dataclass(slots=True)
class Outcome:
    """The results of a run."""

    prefillers: Sequence[Engine]
    decoders: Sequence[Engine]
    answers: list[Answer] = field(default_factory=list)
    jobs: int = 0
    alone: int = 0
    """Jobs that a decode engine did alone."""


class Simulation:
    """`jobs` gets the jobs in the order in which they arrive."""

    def __init__(self, setup: Setup, jobs: list[Job] | None = None) -> None:
        self.setup = setup
        self._jobs = [] if jobs is None else jobs
        self._following: dict[str, deque[Job]] = {}
        """The jobs of each session that wait for the answer before them."""
        budget = (setup.step_tokens, setup.step_s)
        prefillers = range(setup.prefillers + setup.restarts)
        self.prefillers = tuple(self._engine(f"10.1.{n}") for n in prefillers)
        decoders = [self._engine(f"10.2.{n}", *budget, DECODE) for n in range(setup.decoders)]
        if setup.step_s:  # steps without answers are as long as those of prefill engines
            budget = (BATCH_TOKENS, setup.step_s)
        both = [self._engine(f"10.3.{n}", *budget, BOTH) for n in range(setup.both)]
        self.decoders = (*decoders, *both)
        self._slow_pair = "10.1.0", "10.2.0"
        self._totals: dict[tuple[str, str], TransferTotals] = {}
        self._idle_at: dict[tuple[str, str], float] = {}
        """When the last transfer of each pair ends."""
        engines = (*self.prefillers, *self.decoders)
        self.routers = [Router(setup, engines) for _ in range(setup.routers)]
        self.outcome = Outcome(self.prefillers, self.decoders)
        able = setup.prefillers + setup.both / 2
        self._trace = SHAPES[setup.shape](setup.seed, ceil(able))
        self._random = random.Random(setup.seed + 1)
        self._pauses = Pauses(setup.rhythm, self._random)
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._numbers = count()
        self._now = 0.0
        self._left = self._total = len(setup.arrivals) or setup.requests
        self._counted_from = 0.0 if setup.arrivals else WARM_UP_SHARE * self._left
        self._done = 0
        tokens_a_second = setup.load * able / setup.speed.token
        self._rate = tokens_a_second / _tokens_per_arrival(setup.shape, setup.seed)

    def _engine(self, name: str, *budget: Any) -> Engine:
        engine = Engine(name, PrefixCache(self.setup.cache_tokens), self.setup.speed, *budget)
        engine.borrow = partial(self._borrow, engine)
        return engine

    def run(self) -> Outcome:
        for at, job in self.setup.arrivals:
            if self.setup.closed_loop and job.session in self._following:
                self._following[job.session].append(job)
            else:
                self._following[job.session] = deque()
                self._at(at, self._ask, job)
        if not self.setup.arrivals:
            self._at(0.0, self._arrive)
        for number, router in enumerate(self.routers if self.setup.share_interval else ()):
            self._at(number / len(self.routers) * self.setup.share_interval, self._share, router)
        for router in self.routers if self.setup.both else ():
            self._at(0.0, self._balance, router)
        if self.setup.pair_rates:
            self._at(TRANSFERS_INTERVAL_S, self._report_transfers)
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

    def _report_transfers(self) -> None:
        for router in self.routers:
            for pair, totals in self._totals.items():
                router.rates.note(pair, totals, self._now)
        if self._done < self._total:
            self._at(self._now + TRANSFERS_INTERVAL_S, self._report_transfers)

    def _balance(self, router: Router) -> None:
        router.balance(self._now)
        if self._done < self._total:
            self._at(self._now + INTERVAL_S, self._balance, router)

    def _at(self, when: float, act: Callable[..., None], *arguments: object) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), act, arguments))

    def _arrive(self) -> None:
        if self._left > 0:
            self._ask(self._trace.arrive())
            self._at(self._now + self._pauses.next(self._now, self._rate), self._arrive)

    def _ask(self, job: Job) -> None:
        if self._left <= 0:
            return
        self._left -= 1
        if self._left == self._total // 2:
            self._replace()
        self._jobs.append(job)
        job.arrived = self._now
        routers = self.routers
        router = routers[0] if len(routers) == 1 else self._random.choice(routers)
        if self.setup.by_conversation and job.session:
            router = routers[crc32(job.session.encode()) % len(routers)]
        router.turn += 1
        ask = RoutingQuery(router.turn, job.session, job.chunks[:MAX_CHUNKS], job.tokens)
        self.outcome.jobs += 1
        chance = self._random.random if len(routers) > 1 else None
        prefiller, decoders = router.place(ask, chance)
        task = Task(job, ask, router, decoders[0], prefiller)
        least, target = self.setup.min_remote_prefill_tokens, self.setup.target_itl
        if prefiller is decoders[0] or (least and router.uncached(decoders[0], ask) < least):
            self._stay(task)
        elif router.is_free:
            self._send(task, prefiller)
        elif target and (sooner := self._sooner(task, decoders, prefiller, target)) is not None:
            task.decoder = sooner
            self._stay(task)
        else:
            self._send(task, prefiller)

    def _sooner(
        self, task: Task, decoders: Sequence[Seen], prefiller: Seen, target: float
    ) -> Seen | None:
        """Return the decoder that computes the prompt sooner than the prefiller, as the router's
        proxy.plan decides."""
        tokens, router = task.job.tokens, task.router
        loads = ((one, one.load(), router.uncached(one, task.query)) for one in decoders)
        best = find_cheapest(loads, tokens, target)
        if best is None:
            return None
        decoder, _, cost = best
        model = prefiller.engine.step_model
        remote = PlaceLoad(model, prefiller.engine.step_tokens, 0, queued_s=prefiller.queued[0])
        uncached = router.uncached(prefiller, task.query)
        return decoder if cost < remote.remote_cost(uncached, tokens) else None

    def _stay(self, task: Task) -> None:
        self.outcome.alone += 1
        decoder, task.prefiller = task.decoder, None
        task.load = task.router.uncached(decoder, task.query)
        if self.setup.loans:
            task.router.find_loan(task, decoder, self._now)
        self._queue(task, decoder)
        task.router.decode_policy.note_sent(decoder.name, task.query)
        decoder.add_load(1, task.job.tokens)
        decoder.engine.waiting.append(task)
        self._wake(decoder.engine)

    def _queue(self, task: Task, engine: Seen) -> None:
        """Count a prompt as queued at a decode engine, or at one of both roles."""
        load = engine.load()
        if engine.preferred_role is PREFILL and not load.contexts:
            load = load.without_step_limit()
        task.load_s = load.prefill_seconds(task.load, task.job.tokens)
        engine.add_local_prefill(task.load_s, task.load)
        engine.offered_s += engine.engine.step_model.prefill_seconds(task.load, task.job.tokens)

    def _send(self, task: Task, prefiller: Seen) -> None:
        policy, ask = task.router.policy_of(prefiller), task.query
        task.load = ask.tokens - policy.expected_tokens(prefiller.name, ask)
        if self.setup.loans:
            task.router.find_loan(task, prefiller, self._now)
        policy.note_sent(prefiller.name, ask)
        if prefiller.role is BOTH:
            self._queue(task, prefiller)
            prefiller.add_load(1, 0)
        else:
            prefiller.add_load(1, task.load)
        prefiller.engine.waiting.append(task)
        self._wake(prefiller.engine)

    def _borrow(self, reader: Engine, task: Task) -> bool:
        """Ask the first holder that has enough of a prefix. It answers after its running step, and
        the reader reads after its own."""
        for place, _ in () if task.loan is None else task.loan.holders:
            source = next(one.engine for one in task.router.engines if one is place)
            held = min(source.cache.held(task.job.chunks), task.job.tokens - 1)
            if held - task.cached >= MIN_BORROWED_TOKENS:
                task.borrowed = held - task.cached
                answered = source.step_end(self._now)
                if answered > self._now + LOAN_TIMEOUT_S:
                    answered, task.borrowed = self._now + LOAN_TIMEOUT_S, 0
                self._at(answered, self._lent, task, source, reader)
                return True
        return False

    def _lent(self, task: Task, source: Engine, reader: Engine) -> None:
        self._at(reader.step_end(self._now), self._read, task, source, reader)

    def _read(self, task: Task, source: Engine, reader: Engine) -> None:
        end = self._move(source, reader, task.borrowed) if task.borrowed else self._now
        self._at(end + TRANSFER_S, self._borrowed, task, reader)

    def _borrowed(self, task: Task, reader: Engine) -> None:
        reader.borrowed += task.borrowed
        task.done = task.cached + task.borrowed
        reader.prefilling.append(task)
        self._wake(reader)

    def _move(self, source: Engine, reader: Engine, tokens: int) -> float:
        """Move KV, and return when it has arrived. One transfer at a time moves through each
        engine's network interface. The path of a slow pair is slow behind the interfaces, so it
        does not delay other pairs."""
        pair, seconds = (source.name, reader.name), tokens / self.setup.speed.nic_tokens_per_s
        end = max(self._now, source.nic_free_at, reader.nic_free_at) + seconds
        source.nic_free_at = reader.nic_free_at = end
        idle_at = self._idle_at.get(pair, 0.0)
        if pair == self._slow_pair and self.setup.slow_pair != 1:
            end = max(end - seconds, idle_at) + seconds * self.setup.slow_pair
        self._idle_at[pair] = end
        busy = end - max(self._now, idle_at)
        moved = TransferTotals(1, tokens, end - self._now, busy)
        self._totals[pair] = self._totals.get(pair, TransferTotals()).plus(moved)
        return end

    def _replace(self) -> None:
        old = self.prefillers[: self.setup.restarts]
        for router in self.routers:
            router.replace(old)
        for engine in old:
            self._at(self._now + self.setup.lend_s, self._stop, engine)

    def _stop(self, engine: Engine) -> None:
        engine.cache = PrefixCache(self.setup.cache_tokens)
        for router in self.routers:
            router.forget(engine)

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
            if task.loan is not None:
                task.router.note_loan(task, task.loan, self._now)
            if task.prefiller is None:
                decoder = task.decoder
                decoder.add_local_prefill(-task.load_s, -task.load)
                task.router.decode_policy.note_cached(decoder.name, task.query, task.cached)
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
        computed = job.tokens - task.cached - task.borrowed
        if prefiller.role is BOTH:
            prefiller.add_local_prefill(-task.load_s, -task.load)
            prefiller.add_load(-1, 0)
        else:
            prefiller.note_prefill(job.arrived, self._now, computed)
            prefiller.add_load(-1, -task.load)
        router.policy_of(prefiller).note_cached(prefiller.name, ask, task.cached)
        for one in (prefiller, decoder):
            one.transfers += 1
        prefiller.waiting_tokens += job.tokens
        router.decode_policy.note_sent(decoder.name, ask)
        decoder.add_load(1, task.job.tokens)
        if decoder.engine.blocked or not self._transfer(task):
            decoder.engine.blocked.append(task)

    def _transfer(self, task: Task) -> bool:
        """Begin the transfer to the decoder, unless it has no room."""
        assert task.prefiller is not None
        source, engine, job = task.prefiller.engine, task.decoder.engine, task.job
        if not engine.reserve(job.tokens + job.output):
            return False
        missing = job.tokens - engine.look_up(job)
        end = self._move(source, engine, missing)
        self._at(end + TRANSFER_S, self._moved, task, task.prefiller)
        return True

    def _moved(self, task: Task, prefiller: Seen) -> None:
        source = prefiller.engine
        for one in (prefiller, task.decoder):
            one.transfers -= 1
        prefiller.waiting_tokens -= task.job.tokens
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
            ttft, worst = job.first_token - job.arrived, gaps[0][0]
            self.outcome.answers.append(Answer(ttft, tpot, gap, worst, job.tokens, job.arrived))
        following = self._trace.follow(job)
        if waiting := self._following.get(job.session):
            following = waiting[0].pause, waiting.popleft()
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
