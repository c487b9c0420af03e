"""Synthetic steps of known costs, with noise and outliers, from seeds."""

import random
from collections.abc import Iterator

import pytest

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
    for found, true in zip(fit.costs, H200, strict=True):
        assert found == pytest.approx(true, rel=0.05)
    assert errors(fit, H200, rng)[380] < 0.025
    assert fit.to_wire() == {
        **{name: pytest.approx(value, rel=1e-3) for name, value in fit.costs._asdict().items()},
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
    changed = StepCosts(*(times * factor for factor in H200))
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


def test_no_factor_is_negative_where_a_step_is_faster_than_its_parts() -> None:
    """A GPU takes the longer of reading the weights and computing."""
    rng, fit = random.Random(10), StepFit(BUDGET)
    for work in traffic(rng, 2_000):
        compute = 0.052 * work.prompt_tokens
        fit.add(work, max(10.6, compute) * rng.lognormvariate(0.0, 0.3))
    assert fit.costs is not None
    assert min(fit.costs) >= 0.0


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
