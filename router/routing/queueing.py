"""Who goes to engines now, who waits, and who is sent away: arithmetic, without a clock.

Lower priorities go first. Within a priority tenants take turns, in rounds: a round serves each
tenant that waited when it was opened once, and a tenant whose request was large sits out rounds in
proportion. Who comes while a round is served waits for the next one, so every round ends, and every
turn comes. Only what was served is charged for: who leaves the queue has lost nothing.

A request that finds no room keeps it from all behind it: the engines that it lacks are spoken for.
So a large prompt is not overtaken for ever by small ones. What needs none of these engines passes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from router.fleet.engine import Engine
from router.fleet.snapshot import GroupPool
from router.routing.group_choice import preferred

TOKENS_A_ROUND = 4096
# Rounds that a tenant sits out for one request, however large.
MOST_ROUNDS = 8


class AdmittedLoad(Protocol):
    admitted: int
    """Requests that hold a seat there."""
    admitted_tokens: int
    """Of their prompts, as estimated, as far as they are computed there."""


class EngineLimits(NamedTuple):
    """Limits of one engine; 0 is none."""

    requests: int
    tokens: int

    def fits(self, engine: AdmittedLoad, tokens: int = 0) -> bool:
        """Where no prompt is being computed any one fits, or the largest would never run."""
        if self.requests and engine.admitted >= self.requests:
            return False
        if not tokens or not self.tokens or not engine.admitted_tokens:
            return True
        return engine.admitted_tokens + tokens <= self.tokens


class Placement(NamedTuple):
    """Where there is room for a request; None where nobody of that role is needed, or exists."""

    group: str
    prefiller: Engine | None
    decoder: Engine | None


NO_PLACE = Placement("", None, None)


def find_placement(
    pools: Sequence[GroupPool],
    tokens: int,
    alone: bool,
    room: EngineLimits,
    spoken_for: Collection[Engine] = (),
) -> Placement | None:
    """Where the request fits: one prefiller and one decoder of a pool, or a decoder `alone`."""
    for pool in pools if len(pools) == 1 else preferred(pools):
        prefiller = decoder = None
        if not alone and pool.prefillers:
            prefiller = _first_with_room(pool.prefillers, tokens, room, spoken_for)
            if prefiller is None:
                continue
        if pool.decoders:
            at_decoder = tokens if alone else 0
            decoder = _first_with_room(pool.decoders, at_decoder, room, spoken_for)
            if decoder is None:
                continue
        return Placement(pool.group, prefiller, decoder)
    return None


def engines_without_room(
    pools: Sequence[GroupPool], tokens: int, alone: bool, room: EngineLimits
) -> set[Engine]:
    """The engines without which the request cannot go on: those of each role without room."""
    lacked: set[Engine] = set()
    for pool in pools if len(pools) == 1 else preferred(pools):
        if not alone and not _first_with_room(pool.prefillers, tokens, room, ()):
            lacked.update(pool.prefillers)
        if not _first_with_room(pool.decoders, tokens if alone else 0, room, ()):
            lacked.update(pool.decoders)
    return lacked


def _first_with_room(
    engines: Sequence[Engine], tokens: int, room: EngineLimits, spoken_for: Collection[Engine]
) -> Engine | None:
    for engine in engines:
        if room.fits(engine, tokens) and engine not in spoken_for:
            return engine
    return None


@dataclass(slots=True, eq=False)
class QueueTicket:
    """A request that waits. `number` is the queue's own."""

    tenant: str
    priority: int
    tokens: int
    model: object
    decode_only: bool
    number: int = 0


T = TypeVar("T", bound=QueueTicket)
Line = dict[T, None]
"""In the order of arrival."""


class ShedTicket(NamedTuple, Generic[T]):
    """Who has to go, since the queue is full: for it was `outranked`, or for its tenant has more
    than its `share` of the queue while others wait, too; else for there is simply no place."""

    ticket: T
    is_outranked: bool
    is_over_share: bool


class AdmissionQueue(Generic[T]):
    """A line for each tenant, priority, and set of engines that may serve: that is, for each model,
    alone or not. Costs grow with the lines."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.depth = 0
        self._numbers = 0
        self._lines: dict[tuple[int, str, object, bool], Line[T]] = {}
        self._waiting: Counter[tuple[int, str]] = Counter()
        self._tenants: Counter[str] = Counter()
        self._rounds: dict[tuple[int, str], int] = {}
        """The next of each tenant at a priority."""
        self._stuck: set[tuple[int, bool]] = set()
        """Pools, and alone or not, of those for whom there was no room at the last look."""
        self._opened: dict[int, int] = {}
        """The one that is being served, at each priority where somebody waits."""

    def add(self, ticket: T) -> None:
        self._numbers += 1
        ticket.number = self._numbers
        whose = ticket.priority, ticket.tenant
        opened = self._opened.setdefault(ticket.priority, 0)
        if not self._waiting[whose]:
            self._rounds[whose] = max(opened + 1, self._rounds.get(whose, 0))
        self._waiting[whose] += 1
        self._tenants[ticket.tenant] += 1
        self._lines.setdefault(_line_of(ticket), {})[ticket] = None
        self.depth += 1
        if len(self._rounds) > (MOST_ROUNDS + 2) * self.size:
            self._forget_rounds()

    def remove(self, ticket: T) -> bool:
        """Whether it was still there."""
        name = _line_of(ticket)
        line = self._lines.get(name, {})
        if ticket not in line:
            return False
        del line[ticket]
        if not line:
            del self._lines[name]
        self.depth -= 1
        self._count_out(ticket)
        return True

    def next(
        self, pools_of: Callable[[object], Sequence[GroupPool]], room: EngineLimits
    ) -> tuple[T, Placement] | None:
        """Takes out who is first among those for whom there is room, or whom nobody can serve."""
        spoken_for: set[Engine] = set()
        self._stuck = stuck = set()
        for ticket in self._heads():
            pools = pools_of(ticket.model)
            kind = id(pools), ticket.decode_only
            if kind in stuck:
                continue
            asked = ticket.tokens, ticket.decode_only, room
            found = find_placement(pools, *asked, spoken_for) if pools else NO_PLACE
            if found is not None:
                self._serve(ticket)
                return ticket, found
            stuck.add(kind)
            spoken_for |= engines_without_room(pools, *asked)
        return None

    def is_stuck(self, ticket: T, pools: Sequence[GroupPool]) -> bool:
        """Others who want the same had no room at the last look: no need for another."""
        return (id(pools), ticket.decode_only) in self._stuck

    def shed(self, newcomer: T) -> ShedTicket[T] | None:
        """Takes out who has to go now that `newcomer` is there, if there are more than `size`: of
        the last priority, and of the tenant with most waiting there, who came last."""
        if self.depth <= self.size:
            return None
        ticket = self._last_of_most(newcomer)
        share = -(-self.size // len(self._tenants))
        is_over_share = len(self._tenants) > 1 and self._tenants[ticket.tenant] > share
        self.remove(ticket)
        return ShedTicket(ticket, newcomer.priority < ticket.priority, is_over_share)

    def _heads(self) -> list[T]:
        rounds = self._rounds
        heads = [
            (name[0], rounds[name[:2]], (first := next(iter(line))).number, first)
            for name, line in self._lines.items()
        ]
        heads.sort()
        return [head[3] for head in heads]

    def _last_of_most(self, newcomer: T) -> T:
        waiting, last = self._waiting, max(self._opened)
        most = max([count for (priority, _), count in waiting.items() if priority == last])
        if newcomer.priority == last and waiting[last, newcomer.tenant] == most:
            return newcomer
        lines = [self._lines[name] for name in self._lines if name[0] == last]
        ends = [next(reversed(line)) for line in lines]
        heaviest = [end for end in ends if waiting[last, end.tenant] == most]
        return max(heaviest, key=lambda ticket: ticket.number)

    def _serve(self, ticket: T) -> None:
        whose = ticket.priority, ticket.tenant
        served = self._rounds[whose]
        self._opened[ticket.priority] = max(self._opened[ticket.priority], served)
        self._rounds[whose] = served + 1 + min(ticket.tokens // TOKENS_A_ROUND, MOST_ROUNDS)
        self.remove(ticket)

    def _count_out(self, ticket: T) -> None:
        whose = ticket.priority, ticket.tenant
        self._waiting[whose] -= 1
        self._tenants[ticket.tenant] -= 1
        if not self._tenants[ticket.tenant]:
            del self._tenants[ticket.tenant]
        if self._waiting[whose]:
            return
        del self._waiting[whose]
        if not any(priority == ticket.priority for priority, _ in self._waiting):
            del self._opened[ticket.priority]
            self._rounds = {w: r for w, r in self._rounds.items() if w[0] != ticket.priority}

    def _forget_rounds(self) -> None:
        """Those that anybody would get who comes anew."""
        self._rounds = {
            whose: served
            for whose, served in self._rounds.items()
            if whose in self._waiting or served > self._opened[whose[0]] + 1
        }


def _line_of(ticket: QueueTicket) -> tuple[int, str, object, bool]:
    return ticket.priority, ticket.tenant, ticket.model, ticket.decode_only
