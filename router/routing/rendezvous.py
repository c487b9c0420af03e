"""Chooses the same engine for a prompt in all routers that share no state.

A router without a common Redis knows only what it has sent itself, and several such routers send
each prefix to every engine. So a prompt has one engine by a hash that is the same in all routers:
another router may have sent the conversation there. The hash is of the prompt's beginning, up to
the first power of two of its chunks at which few prompts begin alike: later turns of a conversation
keep it, and prompts that share only a system prompt are spread over the engines.

A guess counts only while answers prove it: `cached_tokens` beyond what this router knows of itself.
A router that is alone, or knows what the others send, finds none, and guesses nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from router.routing.policy import Candidate, CandidateCache, E, mix
from router.routing.prompt_chunks import MASK

# A guess counts for GAIN times the share of prompts that answers have found beyond what this router
# knows, over about the last thirty answers: a right one saves a prompt, a wrong one only costs a
# balance of load.
GAIN, MAX_CREDIT, MIN_CREDIT = 20, 0.9, 0.01
WEIGHT = 0.03
# Of the last RECENT to 2 * RECENT prompts, so many with the same beginning, and half of an engine's
# share of all, are too many for one engine.
RECENT, MIN_SHARED = 512, 8


class Rendezvous:
    def __init__(self) -> None:
        self._factors = CandidateCache(_hash_names)
        self._found = 0.0
        self._num_recent = 0
        self._recent: dict[int, int] = {}
        self._older: dict[int, int] = {}
        """How many prompts have begun with each chunk whose number is a power of two."""

    @property
    def credit(self) -> float:
        """The share of a prompt that counts as cached at the engine of the guess."""
        credit = min(MAX_CREDIT, GAIN * self._found)
        return credit if credit >= MIN_CREDIT else 0.0

    def guess(self, candidates: Sequence[E], chunks: Sequence[int]) -> E | None:
        """Return the engine to which other routers send this prompt; None if too many prompts begin
        like this one."""
        total = self._num_recent + (RECENT if self._older else 0)
        most = max(MIN_SHARED, total // (2 * len(candidates)))
        depth, found = 1, 0
        while depth <= len(chunks):
            chunk = chunks[depth - 1]
            number = self._recent[chunk] = self._recent.get(chunk, 0) + 1
            if not found and number + self._older.get(chunk, 0) <= most:
                found = chunk
            depth *= 2
        self._num_recent += 1
        if self._num_recent >= RECENT:
            self._older, self._recent, self._num_recent = self._recent, {}, 0
        if not found:
            return None
        key = mix(found)
        places = [key * factor & MASK for factor in self._factors.get(candidates)]
        return candidates[places.index(min(places))]

    def note_answer(self, unknown: int, found: int) -> None:
        """Take how many tokens an engine had in its cache of those `unknown` to this router."""
        self._found += WEIGHT * (min(1.0, max(0.0, found / unknown)) - self._found)

    def forget(self) -> None:
        """Drop the cached candidates, which would keep a removed engine alive."""
        self._factors.clear()


def _hash_names(engines: Sequence[Candidate]) -> list[int]:
    """Return an odd number of 64 bits for each engine's name."""
    digests = [blake2b(engine.name.encode(), digest_size=8).digest() for engine in engines]
    return [int.from_bytes(digest, "big") | 1 for digest in digests]
