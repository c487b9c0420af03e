"""The engine that holds most of the prompt, as long as it is not overloaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from router.policies.affinity import LoadBound
from router.policies.candidate import MOST_TRIED, Ask, Candidate, E, Policy, filled, load
from router.policies.chance import mix
from router.policies.chunks import TOKENS
from router.policies.holders import Holders
from router.policies.least_loaded import LeastLoaded
from router.policies.power_of_two import PowerOfTwo

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


class Prefix(Policy):
    remembers = True

    def __init__(self, bound: LoadBound, holders: Holders | None = None) -> None:
        self._bound = bound
        self._by_load = LeastLoaded()
        self._stand_ins = PowerOfTwo()
        self._holders = Holders() if holders is None else holders
        self._open: dict[str, dict[int, _Open]] = {}
        """For each engine, by turn."""
        self._strikes: dict[str, int] = {}
        self._seat(())

    def order(self, candidates: Sequence[E], ask: Ask) -> Sequence[E]:
        if not ask.chunks or len(candidates) < 2:
            return self._by_load.order(candidates, ask)
        if candidates is not self._seated:
            self._seat(candidates)
        chance, exceeded = mix(ask.turn), self._bound.exceeded
        overloaded: list[E] = []
        for engines in self._matches(ask.chunks):
            found = [candidates[self._places[bit]] for bit in _some(engines, chance)]
            found.sort(key=load)
            if not exceeded(found[0], candidates, chance):
                return filled(found, self._stand_ins.order(candidates, ask))
            overloaded += found
        return filled([], self._by_load.order(candidates, ask), overloaded)

    def note(self, name: str, ask: Ask) -> None:
        if not ask.chunks or not self._holders.bit(name):
            return
        open_asks = self._open.setdefault(name, {})
        depth = self._depth(name, ask)
        chunk = ask.chunks[depth - 1] if depth else 0
        certain = not any(other.brings(chunk, depth) for other in open_asks.values())
        if len(open_asks) >= MOST_OPEN:
            del open_asks[next(iter(open_asks))]
        open_asks[ask.turn] = _Open(depth, certain, ask.chunks)
        self._holders.add(name, ask.chunks)

    def note_cached(self, name: str, ask: Ask, cached_tokens: int | None) -> None:
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
        self._seat(())

    def expected(self, name: str, ask: Ask) -> int:
        """Without what others that are unanswered yet will bring."""
        depth = self._depth(name, ask)
        for other in self._open.get(name, {}).values():
            if depth and other.brings(ask.chunks[depth - 1], depth):
                depth = other.depth
        return depth * TOKENS

    def _depth(self, name: str, ask: Ask) -> int:
        return self._holders.longest(ask.chunks, self._holders.bit(name)).depth

    def _matches(self, chunks: Sequence[int]) -> Iterator[int]:
        """Those who hold most of it (bits), those who hold most of it after them, and so on."""
        among, most = self._among, len(chunks)
        for _ in range(MOST_TRIED):
            depth, engines = self._holders.longest(chunks, among, most)
            if not depth:
                return
            yield engines
            among, most = among & ~engines, depth - 1

    def _seat(self, candidates: Sequence[Candidate]) -> None:
        """A tuple stays what it is, so its identity tells; a list is looked at each time."""
        self._seated = candidates if isinstance(candidates, tuple) else ()
        bits = self._holders.seat([engine.name for engine in candidates])
        self._places = {bit: place for place, bit in enumerate(bits)}
        self._among = sum(bits)
        for name in [name for name in self._open if not self._holders.bit(name)]:
            del self._open[name]


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
