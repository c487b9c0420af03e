"""What a policy sees and says: engines to choose from, what is asked, and an order of preference.

All of it is pure: no I/O, no clock, and no chance but what follows from `Ask.turn`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Protocol, TypeVar

from msgspec import Struct

MAX_ORDERED = 3


class Candidate(Protocol):
    """An engine that may be asked; its name never changes and is nobody else's."""

    name: str
    in_flight: int
    """Legs that run on it."""
    tokens_in_flight: int
    """Prompt tokens of those legs, as estimated."""


E = TypeVar("E", bound=Candidate)


class RoutingQuery(Struct, frozen=True):
    """`turn` grows with each request of a role: the only source of chance, so all of it replays."""

    turn: int
    tokens: int = 0
    """Of the prompt, as estimated."""
    session: str = ""
    chunks: tuple[int, ...] = ()
    """Chained hashes of the prompt's beginnings: see router.routing.prompt_chunks."""


class Policy(ABC):
    """One object for the engines of a role and a group. Most remember nothing: their notes go
    nowhere, and `Ask.chunks` are made only for those that do."""

    uses_feedback = False

    @abstractmethod
    def order(self, candidates: Sequence[E], ask: RoutingQuery) -> Sequence[E]:
        """The engines to try, best first: distinct, at most MOST_TRIED, one if there is any."""

    def note_sent(self, name: str, ask: RoutingQuery) -> None:
        """That engine was sent this prompt."""
        return

    def note_cached(self, name: str, ask: RoutingQuery, cached_tokens: int | None) -> None:
        """That engine answered: now it holds the prompt. This much it had, or was given, before;
        None: it did not say."""
        return

    def forget(self, name: str) -> None:
        """That engine is gone, or has begun anew."""
        return

    def expected_tokens(self, name: str, ask: RoutingQuery) -> int:
        """Tokens of the prompt that the engine is believed to hold."""
        return 0


legs = attrgetter("in_flight")
prompt_tokens = attrgetter("tokens_in_flight")
load = attrgetter("tokens_in_flight", "in_flight")


def filled(order: list[E], *more: Iterable[E]) -> list[E]:
    """The order, made as long as may be with what is not in it yet."""
    for engines in more:
        for engine in engines:
            if len(order) >= MAX_ORDERED:
                break
            if engine not in order:
                order.append(engine)
    return order[:MAX_ORDERED]
