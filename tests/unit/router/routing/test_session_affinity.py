"""A session's engine: always the same, evenly spread, and moved only when it must be."""

from collections import Counter
from statistics import pstdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.routing.policy import RoutingQuery
from router.routing.session_affinity import HashRing, SessionAffinity
from tests.unit.router.routing.engines import BOUND, Engine, engines

SESSIONS = [f"session {number}" for number in range(600)]


def _owners(policy: SessionAffinity, candidates: tuple[Engine, ...]) -> dict[str, str]:
    return {s: policy.order(candidates, RoutingQuery(0, session=s))[0].name for s in SESSIONS}


@pytest.mark.parametrize("count", [2, 4, 8, 40, 500])
def test_sessions_are_spread_evenly(count: int) -> None:
    """Besides what chance does to few sessions, an engine's share is off by 4 % or so."""
    policy, candidates, asked = SessionAffinity(BOUND), engines(count), 10_000
    seen = Counter(
        policy.order(candidates, RoutingQuery(0, session=f"s{n}"))[0].name for n in range(asked)
    )
    mean = asked / count
    shares = [seen[engine.name] / mean for engine in candidates]
    by_chance = mean**-0.5
    assert pstdev(shares) < 1.15 * (by_chance**2 + 0.04**2) ** 0.5
    assert max(shares) < 1 + 5 * by_chance + 0.12


@settings(max_examples=10)
@given(count=st.integers(2, 30), data=st.data())
def test_only_the_sessions_of_a_removed_engine_move(count: int, data: st.DataObject) -> None:
    candidates = engines(count + 1)
    gone = data.draw(st.sampled_from(candidates))
    rest = tuple(engine for engine in candidates if engine is not gone)
    policy = SessionAffinity(BOUND)
    before = _owners(policy, candidates)
    after = _owners(policy, rest)
    assert {s for s in SESSIONS if before[s] != after[s]} == {
        s for s in SESSIONS if before[s] == gone.name
    }
    assert _owners(policy, candidates) == before, "it comes back, and so do they"
    assert _owners(SessionAffinity(BOUND), rest) == after, "a router that never knew it agrees"


@given(st.lists(st.integers(0, 15), min_size=1, unique=True))
def test_a_ring_does_not_depend_on_the_order_of_its_names(numbers: list[int]) -> None:
    names = [f"e{number}" for number in numbers]
    ring, ordered = HashRing(names), HashRing(sorted(names))
    for session in SESSIONS[:50]:
        found = [names[place] for place in ring.nearest(session)]
        assert found == [sorted(names)[place] for place in ordered.nearest(session)]


def test_a_session_leaves_an_overloaded_engine_and_returns() -> None:
    policy, candidates = SessionAffinity(BOUND), engines(5)
    ask = RoutingQuery(1, session="s")
    own, next_one = policy.order(candidates, ask)[:2]
    own.total_legs = 20
    order = policy.order(candidates, ask)
    assert order[0] is next_one
    assert own not in order[:2]
    own.total_legs = 7
    assert policy.order(candidates, ask)[0] is own


def test_when_its_engines_are_all_overloaded_a_session_goes_by_load() -> None:
    policy, candidates = SessionAffinity(BOUND), engines(100)
    for place in HashRing([engine.name for engine in candidates]).nearest("s"):
        candidates[place].total_legs = candidates[place].total_tokens = 100
    order = policy.order(candidates, RoutingQuery(2, session="s"))
    assert order[0].total_legs == 0


def test_without_a_session_load_decides() -> None:
    policy, candidates = SessionAffinity(BOUND), engines(2)
    candidates[0].total_tokens = 1
    assert all(policy.order(candidates, RoutingQuery(n))[0] is candidates[1] for n in range(20))
