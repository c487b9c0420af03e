"""The interface of policies: engines to choose from, a query, and an order of preference."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Generic, Protocol, TypeVar

from msgspec import Struct

MAX_ORDERED = 3
MAX_CACHED_TUPLES = 16
T = TypeVar("T")


class Candidate(Protocol):
    """An engine to choose. Its name is unique and never changes."""

    name: str
    in_flight: int
    """Request legs that run on the engine."""
    tokens_in_flight: int
    """Estimated prompt tokens of these legs."""


E = TypeVar("E", bound=Candidate)


class RoutingQuery(Struct, frozen=True):
    """The facts about a request that a policy may use. `turn` grows with each request of a role;
    it is the only source of chance, so that all decisions can be replayed."""

    turn: int
    tokens: int = 0
    """Estimated tokens of the prompt."""
    session: str = ""
    chunks: tuple[int, ...] = ()
    """Chained hashes of the prompt's beginnings: see router.routing.prompt_chunks."""


class Policy(ABC):
    """Orders the engines of one role and one group.

    Most policies keep no state. Only for policies with `uses_feedback` is `RoutingQuery.chunks`
    filled in, and only these are sent feedback.
    """

    uses_feedback = False

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
    """Reports one request to its policy: each engine that was sent the prompt is reported once more
    when it has answered, at the latest by `end`."""

    __slots__ = ("_policy", "_query", "_sent")

    def __init__(self, policy: Policy, query: RoutingQuery) -> None:
        self._policy = policy
        self._query = query
        self._sent: list[str] = []

    def expected_tokens(self, name: str) -> int:
        """Return the number of prompt tokens that the engine is expected to hold."""
        return self._policy.expected_tokens(name, self._query)

    def sent(self, name: str) -> None:
        """The prompt was sent to the engine."""
        if name not in self._sent:
            self._sent.append(name)
            self._policy.note_sent(name, self._query)

    def answered(self, name: str, cached_tokens: int | None) -> None:
        """The engine holds the prompt now; see `Policy.note_cached`."""
        if name in self._sent:
            self._sent.remove(name)
            self._policy.note_cached(name, self._query, cached_tokens)

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


legs = attrgetter("in_flight")
prompt_tokens = attrgetter("tokens_in_flight")
load = attrgetter("tokens_in_flight", "in_flight")


def first(candidates: Sequence[T], preferred: T) -> list[T]:
    """Return all candidates, `preferred` before the others."""
    return [preferred, *(engine for engine in candidates if engine is not preferred)]


def filled(order: list[E], *more: Iterable[E]) -> list[E]:
    """Return the order, extended to MAX_ORDERED engines from `more` if there are enough."""
    for engines in more:
        for engine in engines:
            if len(order) >= MAX_ORDERED:
                break
            if engine not in order:
                order.append(engine)
    return order[:MAX_ORDERED]
