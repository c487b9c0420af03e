"""Synthetic steps of known costs, with noise and outliers, from seeds."""

import math
import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from engine_ext.common.step_budget import StepBudget
from engine_ext.common.step_costs import StepCosts, StepFit, StepWork

H200 = StepCosts(10.6, 52.0, 1.65, 32.1)
BUDGET = 2048


def decode(rng: random.Random) -> StepWork:
    return StepWork(0, 0.0, rng.randint(1_000, 400_000))


def prompt(rng: random.Random) -> StepWork:
    chunk = rng.choice((48, 256, 1024, BUDGET))
    pairs = chunk * (rng.randint(0, 60_000) + chunk / 2)
    return StepWork(chunk, pairs, rng.randint(0, 300_000))


def traffic(rng: random.Random, count: int) -> Iterator[StepWork]:
    for _ in range(count):
        yield decode(rng) if rng.random() < 0.8 else prompt(rng)


def measured(costs: StepCosts, work: StepWork, rng: random.Random, noise: float = 0.05) -> float:
    return costs.milliseconds(work) * rng.lognormvariate(0.0, noise)


def errors(fit: StepFit, costs: StepCosts, rng: random.Random) -> list[float]:
    assert fit.costs is not None
    works = [*traffic(rng, 400)]
    return sorted(
        abs(fit.costs.milliseconds(work) / costs.milliseconds(work) - 1) for work in works
    )


@pytest.mark.parametrize("seed", range(5))
def test_costs_are_recovered_from_steps_with_noise_and_outliers(seed: int) -> None:
    rng, fit = random.Random(seed), StepFit(BUDGET)
    for work in traffic(rng, 2_000):
        stalled = rng.choice((3, 30, 300)) if rng.random() < 0.02 else 1
        fit.add(work, measured(H200, work, rng) * stalled)
    assert fit.costs is not None
    for found, true in zip(fit.costs[:4], H200, strict=False):
        assert found == pytest.approx(true, rel=0.05)
    assert errors(fit, H200, rng)[380] < 0.025
    assert fit.costs.mixing is None  # no step has prompts alone
    assert fit.to_wire() == {
        "base_ms": pytest.approx(fit.costs.base_ms, rel=1e-3),
        "token_us": pytest.approx(fit.costs.token_us, rel=1e-3),
        "token_context_ns": pytest.approx(fit.costs.token_context_ns, rel=1e-3),
        "context_ns": pytest.approx(fit.costs.context_ns, rel=1e-3),
        "prompt_base_ms": pytest.approx(fit.costs.base_ms + fit.costs.prompt_ms, rel=1e-3),
        "steps": 2_000,
    }


@pytest.mark.parametrize("seed", range(3))
def test_a_busy_machine_that_makes_every_fourth_step_slow_changes_costs_little(seed: int) -> None:
    rng, fit = random.Random(seed), StepFit(BUDGET)
    for work in traffic(rng, 2_000):
        slower = 1 + rng.expovariate(1 / 0.7) if rng.random() < 0.25 else 1
        fit.add(work, measured(H200, work, rng, 0.1) * slower)
    assert errors(fit, H200, rng)[200] < 0.1  # 0.15 with plain least squares


def test_a_compilation_in_the_first_steps_does_no_harm() -> None:
    rng, fit = random.Random(7), StepFit(BUDGET)
    for number, work in enumerate(traffic(rng, 600)):
        fit.add(work, 20_000.0 if number % 10 == 0 and number < 60 else measured(H200, work, rng))
    assert errors(fit, H200, rng)[380] < 0.08


@pytest.mark.parametrize("times", [0.4, 1.5])
def test_costs_follow_a_machine_whose_speed_changes(times: float) -> None:
    rng, fit = random.Random(8), StepFit(BUDGET)
    changed = StepCosts(*(times * factor for factor in H200[:4]))
    for costs in (H200, changed):
        for work in traffic(rng, 12_000):
            fit.add(work, measured(costs, work, rng))
    assert errors(fit, changed, rng)[380] < 0.08


def test_an_hour_of_decoding_keeps_what_is_known_of_prompts() -> None:
    rng, fit = random.Random(9), StepFit(BUDGET)
    for work in traffic(rng, 1_000):
        fit.add(work, measured(H200, work, rng))
    for _ in range(20_000):
        work = decode(rng)
        fit.add(work, measured(H200, work, rng))
    assert errors(fit, H200, rng)[380] < 0.05


@pytest.mark.parametrize("seed", range(4))
def test_costs_are_known_from_prompts_of_about_one_length_on_a_machine_that_stalls(
    seed: int,
) -> None:
    """A decode engine loads all but a token of some prompts, and computes others as trials."""
    rng, fit = random.Random(seed), StepFit(BUDGET)
    costs = StepCosts(10.0, 600.0, 20.0, 5_000.0)
    for number in range(30):
        length = 450 - 5 * (number % 10)
        works = [StepWork.of([(1, 29)], 0), StepWork.of([(length, 0)], 0)]
        works += [StepWork(0, 0.0, before + n) for before in (30, length) for n in range(23)]
        for work in works:
            stalled = rng.uniform(50, 400) if rng.random() < 0.1 else 0.0
            fit.add(work, measured(costs, work, rng, 0.6) + stalled)
    assert fit.costs is not None
    work = StepWork.of([(430, 0)], 0)
    assert fit.costs.milliseconds(work) == pytest.approx(costs.milliseconds(work), rel=0.5)


class Traffic:
    """Steps of an H200. `overlap`: computing prompts hides a part of reading the weights, as there;
    else the times add up, and a decoding request takes 20 us more in each step."""

    def __init__(
        self, seed: int, overlap: bool, mixing: float, noise: float = 0.05, most_decoding: int = 64
    ) -> None:
        self.rng = random.Random(seed)
        self.overlap, self.mixing, self.noise = overlap, mixing, noise
        self.most_decoding = most_decoding

    def decode(self) -> tuple[StepWork, float]:
        return self.step(0, self.rng.randint(1, self.most_decoding))

    def alone(self, least: int = 2) -> tuple[StepWork, float]:
        return self.step(self._chunk(least), 0)

    def mixed(self, most: int = BUDGET) -> tuple[StepWork, float]:
        return self.step(self._chunk(2, most), self.rng.randint(1, self.most_decoding))

    def any(self) -> tuple[StepWork, float]:
        share = self.rng.random()
        return self.decode() if share < 0.5 else self.alone() if share < 0.6 else self.mixed()

    def measured(self, step: tuple[StepWork, float]) -> tuple[StepWork, float]:
        return step[0], step[1] * self.rng.lognormvariate(0.0, self.noise)

    def _chunk(self, least: int, most: int = BUDGET) -> int:
        return min(most, max(least, int(self.rng.lognormvariate(5.8, 1.2))))

    def step(self, tokens: int, decoding: int) -> tuple[StepWork, float]:
        before = self.rng.choice((0, self.rng.randint(0, 20_000)))
        contexts = sum(self.rng.choices(range(300, 6000), k=decoding))
        return self.known_step(tokens, before, decoding, contexts)

    def known_step(
        self, tokens: int, before: int, decoding: int, contexts: int
    ) -> tuple[StepWork, float]:
        work = StepWork.of([(tokens, before)] if tokens else [], contexts)
        base, token = H200.base_ms, H200.token_us * 1e-3
        if self.overlap:
            computing = (base**4 + (token * (tokens + decoding)) ** 4) ** 0.25
        else:
            computing = base + token * tokens + 0.02 * decoding
        attention = H200.token_context_ns * work.prompt_pairs + H200.context_ns * work.contexts
        penalty = self.mixing * base if tokens and decoding else 0.0
        return work, computing + attention * 1e-6 + penalty


def four_terms(steps: list[tuple[StepWork, float]]) -> Callable[[StepWork], float]:
    """The best fit without the terms of steps with prompts."""
    rows = np.array([[1, *work] for work, _ in steps]) / np.array([[ms] for _, ms in steps])
    factors = np.linalg.lstsq(rows, np.ones(len(steps)), rcond=None)[0]
    return lambda work: float(np.dot(factors, [1, *work]))


def root_mean_square(
    predict: Callable[[StepWork], float], steps: list[tuple[StepWork, float]]
) -> float:
    return math.sqrt(sum((predict(work) / true - 1) ** 2 for work, true in steps) / len(steps))


@pytest.mark.parametrize(("overlap", "most_decoding"), [(False, 64), (True, 64), (True, 256)])
@pytest.mark.parametrize("mixing", [0.0, 0.3, 1.0])
def test_mixing_penalty_is_found_and_no_kind_of_step_is_predicted_worse(
    overlap: bool, most_decoding: int, mixing: float
) -> None:
    traffic = Traffic(0, overlap, mixing, most_decoding=most_decoding)
    fit = StepFit(BUDGET)
    seen, found = [], []
    for _ in range(4_000):
        seen.append(traffic.measured(traffic.any()))
        fit.add(*seen[-1])
        if fit.costs is not None and fit.costs.mixing is not None:
            found.append(fit.costs.mixing)
    assert len(found) > 3_000  # known after at most 1,000 steps
    tolerance = 0.15 if most_decoding == 64 else 0.2
    assert all(abs(one - mixing) < tolerance for one in found)
    assert found[-1] == pytest.approx(mixing, abs=0.75 * tolerance)
    assert fit.costs is not None
    page = fit.to_wire()
    assert page is not None
    assert page["mixing"] == pytest.approx(found[-1], rel=1e-3, abs=1e-9)
    before = four_terms(seen)
    for kind in (traffic.decode, traffic.alone, traffic.mixed):
        steps = [kind() for _ in range(1_000)]
        error = root_mean_square(fit.costs.milliseconds, steps)
        assert error < 0.12
        assert error < root_mean_square(before, steps) + 0.01


@pytest.mark.parametrize("seed", range(2))
def test_mixing_penalty_of_noisy_steps_is_less_exact_and_known_later(seed: int) -> None:
    traffic, fit = Traffic(seed, True, 0.3, noise=0.4), StepFit(BUDGET)
    for _ in range(3_000):
        fit.add(*traffic.measured(traffic.any()))
        if fit.costs is not None and fit.costs.mixing is not None:
            assert fit.costs.mixing == pytest.approx(0.3, abs=0.27)
    assert fit.costs is not None
    assert fit.costs.mixing is not None


@pytest.mark.parametrize(
    "kinds", [("decode",), ("alone",), ("decode", "alone"), ("decode", "mixed"), ("alone", "mixed")]
)
def test_mixing_penalty_is_unknown_without_all_kinds_of_steps(kinds: tuple[str, ...]) -> None:
    traffic, fit = Traffic(1, True, 0.5), StepFit(BUDGET)
    for number in range(2_000):
        fit.add(*traffic.measured(getattr(traffic, kinds[number % len(kinds)])()))
    assert (fit.costs is not None) == ("decode" in kinds and len(kinds) > 1)
    if fit.costs is not None:
        assert fit.costs.mixing is None
        page = fit.to_wire()
        assert page is not None
        assert not {"mixing", "mixed_context_ns"} & set(page)


def test_mixing_penalty_is_unknown_where_prompts_alone_have_other_sizes() -> None:
    traffic, fit = Traffic(1, True, 1.0), StepFit(8192)
    for _ in range(1_000):
        for step in (traffic.decode(), traffic.alone(1024), traffic.mixed(100)):
            fit.add(*traffic.measured(step))
    assert fit.costs is not None
    assert fit.costs.mixing is None
    steps = [traffic.mixed(100) for _ in range(1_000)]
    assert root_mean_square(fit.costs.milliseconds, steps) < 0.15


@pytest.mark.parametrize(
    ("target_ms", "overlap", "mixing"),
    [(50.0, False, 0.0), (50.0, True, 0.3), (100.0, False, 0.3), (100.0, True, 1.0)],
)
def test_steps_with_a_budget_keep_the_target_and_use_it(
    target_ms: float, overlap: bool, mixing: float
) -> None:
    traffic, fit = Traffic(3, overlap, mixing), StepFit(BUDGET)
    budget, taken = StepBudget(target_ms, fit, BUDGET), []
    for number in range(6_000):
        step = traffic.any()
        if step[0].prompt_tokens and step[0].contexts:
            decoding = traffic.rng.randint(1, 64)
            before, contexts = traffic.rng.choice((0, 10_000)), 3_000 * decoding
            budget.begin(decoding, contexts, 0.0)
            chunk = budget.take(BUDGET, before)
            step = traffic.known_step(chunk, before, decoding, contexts)
            if number >= 3_000 and chunk < BUDGET:
                taken.append(step[1])
        fit.add(*traffic.measured(step))
    assert np.quantile(taken, 0.99) < target_ms
    assert np.median(taken) > 0.85 * target_ms


def test_no_factor_is_negative_where_a_step_is_faster_than_its_parts() -> None:
    """A GPU takes the longer of reading the weights and computing."""
    rng, fit = random.Random(10), StepFit(BUDGET)
    for work in traffic(rng, 2_000):
        compute = 0.052 * work.prompt_tokens
        fit.add(work, max(10.6, compute) * rng.lognormvariate(0.0, 0.3))
    found = fit.to_wire()
    assert found is not None
    assert min(found.values()) >= 0.0


@pytest.mark.parametrize(
    "kind",
    ["decodes", "prompts", "short prompts", "equal chunks", "equal contexts", "too few"],
)
def test_nothing_is_said_before_enough_different_steps(kind: str) -> None:
    rng, fit = random.Random(11), StepFit(BUDGET)
    for _ in range(10 if kind == "too few" else 500):
        decoding = StepWork(0, 0.0, 5_000) if kind == "equal contexts" else decode(rng)
        chunk = 20 if kind == "short prompts" else rng.randint(300, BUDGET)
        prefill = StepWork(chunk, chunk * chunk / 2, 5_000 if kind == "equal contexts" else 0)
        if kind != "prompts":
            fit.add(decoding, measured(H200, decoding, rng))
        if kind == "equal chunks":
            continue
        if kind != "decodes":
            fit.add(prefill, measured(H200, prefill, rng))
    assert fit.costs is None
    assert fit.to_wire() is None
