"""The choice of another pair where KV moves slowly between the engines that the policies chose.

Policies order the engines of each role by themselves. If the first ones of both orders are a slow
pair, all pairs of the first engines are compared by the seconds of

    the prompt     what the prefill engine lacks of it, behind a share of its queue
    the transfer   what the decode engine lacks, times the slowness of the pair
    the answer     what its steps take longer beside the contexts of the decode engine

so that a slow pair still serves where the other engines are busy. One of EXPLORED requests keeps
its pair, to measure whether it is still slow. Without slow pairs nothing is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from router.routing.costs import (
    ANSWER_STEPS,
    DEFAULT_CONTEXT_S,
    DEFAULT_TOKEN_S,
    QUEUE_SHARE,
    SAFE_SHARE,
    PairSlowness,
    prompt_cost,
    transfer_cost,
)
from router.routing.policy import MAX_ORDERED, E, mix, queued_tokens

EXPLORED = 16


def choose_pair(
    orders: tuple[Sequence[E], Sequence[E]],
    tokens: int,
    turn: int,
    slowness: PairSlowness,
    expected_tokens: tuple[Callable[[str], int], Callable[[str], int]],
) -> tuple[Sequence[E], Sequence[E]]:
    """Return the orders of prefill and decode engines, none of them empty, with the chosen pair
    first. `expected_tokens` returns for each role what an engine is expected to hold of the prompt
    of `tokens` tokens."""
    prefillers, decoders = orders
    is_slow = slowness(prefillers[0].name, decoders[0].name) > 1
    if not is_slow or mix(turn) % EXPLORED == 0:
        return orders

    def uncached(engine: E, place: int) -> int:
        return max(1, tokens - expected_tokens[place](engine.name))

    def prompt(engine: E) -> float:
        token_s = engine.prefill_rate.token_seconds or DEFAULT_TOKEN_S
        return prompt_cost(token_s, uncached(engine, 0), queued_tokens(engine), QUEUE_SHARE)

    def cost(prefiller: E, decoder: E) -> float:
        slow = slowness(prefiller.name, decoder.name)
        answer = ANSWER_STEPS * DEFAULT_CONTEXT_S * decoder.total_tokens
        return prompt(prefiller) + transfer_cost(uncached(decoder, 1), slowness=slow) + answer

    def has_room(decoder: E) -> bool:
        size = decoder.cache_tokens
        return not size or decoder.total_tokens + tokens < SAFE_SHARE * size

    first = decoders[0]
    candidates = [d for d in decoders[:MAX_ORDERED] if d is first or has_room(d)]
    pairs = [(p, d) for p in prefillers[:MAX_ORDERED] for d in candidates if p is not d]
    if not pairs:
        return orders
    best = min(pairs, key=lambda pair: cost(*pair))
    return _put_first(best[0], prefillers), _put_first(best[1], decoders)


def _put_first(engine: E, order: Sequence[E]) -> Sequence[E]:
    return [engine, *(one for one in order if one is not engine)]
