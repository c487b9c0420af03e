"""The interface of policies, the policies that go by load, and the bound of load within which
affinity applies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import filterfalse, islice
from operator import attrgetter
from typing import Any, Generic, Protocol, TypeVar

from msgspec import Struct

from router.fleet.engine import BOTH, PrefillRate
from router.routing.prompt_chunks import MASK, MIXER

MAX_ORDERED = 3
MAX_CACHED_TUPLES = 16
SAMPLE_SIZE = 64
# An engine is full if the prompts of its running requests need more than this of its KV cache:
# answers need room, too.
FULL_SHARE = 0.75
# Share of a KV cache that counts as left in a full one. Prompts may share what they need.
MIN_ROOM = 0.02
T = TypeVar("T")


class Candidate(Protocol):
    """An engine to choose. Its name is unique and never changes."""

    name: str

    @property
    def role(self) -> str: ...

    @property
    def preferred_role(self) -> str: ...

    total_legs: int
    """Request legs that run on the engine, with those that other routers have reported."""
    total_tokens: int
    """Estimated prompt tokens of these legs."""
    prefill_rate: PrefillRate

    @property
    def total_local_prefill(self) -> tuple[float, int]:
        """Seconds and tokens of the prompts that it computes as a decode engine; at an engine of
        both roles, of all prompts."""
        ...

    @property
    def cache_tokens(self) -> int:
        """Tokens that its prefix cache holds; 0 if unknown."""
        ...


E = TypeVar("E", bound=Candidate)


class RoutingQuery(Struct, frozen=True):
    """The facts about a request that a policy may use. `turn` grows with each request of a role;
    policies have no other source of chance, so that their decisions can be replayed."""

    turn: int
    session: str = ""
    chunks: tuple[int, ...] = ()
    """Chained hashes of the prompt's beginnings: see router.routing.prompt_chunks."""
    tokens: int = 0
    """Estimated tokens of the prompt, plus those that loading its adapter counts as."""
    marks: int = 0
    """The number of leading `chunks` that represent the adapter instead of tokens."""


class Policy(ABC):
    """Orders the engines of one role and one group.

    Most policies keep no state. Only for policies with `uses_feedback` is `RoutingQuery.chunks`
    filled in, and only these are sent feedback.
    """

    uses_feedback = False
    chooses_ranks = False
    """It chooses among the data-parallel ranks of engines. A policy that goes by load alone leaves
    the rank to the engine, which knows the queues of its ranks better."""

    @abstractmethod
    def order(self, candidates: Sequence[E], query: RoutingQuery) -> Sequence[E]:
        """Return the engines to try, best first: distinct, at most MAX_ORDERED, and at least one if
        there is any candidate."""

    def note_sent(self, name: str, query: RoutingQuery) -> None:
        """The prompt was sent to the engine."""
        return

    def note_cached(self, name: str, query: RoutingQuery, cached_tokens: int | None) -> None:
        """The engine answered, so it now holds the prompt. `cached_tokens` of the prompt were
        cached or transferred before; None if the engine did not report that."""
        return

    def forget(self, name: str) -> None:
        """The engine was removed or has restarted."""
        return

    def expected_tokens(self, name: str, query: RoutingQuery) -> int:
        """Return the number of prompt tokens that the engine is expected to hold."""
        return 0


class PolicyFeedback:
    """Asks a policy about one request, and reports the request to it: each engine that was sent the
    prompt is reported once more when it has answered, at the latest by `end`."""

    __slots__ = ("_expected", "_policy", "_sent", "query")

    def __init__(self, policy: Policy, query: RoutingQuery) -> None:
        self._policy = policy
        self.query = query
        self._sent: list[str] = []
        self._expected: dict[str, int] = {}

    def expected_tokens(self, name: str) -> int:
        """Return the number of prompt tokens that the engine was expected to hold when this was
        asked first, so that all choices for a request go by the same figures."""
        expected = self._expected.get(name)
        if expected is None:
            expected = self._expected[name] = self._policy.expected_tokens(name, self.query)
        return expected

    def sent(self, name: str) -> None:
        """The prompt was sent to the engine."""
        if name not in self._sent:
            self._sent.append(name)
            self._policy.note_sent(name, self.query)

    def answered(self, name: str, cached_tokens: int | None) -> None:
        """The engine holds the prompt now; see `Policy.note_cached`."""
        if name in self._sent:
            self._sent.remove(name)
            self._policy.note_cached(name, self.query, cached_tokens)

    def end(self) -> None:
        """The request has ended."""
        while self._sent:
            self.answered(self._sent[-1], None)


class CandidateCache(Generic[T]):
    """Results of a policy for a tuple of candidates, found again by the tuple's identity.

    The fleet keeps the tuple of an unchanged set of engines. The cache keeps the tuple alive as
    long as its value, so that its id stays unique. Values of other sequences are not cached.
    """

    def __init__(self, compute: Callable[[Sequence[Candidate]], T]) -> None:
        self._compute = compute
        self._cached: dict[int, tuple[Sequence[Candidate], T]] = {}

    def get(self, candidates: Sequence[Candidate]) -> T:
        cached = self._cached.get(id(candidates))
        if cached is not None:
            return cached[1]
        value = self._compute(candidates)
        if isinstance(candidates, tuple):
            if len(self._cached) >= MAX_CACHED_TUPLES:
                del self._cached[next(iter(self._cached))]
            self._cached[id(candidates)] = (candidates, value)
        return value

    def clear(self) -> None:
        self._cached.clear()


legs = attrgetter("total_legs")
load = attrgetter("total_tokens", "total_legs")


def has_tokens(engine: Candidate) -> bool:
    """Return True if prompts or answers run on the engine. An engine without legs has none."""
    return engine.total_tokens > 0 or engine.total_local_prefill[1] > 0


def queued_tokens(engine: Candidate) -> int:
    """Return the tokens of the prompts that the engine has to compute as a prefill engine."""
    return engine.total_local_prefill[1] if engine.role == BOTH else engine.total_tokens


def prefill_load(engine: Candidate) -> float:
    """Return the queued tokens and, as a fraction, the legs: one number sorts faster than two."""
    # As in `queued_tokens`, which would be a second call for each engine.
    queued = engine.total_local_prefill[1] if engine.role == BOTH else engine.total_tokens
    return queued + engine.total_legs * 2.0**-20


def filled(order: list[E], *more: Iterable[E]) -> list[E]:
    """Return the order, extended to MAX_ORDERED engines from `more` if there are enough."""
    for engines in more:
        for engine in engines:
            if len(order) >= MAX_ORDERED:
                break
            if engine not in order:
                order.append(engine)
    return order[:MAX_ORDERED]


def mix(number: int) -> int:
    """Return 64 pseudo-random bits that depend on every bit of the number (splitmix64)."""
    mixed = (number + 1) * MIXER & MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & MASK
    return mixed ^ mixed >> 31


def sample(items: Sequence[T], chance: int, most: int = SAMPLE_SIZE) -> Sequence[T]:
    """Return `most` items, evenly spaced from a random place on; all if there are fewer.

    Two slices, the second one where the first runs over the end: a thousand items cost no more than
    a hundred. Any two items may meet in a sample, so load spreads over all of them.
    """
    size = len(items)
    if size <= most:
        return items
    start = chance % size
    step = 1 + (chance >> 32) % (size // most)
    end = start + most * step
    picked = items[start:end:step]
    missing = most - len(picked)
    return [*picked, *items[end - missing * step - size : end - size : step]] if missing else picked


def in_turn(candidates: Sequence[T], turn: int) -> Sequence[T]:
    """Return all candidates, rotated so that each one comes first in turn."""
    start = turn % len(candidates) if candidates else 0
    return [*candidates[start:], *candidates[:start]] if start else candidates


def some_of(candidates: Sequence[T], turn: int, most: int = SAMPLE_SIZE) -> Sequence[T]:
    """Return all of a few candidates, each one first in turn, or a sample of more than `most`."""
    if len(candidates) > most:
        return sample(candidates, mix(turn), most)
    return in_turn(candidates, turn)


@dataclass(frozen=True, slots=True)
class LoadBound:
    """The load up to which an engine keeps requests that prefer it. It is overloaded with at least
    `floor` legs and more than `factor` times the mean of the candidates."""

    factor: float = 1.5
    floor: int = 8

    def limit(self, candidates: Sequence[Candidate], chance: int = 0) -> int:
        """Return the largest number of legs of an engine that is not overloaded. Of many candidates
        a sample, which `chance` chooses, gives the mean."""
        sampled = sample(candidates, chance)
        mean = sum(map(legs, sampled)) / max(1, len(sampled))
        return max(self.floor - 1, int(self.factor * mean))

    def is_overloaded(
        self, engine: Candidate, candidates: Sequence[Candidate], chance: int = 0
    ) -> bool:
        if engine.total_legs < self.floor:
            return False
        return engine.total_legs > self.limit(candidates, chance)


class RoundRobin(Policy):
    """Each engine in turn."""

    def order(self, candidates: Sequence[E], query: RoutingQuery) -> Sequence[E]:
        return in_turn(candidates, query.turn)[:MAX_ORDERED]


class LeastLoaded(Policy):
    """The engine with the least load: with the fewest prompt tokens in flight, if nothing else is
    given.

    Of many engines it considers a sample: the best of 64 is nearly the best of all, and routers
    that do not know each other's requests do not all choose the same engine. In a large fleet most
    engines are idle, and the first idle ones of the sample are the best without comparing all.
    """

    def __init__(self, load_of: Callable[[Candidate], Any] = load) -> None:
        self._load_of = load_of

    def order(self, candidates: Sequence[E], query: RoutingQuery) -> Sequence[E]:
        considered = some_of(candidates, query.turn)
        idle = list(islice(filterfalse(legs, considered), MAX_ORDERED))
        if len(idle) == MAX_ORDERED and not any(map(has_tokens, idle)):
            return idle
        return sorted(considered, key=self._load_of)[:MAX_ORDERED]


class PowerOfTwo(Policy):
    """The less loaded one of two random engines: nearly as even as comparing all of them.

    Of engines with KV caches of different sizes, a fuller cache counts like more load, because
    requests that find no room wait.
    """

    def order(self, candidates: Sequence[E], query: RoutingQuery) -> Sequence[E]:
        size = len(candidates)
        if size < 2:
            return candidates
        chance = mix(query.turn)
        first = chance % size
        second = (first + 1 + (chance >> 32) % (size - 1)) % size
        one, other = candidates[first], candidates[second]
        if one.cache_tokens == other.cache_tokens:
            is_behind = load(other) < load(one)
        else:
            is_behind = crowding(other, query.tokens) < crowding(one, query.tokens)
        return [other, one] if is_behind else [one, other]


def is_full(engine: Candidate, tokens: int) -> bool:
    """Return True if the engine's KV cache has no room for `tokens` more prompt tokens. False
    if its size is unknown."""
    return engine.total_tokens + tokens > FULL_SHARE * engine.cache_tokens > 0


def crowding(engine: Candidate, tokens: int) -> float:
    """Return the engine's tokens with those of one more request, divided by the share of its KV
    cache that would be left."""
    used, size = engine.total_tokens + tokens, engine.cache_tokens
    return used / max(1 - used / size, MIN_ROOM) if size else used
