"""Who may be asked for which model: pictures of fleets in every state."""

from collections.abc import Sequence
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.fleet.engine import (
    LEGS,
    BreakerRules,
    CircuitBreaker,
    CircuitState,
    Engine,
    EngineRole,
    EngineSpec,
    Health,
    Intent,
)
from router.fleet.fleet import EngineTuples, build_snapshot, find_unread
from router.http_client.pool import EnginePool
from router.settings import Address

MODELS = ("a", "b")


def engine_at(port: int, role: EngineRole, **state: Any) -> Engine:
    models, group = state.pop("models", frozenset()), state.pop("group", "g")
    spec = EngineSpec(role, Address("h", port), group=group, weight=state.pop("weight", 1.0))
    circuit = state.pop("circuit", CircuitState.CLOSED)
    made = Engine(spec, cast(EnginePool, None), CircuitBreaker(BreakerRules()))
    made.health, made.models, made.breaker.circuit = Health.HEALTHY, models or None, circuit
    for name, value in state.items():
        setattr(made, name, value)
    made.update_availability()
    return made


ENGINES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(EngineRole),
            "health": st.sampled_from(Health),
            "intent": st.sampled_from(Intent),
            "is_cooling": st.booleans(),
            "circuit": st.sampled_from(CircuitState),
            "group": st.sampled_from("gh"),
            "models": st.frozensets(st.sampled_from(MODELS)),
        }
    ),
    max_size=7,
).map(lambda drawn: [engine_at(port, **state) for port, state in enumerate(drawn)])


def of_role(engines: Sequence[Engine], role: EngineRole) -> list[Engine]:
    return [one for one in engines if one.role.plays(role)]


@given(ENGINES, st.sampled_from([*MODELS, "unknown", "", None, 7]))
def test_a_role_is_empty_only_without_any_usable_engine(
    engines: list[Engine], model: object
) -> None:
    """Neither circuits nor a word of "too much" leave nobody to ask."""
    find_unread(engines)
    for one in engines:
        one.update_availability()
    snapshot = build_snapshot(engines)
    pools = {pool.group: pool for pool in snapshot.pools(model)}
    serving = [e for e in engines if model in (e.models or ())]
    if model not in snapshot.by_model:
        groups = {e.group for e in engines if e.models is not None}
        serving = [e for e in engines if e.group not in groups]
    wanted = [e for e in serving if e.health is not Health.UNHEALTHY and e.intent is Intent.SERVING]
    assert pools.keys() == {e.group for e in wanted}
    for group, pool in pools.items():
        for role, members in zip(LEGS, (pool.prefillers, pool.decoders), strict=True):
            able = [e for e in of_role(wanted, role) if e.group == group]
            assert set(members) <= set(able)
            assert bool(members) == bool(able)
            asked = [e for e in able if e.is_available]
            healthy = [e for e in able if e.health is Health.HEALTHY]
            assert set(members) == set(asked or healthy or able)


def test_group_of_unknown_models_serves_any_model_that_no_other_group_serves() -> None:
    silent = engine_at(1, EngineRole.DECODE, group="h")
    named = engine_at(2, EngineRole.DECODE, models=frozenset("a"))
    snapshot = build_snapshot([silent, named])
    assert snapshot.pools("a")[0].decoders == (named,)
    assert snapshot.pools("nobody's")[0].decoders == (silent,)
    assert build_snapshot([silent]).pools(None)[0].decoders == (silent,)
    assert build_snapshot([named]).pools("nobody's") == ()


@pytest.mark.parametrize(
    ("served", "default"),
    [
        (("a", "a"), "a"),
        (("a", "b"), ""),
        (("ab", "ba"), "a"),
        (("ab", "b"), "b"),
        (("ab", "ac", "c"), ""),
        ((), None),
        (("", ""), None),
        (("", "a"), "a"),
    ],
)
def test_default_model_is_the_first_name_that_all_engines_have(
    served: tuple[str, ...], default: str | None
) -> None:
    engines = [engine_at(port, EngineRole.BOTH) for port, _ in enumerate(served)]
    for one, names in zip(engines, served, strict=True):
        if names:
            one.take_models(frozenset(names), base_models=tuple(names))
    assert build_snapshot(engines).default_model == default


def test_several_models_of_one_engine_have_no_default_but_adapters_do_not_count() -> None:
    one = engine_at(1, EngineRole.BOTH)
    one.take_models(frozenset("ab"), adapters=frozenset("b"))
    assert build_snapshot([one]).default_model == "a"
    one.take_models(frozenset("ab"))
    assert build_snapshot([one]).default_model == ""


def test_a_draining_engine_gets_nothing_new_even_if_it_is_the_last() -> None:
    last = engine_at(1, EngineRole.BOTH, intent=Intent.DRAINING, models=frozenset("a"))
    assert build_snapshot([last]).pools("a") == build_snapshot([last]).pools(None) == ()


def test_groups_are_separate_and_weigh_as_much_as_their_decoders() -> None:
    engines = [
        engine_at(1, EngineRole.PREFILL, weight=9.0),
        engine_at(2, EngineRole.DECODE, weight=2.0),
        engine_at(3, EngineRole.DECODE, weight=3.0),
        engine_at(4, EngineRole.PREFILL, group="h", weight=4.0),
    ]
    one, other = build_snapshot(engines).pools(None)
    assert (one.group, one.weight, other.group, other.weight) == ("g", 5.0, "h", 4.0)
    assert [len(x) for x in (one.prefillers, one.decoders, other.prefillers)] == [1, 2, 1]
    assert other.decoders == ()


def test_no_tuple_keeps_a_removed_engine() -> None:
    members, one, other = (
        EngineTuples(),
        engine_at(1, EngineRole.DECODE),
        engine_at(2, EngineRole.DECODE),
    )
    members.renew([one, other])
    both, alone = members.get([one, other]), members.get([other])
    members.renew([other])
    assert members.get([one, other]) is not both
    assert members.get([other]) is alone


def test_a_half_open_engine_is_available_until_its_trial_starts() -> None:
    closed, trying = (
        engine_at(1, EngineRole.DECODE),
        engine_at(2, EngineRole.DECODE, circuit=CircuitState.HALF_OPEN),
    )
    assert set(build_snapshot([closed, trying]).pools(None)[0].decoders) == {closed, trying}
    trying.breaker.trial = object()
    trying.update_availability()
    assert build_snapshot([closed, trying]).pools(None)[0].decoders == (closed,)
    assert build_snapshot([trying]).pools(None)[0].decoders == (trying,), "there is nobody else"
