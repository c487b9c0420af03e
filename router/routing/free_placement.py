"""Free placement: which of several engines of both roles computes a prompt, and which one answers.

Every engine may do either. The engine with the least cost computes the prompt, and the one with the
least cost after that decodes. If both are the same engine, nothing is transferred, and that is so
as long as there is little load. Costs are seconds:

    prefill   the prompt's own work beside the answers there, a part of what is queued before it,
              and what its steps take from the answers
    decode    the time of the answer's steps, the transfer of what the engine lacks with all
              transfers that wait at both engines' network interfaces, and a part of what is queued

This is worth it where a step with prompts and answers costs little more than its parts; see
`role_balance`, which decides that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from msgspec import Struct

from router.routing.local_prefill import (
    CACHE_SHARE,
    TRANSFER_LATENCY_S,
    TRANSFER_TOKENS_PER_S,
    DecoderLoad,
)
from router.routing.policy import MAX_ORDERED

E = TypeVar("E")
# Weights of the cost, chosen by simulations of published traces (docs/performance.md).
ANSWER_SHARE = 0.2
DECODE_QUEUE_SHARE = 0.05
HARM_SHARE = 0.05
# The number of an answer's tokens is not known before its end.
ANSWER_TOKENS = 250
# The cost of an engine whose KV cache has no room.
FULL_S = 10.0
# Routers that know each other's load a moment late would choose the same engine.
JITTER = 0.3


class Choice(Struct, Generic[E], frozen=True):
    """An engine as one prompt sees it."""

    engine: E
    load: DecoderLoad
    uncached: int
    """The tokens of the prompt that it lacks."""
    answers: int
    """Requests whose answers it computes."""
    transfers: int = 0
    """Prompts whose KV waits there for another engine."""

    def prefill_cost(self, total: int) -> float:
        """Return the cost of computing the prompt of `total` tokens here."""
        load = self.load
        work = load.model.prefill_seconds(self.uncached, total)
        cost = load.cost(self.uncached, total) + HARM_SHARE * self.answers * work
        return cost + self._crowding(total)

    def decode_cost(self, total: int, prefiller: Choice[E]) -> float:
        """Return the cost of answering here, after `prefiller` has computed the prompt."""
        load = self.load
        step = load.model.decode_step(load.contexts + total)
        cost = ANSWER_SHARE * ANSWER_TOKENS * step + DECODE_QUEUE_SHARE * load.queued_s
        if prefiller is not self:
            waiting = 1 + max(self.transfers, prefiller.transfers)
            cost += TRANSFER_LATENCY_S + waiting * self.uncached / TRANSFER_TOKENS_PER_S
        return cost + self._crowding(total)

    def _crowding(self, total: int) -> float:
        load = self.load
        return 0.0 if load.contexts + total < CACHE_SHARE * load.cache_tokens else FULL_S


def place_freely(
    choices: Sequence[Choice[E]],
    total: int,
    home: E | None = None,
    chance: Callable[[], float] | None = None,
) -> tuple[list[E], list[E]]:
    """Return the engines for the prompt of `total` tokens and for the answer, best first.

    The engine `home`, if it is one of them, answers in any case: it has the conversation's last
    turn. `chance` returns numbers in [0, 1) if other routers send requests to the same engines.
    """

    def jitter() -> float:
        return 1.0 if chance is None else 1.0 + JITTER * chance()

    costs = [(one.prefill_cost(total) * jitter(), index) for index, one in enumerate(choices)]
    prefillers = [choices[index] for _, index in sorted(costs)[:MAX_ORDERED]]
    first = prefillers[0]
    costs = [(one.decode_cost(total, first) * jitter(), index) for index, one in enumerate(choices)]
    decoders = [choices[index].engine for _, index in sorted(costs)[:MAX_ORDERED]]
    if home is not None and any(one.engine is home for one in choices):
        decoders = [home, *(engine for engine in decoders if engine is not home)]
    return [one.engine for one in prefillers], decoders
