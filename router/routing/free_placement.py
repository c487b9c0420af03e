"""Free placement: choose the engine that computes a prompt and the one that answers, by cost.

Every engine has both roles. The engine with the least cost computes the prompt, and the one with
the least cost after that decodes. If both are the same engine, nothing is transferred, and that is
so as long as there is little load. Costs are seconds:

    prefill   the prompt's own work beside the answers there, a part of what is queued before it,
              and what its steps take from the answers
    decode    the time of the answer's steps, the transfer of what the engine lacks with all
              transfers that wait at both engines' network interfaces, a part of what is queued,
              and while prompts wait, what the answer takes from them: so answers gather on some
              engines, and the others compute prompts in long steps

This is worth it where a step with prompts and answers costs little more than its parts; see
`router.coordination.role_balance`, which decides that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from msgspec import Struct

from router.routing.costs import (
    ANSWER_STEPS,
    BUSY_QUEUE_S,
    CLEAR_DIFFERENCE,
    DELAY_SHARE,
    PlaceLoad,
    queue_cost,
    transfer_cost,
)
from router.routing.policy import MAX_ORDERED

E = TypeVar("E")
# The cost of an engine whose KV cache has no room.
FULL_S = 10.0
# The part of a KV cache that prompts for other engines may fill.
PROMPT_SHARE = 0.8
# Routers that know each other's load a moment late would choose the same engine.
COST_JITTER = 0.3
# An engine with answers computes prompts more slowly, because it reads its weights for each of its
# short steps. The more prompts wait, the more an engine without answers should stay so. LOSS_SHARE
# is the weight of this loss. It counts fully with BUSY_QUEUE_S of queued prompts per engine, and to
# the part CALM of that without any, if engines have FEW_TOKENS of contexts in the mean. It counts
# for prompts that are new everywhere: others cost least where their prefix is. The weights were
# chosen by simulations of published traces (docs/performance.md).
LOSS_SHARE = 0.5
CALM = 0.2
FEW_TOKENS = 20_000


class Choice(Struct, Generic[E], frozen=True):
    """An engine as one prompt sees it."""

    engine: E
    load: PlaceLoad
    uncached: int
    """The tokens of the prompt that it lacks."""
    answers: int
    """Requests whose answers it computes."""
    transfers: int = 0
    """Prompts whose KV waits there for another engine."""
    waiting_tokens: int = 0
    """The tokens of these prompts."""

    def prefill_cost(self, total: int) -> float:
        """Return the cost of computing the prompt of `total` tokens here."""
        load = self.load
        work = load.model.prefill_seconds(self.uncached, total)
        seconds = load.prefill_seconds(self.uncached, total) if load.contexts else work
        cost = seconds + queue_cost(load.queued_s) + DELAY_SHARE * self.answers * work
        return cost + self._crowding(total)

    def decode_cost(
        self, total: int, prefiller: Choice[E], pressure: float = 0.0, slowness: float = 1.0
    ) -> float:
        """Return the cost of answering here, after `prefiller` has computed the prompt."""
        load, model = self.load, self.load.model
        bases = model.base, prefiller.load.model.base
        if max(bases) < CLEAR_DIFFERENCE * min(bases):  # as exactly as it is measured
            model = prefiller.load.model
        cost = load.decode_cost(total, model)
        if pressure and not math.isinf(load.step_limit):
            cost += LOSS_SHARE * pressure * ANSWER_STEPS * self._lost_seconds(total)
        if prefiller is not self:
            waiting = 1 + max(self.transfers, prefiller.transfers)
            cost += transfer_cost(self.uncached, waiting, slowness)
        return cost + self._crowding(total)

    def is_full_of_prompts(self, total: int) -> bool:
        """Return True if one more prompt for another engine would leave too little room to load
        prompts from others: two such engines would wait for each other."""
        tokens = self.waiting_tokens + self.load.queued_tokens + total
        return tokens > PROMPT_SHARE * self.load.cache_tokens

    def _lost_seconds(self, total: int) -> float:
        """Return the seconds that one more answer takes from the prompts of each step. The first
        answers take most, and where there are few, the engine may soon be without any again."""
        load = self.load
        few = FEW_TOKENS / (FEW_TOKENS + load.contexts)
        return few * load.model.mixed_step(1) + load.model.context * total

    def _crowding(self, total: int) -> float:
        return 0.0 if self.load.has_room(total) else FULL_S


def place_freely(
    choices: Sequence[Choice[E]],
    total: int,
    home: E | None = None,
    chance: Callable[[], float] | None = None,
    slowness: Callable[[E, E], float] = lambda source, target: 1.0,
) -> tuple[list[E], list[E]]:
    """Return the engines for the prompt of `total` tokens and for the answer, best first.

    The engine `home`, if it is one of them, answers in any case: it has the conversation's last
    turn. `chance` returns numbers in [0, 1) if other routers send requests to the same engines.
    `slowness` returns how many times as long a transfer takes as between others.
    """

    def cheapest(cost: Callable[[Choice[E]], float]) -> list[Choice[E]]:
        jitters = (1.0 if chance is None else 1.0 + COST_JITTER * chance() for _ in choices)
        costs = [cost(one) * jitter for one, jitter in zip(choices, jitters, strict=True)]
        order = sorted(range(len(choices)), key=costs.__getitem__)
        return [choices[index] for index in order[:MAX_ORDERED]]

    def put_first(one: Choice[E], others: list[Choice[E]]) -> list[Choice[E]]:
        return [one, *(other for other in others if other is not one)]

    new = min(1.0, min(one.uncached for one in choices) / max(1, total))
    pressure = new**3 * _pressure(choices)
    prefillers = cheapest(lambda one: one.prefill_cost(total))
    first = prefillers[0]
    decoders = cheapest(
        lambda one: one.decode_cost(total, first, pressure, slowness(first.engine, one.engine))
    )
    for one in choices:
        if one.engine is home:
            decoders = put_first(one, decoders)
    if decoders[0] is not first and first.is_full_of_prompts(total):
        if decoders[0].engine is home:
            prefillers = put_first(decoders[0], prefillers)
        else:
            decoders = put_first(first, decoders)
    return [one.engine for one in prefillers], [one.engine for one in decoders]


def _pressure(choices: Sequence[Choice[E]]) -> float:
    """Return how much engines without answers are needed for prompts, 0 to 1."""
    queued_s = sum(one.load.queued_s for one in choices) / len(choices)
    contexts = sum(one.load.contexts for one in choices) / len(choices)
    return min(1.0, queued_s / BUSY_QUEUE_S + CALM * min(1.0, contexts / FEW_TOKENS))
