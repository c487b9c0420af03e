"""Engines that hold most of a prompt are preferred, and the memory for that is bounded."""

import tracemalloc
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.routing.chunk_index import BYTES_PER_CHUNK, MAX_UNUSED_BITS, ChunkIndex
from router.routing.costs import QUEUE_SHARE
from router.routing.policy import PolicyFeedback, RoutingQuery
from router.routing.prefix_cache import (
    MAX_STRIKES,
    MAX_UNANSWERED,
    PrefillCost,
    PrefixAffinity,
)
from router.routing.prompt_chunks import TOKENS_PER_CHUNK
from tests.unit.router.routing.engines import BOUND, Engine, engines

TURN = iter(range(10**9))


def _ask(*chunks: int) -> RoutingQuery:
    return RoutingQuery(next(TURN), chunks=chunks)


def _told(
    *notes: tuple[Engine, tuple[int, ...]], make: type[PrefixAffinity] = PrefixAffinity
) -> PrefixAffinity:
    """All engines are known to it, and have answered those prompts."""
    policy = make(BOUND, ChunkIndex())
    policy.order(FLEET, _ask(0))
    for engine, chunks in notes:
        ask = _ask(*chunks)
        policy.note_sent(engine.name, ask)
        policy.note_cached(engine.name, ask, 0)
    return policy


FLEET = engines(6)


@pytest.fixture(autouse=True)
def _idle() -> None:
    for engine in FLEET:
        engine.total_legs = engine.total_tokens = 0


def test_the_longest_match_wins_and_the_next_one_stands_in_when_it_is_overloaded() -> None:
    a, b, c = FLEET[:3]
    policy = _told((a, (1, 2)), (b, (1, 2, 3, 4)), (c, (1,)))
    assert policy.order(FLEET, _ask(1, 2, 3, 4, 5))[0] is b
    b.total_legs = 20
    order = policy.order(FLEET, _ask(1, 2, 3, 4, 5))
    assert order[0] is a
    a.total_legs = 20
    assert policy.order(FLEET, _ask(1, 2, 3, 4, 5))[0] is c


def test_of_equal_matches_the_less_loaded_wins() -> None:
    a, b = FLEET[:2]
    policy = _told((a, (1, 2)), (b, (1, 2)))
    a.total_tokens = 5
    assert policy.order(FLEET, _ask(1, 2, 9))[0] is b
    b.total_tokens = 6
    assert policy.order(FLEET, _ask(1, 2, 9))[0] is a


def test_an_unknown_prompt_goes_by_load() -> None:
    one, other = fleet = engines(2)
    one.total_tokens = 1
    for _ in range(10):
        assert _told((one, (1, 2))).order(fleet, _ask(7, 8))[0] is other


def test_prompt_leaves_an_engine_whose_smaller_cache_is_full() -> None:
    small, large = fleet = engines(2)
    small.cache_tokens, large.cache_tokens = 100_000, 900_000
    policy = PrefixAffinity(BOUND, ChunkIndex())
    prompt = RoutingQuery(next(TURN), chunks=(1, 2, 3), tokens=800)
    policy.order(fleet, prompt)
    policy.note_sent(small.name, prompt)
    small.total_tokens = large.total_tokens = 20_000
    assert policy.order(fleet, prompt)[0] is small
    small.total_tokens = 90_000
    assert policy.order(fleet, prompt) == [large, small]
    large.total_tokens = 890_000
    assert policy.order(fleet, prompt)[0] is small


def test_prompt_leaves_a_full_engine_if_an_equal_one_has_room() -> None:
    holder, other = fleet = engines(2)
    holder.cache_tokens = other.cache_tokens = 100_000
    policy = PrefixAffinity(BOUND, ChunkIndex())
    prompt = RoutingQuery(next(TURN), chunks=(1, 2, 3), tokens=800)
    policy.order(fleet, prompt)
    policy.note_sent(holder.name, prompt)
    holder.total_tokens, other.total_tokens = 60_000, 20_000
    assert policy.order(fleet, prompt)[0] is holder
    holder.total_tokens = 80_000
    assert policy.order(fleet, prompt)[0] is other
    other.total_tokens = 79_000
    assert policy.order(fleet, prompt)[0] is holder


def test_a_forgotten_engine_holds_nothing_even_if_its_name_returns() -> None:
    a = FLEET[0]
    policy = _told((a, (1, 2)))
    assert policy.expected_tokens(a.name, _ask(1, 2, 3)) == 2 * TOKENS_PER_CHUNK
    policy.forget(a.name)
    policy.order(FLEET, _ask(1, 2))
    assert policy.expected_tokens(a.name, _ask(1, 2, 3)) == 0


def test_several_contradicting_answers_make_the_index_forget_the_engine() -> None:
    a = FLEET[0]
    policy = _told((a, (1, 2, 3, 4)))
    for strike in range(MAX_STRIKES):
        assert policy.expected_tokens(a.name, _ask(1, 2, 3, 4)) == 4 * TOKENS_PER_CHUNK, strike
        ask = _ask(1, 2, 3, 4)
        policy.note_sent(a.name, ask)
        policy.note_cached(a.name, ask, TOKENS_PER_CHUNK)
    assert policy.expected_tokens(a.name, _ask(1, 2, 3, 4)) == 0


def test_a_confirming_answer_resets_the_strikes() -> None:
    a = FLEET[0]
    policy = _told((a, (1, 2, 3, 4)))
    for cached in [0, 0, 4 * TOKENS_PER_CHUNK] * 3:
        ask = _ask(1, 2, 3, 4)
        policy.note_sent(a.name, ask)
        policy.note_cached(a.name, ask, cached)
    assert policy.expected_tokens(a.name, _ask(1, 2, 3, 4)) == 4 * TOKENS_PER_CHUNK


def test_a_first_prompt_without_cached_tokens_contradicts_nothing() -> None:
    a, policy = FLEET[0], _told()
    for number in range(10):
        ask = _ask(100 + number, 200 + number)
        policy.note_sent(a.name, ask)
        policy.note_cached(a.name, ask, 0)
    assert policy.expected_tokens(a.name, _ask(100, 200)) == 2 * TOKENS_PER_CHUNK


def test_simultaneous_prompts_contradict_nothing() -> None:
    """None of them finds in the cache what they are all computing."""
    a, policy = FLEET[0], _told()
    asks = [_ask(1, 2, 3, number) for number in range(10, 10 + 3 * MAX_STRIKES)]
    for ask in asks:
        policy.note_sent(a.name, ask)
    for ask in asks:
        policy.note_cached(a.name, ask, 0)
    assert policy.expected_tokens(a.name, _ask(1, 2, 3)) == 3 * TOKENS_PER_CHUNK


def test_a_running_prefill_is_not_expected_but_attracts() -> None:
    a, policy = FLEET[0], _told((FLEET[0], (1, 2)))
    ask = _ask(1, 2, 3, 4)
    policy.note_sent(a.name, ask)
    assert policy.expected_tokens(a.name, _ask(1, 2, 3, 5)) == 2 * TOKENS_PER_CHUNK
    assert policy.order(FLEET, _ask(1, 2, 3, 5))[0] is a
    policy.note_cached(a.name, ask, 2 * TOKENS_PER_CHUNK)
    assert policy.expected_tokens(a.name, _ask(1, 2, 3, 5)) == 3 * TOKENS_PER_CHUNK


def test_all_choices_for_a_request_go_by_the_expectation_of_the_first() -> None:
    a = FLEET[0]
    policy = _told((a, (1, 2)))
    feedback = PolicyFeedback(policy, _ask(1, 2, 3))
    assert feedback.expected_tokens(a.name) == 2 * TOKENS_PER_CHUNK
    policy.forget(a.name)
    assert feedback.expected_tokens(a.name) == 2 * TOKENS_PER_CHUNK
    assert PolicyFeedback(policy, _ask(1, 2, 3)).expected_tokens(a.name) == 0


def test_memory_is_bounded_whatever_stays_unanswered() -> None:
    holders = ChunkIndex(memory=4000 * BYTES_PER_CHUNK)
    policy = PrefixAffinity(BOUND, holders)
    policy.order(FLEET, _ask(0))
    for number in range(3000):
        chunks = range(number * 10, number * 10 + 10)
        policy.note_sent(FLEET[number % 6].name, _ask(*chunks))
        assert 0 < len(holders) <= 4000
    assert policy.num_unanswered <= MAX_UNANSWERED * len(FLEET)
    unanswered = policy.num_unanswered
    policy.note_sent("nobody", _ask(1))
    assert policy.num_unanswered == unanswered
    for number in range(100):
        holders.register([f"pod-{number}"])
        policy.note_sent(f"pod-{number}", _ask(number))
        holders.forget(f"pod-{number}")
    assert policy.num_unanswered <= unanswered + len(FLEET) + 1, "of engines that are gone"


def test_many_changing_names_keep_few_bits() -> None:
    holders = ChunkIndex()
    for number in range(3 * MAX_UNUSED_BITS):
        holders.register([f"pod-{number}", "old"])
        holders.add("old", [number])
        assert holders.bit("old").bit_length() <= MAX_UNUSED_BITS + 6
        if number % 2:
            holders.forget(f"pod-{number}")


def test_repeated_prompts_are_kept_and_others_are_forgotten() -> None:
    holders = ChunkIndex()
    (bit,) = holders.register(["a"], [100 * TOKENS_PER_CHUNK])
    for number in range(1000):
        holders.add("a", [1, 2, 3])
        holders.add("a", [10 + number])
    assert holders.longest([1, 2, 3], bit).depth == 3
    assert holders.longest([10], bit).depth == 0
    assert holders.longest([1009], bit).depth == 1


@given(st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(0, 2), min_size=1, max_size=6))))
def test_a_match_is_the_longest_that_was_added(notes: list[tuple[int, list[int]]]) -> None:
    """Against looking through all that was noted; chunks are chained as real ones are."""
    holders = ChunkIndex()
    bits = holders.register([str(n) for n in range(6)])
    for engine, path in notes:
        holders.add(str(engine), _chained(path))
    asked = [0, 1, 0, 1]
    depths = {
        engine: max((_common(path, asked) for e, path in notes if e == engine), default=0)
        for engine in range(6)
    }
    for among in (range(6), range(3), range(1)):
        match = holders.longest(_chained(asked), sum(bits[engine] for engine in among))
        depth = max(depths[engine] for engine in among)
        assert match.depth == depth
        if depth:
            held = {engine for engine in among if bits[engine] & match.engines}
            assert held == {engine for engine in among if depths[engine] == depth}


def test_index_remembers_as_much_as_the_caches_hold() -> None:
    index = ChunkIndex(host_tokens=1000 * TOKENS_PER_CHUNK)
    (bit,) = index.register(["a"], [1000 * TOKENS_PER_CHUNK])
    for number in range(5999):
        index.add("a", [number])
        assert index.longest([max(0, number - 1999)], bit).depth == 1
    assert index.longest([1998], bit).depth == 0, "older than twice the cache"


def test_busy_decode_engine_does_not_make_the_index_forget_what_prefill_engines_hold() -> None:
    index = ChunkIndex()
    p, d = index.register(["p", "d"], [1000 * TOKENS_PER_CHUNK] * 2, ["prefill", "decode"])
    for number in range(900):
        index.add("p", [number])
    for number in range(5000, 9000):
        index.add("d", [number])
    assert index.longest([500], p | d) == (1, p)
    assert index.longest([8999], p | d) == (1, d)
    assert index.longest([5000], p | d).depth == 0
    assert index.longest([8400], p | d).depth == 0, "it may have evicted the prompt"
    index.add("p", [8999])
    assert index.longest([8999], p | d) == (1, p | d)


def test_engine_that_begins_to_decode_is_not_expected_to_hold_what_it_computed_before() -> None:
    """The prompts of all prefill engines replace it soon, and the index forgets slowly what
    prefill engines hold. An engine that computes prompts again is still expected to hold what it
    decoded."""
    index = ChunkIndex()
    caches = [1000 * TOKENS_PER_CHUNK] * 2
    p, one = index.register(["p", "one"], caches, ["prefill", "prefill"])
    for name in ("p", "one"):
        index.add(name, [1])
    assert index.register(["one"], caches[:1], ["decode"]) == [one]
    assert index.longest([1], p | one) == (1, p)
    index.add("one", [2])
    assert index.register(["one"], caches[:1], ["prefill"]) == [one]
    assert index.longest([2], p | one) == (1, one)
    for number in range(1000, 3000):
        index.add("one", [number])
    assert index.longest([1001], p | one) == (1, one), "as much as two caches hold"
    index.forget("one")
    assert index.longest([2], p | one).depth == index.longest([1001], p | one).depth == 0


def test_chunks_of_a_role_that_no_engine_has_any_more_are_forgotten_as_others_are_added() -> None:
    """A group changes from the boundary to placement by cost."""
    index, caches = ChunkIndex(memory=1000 * BYTES_PER_CHUNK), [500 * TOKENS_PER_CHUNK] * 2
    p, d = index.register(["p", "d"], caches, ["prefill", "decode"])
    for number in range(300):
        index.add("pd"[number % 2], [number])
    assert index.register(["p", "d"], caches, ["both", "both"]) == [p, d]
    assert index.longest([298], p | d) == (1, p)
    for number in range(1000, 3000):
        index.add("pd"[number % 2], [number])
    assert index.longest([298], p | d).depth == index.longest([299], p | d).depth == 0
    assert len(index) <= 1000


@given(
    st.integers(0, 300),
    st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.sampled_from(["prefill", "decode", "both", ""]),
            st.integers(0, 200),
        ),
        min_size=1,
        max_size=12,
    ),
)
def test_the_index_keeps_its_bound_however_engines_change_their_roles(
    most: int, changes: list[tuple[str, str, int]]
) -> None:
    index, chunk = ChunkIndex(memory=most * BYTES_PER_CHUNK), count()
    for name, role, added in changes:
        index.register([name], [100 * TOKENS_PER_CHUNK], [role])
        for _ in range(added):
            index.add(name, [next(chunk)])
            assert len(index) <= max(2, most)


def test_chunk_that_an_engine_lacks_is_dropped_whatever_role_it_had_when_it_was_added() -> None:
    index = ChunkIndex()
    (bit,) = index.register(["one"], roles=["decode"])
    index.add("one", [1, 2, 3])
    index.register(["one"], roles=["prefill"])
    index.drop("one", [1, 2, 3], 1)
    assert index.longest([1, 2, 3], bit) == (1, bit)


@pytest.mark.parametrize("memory", [500, 2000, 10_000])
def test_index_of_too_little_memory_keeps_fewer_chunks_of_as_many_prompts(memory: int) -> None:
    index = ChunkIndex(memory=memory * BYTES_PER_CHUNK)
    (bit,) = index.register(["a"], [16_000 * TOKENS_PER_CHUNK])
    prompts = [[100 * number + at for at in range(64)] for number in range(120)]
    for prompt in prompts:
        index.add("a", prompt)
        assert len(index) <= memory
    stride = index.stride
    assert 16_000 / memory <= stride < 2 * 16_000 / memory
    for prompt in prompts:
        assert index.longest(prompt, bit).depth == 64 // stride * stride
        assert index.longest([*prompt[:40], *range(10**6, 10**6 + 24)], bit).depth == (
            40 // stride * stride
        )


def test_bytes_per_chunk_are_not_understated() -> None:
    tracemalloc.start()
    try:
        index = ChunkIndex()
        index.register(["a", "b"], [2**25] * 2)
        before = tracemalloc.get_traced_memory()[0]
        for number in range(50_000):
            index.add("ab"[number % 2], [hash((number, "chunk"))])
        per_chunk = (tracemalloc.get_traced_memory()[0] - before) / len(index)
    finally:
        tracemalloc.stop()
    assert BYTES_PER_CHUNK / 3 < per_chunk <= BYTES_PER_CHUNK


# PrefillCost.


def _prompt(*chunks: int) -> RoutingQuery:
    return RoutingQuery(next(TURN), chunks=chunks, tokens=len(chunks) * TOKENS_PER_CHUNK)


def test_prefill_goes_where_the_least_is_left_to_compute() -> None:
    a, b = FLEET[:2]
    policy = _told((a, (1, 2)), (b, (1, 2, 3, 4)), make=PrefillCost)
    for engine in FLEET:
        engine.total_tokens = 10_000
    assert policy.order(FLEET, _prompt(1, 2, 3, 4, 5))[:2] == [b, a]
    # Beyond two more chunks' worth of queue, the shorter match is better.
    limit = 2 * TOKENS_PER_CHUNK / QUEUE_SHARE
    b.total_tokens = 10_000 + int(limit) - 1
    assert policy.order(FLEET, _prompt(1, 2, 3, 4, 5))[0] is b
    b.total_tokens = 10_000 + int(limit) + 1
    assert policy.order(FLEET, _prompt(1, 2, 3, 4, 5))[0] is a


def test_idle_engine_without_a_match_gets_the_prompt_once_it_is_sooner() -> None:
    a, *others = FLEET
    policy = _told((a, (1, 2, 3, 4)), make=PrefillCost)
    a.total_tokens = 4 * TOKENS_PER_CHUNK - 1
    assert policy.order(FLEET, _prompt(1, 2, 3, 4))[0] is a
    a.total_tokens = 4 * TOKENS_PER_CHUNK + 1
    assert policy.order(FLEET, _prompt(1, 2, 3, 4))[0] in others


@given(
    notes=st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(0, 1), min_size=1))),
    queued=st.lists(st.integers(1, 4000), min_size=6, max_size=6),
)
def test_prefill_cost_is_the_least_of_all_engines(
    notes: list[tuple[int, list[int]]], queued: list[int]
) -> None:
    """Against the cost of every engine."""
    policy, asked = PrefillCost(BOUND, ChunkIndex()), [0, 1, 0, 1]
    policy.order(FLEET, _prompt(0))
    for engine, path in notes:
        query = _prompt(*_chained(path))
        policy.note_sent(FLEET[engine].name, query)
        policy.note_cached(FLEET[engine].name, query, 0)
    for one, tokens in zip(FLEET, queued, strict=True):
        one.total_tokens = tokens
    query = _prompt(*_chained(asked))

    def cost(engine: Engine) -> float:
        missing = query.tokens - policy.expected_tokens(engine.name, query)
        return missing + QUEUE_SHARE * engine.total_tokens

    assert cost(policy.order(FLEET, query)[0]) == min(map(cost, FLEET))


def _chained(path: list[int]) -> list[int]:
    return [hash(tuple(path[: end + 1])) for end in range(len(path))]


def _common(one: list[int], other: list[int]) -> int:
    same = [a == b for a, b in zip(one, other, strict=False)]
    return same.index(False) if False in same else len(same)
