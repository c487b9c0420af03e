"""The engine that holds most of the prompt, as long as it is not overloaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from router.routing.affinity import LoadBound
from router.routing.candidate import MAX_ORDERED, Candidate, E, Policy, RoutingQuery, filled, load
from router.routing.candidate_cache import CandidateCache
from router.routing.chunk_index import ChunkIndex, ChunkMatch
from router.routing.least_loaded import LeastLoaded
from router.routing.prompt_chunks import TOKENS
from router.routing.repeatable_random import mix

# Of those who hold the same, so many are compared.
COMPARED = 8
# Answers in a row that belied us, before nothing we believed of that engine counts any more.
ENOUGH = 3
# Of the prompts sent to an engine last, so many are remembered until they are answered.
MOST_OPEN = 32


class _Open(NamedTuple):
    """A prompt that was sent, when `depth` of its chunks were believed to be there already."""

    depth: int
    certain: bool
    """Not just because another prompt, unanswered too, begins with them."""
    chunks: tuple[int, ...]

    def brings(self, chunk: int, depth: int) -> bool:
        return self.depth < depth <= len(self.chunks) and self.chunks[depth - 1] == chunk


class _Seat(NamedTuple):
    """Of some candidates: their bits."""

    places: dict[int, int]
    among: int


class PrefixAffinity(Policy):
    uses_feedback = True

    def __init__(self, bound: LoadBound, holders: ChunkIndex | None = None) -> None:
        self._bound = bound
        self._by_load = LeastLoaded()
        self._holders = ChunkIndex() if holders is None else holders
        self._seats = CandidateCache(self._seat)
        self._open: dict[str, dict[int, _Open]] = {}
        """For each engine, by turn."""
        self._strikes: dict[str, int] = {}
        self._asked: tuple[int, ...] = ()
        self._match = ChunkMatch(0, 0)
        """Who holds most of what was asked last: its notes come soon."""

    def order(self, candidates: Sequence[E], ask: RoutingQuery) -> Sequence[E]:
        chunks = ask.chunks
        if not chunks:
            return self._by_load.order(candidates, ask)
        seat = self._seats.get(candidates)
        depth, engines = self._match = self._holders.longest(chunks, seat.among)
        self._asked = chunks
        if not depth:
            return self._by_load.order(candidates, ask)
        first = self._least(engines, candidates, seat, ask)
        if first.in_flight >= self._bound.floor:
            chance = mix(ask.turn)
            if self._bound.is_overloaded(first, candidates, chance):
                return self._next_best(candidates, seat, ask, chance)
        return _with_stand_in(first, candidates, ask.turn)

    def _least(self, engines: int, candidates: Sequence[E], seat: _Seat, ask: RoutingQuery) -> E:
        if engines in seat.places:
            return candidates[seat.places[engines]]
        found = [candidates[seat.places[bit]] for bit in _some(engines, mix(ask.turn))]
        return min(found, key=load)

    def _next_best(
        self, candidates: Sequence[E], seat: _Seat, ask: RoutingQuery, chance: int
    ) -> Sequence[E]:
        """Those who hold most of it are overloaded; so who holds the most of the others?"""
        depth, engines = self._match
        among, overloaded = seat.among, [self._least(engines, candidates, seat, ask)]
        for _ in range(MAX_ORDERED - 1):
            among &= ~engines
            depth, engines = self._holders.longest(ask.chunks, among, depth - 1)
            if not depth:
                break
            first = self._least(engines, candidates, seat, ask)
            if not self._bound.is_overloaded(first, candidates, chance):
                return _with_stand_in(first, candidates, ask.turn)
            overloaded.append(first)
        return filled([], self._by_load.order(candidates, ask), overloaded)

    def note_sent(self, name: str, ask: RoutingQuery) -> None:
        if not ask.chunks or not self._holders.bit(name):
            return
        open_asks = self._open.setdefault(name, {})
        depth, certain = self._depth(name, ask), True
        if depth and open_asks:
            chunk = ask.chunks[depth - 1]
            certain = not any(other.brings(chunk, depth) for other in open_asks.values())
        if len(open_asks) >= MOST_OPEN:
            del open_asks[next(iter(open_asks))]
        open_asks[ask.turn] = _Open(depth, certain, ask.chunks)
        self._holders.add(name, ask.chunks)

    def note_cached(self, name: str, ask: RoutingQuery, cached_tokens: int | None) -> None:
        """What it held may be a bit less than we believed: tokens are estimated."""
        sent = self._open.get(name, {}).pop(ask.turn, None)
        if sent is None or cached_tokens is None or not sent.depth:
            return
        if 2 * cached_tokens >= sent.depth * TOKENS:
            self._strikes.pop(name, None)
        elif sent.certain:
            strikes = self._strikes[name] = self._strikes.get(name, 0) + 1
            if strikes >= ENOUGH:
                self.forget(name)

    def forget(self, name: str) -> None:
        self._strikes.pop(name, None)
        self._open.pop(name, None)
        self._holders.forget(name)
        self._seats.clear()

    def expected_tokens(self, name: str, ask: RoutingQuery) -> int:
        """Without what others that are unanswered yet will bring."""
        depth = self._depth(name, ask)
        if depth:
            for other in self._open.get(name, {}).values():
                if depth and other.brings(ask.chunks[depth - 1], depth):
                    depth = other.depth
        return depth * TOKENS

    def _depth(self, name: str, ask: RoutingQuery) -> int:
        bit = self._holders.bit(name)
        if ask.chunks is self._asked and self._match.engines & bit:
            return self._match.depth
        return self._holders.longest(ask.chunks, bit).depth

    def _seat(self, candidates: Sequence[Candidate]) -> _Seat:
        era = self._holders.era
        bits = self._holders.seat([engine.name for engine in candidates])
        if self._holders.era != era:
            self._seats.clear()
        for name in [name for name in self._open if not self._holders.bit(name)]:
            del self._open[name]
        return _Seat({bit: place for place, bit in enumerate(bits)}, sum(bits))


def _with_stand_in(first: E, candidates: Sequence[E], turn: int) -> list[E]:
    """Somebody else is asked only if the first one fails."""
    other = candidates[turn % len(candidates)]
    if other is first:
        other = candidates[(turn + 1) % len(candidates)]
    return [first, other] if other is not first else [first]


def _some(engines: int, chance: int) -> list[int]:
    """The bits of at most COMPARED of these engines, from a random one on."""
    found: list[int] = []
    shift = chance % engines.bit_length()
    above = engines >> shift << shift
    for bits in (above, engines ^ above):
        while bits and len(found) < COMPARED:
            bit = bits & -bits
            found.append(bit)
            bits ^= bit
    return found
