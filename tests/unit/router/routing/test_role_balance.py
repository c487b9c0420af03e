"""Which role each engine of both roles prefers."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from router.fleet.engine import BOTH, PREFILL
from router.fleet.step_model import StepModel
from router.routing.role_balance import INTERVAL_S, Balance, EngineState, RoleBalancer

MODEL = StepModel(0.01, 50e-6, 1e-9, 30e-9)


def both(name: str, mixing: float | None = None, **changes: Any) -> EngineState:
    state = EngineState(name, BOTH, replace(MODEL, mixing=mixing), True, 1_000_000, 0, 0, 0.0, 0.0)
    return state._replace(**changes)


def prefiller(name: str) -> EngineState:
    return both(name, role=PREFILL, has_step_limit=False)


def prefillers_of(balance: Balance | None) -> int:
    assert balance is not None
    return [*balance.roles.values()].count(PREFILL)


def test_free_placement_does_not_end_and_begin_with_each_small_change_of_the_penalty() -> None:
    balancer, moments = RoleBalancer(0.05), count(0.0, INTERVAL_S)

    def is_free(mixing: float | None) -> bool:
        balance = balancer.update([both("a", mixing), both("b", mixing)], next(moments))
        assert balance is not None
        return balance.is_free

    assert [is_free(mixing) for mixing in (None, 0.32, 0.29, 0.32, 0.39)] == [
        False, False, True, True, True
    ]  # fmt: skip
    assert is_free(None)  # the fit is too noisy just now
    assert not is_free(0.41)
    assert not is_free(None)
    assert not is_free(0.32)


def test_with_prefill_engines_beside_them_all_engines_of_both_roles_may_decode() -> None:
    """And they continue to: no engine prefers prompts again without a need."""
    balancer = RoleBalancer(0.05)
    engines = [
        prefiller("p"),
        *(both(name, contexts=300_000, own_contexts=300_000) for name in "abcd"),
    ]
    found = [prefillers_of(balancer.update(engines, tick * INTERVAL_S)) for tick in range(8)]
    assert found == [1, 0, 0, 0, 0, 0, 0, 0]


def test_a_router_that_has_few_answers_just_now_does_not_overestimate_the_work_of_all() -> None:
    balancer, reasons = RoleBalancer(0.05), []
    for tick in range(20):
        own = 100_000 if tick < 19 else 10
        engines = [
            both(name, contexts=200_000, own_contexts=own, offered_s=tick * INTERVAL_S * 0.25)
            for name in "abcd"
        ]
        balance = balancer.update(engines, tick * INTERVAL_S)
        assert balance is not None
        reasons.append(balance.reason)
    assert reasons[18].startswith("prompts need 2.0 engines")
    assert reasons[19].startswith("prompts need 2.2 engines")


def test_a_thousand_engines_are_divided_by_need_within_minutes() -> None:
    balancer, found = RoleBalancer(0.05), []
    for tick in range(60):  # two minutes
        changes = {"contexts": 300_000, "own_contexts": 300_000, "offered_s": tick * 0.2}
        engines = [both(f"{number:04}", **changes) for number in range(1000)]
        found.append(prefillers_of(balancer.update(engines, tick * INTERVAL_S)))
    assert found[0] == pytest.approx(500, abs=100)
    assert len({*found[50:]}) == 1
    # Prompts need 0.1 engines each, and answers 0.6: the time of their steps.
    assert found[-1] == pytest.approx(1000 * 0.1 / 0.7, abs=10)


@pytest.mark.parametrize("cache_tokens", [16, 10**15])
def test_one_engine_with_an_absurd_cache_does_not_change_the_need_of_answers(
    cache_tokens: int,
) -> None:
    engines = [both(name, contexts=400_000, model=None) for name in "abcd"]
    engines[0] = engines[0]._replace(cache_tokens=cache_tokens)
    balance = RoleBalancer(0.05).update(engines, 0.0)
    assert balance is not None
    assert balance.reason.endswith("answers 2.2")


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_answers_need_time_on_each_data_parallel_rank(num_ranks: int) -> None:
    model = replace(MODEL, context=300e-9)
    engines = [both(name, contexts=50_000, num_ranks=num_ranks, model=model) for name in "ab"]
    balance = RoleBalancer(0.05).update(engines, 0.0)
    assert balance is not None
    assert balance.reason.endswith(f"answers {2.0 / num_ranks:.1f}")
