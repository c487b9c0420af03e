"""Policies that prefer engines whose cache holds the beginning of the prompt.

`PrefixAffinity` chooses the longest match, as long as that engine is not overloaded. `PrefillCost`
chooses the engine that has the least to compute before it can answer, in seconds: what it lacks of
this prompt, and a share of what is queued there. Both go by a `ChunkIndex` of what the router has
sent, and correct it by the `cached_tokens` of the engines' answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from statistics import fmean
from typing import Any, NamedTuple

from router.routing.chunk_index import NO_MATCH, ChunkIndex, ChunkMatch
from router.routing.costs import CLEAR_DIFFERENCE, DEFAULT_TOKEN_S, QUEUE_SHARE, prompt_cost
from router.routing.policy import (
    MAX_ORDERED,
    Candidate,
    CandidateCache,
    E,
    LeastLoaded,
    LoadBound,
    Policy,
    PowerOfTwo,
    RoutingQuery,
    crowding,
    filled,
    is_full,
    load,
    mix,
    prefill_load,
    queued_tokens,
    some_of,
)
from router.routing.prompt_chunks import TOKENS_PER_CHUNK
from router.routing.rendezvous import Rendezvous

# The speeds of engines are compared once in so many choices.
CHOICES_PER_COMPARISON = 64
# PrefillCost compares at most this many lengths of match, and by load this many engines of each.
MAX_COMPARED = 8
# After this many consecutive answers that contradict the index, it forgets the engine.
MAX_STRIKES = 3
# The unanswered prompts of one engine that are remembered.
MAX_UNANSWERED = 32
# An engine counts as at most this many times as slow or as fast as the mean.
MAX_SLOWNESS = 8.0


class _UnansweredPrompt(NamedTuple):
    """A prompt that was sent when its first `depth` chunks were expected to be cached. `is_certain`
    is False if only another unanswered prompt would bring these chunks."""

    depth: int
    is_certain: bool
    chunks: tuple[int, ...]

    def brings(self, chunk: int, depth: int) -> bool:
        return self.depth < depth <= len(self.chunks) and self.chunks[depth - 1] == chunk


class CandidateBits(NamedTuple):
    """The bits of some candidates with their indexes, and all bits together, in an era of the
    index. `unequal`: their caches differ in size."""

    indexes: dict[int, int]
    all: int
    era: int
    unequal: bool


class RegisteredCandidates(CandidateCache[CandidateBits]):
    """Registers candidates at an index when they are first used, and in each new era."""

    def __init__(self, index: ChunkIndex) -> None:
        super().__init__(self._register)
        self._index = index

    def get(self, candidates: Sequence[Candidate]) -> CandidateBits:
        bits = super().get(candidates)
        if bits.era != self._index.era:
            self.clear()
            bits = super().get(candidates)
        return bits

    def _register(self, candidates: Sequence[Candidate]) -> CandidateBits:
        names = [engine.name for engine in candidates]
        caches = [engine.cache_tokens for engine in candidates]
        bits = self._index.register(names, caches, [engine.preferred_role for engine in candidates])
        indexes = {bit: index for index, bit in enumerate(bits)}
        return CandidateBits(indexes, sum(bits), self._index.era, len({*caches}) > 1)


class PrefixAffinity(Policy):
    """Prefers the engine with the longest match. `index` may be shared with other policies."""

    uses_feedback = chooses_ranks = True

    def __init__(self, bound: LoadBound, index: ChunkIndex) -> None:
        self._bound = bound
        self._by_load: Policy = PowerOfTwo()
        self._load_of: Callable[[Candidate], Any] = load
        self._index = index
        self._registered = RegisteredCandidates(index)
        self._unanswered: dict[str, dict[int, _UnansweredPrompt]] = {}
        """For each engine, by turn."""
        # With so many engines there, those that are gone are looked for.
        self._most_known = 1
        self._strikes: dict[str, int] = {}
        # The best match of the last query: its feedback follows soon.
        self._last_chunks: tuple[int, ...] = ()
        self._last_match = NO_MATCH
        self._rendezvous = Rendezvous()

    @property
    def num_unanswered(self) -> int:
        """Prompts that were sent and whose answers are awaited."""
        return sum(map(len, self._unanswered.values()))

    def order(self, candidates: Sequence[E], query: RoutingQuery) -> Sequence[E]:
        """Prefer the engine with the longest match. If it is overloaded, look for shorter matches
        of the other engines."""
        chunks = query.chunks
        if not chunks:
            return self._by_load.order(candidates, query)
        bits = self._registered.get(candidates)
        depth, engines = self._find_match(chunks, bits)
        among = bits.all
        overloaded: list[E] = []
        while depth and len(overloaded) < MAX_ORDERED:
            first = self._least_loaded(engines, candidates, bits, query)
            is_busy = first.total_legs >= self._bound.floor and self._bound.is_overloaded(
                first, candidates, mix(query.turn)
            )
            full = is_full(first, query.tokens)
            if not is_busy and not (
                (full or bits.unequal) and self._is_crowded(first, candidates, query, full)
            ):
                return _with_stand_in(first, candidates, query.turn)
            overloaded.append(first)
            among &= ~engines
            depth, engines = self._index.longest(chunks, among, depth - 1)
        return filled([], self._by_load.order(candidates, query), overloaded)

    def _is_crowded(
        self, engine: E, candidates: Sequence[E], query: RoutingQuery, full: bool
    ) -> bool:
        """Return True if another engine has clearly more room in its KV cache. Engines with caches
        of equal size are compared only if this one is full."""
        other, tokens = self._by_load.order(candidates, query)[0], query.tokens
        if engine.cache_tokens == other.cache_tokens and not full:
            return False
        return crowding(engine, tokens) > self._bound.factor * crowding(other, tokens)

    def _find_match(self, chunks: tuple[int, ...], bits: CandidateBits) -> ChunkMatch:
        """Return the longest match of any candidate, and remember it for the feedback."""
        self._last_chunks = chunks
        self._last_match = self._index.longest(chunks, bits.all)
        return self._last_match

    def _least_loaded(
        self, engines: int, candidates: Sequence[E], bits: CandidateBits, query: RoutingQuery
    ) -> E:
        if engines in bits.indexes:
            return candidates[bits.indexes[engines]]
        found = [candidates[bits.indexes[bit]] for bit in some_bits(engines, mix(query.turn))]
        return min(found, key=self._load_of)

    def note_sent(self, name: str, query: RoutingQuery) -> None:
        if not query.chunks or not self._index.bit(name):
            return
        if len(self._unanswered) >= self._most_known:
            for gone in [one for one in self._unanswered if not self._index.bit(one)]:
                del self._unanswered[gone]
            self._most_known = 2 * len(self._unanswered) + 1
        unanswered = self._unanswered.setdefault(name, {})
        depth, is_certain = self._depth(name, query), True
        if depth and unanswered:
            chunk = query.chunks[depth - 1]
            is_certain = not any(other.brings(chunk, depth) for other in unanswered.values())
        if len(unanswered) >= MAX_UNANSWERED:
            del unanswered[next(iter(unanswered))]
        unanswered[query.turn] = _UnansweredPrompt(depth, is_certain, query.chunks)
        self._index.add(name, query.chunks)
        self._index.on_sent(name, query.chunks)

    def note_cached(self, name: str, query: RoutingQuery, cached_tokens: int | None) -> None:
        """Compare the expectation with the answer. Half of it suffices: tokens are estimated."""
        sent = self._unanswered.get(name, {}).pop(query.turn, None)
        if sent is None or cached_tokens is None:
            return
        known = (sent.depth - query.marks) * TOKENS_PER_CHUNK
        if len(sent.chunks) > sent.depth:
            unknown = (len(sent.chunks) - sent.depth) * TOKENS_PER_CHUNK
            # Tokens are estimated, and prompts may also share a part of a chunk.
            is_more = cached_tokens > 2 * (known + TOKENS_PER_CHUNK)
            self._rendezvous.note_answer(unknown, cached_tokens - known if is_more else 0)
        if known <= 0:
            return
        if 2 * cached_tokens >= known:
            self._strikes.pop(name, None)
        elif sent.is_certain:
            strikes = self._strikes[name] = self._strikes.get(name, 0) + 1
            if strikes >= MAX_STRIKES:
                self.forget(name)

    def forget(self, name: str) -> None:
        self._strikes.pop(name, None)
        self._unanswered.pop(name, None)
        self._index.forget(name)
        self._registered.clear()
        self._rendezvous.forget()

    def expected_tokens(self, name: str, query: RoutingQuery) -> int:
        """Return the tokens without those that only unanswered prompts will bring."""
        depth = self._depth(name, query)
        if depth:
            for other in self._unanswered.get(name, {}).values():
                if depth and other.brings(query.chunks[depth - 1], depth):
                    depth = other.depth
        return max(0, depth - query.marks) * TOKENS_PER_CHUNK

    def _depth(self, name: str, query: RoutingQuery) -> int:
        bit = self._index.bit(name)
        if query.chunks is self._last_chunks and self._last_match.engines & bit:
            return self._last_match.depth
        return self._index.longest(query.chunks, bit).depth


class PrefillCost(PrefixAffinity):
    """Prefers the engine with the least `prompt_cost`, by the seconds per token that compare_paces
    returns."""

    def __init__(self, bound: LoadBound, index: ChunkIndex) -> None:
        super().__init__(bound, index)
        self._by_load = LeastLoaded(prefill_load)
        self._load_of = prefill_load
        self._token_s: dict[str, float] = {}
        """The seconds per token of each engine, by name; empty while all seem equally fast."""
        self._mean_token_s = self._least_token_s = DEFAULT_TOKEN_S
        self._choices_left = 0

    def order(self, candidates: Sequence[E], query: RoutingQuery) -> Sequence[E]:
        """Compare the least loaded engine of each length of match, longest first, until shorter
        ones cannot be better, and the least loaded engines of all."""
        self._choices_left -= 1
        if self._choices_left < 0:
            self._compare_rates(candidates)
        chunks = query.chunks
        if not chunks:
            return self._soonest(candidates, query)
        bits = self._registered.get(candidates)
        depth, engines = self._find_match(chunks, bits)
        held, guessed = self._guess(candidates, query)
        if held <= depth * TOKENS_PER_CHUNK:
            guessed = None
        if not depth and guessed is None:
            return self._soonest(candidates, query)
        one = self._least_loaded(engines, candidates, bits, query) if depth else None
        if one is not None and guessed is None and not queued_tokens(one) and not self._token_s:
            return _with_stand_in(one, candidates, query.turn)
        idle = self._soonest(candidates, query)
        # With several idle engines, the wait is all that counts.
        share = 1.0 if len(idle) > 2 and not queued_tokens(idle[-1]) else QUEUE_SHARE
        tokens = max(query.tokens, len(chunks) * TOKENS_PER_CHUNK)
        costs = [(self._cost_of(engine, tokens, share), engine) for engine in idle]
        if guessed is not None:
            costs.append((self._cost_of(guessed, tokens - held, share), guessed))
        least, among = costs[0][0], bits.all
        for _ in range(MAX_COMPARED):
            if one is None:
                break
            cost = self._cost_of(one, tokens - depth * TOKENS_PER_CHUNK, share)
            costs.append((cost, one))
            least, among = min(least, cost), among & ~engines
            depth, engines = self._index.longest(chunks, among, depth - 1)
            if not depth or self._least_token_s * (tokens - depth * TOKENS_PER_CHUNK) >= least:
                break
            one = self._least_loaded(engines, candidates, bits, query)
        costs.sort(key=itemgetter(0))
        return filled([], (engine for _, engine in costs))

    def _guess(self, candidates: Sequence[E], query: RoutingQuery) -> tuple[int, E | None]:
        """Return the engine to which other routers may have sent the beginning of this prompt, and
        the tokens for which that counts."""
        credit = self._rendezvous.credit
        if not credit or len(candidates) < 2:
            return 0, None
        held = int(credit * len(query.chunks) * TOKENS_PER_CHUNK)
        return held, self._rendezvous.guess(candidates, query.chunks)

    def _cost_of(self, engine: Candidate, uncached: int, share: float = 1.0) -> float:
        token_s = self._token_s.get(engine.name, self._mean_token_s)
        return prompt_cost(token_s, uncached, queued_tokens(engine), share)

    def _soonest(self, candidates: Sequence[E], query: RoutingQuery) -> Sequence[E]:
        """Return the engines that would compute the whole prompt soonest."""
        if not self._token_s:
            return self._by_load.order(candidates, query)
        considered = some_of(candidates, query.turn)
        return sorted(considered, key=lambda one: self._cost_of(one, query.tokens))[:MAX_ORDERED]

    def _compare_rates(self, candidates: Sequence[Candidate]) -> None:
        self._choices_left = max(CHOICES_PER_COMPARISON, len(candidates))
        latest = max((engine.prefill_rate.ended for engine in candidates), default=0.0)
        paces = [engine.prefill_rate.pace_at(latest) for engine in candidates]
        names, found = [engine.name for engine in candidates], compare_paces(paces)
        for name in names:
            self._token_s.pop(name, None)
        self._token_s.update(zip(names, found, strict=False))
        self._mean_token_s = fmean(filter(None, paces)) if found else DEFAULT_TOKEN_S
        self._least_token_s = min(self._token_s.values(), default=DEFAULT_TOKEN_S)
        one_chunk = partial(self._cost_of, uncached=TOKENS_PER_CHUNK)
        self._load_of = one_chunk if self._token_s else prefill_load

    def forget(self, name: str) -> None:
        super().forget(name)
        self._token_s.pop(name, None)


def _with_stand_in(first: E, candidates: Sequence[E], turn: int) -> list[E]:
    """Return `first` and another engine, which is used only if the first one fails."""
    other = candidates[turn % len(candidates)]
    if other is first:
        other = candidates[(turn + 1) % len(candidates)]
    return [first, other] if other is not first else [first]


def some_bits(engines: int, chance: int) -> list[int]:
    """Return the bits of at most MAX_COMPARED of these engines, from a random one on."""
    found: list[int] = []
    shift = chance % engines.bit_length()
    above = engines >> shift << shift
    for bits in (above, engines ^ above):
        while bits and len(found) < MAX_COMPARED:
            bit = bits & -bits
            found.append(bit)
            bits ^= bit
    return found


def compare_paces(paces: Sequence[float]) -> Sequence[float]:
    """Return the seconds per token by which engines with these measured ones (0: unknown) are
    compared.

    Engines without a clear difference are equally fast, and unknown ones as fast as the mean. Empty
    if all are equally fast.
    """
    classes: list[list[float]] = []
    for pace in sorted(filter(None, paces)):
        # In the order of their pace, two neighbours may differ.
        if classes and pace < CLEAR_DIFFERENCE * classes[-1][-1]:
            classes[-1].append(pace)
        else:
            classes.append([pace])
    if len(classes) < 2:
        return ()
    mean = fmean(filter(None, paces))
    compared = {
        pace: min(max(fmean(equal), mean / MAX_SLOWNESS), mean * MAX_SLOWNESS)
        for equal in classes
        for pace in equal
    }
    return [compared.get(pace, mean) for pace in paces]
