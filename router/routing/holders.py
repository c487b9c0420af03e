"""Which engines hold more of a prompt than the engine that is about to compute it.

An engine can borrow the beginning of a prompt from the prefix cache of another one (a *loan*, see
docs/engine-half.md). The router names likely *holders* by what it has sent to which engine. A wrong
guess costs one refusal: the engines compare hashes of the tokens.

A loan is worth it if it takes less time than computing, including what the router knows to be
queued at the network interfaces of both engines: the loans that it has named before. The pace of
transfers is learned from loans of engines that did nothing else, since a slow network is the usual
reason why a loan costs more than it saves. The fastest of the latest loans counts, because most of
them also wait for the end of a step of their holder, which can take longer than the transfer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Generic, NamedTuple

from msgspec import Struct

from router.fleet.engine import STALE_S
from router.routing.chunk_index import ChunkIndex
from router.routing.costs import DEFAULT_TOKEN_S, LOAN_LATENCY_S, TRANSFER_TOKENS_PER_S, loan_cost
from router.routing.policy import Candidate, E, RoutingQuery, mix
from router.routing.prefix_cache import RegisteredCandidates, some_bits
from router.routing.prompt_chunks import TOKENS_PER_CHUNK

MAX_HOLDERS = 4
# A loan of fewer tokens is not worth the trouble.
MIN_BORROWED_TOKENS = 1024
FASTEST_TRANSFER_S = 1 / TRANSFER_TOKENS_PER_S
MAX_LOANS, MIN_LOANS = 9, 3


class LikelyHolder(NamedTuple, Generic[E]):
    """An engine, or one of its data-parallel ranks, that is expected to hold the first `tokens` of
    a prompt."""

    place: E
    tokens: int


class NamedHolders(Struct, Generic[E], frozen=True):
    """The holders that one leg names, best first. The reader was expected to hold `own_tokens` of
    the prompt itself; `is_alone`: it had no other leg."""

    holders: Sequence[LikelyHolder[E]]
    reader: E
    own_tokens: int
    is_alone: bool

    @property
    def tokens(self) -> int:
        """The tokens that the best holder can lend."""
        return self.holders[0].tokens - self.own_tokens


class HolderFinder:
    """Finds the holders of prompts. `index` is what the routing policies remember."""

    def __init__(self, index: ChunkIndex) -> None:
        self._index = index
        self._lenders = RegisteredCandidates(index)
        self._free_at: dict[str, float] = {}
        """When the network interface of each engine has moved what was named so far."""
        self._paces: deque[float] = deque(maxlen=MAX_LOANS)
        """Seconds per borrowed token."""
        self._sampled_at = 0.0

    def find(
        self,
        reader: E,
        lenders: Sequence[E],
        query: RoutingQuery,
        expected_tokens: Callable[[E], int],
        now: float,
    ) -> NamedHolders[E] | None:
        """Return what the reader may borrow of a prompt; None if no loan is worth it.

        `expected_tokens` returns how many tokens of the prompt an engine has by now, and 0 for an
        engine that cannot lend. A loan that a leg names is reported by `note_named`.
        """
        own_tokens, chunks = expected_tokens(reader), query.chunks
        least = own_tokens + MIN_BORROWED_TOKENS
        if (len(chunks) - query.marks) * TOKENS_PER_CHUNK < least:
            return None
        known = self._lenders.get(lenders)
        among, depth = known.all & ~self._index.bit(reader.name), len(chunks) + 1
        found: list[tuple[float, LikelyHolder[E]]] = []
        while among and len(found) < MAX_HOLDERS:
            depth, bits = self._index.longest(chunks, among, depth - 1)
            if depth * TOKENS_PER_CHUNK < least:
                break
            among &= ~bits
            for bit in some_bits(bits, mix(query.turn)):
                place = lenders[known.indexes[bit]]
                tokens = expected_tokens(place)
                saved = self._saved_seconds(reader, place, tokens - own_tokens, now)
                if tokens >= least and saved > 0:
                    found.append((saved, LikelyHolder(place, tokens)))
        if not found:
            return None
        found.sort(key=itemgetter(0), reverse=True)
        holders = [holder for _, holder in found[:MAX_HOLDERS]]
        return NamedHolders(holders, reader, own_tokens, not reader.total_legs)

    def note_named(self, loan: NamedHolders[E], now: float) -> None:
        """Count the transfer as queued at the network interfaces of both engines."""
        reader, holder = loan.reader, loan.holders[0].place
        end = self._free_from(reader, holder, now) + loan.tokens * self._pace(now)
        self._free_at[reader.name] = self._free_at[holder.name] = end

    def note_answer(
        self,
        loan: NamedHolders[E],
        query: RoutingQuery,
        cached_tokens: int | None,
        lender: int | None = None,
    ) -> None:
        """The reader had `cached_tokens` of the prompt when it began to compute. Holders that were
        expected to have twice as much have evicted it. The one at the place `lender` may have more
        than it has lent, because an engine lends a share of its cache only."""
        if cached_tokens is None:
            return
        for index, (place, tokens) in enumerate(loan.holders):
            if 2 * cached_tokens < tokens and index != lender:
                kept = query.marks + cached_tokens // TOKENS_PER_CHUNK
                self._index.drop(place.name, query.chunks, kept)

    def note_transfer(
        self, loan: NamedHolders[E], borrowed: int, computed: int, seconds: float, now: float
    ) -> None:
        """A reader that did nothing else borrowed and computed these tokens in these seconds."""
        token_s = loan.reader.prefill_rate.token_seconds
        if loan.is_alone and borrowed >= MIN_BORROWED_TOKENS and token_s:
            transfer = seconds - LOAN_LATENCY_S - computed * token_s
            self._paces.append(max(0.0, transfer) / borrowed)
            self._sampled_at = now

    def forget(self, name: str) -> None:
        """The engine was removed or has restarted."""
        self._free_at.pop(name, None)
        self._lenders.clear()

    def _saved_seconds(
        self, reader: Candidate, holder: Candidate, tokens: int, now: float
    ) -> float:
        token_s = reader.prefill_rate.token_seconds or holder.prefill_rate.token_seconds
        queued_s = self._free_from(reader, holder, now) - now
        return tokens * (token_s or DEFAULT_TOKEN_S) - loan_cost(tokens, self._pace(now), queued_s)

    def _free_from(self, reader: Candidate, holder: Candidate, now: float) -> float:
        free_at = self._free_at
        return max(now, free_at.get(reader.name, now), free_at.get(holder.name, now))

    def _pace(self, now: float) -> float:
        """Return the seconds per token of a transfer."""
        if len(self._paces) < MIN_LOANS or now > self._sampled_at + STALE_S:
            return FASTEST_TRANSFER_S
        return max(FASTEST_TRANSFER_S, min(self._paces))
