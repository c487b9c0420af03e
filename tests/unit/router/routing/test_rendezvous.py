"""Routers that share nothing send a prompt to the same engine, once answers prove that it helps."""

import random
from statistics import fmean

from router.routing.chunk_index import ChunkIndex
from router.routing.policy import RoutingQuery
from router.routing.prefix_cache import PrefillCost
from router.routing.prompt_chunks import TOKENS_PER_CHUNK
from tests.unit.router.routing.engines import BOUND, Engine, engines

FLEET = engines(6)
TURNS = random.Random(1)


class Caches:
    """The chunks in each engine's cache, sent by any router."""

    def __init__(self) -> None:
        self._held: dict[str, set[int]] = {engine.name: set() for engine in FLEET}

    def send(self, policy: PrefillCost, chunks: tuple[int, ...]) -> tuple[Engine, int]:
        """Let a router choose, and tell it what the engine had. Return the engine and its hits."""
        query = _query(chunks)
        chosen = policy.order(FLEET, query)[0]
        policy.note_sent(chosen.name, query)
        held = self._held[chosen.name]
        hits = next((n for n, chunk in enumerate(chunks) if chunk not in held), len(chunks))
        policy.note_cached(chosen.name, query, hits * TOKENS_PER_CHUNK)
        held.update(chunks)
        return chosen, hits


def _query(chunks: tuple[int, ...]) -> RoutingQuery:
    tokens = len(chunks) * TOKENS_PER_CHUNK
    return RoutingQuery(TURNS.getrandbits(32), chunks=chunks, tokens=tokens)


def _prompts(number: int) -> list[tuple[int, ...]]:
    return [tuple(range(1000 * n, 1000 * n + 40)) for n in range(number)]


def test_routers_that_share_nothing_find_what_the_others_have_sent() -> None:
    routers, caches = [PrefillCost(BOUND, ChunkIndex()) for _ in range(4)], Caches()
    found = []
    for n, prompt in enumerate(_prompts(200)):
        caches.send(routers[n % 4], prompt)
        found.append(caches.send(routers[(n + 1) % 4], prompt)[1] / len(prompt))
    assert fmean(found[:10]) < 0.5  # one engine of six, by chance
    assert fmean(found[-100:]) > 0.8


def test_a_router_alone_chooses_as_without_guesses() -> None:
    caches, router = Caches(), PrefillCost(BOUND, ChunkIndex())
    sequence = [prompt for _ in range(3) for prompt in _prompts(60)]
    chosen = [caches.send(router, prompt)[0].name for prompt in sequence]
    assert chosen[60:120] == chosen[:60] == chosen[120:]
    assert len({*chosen}) == len(FLEET)


def test_engines_that_report_no_cached_tokens_are_never_guessed() -> None:
    routers = [PrefillCost(BOUND, ChunkIndex()) for _ in range(2)]
    for n, prompt in enumerate(_prompts(100)):
        for router in routers:
            query = _query(prompt)
            name = FLEET[n % 6].name
            router.order(FLEET, query)
            router.note_sent(name, query)
            router.note_cached(name, query, None)
    new = [RoutingQuery(n, chunks=tuple(range(10**6 + n, 10**6 + 40 + n))) for n in range(30)]
    spread = {routers[0].order(FLEET, query)[0].name for query in new}
    assert len(spread) == len(FLEET)


def _routers_that_find() -> tuple[list[PrefillCost], Caches]:
    """Return routers to which answers have proved that others send prompts, too."""
    routers, caches = [PrefillCost(BOUND, ChunkIndex()) for _ in range(2)], Caches()
    for n, prompt in enumerate(_prompts(200)):
        for router in (routers, routers[::-1])[n % 2]:
            caches.send(router, prompt)
    return routers, caches


def test_a_conversation_stays_at_its_engine_when_its_length_doubles() -> None:
    (one, other), caches = _routers_that_find()
    for n in range(20):
        start = 10**6 + 1000 * n
        first, _ = caches.send(one, tuple(range(start, start + 30)))
        second, hits = caches.send(other, tuple(range(start, start + 35)))
        assert (second, hits) == (first, 30)


def test_prompts_that_share_a_system_prompt_are_spread_over_the_engines() -> None:
    (one, _), caches = _routers_that_find()
    system = tuple(range(10**6, 10**6 + 4))
    prompts = [(*system, *range(10**7 + 1000 * n, 10**7 + 1000 * n + 40)) for n in range(60)]
    sent = [caches.send(one, prompt)[0].name for prompt in prompts]
    assert {*sent[:8]} == {sent[0]}  # until it is known to be shared
    assert {*sent[30:]} == {engine.name for engine in FLEET}


def test_a_prefix_shorter_than_a_chunk_proves_no_other_router() -> None:
    router = PrefillCost(BOUND, ChunkIndex())
    for prompt in _prompts(60):
        query = _query(prompt)
        name = router.order(FLEET, query)[0].name
        router.note_sent(name, query)
        router.note_cached(name, query, TOKENS_PER_CHUNK - 16)
    again = [RoutingQuery(7, chunks=(-n, *range(n, n + 40))) for n in range(10**6, 10**6 + 30)]
    assert len({router.order(FLEET, query)[0].name for query in again}) == 1  # by load alone
