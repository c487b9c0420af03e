"""The engine that holds most of the prompt, as long as it is not overloaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from router.policies.affinity import LoadBound
from router.policies.candidate import MOST_TRIED, Ask, Candidate, E, Policy, filled, load
from router.policies.chance import mix
from router.policies.chunks import TOKENS
from router.policies.holders import Holders
from router.policies.least_loaded import LeastLoaded
from router.policies.power_of_two import PowerOfTwo

# Of those who hold the same, so many are compared.
COMPARED = 8
# Answers in a row that belied us, before nothing we believed of that engine counts any more. One
# proves little: of two prompts with one beginning at the same time, neither finds it in the cache.
ENOUGH = 3
MOST_OPEN = 4096


class Prefix(Policy):
    def __init__(self, bound: LoadBound, holders: Holders | None = None) -> None:
        self._bound = bound
        self._by_load = LeastLoaded()
        self._stand_ins = PowerOfTwo()
        self._holders = holders or Holders()
        self._open: dict[tuple[str, int], int] = {}
        """What we believed of an engine when it was sent a prompt: (name, turn) -> tokens."""
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
        if not ask.chunks:
            return
        if len(self._open) >= MOST_OPEN:
            self._open.clear()  # Of answers that never came: nothing is learned from the others.
        self._open[name, ask.turn] = self.expected(name, ask)
        self._holders.add(name, ask.chunks)

    def note_cached(self, name: str, ask: Ask, cached_tokens: int) -> None:
        believed = self._open.pop((name, ask.turn), 0)
        if believed < TOKENS:
            return
        if 2 * cached_tokens >= believed:
            self._strikes.pop(name, None)
            return
        strikes = self._strikes[name] = self._strikes.get(name, 0) + 1
        if strikes >= ENOUGH:
            self.forget(name)

    def forget(self, name: str) -> None:
        self._strikes.pop(name, None)
        self._holders.forget(name)
        self._seat(())

    def expected(self, name: str, ask: Ask) -> int:
        return self._holders.longest(ask.chunks, self._holders.bit(name)).depth * TOKENS

    def _matches(self, chunks: Sequence[int]) -> Iterator[int]:
        """Those who hold most of it (bits), those who hold most of it after them, and so on."""
        among = self._among
        for _ in range(MOST_TRIED):
            depth, engines = self._holders.longest(chunks, among)
            if not depth:
                return
            yield engines
            among &= ~engines

    def _seat(self, candidates: Sequence[Candidate]) -> None:
        """A tuple stays what it is, so its identity tells; a list is looked at each time."""
        self._seated = candidates if isinstance(candidates, tuple) else ()
        bits = self._holders.seat([engine.name for engine in candidates])
        self._places = {bit: place for place, bit in enumerate(bits)}
        self._among = sum(bits)


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
