"""Which role each engine of both roles prefers."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import count, pairwise
from typing import Any

import pytest

from router.coordination.role_balance import INTERVAL_S, Balance, EngineState, RoleBalancer
from router.fleet.engine import BOTH, DECODE, PREFILL, EngineRole
from router.fleet.step_model import StepModel

MODEL = StepModel(0.01, 50e-6, 1e-9, 30e-9)
QWEN = StepModel(base=0.0106, token=52e-6, token_context=1.65e-9, context=32.1e-9)


def both(name: str, mixing: float | None = None, **changes: Any) -> EngineState:
    model = replace(MODEL, mixing=mixing)
    state = EngineState(name, BOTH, BOTH, model, True, 1_000_000, 0, 0, 0, 0.0, 0.0)
    return state._replace(**changes)


def prefill_state(name: str) -> EngineState:
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
        prefill_state("p"),
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
    assert "answers 2.2; " in balance.reason


@pytest.mark.parametrize(("num_ranks", "need"), [(1, "2.0"), (4, "0.50")])
def test_answers_need_time_on_each_data_parallel_rank(num_ranks: int, need: str) -> None:
    model = replace(MODEL, context=300e-9)
    engines = [both(name, contexts=50_000, num_ranks=num_ranks, model=model) for name in "ab"]
    balance = RoleBalancer(0.05).update(engines, 0.0)
    assert balance is not None
    assert f"answers {need}; " in balance.reason


# A decode engine should have at most (0.5 * 0.05 - 0.0106) / 32.1e-9 = 449,000 tokens of contexts.


class Group:
    """Engines that get an even share of the offered work. It moves the clock by two seconds."""

    def __init__(self, both: int, *fixed: EngineRole, **fields: Any) -> None:
        self.balancer = RoleBalancer(0.05)
        self.moment = 100.0
        roles = [BOTH] * both + [*fixed]
        common = EngineState("", BOTH, BOTH, QWEN, True, 700_000, 0, 0, 0, 0.0, 0.0)
        common = common._replace(**fields)
        self.engines = [
            common._replace(name=f"e{i}", role=role, preferred_role=role)
            for i, role in enumerate(roles)
        ]

    def update(
        self, work: float = 0.0, contexts: int = 0, queued_s: float = 0.0, legs: int = 0
    ) -> Balance:
        """Update with `work` seconds of prompts a second, and the sums of the others. Answers are
        at the engines that do not prefer prompts."""
        count = len(self.engines)
        decoders = sum(one.preferred_role is not PREFILL for one in self.engines)
        self.moment += 2.0
        for index, one in enumerate(self.engines):
            answers = 0 if one.preferred_role is PREFILL else contexts // decoders
            self.engines[index] = one._replace(
                offered_s=one.offered_s + 2.0 * work / count,
                own_contexts=answers,
                contexts=answers,
                legs=legs // max(1, decoders) if answers else 0,
                queued_s=queued_s / count,
            )
        found = self.balancer.update(self.engines, self.moment)
        assert found is not None
        self.engines = [
            one._replace(preferred_role=found.roles.get(one.name, one.role)) for one in self.engines
        ]
        return found

    def settle(self, times: int = 40, **loads: Any) -> list[int]:
        """Return how many engines preferred prompts after each update."""
        return [prompts(self.update(**loads)) for _ in range(times)]


def prompts(balance: Balance) -> int:
    assert not balance.is_free
    return sum(role is PREFILL for role in balance.roles.values())


def test_boundary_follows_the_work_by_one_engine_at_a_time() -> None:
    group = Group(8)
    documents = group.settle(work=5.0, contexts=400_000)
    answers = group.settle(work=0.5, contexts=2_200_000)
    assert documents[-1] == 7
    assert answers[-1] == 1
    both = [*documents, *answers]
    assert all(abs(b - a) <= 1 for a, b in pairwise(both))
    assert len(set(documents[-10:])) == len(set(answers[-10:])) == 1
    roles = group.update(work=0.5, contexts=2_200_000).roles
    assert list(roles) == [f"e{n}" for n in range(8)]
    assert [*roles.values()] == [PREFILL] + 7 * [DECODE]


def test_both_roles_keep_an_engine_whatever_the_work() -> None:
    assert set(Group(4).settle(work=100.0)[-5:]) == {3}
    assert set(Group(4).settle(contexts=9_000_000)[-5:]) == {1}


def test_idle_group_keeps_its_boundary() -> None:
    group = Group(6)
    assert set(group.settle()) == {3}
    before = group.settle(work=4.0, contexts=100_000)[-1]
    assert before == 5
    # Its queue empties, and the average of the work falls to nothing.
    assert {before} >= set(group.settle(times=3))


@pytest.mark.parametrize("division", [1, 4, 7])
def test_almost_idle_group_keeps_its_boundary_whatever_the_little_work_is(division: int) -> None:
    group = Group(8)
    work = {1: (0.5, 2_200_000), 4: (0.0, 0), 7: (5.0, 400_000)}[division]
    assert group.settle(work=work[0], contexts=work[1])[-1] == division
    few = group.settle(times=60, work=0.01, contexts=20_000)
    for _ in range(10):
        few += group.settle(times=5, work=0.1, contexts=0)
        few += group.settle(times=5, work=0.0, contexts=50_000)
    assert set(few) == {division}
    assert group.settle(work=5.0, contexts=400_000)[-1] == 7, "it follows the load again"


def test_answers_whose_contexts_have_no_known_cost_move_no_boundary() -> None:
    group = Group(4, cache_tokens=0, max_num_seqs=16, model=None)
    assert set(group.settle(contexts=40_000, legs=100)) == {2}


def test_answers_that_need_their_engines_keep_them() -> None:
    # Four engines decode, and 3.3 are needed, because 20 seconds of prompts need far more.
    assert max(Group(8).settle(work=20.0, contexts=1_500_000)) == 4


def test_long_queue_of_prompts_gets_an_engine_although_little_work_is_offered() -> None:
    """Short prompts of chats are little work, and yet no prompt may wait long."""
    assert Group(8).settle(times=1, contexts=1_000_000, queued_s=4.5) == [5]
    assert Group(8).settle(times=1, contexts=1_000_000, queued_s=3.0) == [4]
    assert Group(8).settle(times=1, contexts=1_000_000, queued_s=0.5) == [3]


def test_answers_without_room_get_an_engine_although_prompts_wait() -> None:
    group = Group(8, cache_tokens=100_000)
    group.settle(work=7.0, contexts=60_000)
    assert group.settle(times=1, work=7.0, contexts=60_000) == [7]
    assert group.settle(times=2, work=7.0, contexts=160_000, queued_s=40.0) == [6, 5]


def test_engine_is_taken_from_answers_only_if_they_have_needed_few_for_a_while() -> None:
    group = Group(8)
    assert group.settle(work=3.0, contexts=1_500_000)[-1] == 4  # 3.3 engines for answers
    found = group.settle(times=20, work=6.0, contexts=1_200_000, queued_s=60.0)  # 2.7 engines
    assert found[:5] == [4] * 5
    assert found[-1] == 5


@pytest.mark.parametrize("contexts", [0, 1000])
def test_pause_between_answers_takes_no_engine_from_them_at_once(contexts: int) -> None:
    group = Group(8)
    assert group.settle(work=3.0, contexts=1_500_000)[-1] == 4
    assert group.settle(times=3, work=6.0, contexts=contexts, queued_s=60.0) == [4, 5, 5]


def test_answers_at_engines_that_prefer_prompts_by_now_need_no_decode_engines() -> None:
    group = Group(8)
    assert group.settle(work=6.0, contexts=300_000, queued_s=20.0)[-1] == 7
    group.engines[0] = group.engines[0]._replace(contexts=400_000)
    group.moment += 2.0
    found = group.balancer.update(group.engines, group.moment)
    assert found is not None
    assert prompts(found) == 7
    group.engines[7] = group.engines[7]._replace(contexts=700_000)
    group.moment += 2.0
    found = group.balancer.update(group.engines, group.moment)
    assert found is not None
    assert prompts(found) == 6


@pytest.mark.parametrize("limit", [256, 1024])
def test_engine_with_as_many_answers_as_it_runs_at_once_needs_another_one_beside_it(
    limit: int,
) -> None:
    group = Group(8, max_num_seqs=limit)
    work: dict[str, Any] = {"work": 6.0, "contexts": 100_000}
    assert group.settle(**work, legs=limit * 3 // 4 - 2)[-1] == 7
    assert group.settle(times=2, **work, legs=limit * 3 // 4 + 18) == [6, 6]


@pytest.mark.parametrize("factors", [{"context": 1e-3}, {"base": 60.0}, {"context": 0.0}])
def test_one_engine_with_an_absurd_step_model_moves_no_boundary(factors: dict[str, float]) -> None:
    group = Group(8)
    group.engines[7] = group.engines[7]._replace(model=replace(QWEN, **factors))
    assert group.settle(work=4.0, contexts=300_000)[-1] == 7


@pytest.mark.parametrize("limit", [1, 10**7])
def test_one_engine_with_an_absurd_limit_moves_no_boundary(limit: int) -> None:
    group = Group(8, max_num_seqs=256)
    group.engines[7] = group.engines[7]._replace(max_num_seqs=limit)
    assert group.settle(work=4.0, contexts=300_000, legs=500)[-1] == 5


def test_many_answers_at_engines_whose_limit_is_unknown_take_no_engine_from_prompts() -> None:
    assert set(Group(8).settle(work=6.0, contexts=100_000, legs=5000)[-5:]) == {7}


def test_small_caches_need_more_decode_engines() -> None:
    large, small = (
        Group(8, cache_tokens=tokens).settle(work=2.0, contexts=300_000)[-1]
        for tokens in (700_000, 90_000)
    )
    assert small < large


def test_fixed_engines_count_in_the_group() -> None:
    prefill = Group(4, PREFILL, PREFILL)
    assert set(prefill.settle(contexts=3_000_000, work=0.1)[-5:]) == {0}
    assert prefill.settle(times=60, work=5.0, contexts=100_000)[-1] == 3
    decode = Group(4, DECODE, DECODE)
    assert decode.settle(work=5.0, contexts=100_000)[-1] == 4
    assert decode.settle(times=60, contexts=3_000_000, work=0.1)[-1] == 1
    assert Group(1, PREFILL).settle(work=1.0, contexts=100_000)[-1] == 0
    assert Group(1, DECODE).settle(work=1.0, contexts=100_000)[-1] == 1


@pytest.mark.parametrize("roles", [[], [BOTH], [PREFILL, DECODE], [DECODE]])
def test_nothing_is_divided_without_two_engines_or_a_choice(roles: list[EngineRole]) -> None:
    group = Group(0, *roles)
    assert group.balancer.update(group.engines, 1.0) is None


def mixed(penalties: Iterable[float | None], **fields: Any) -> Balance:
    group = Group(0, *(BOTH for _ in penalties), **fields)
    group.engines = [
        one._replace(model=replace(QWEN, mixing=penalty))
        for one, penalty in zip(group.engines, penalties, strict=True)
    ]
    return group.update()


def test_cheap_mixing_makes_every_engine_do_both() -> None:
    free = mixed([0.0, 0.1, 2.0])
    assert free.is_free
    assert set(free.roles.values()) == {BOTH}
    assert free.form_reason == "mixing prompts and answers costs little"
    assert free.reason == f"{free.form_reason}: 0.10 weight reads per step"


def test_the_reason_of_a_boundary_is_why_requests_are_not_placed_by_cost() -> None:
    fixed = Group(2, DECODE)
    fixed.engines = [one._replace(model=replace(QWEN, mixing=0.0)) for one in fixed.engines]
    costly = "mixing prompts and answers costs too much"
    figure = f"{costly}: 1.00 weight reads per step"
    no_budget, one_role = "an engine has no step budget in time", "an engine has only one role"
    for balance, form_reason, reason in (
        (mixed([0.0, 1.0, 1.0]), costly, figure),
        (mixed([None, None]), "no engine has measured the mixing penalty yet", ""),
        (mixed([0.0] * 3, has_step_limit=False), no_budget, f"{no_budget}: e0"),
        (fixed.update(), one_role, f"{one_role}: e2"),
    ):
        assert (balance.is_free, balance.form_reason) == (False, form_reason)
        assert balance.reason.endswith(f"; boundary, since {reason or form_reason}")


def test_unknown_models_and_caches_leave_the_queue_as_the_only_signal() -> None:
    group = Group(4, model=None, cache_tokens=0, has_step_limit=False)
    assert group.settle(times=3, contexts=10**6) == [2, 2, 2]
    assert group.settle(times=2, queued_s=9.0) == [3, 3]


def test_clock_that_does_not_move_loses_no_work() -> None:
    group = Group(8)
    group.update()
    group.update(work=6.0)
    moved = [one._replace(offered_s=one.offered_s + 1.5, contexts=10_000) for one in group.engines]
    for moment in (group.moment, group.moment - 50.0):
        assert group.balancer.update(moved, moment) is not None
    found = group.balancer.update(moved, group.moment + 2.0)
    assert found is not None
    assert "prompts need 6.0 engines" in found.reason


def test_shares_of_other_routers_count_in_the_offered_work() -> None:
    """This router has a quarter of the contexts, so a quarter of the prompts."""
    group = Group(8)
    group.update()
    group.update(work=1.0)
    engines = [one._replace(own_contexts=10_000, contexts=40_000) for one in group.engines]
    found = group.balancer.update(engines, group.moment + 1e-3)
    assert found is not None
    assert "prompts need 4.0 engines" in found.reason


def test_engines_that_come_restart_or_report_nonsense_do_no_harm() -> None:
    group = Group(4)
    group.settle(times=5, work=2.0, contexts=100_000)
    new = group.engines[0]._replace(name="new", offered_s=1e12)
    lost = group.engines[1]._replace(offered_s=0.0, contexts=10**15, queued_s=1e12, cache_tokens=1)
    slow = group.engines[2]._replace(model=StepModel(60.0, 1.0, 1e-3, 1e-3))
    for engines in ([new, lost, slow], [slow, new], [lost, slow]):
        group.moment += 2
        found = group.balancer.update(engines, group.moment)
        assert found is not None
        assert 1 <= prompts(found) < len(engines)
