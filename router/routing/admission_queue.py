"""Which request goes to the engines next, and which one leaves a full queue. Pure, without a clock.

Lower priorities go first. Within a priority tenants take turns in rounds: a round serves each
tenant that was waiting when the round was opened once, and a tenant whose request was large skips
rounds in proportion. A request that arrives during a round waits for the next one, so each round
ends and each tenant gets its turn. Only served requests are charged.

A request without room reserves the engines that it lacks: later requests cannot take them, so a
large prompt is not overtaken for ever by small ones. Requests that need none of these engines pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from router.fleet.engine import Engine
from router.fleet.fleet import GroupPool
from router.routing.route import preferred_groups

TOKENS_PER_ROUND = 4096
# The rounds that a tenant skips for one request, however large the request was.
MAX_SKIPPED_ROUNDS = 8


class EngineLimits(NamedTuple):
    """Limits of each engine; 0 means unlimited."""

    requests: int
    tokens: int

    def fits(self, engine: Engine, tokens: int = 0) -> bool:
        """Return True if there is room for a request that computes this many tokens. An engine that
        computes no prompt takes any one, or the largest would never run."""
        if self.requests and engine.admitted >= self.requests:
            return False
        is_bounded = tokens and self.tokens and engine.admitted_tokens
        return not is_bounded or engine.admitted_tokens + tokens <= self.tokens


class Placement(NamedTuple):
    """Engines with room for a request; None if the role is not needed or has no engine."""

    group: str
    prefiller: Engine | None
    decoder: Engine | None


NO_PLACE = Placement("", None, None)


def find_placement(
    pools: Sequence[GroupPool],
    tokens: int,
    decode_only: bool,
    limits: EngineLimits,
    reserved: Collection[Engine] = (),
) -> Placement | None:
    """Return a prefill and a decode engine of one group with room for the request, or only a decode
    engine if `decode_only`. None if there is no room outside of the `reserved` engines."""
    for pool in preferred_groups(pools):
        prefillers, decode_tokens = ((), tokens) if decode_only else (pool.prefillers, 0)
        prefiller = _first_with_room(prefillers, tokens, limits, reserved)
        decoder = _first_with_room(pool.decoders, decode_tokens, limits, reserved)
        if (prefiller or not prefillers) and (decoder or not pool.decoders):
            return Placement(pool.group, prefiller, decoder)
    return None


def engines_without_room(
    pools: Sequence[GroupPool], tokens: int, decode_only: bool, limits: EngineLimits
) -> set[Engine]:
    """Return all engines of each role that has no room for the request."""
    full: set[Engine] = set()
    for pool in preferred_groups(pools):
        if not decode_only and not _first_with_room(pool.prefillers, tokens, limits, ()):
            full.update(pool.prefillers)
        if not _first_with_room(pool.decoders, tokens if decode_only else 0, limits, ()):
            full.update(pool.decoders)
    return full


def _first_with_room(
    engines: Sequence[Engine], tokens: int, limits: EngineLimits, reserved: Collection[Engine]
) -> Engine | None:
    return next((one for one in engines if limits.fits(one, tokens) and one not in reserved), None)


@dataclass(slots=True, eq=False)
class QueueTicket:
    """A waiting request. The queue sets `number`, in the order of arrival."""

    tenant: str
    priority: int
    tokens: int
    model: object
    decode_only: bool
    number: int = 0


T = TypeVar("T", bound=QueueTicket)
LineKey = tuple[int, str, object, bool]


class ShedTicket(NamedTuple, Generic[T]):
    """The request that leaves a full queue: because the newcomer has precedence (`is_outranked`),
    because its tenant has more than its share of the queue while others wait (`is_over_share`), or
    just because the queue is full."""

    ticket: T
    is_outranked: bool
    is_over_share: bool


class AdmissionQueue(Generic[T]):
    """The waiting requests: a line for each priority, tenant, model and `decode_only`. `size` is
    the most requests that wait, `depth` how many do. Costs grow with the number of lines."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.depth = 0
        self._last_number = 0
        self._lines: dict[LineKey, dict[T, None]] = {}
        self._waiting: Counter[tuple[int, str]] = Counter()
        self._rounds: dict[tuple[int, str], int] = {}
        """The next round of each tenant at each priority."""
        self._opened: dict[int, int] = {}
        """The round that is being served, at each priority with waiting requests."""
        self._stuck: set[tuple[int, bool]] = set()
        """The ids of pools, with `decode_only`, that had no room at the last attempt."""

    def add(self, ticket: T) -> None:
        self._last_number += 1
        ticket.number = self._last_number
        key = ticket.priority, ticket.tenant
        opened = self._opened.setdefault(ticket.priority, 0)
        if not self._waiting[key]:
            self._rounds[key] = max(opened + 1, self._rounds.get(key, 0))
        self._waiting[key] += 1
        self._lines.setdefault(_line_key(ticket), {})[ticket] = None
        self.depth += 1
        if len(self._rounds) > (MAX_SKIPPED_ROUNDS + 2) * self.size:
            # Drop the rounds that a newcomer would get anyway.
            self._rounds = {
                known: served
                for known, served in self._rounds.items()
                if known in self._waiting or served > self._opened[known[0]] + 1
            }

    def remove(self, ticket: T) -> bool:
        """Return False if the ticket had already left the queue."""
        line_key = _line_key(ticket)
        line = self._lines.get(line_key, {})
        if ticket not in line:
            return False
        del line[ticket]
        if not line:
            del self._lines[line_key]
        self.depth -= 1
        key = ticket.priority, ticket.tenant
        self._waiting[key] -= 1
        if not self._waiting[key]:
            del self._waiting[key]
            if not any(priority == ticket.priority for priority, _ in self._waiting):
                del self._opened[ticket.priority]
                self._rounds = {k: r for k, r in self._rounds.items() if k[0] != ticket.priority}
        return True

    def next(
        self, pools_of: Callable[[object], Sequence[GroupPool]], limits: EngineLimits
    ) -> tuple[T, Placement] | None:
        """Take out the first request for which there is room, or which no engine can serve.
        `pools_of` returns the pools of a model."""
        reserved: set[Engine] = set()
        self._stuck = stuck = set()
        for ticket in self._heads():
            pools = pools_of(ticket.model)
            kind = id(pools), ticket.decode_only
            if kind in stuck:
                continue
            wanted = ticket.tokens, ticket.decode_only, limits
            found = find_placement(pools, *wanted, reserved) if pools else NO_PLACE
            if found is not None:
                self._charge(ticket)
                self.remove(ticket)
                return ticket, found
            stuck.add(kind)
            reserved |= engines_without_room(pools, *wanted)
        return None

    def is_stuck(self, ticket: T, pools: Sequence[GroupPool]) -> bool:
        """Return True if requests like this one had no room at the last attempt."""
        return (id(pools), ticket.decode_only) in self._stuck

    def shed(self, newcomer: T) -> ShedTicket[T] | None:
        """Take out one request if there are more than `size` with the newcomer: of the last
        priority, and of the tenant that has most requests waiting there, the youngest one."""
        if self.depth <= self.size:
            return None
        ticket = self._youngest_of_largest_tenant(newcomer)
        tenants: Counter[str] = Counter()
        for (_, tenant), count in self._waiting.items():
            tenants[tenant] += count
        share = -(-self.size // len(tenants))
        is_over_share = len(tenants) > 1 and tenants[ticket.tenant] > share
        self.remove(ticket)
        return ShedTicket(ticket, newcomer.priority < ticket.priority, is_over_share)

    def _heads(self) -> list[T]:
        """Return the first request of each line, in the order of service."""

        def order(head: T) -> tuple[int, int, int]:
            return head.priority, self._rounds[head.priority, head.tenant], head.number

        return sorted([next(iter(line)) for line in self._lines.values()], key=order)

    def _youngest_of_largest_tenant(self, newcomer: T) -> T:
        waiting, last = self._waiting, max(self._opened)
        most = max([count for (priority, _), count in waiting.items() if priority == last])
        if newcomer.priority == last and waiting[last, newcomer.tenant] == most:
            return newcomer
        ends = [next(reversed(line)) for key, line in self._lines.items() if key[0] == last]
        heaviest = [end for end in ends if waiting[last, end.tenant] == most]
        return max(heaviest, key=lambda ticket: ticket.number)

    def _charge(self, ticket: T) -> None:
        """Open the ticket's round, and let its tenant skip rounds in proportion to its tokens."""
        key = ticket.priority, ticket.tenant
        served = self._rounds[key]
        self._opened[ticket.priority] = max(self._opened[ticket.priority], served)
        skipped = min(ticket.tokens // TOKENS_PER_ROUND, MAX_SKIPPED_ROUNDS)
        self._rounds[key] = served + 1 + skipped


def _line_key(ticket: QueueTicket) -> LineKey:
    return ticket.priority, ticket.tenant, ticket.model, ticket.decode_only
