"""The group of a request, and the engines of a group that are chosen by cost."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.common.deadlines import Deadlines
from router.fleet.engine import BreakerRules, CircuitBreaker, Engine, EngineRole, EngineSpec, Health
from router.fleet.fleet import GroupPool
from router.fleet.step_model import StepModel
from router.http_client.pool import EnginePool, PoolLimits
from router.routing.chunk_index import ChunkIndex
from router.routing.policy import RoutingQuery
from router.routing.route import (
    POLICIES,
    PREFILL_POLICIES,
    GroupPolicies,
    Route,
    choose_group,
    preferred_groups,
    route,
)
from router.settings import Address
from tests.unit.router.routing.engines import BOUND

LIMITS = PoolLimits(connect_timeout_s=1, max_idle_connections=1, max_idle_s=1, max_head_bytes=1024)


def engine_in(role: EngineRole, group: str) -> Engine:
    address = Address(f"{role}-{group}", 8000)
    pool = EnginePool(address.host, address.port, LIMITS, Deadlines())
    made = Engine(EngineSpec(role, address, group=group), pool, CircuitBreaker(BreakerRules()))
    made.health = Health.HEALTHY
    return made


def group(name: str, weight: float = 1.0, roles: str = "pd") -> GroupPool:
    prefillers = (engine_in(EngineRole.PREFILL, name),) if "p" in roles else ()
    decoders = (engine_in(EngineRole.DECODE, name),) if "d" in roles else ()
    return GroupPool(name, weight, prefillers, decoders)


def chosen(pools: list[GroupPool], session: str = "", turn: int = 0) -> str:
    found = choose_group(pools, RoutingQuery(turn, session=session))
    assert found is not None
    return found.group


@pytest.mark.parametrize("names", ["", "conversation"])
def test_a_group_gets_its_weights_share(names: str) -> None:
    pools, count = [group("blue", 3), group("green", 1)], 4000
    found = Counter(chosen(pools, f"{names}{n}" if names else "", n) for n in range(count))
    assert found["green"] / count == pytest.approx(0.25, abs=0.03)


def test_a_change_of_weights_moves_only_the_share_that_changes() -> None:
    before, after = [group("blue", 9), group("green", 1)], [group("blue", 5), group("green", 5)]
    sessions = [f"s{n}" for n in range(3000)]
    was, now = [chosen(before, s) for s in sessions], [chosen(after, s) for s in sessions]
    moved = sum(one != other for one, other in zip(was, now, strict=True)) / len(sessions)
    assert moved == pytest.approx(0.4, abs=0.04)
    assert not any(one == "green" != other for one, other in zip(was, now, strict=True))


@given(st.lists(st.sampled_from("abcdef"), min_size=2, unique=True), st.text(max_size=8))
def test_the_order_and_removal_of_groups_move_no_other_conversation(
    names: list[str], session: str
) -> None:
    pools = [group(name) for name in names]
    first = chosen(pools, session or "s")
    assert chosen(pools[::-1], session or "s") == first
    left = [pool for pool in pools if pool.group == first or pool.group != names[0]]
    assert chosen(left, session or "s") == first


def test_incomplete_groups_and_groups_without_weight_get_no_requests() -> None:
    whole, half = group("whole", 0.1), group("half", 100, roles="d")
    assert {chosen([whole, half], turn=n) for n in range(50)} == {"whole"}
    assert {chosen([whole, group("none", 0)], turn=n) for n in range(50)} == {"whole"}


@pytest.mark.parametrize("state", ["is_cold", "is_cooling"])
@pytest.mark.parametrize("role", [EngineRole.PREFILL, EngineRole.DECODE])
def test_a_group_without_available_engines_gets_nothing_while_there_is_another(
    state: str, role: EngineRole
) -> None:
    sound, green = group("sound"), group("green", 100)
    for pool in (sound, green):
        for one in (*pool.prefillers, *pool.decoders):
            one.update_availability()
    troubled = green.by_role(role)[0]
    setattr(troubled, state, True)
    troubled.update_availability()
    assert {chosen([sound, green], turn=n) for n in range(50)} == {"sound"}
    assert chosen([green, group("none", 0)]) == "green"


def test_without_another_an_incomplete_or_weightless_group_serves() -> None:
    half = group("half", roles="d")
    assert preferred_groups([half, group("other", roles="p")]) == [half]
    assert chosen([group("a", 0), group("b", 0)]) in ("a", "b")
    assert choose_group([], RoutingQuery(0)) is None


def test_a_conversation_stays_in_its_group_whatever_its_weight() -> None:
    blue, green = group("blue", 0), group("green", 5)
    found = choose_group([green, blue], RoutingQuery(0, session="s"), blue.decoders[0])
    assert found is blue
    gone = replace(blue, prefillers=())
    assert choose_group([green, gone], RoutingQuery(0, session="s"), blue.decoders[0]) is green


class FreeGroup:
    """A group of 200 engines of both roles, where each request goes where it costs least."""

    def __init__(self, policy: str) -> None:
        self.engines = tuple(engine_in(EngineRole.BOTH, f"g{number}") for number in range(200))
        for one in self.engines:
            known = one.capabilities
            known.step_model = StepModel(0.01, 50e-6, 1e-9, 30e-9, 0.0)
            known.max_step_tokens, known.cache_tokens = 2048, 1_000_000
        self.pool = GroupPool("g", 1.0, self.engines, self.engines, is_free=True)
        index = ChunkIndex()
        self.policies = (
            GroupPolicies(PREFILL_POLICIES[policy], BOUND, index),
            GroupPolicies(POLICIES[policy], BOUND, index),
        )

    def route(self, turn: int, session: str = "", chunks: tuple[int, ...] = ()) -> Route:
        query = RoutingQuery(turn, session, chunks, 8192)
        return route([self.pool], *self.policies, (query, query))


def test_free_placement_among_many_engines_finds_the_one_that_holds_the_prompt() -> None:
    group, chunks = FreeGroup("prefix"), tuple(range(1, 17))
    first = group.route(0, chunks=chunks)
    holder = first.decoders[0]
    assert first.decode_feedback is not None
    first.decode_feedback.sent(holder.name)
    first.decode_feedback.answered(holder.name, 0)
    for turn in range(1, 50):
        found = group.route(turn, chunks=chunks)
        assert found.prefillers[0] is found.decoders[0] is holder


def test_free_placement_keeps_a_session_at_its_engine_if_the_policy_does() -> None:
    by_session, by_load = FreeGroup("session"), FreeGroup("least_loaded")
    for group, count in ((by_session, 1), (by_load, 20)):
        assert len({group.route(turn, "s").decoders[0].name for turn in range(20)}) == count


def test_a_group_that_has_just_lost_its_last_engine_of_both_roles_is_not_placed_freely() -> None:
    group = FreeGroup("session")
    group.pool = replace(group.pool, decoders=())
    assert group.route(0, "s").prefillers
