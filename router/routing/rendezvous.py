"""Chooses the same engines for a prompt in all routers that share no state.

A router without a common Redis knows only what it has sent itself, and several such routers send
each prefix to every engine. So the chunks at which a prompt's length passes a power of two name one
engine each, by a hash ring that is the same in all routers: another router may have sent the prompt
there. A growing conversation names another engine only when its length has doubled.

A guess counts only while answers prove it: `cached_tokens` beyond what this router knows of itself.
A router that is alone, or knows what the others send, finds none, and guesses nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.routing.policy import CandidateCache, E
from router.routing.prompt_chunks import MASK, MIXER
from router.routing.session_affinity import HashRing

# A prompt has at most this many guesses, for its longest powers of two.
MAX_GUESSES = 4
# Guesses count for GAIN times the share of their tokens that answers have found, over about the
# last ten answers: a right one saves a prompt, a wrong one only costs a balance of load.
GAIN, MAX_CREDIT, MIN_CREDIT = 20, 0.9, 0.01
WEIGHT = 0.1


class Rendezvous:
    def __init__(self) -> None:
        self._rings = CandidateCache(lambda engines: HashRing([engine.name for engine in engines]))
        self._found = 0.0

    @property
    def credit(self) -> float:
        """The share of a guess that counts as cached."""
        credit = min(MAX_CREDIT, GAIN * self._found)
        return credit if credit >= MIN_CREDIT else 0.0

    def guess(
        self, candidates: Sequence[E], chunks: Sequence[int], known: int
    ) -> list[tuple[int, E]]:
        """Return pairs of a number of chunks, more than `known`, and the engine that may hold them,
        longest first."""
        ring, depth = self._rings.get(candidates), 1 << len(chunks).bit_length() >> 1
        found: list[tuple[int, E]] = []
        while depth > known and len(found) < MAX_GUESSES:
            found.append((depth, candidates[ring.next_to(chunks[depth - 1] * MIXER & MASK)]))
            depth >>= 1
        return found

    def note_answer(self, guessed: int, found: int) -> None:
        """Take how many of the guessed tokens an engine had in its cache."""
        self._found += WEIGHT * (min(1.0, max(0.0, found / guessed)) - self._found)

    def forget(self) -> None:
        """Drop the rings, since a ring's candidates would keep a removed engine alive."""
        self._rings.clear()
