"""What holds for every policy, and for those that go by load."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.routing.chunk_index import ChunkIndex
from router.routing.policy import (
    MAX_ORDERED,
    SAMPLE_SIZE,
    LeastLoaded,
    LoadBound,
    Policy,
    PowerOfTwo,
    RoundRobin,
    RoutingQuery,
    load,
    mix,
    sample,
    some_of,
)
from router.routing.prefix_cache import PrefillCost
from router.routing.route import POLICIES
from router.routing.session_affinity import SessionAffinity
from tests.unit.router.routing.engines import BOUND, Engine, engines, loaded

LOADS = st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 40)), max_size=200)
ASKS = st.builds(
    RoutingQuery,
    turn=st.integers(0, 2**63),
    session=st.sampled_from(["", "a", "b", "\ud800"]),
    chunks=st.lists(st.integers(0, 20), max_size=6).map(tuple),
)
EVERY = POLICIES | {"prefix for prefill": PrefillCost}
NAMES = pytest.mark.parametrize("name", EVERY)


@NAMES
@given(loads=LOADS, asks=st.lists(ASKS, min_size=1, max_size=6))
def test_an_order_is_distinct_candidates_and_replays(
    name: str, loads: list[tuple[int, int]], asks: list[RoutingQuery]
) -> None:
    candidates = loaded(loads)
    policy, twin = EVERY[name](BOUND, ChunkIndex()), EVERY[name](BOUND, ChunkIndex())
    for ask in asks:
        order = policy.order(candidates, ask)
        assert len(set(order)) == len(order)
        assert set(order) <= set(candidates)
        assert min(1, len(candidates)) <= len(order) <= min(MAX_ORDERED, len(candidates))
        assert list(order) == list(twin.order(list(candidates), ask)), "a list is no other question"
        for each in (policy, twin):
            if order:
                each.note_sent(order[0].name, ask)
                each.note_cached(order[0].name, ask, 128 * len(ask.chunks))


@NAMES
@pytest.mark.parametrize("count", [1, 3, 64, 150])
def test_no_engine_starves(name: str, count: int) -> None:
    policy, candidates = EVERY[name](BOUND, ChunkIndex()), engines(count)
    chosen = _fill(policy, candidates, 30 * count)
    assert len(chosen) == count


@NAMES
def test_removed_engines_are_not_chosen_and_added_ones_are(name: str) -> None:
    policy, everyone = EVERY[name](BOUND, ChunkIndex()), engines(12)
    for present in (everyone[:8], everyone[4:], everyone[:1], everyone):
        for turn in range(400):
            ask = RoutingQuery(turn, session=f"s{turn}", chunks=(turn % 7, turn))
            order = policy.order(present, ask)
            assert set(order) <= set(present)
            policy.note_sent(order[0].name, ask)
        policy.forget(everyone[5].name)


@given(count=st.integers(1, 300), rounds=st.integers(1, 3), start=st.integers(0, 10**9))
def test_round_robin_is_exact(count: int, rounds: int, start: int) -> None:
    candidates, policy = engines(count), RoundRobin()
    turns = range(start, start + rounds * count)
    chosen = Counter(policy.order(candidates, RoutingQuery(turn))[0].name for turn in turns)
    assert set(chosen.values()) == {rounds}


@given(LOADS.filter(bool), st.integers(0, 2**63))
def test_the_least_loaded_of_the_sample_is_first(loads: list[tuple[int, int]], turn: int) -> None:
    candidates = loaded(loads)
    order = LeastLoaded().order(candidates, RoutingQuery(turn))
    looked_at = sample(candidates, mix(turn))
    assert load(order[0]) == min(map(load, looked_at))
    assert [load(engine) for engine in order] == sorted(map(load, looked_at))[: len(order)]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=200), st.integers(0))
def test_idle_engines_are_found_as_by_comparing_the_whole_sample(
    busy: list[int], turn: int
) -> None:
    candidates = loaded([(7 * (legs or turn % 2), legs) for legs in busy])
    compared = sorted(some_of(candidates, turn), key=load)
    assert LeastLoaded().order(candidates, RoutingQuery(turn)) == compared[:MAX_ORDERED]


def test_equally_loaded_engines_take_turns() -> None:
    candidates = engines(5)
    chosen = [LeastLoaded().order(candidates, RoutingQuery(turn))[0] for turn in range(5)]
    assert chosen == list(candidates)


def test_the_fuller_of_two_random_engines_is_never_first() -> None:
    candidates = loaded([(10, 1)] * 50 + [(0, 0)] * 50)
    for turn in range(500):
        first_two = PowerOfTwo().order(candidates, RoutingQuery(turn))[:2]
        assert load(first_two[0]) <= load(first_two[1])


def test_of_unequal_kv_caches_the_one_with_room_is_taken() -> None:
    small, large = loaded([(40_000, 1), (60_000, 1)])
    order = PowerOfTwo().order

    def first(tokens: int) -> Engine:
        return order((small, large), RoutingQuery(1, tokens=tokens))[0]

    assert first(30_000) is small
    small.cache_tokens, large.cache_tokens = 100_000, 1_000_000
    assert first(1000) is large
    small.total_tokens = 10_000
    assert first(1000) is small, "with enough room, load decides"
    assert first(95_000) is large
    small.cache_tokens = 0  # unknown
    assert first(95_000) is small


@pytest.mark.parametrize(("name", "most"), [("power_of_two", 5), ("least_loaded", 1)])
@pytest.mark.parametrize("count", [10, 200])
def test_load_policies_keep_every_engine_near_the_mean(name: str, most: int, count: int) -> None:
    candidates = engines(count)
    _fill(EVERY[name](BOUND, ChunkIndex()), candidates, 50 * count)
    assert max(engine.total_legs for engine in candidates) <= 50 + most


@given(st.integers(0, 1100), st.integers(0, 2**64 - 1))
def test_a_sample_is_distinct_and_full(size: int, chance: int) -> None:
    found = sample(range(size), chance)
    assert len(set(found)) == len(found) == min(size, SAMPLE_SIZE)


def test_samples_contain_each_item_equally_often() -> None:
    seen = Counter(item for turn in range(4000) for item in sample(range(1000), mix(turn)))
    expected = 4000 * SAMPLE_SIZE / 1000
    assert len(seen) == 1000
    assert max(seen.values()) < 1.4 * expected
    assert min(seen.values()) > 0.6 * expected


@given(LOADS.filter(bool), st.integers(0, 10), st.floats(1, 4))
def test_only_what_is_above_floor_and_mean_is_overloaded(
    loads: list[tuple[int, int]], floor: int, factor: float
) -> None:
    candidates = loaded(loads)[:SAMPLE_SIZE]
    mean = sum(engine.total_legs for engine in candidates) / len(candidates)
    for engine in candidates:
        expected = engine.total_legs >= floor and engine.total_legs > factor * mean
        assert LoadBound(factor, floor).is_overloaded(engine, candidates) == expected


def test_the_overloaded_are_last_in_a_sessions_order_of_all() -> None:
    idle, candidates = loaded([(0, 0)] * 3), loaded([(0, 0)] * 2 + [(0, 90)])
    home = next(
        session
        for session in map(str, range(1000))
        if SessionAffinity(BOUND).order(idle, RoutingQuery(0, session=session))[0] is idle[-1]
    )
    order = SessionAffinity(BOUND).order(candidates, RoutingQuery(0, session=home))
    assert order[-1] is candidates[-1]
    assert set(order) == set(candidates)


def _fill(policy: Policy, candidates: tuple[Engine, ...], turns: int) -> Counter[str]:
    """Legs that never end; nothing is shared."""
    chosen: Counter[str] = Counter()
    for turn in range(turns):
        ask = RoutingQuery(turn, f"session {turn}", (turn,))
        engine = policy.order(candidates, ask)[0]
        policy.note_sent(engine.name, ask)
        engine.total_legs += 1
        engine.total_tokens += 1
        chosen[engine.name] += 1
    return chosen
