"""The core measures its steps and cuts prompts to fit them into a time, with a model that takes as
long as its batch says, by a clock of the test."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch import Tensor

from engine_ext.common.step_costs import StepCosts
from engine_ext.reference.model import Decoder, ForwardBatch
from tests.unit.reference.core.harness import Driver, greedy, make_core, prompt, request

COSTS = StepCosts(10.0, 200.0, 300.0, 9000.0)
BUDGET = 256
TARGET = 40.0


class Step(NamedTuple):
    num_decoding: int
    prompt_tokens: int
    milliseconds: float


class TimedModel(Decoder):
    """Computes what `model` does, and lets the clock go on by the costs of the batch."""

    def __init__(self, model: Decoder, mixing: float = 0.0) -> None:
        self.model = model
        self.mixing = mixing
        self.seconds = 0.0
        self.steps: list[Step] = []

    def forward(self, batch: ForwardBatch, layers: Sequence[Tensor]) -> Tensor:
        positions = batch.positions.tolist()
        milliseconds, num_decoding, prompt_tokens = COSTS.base_ms, 0, 0
        for span in batch.spans:
            of_span = positions[span.rows]
            if len(of_span) == span.count:
                num_decoding += span.count
                milliseconds += COSTS.context_ns * 1e-6 * sum(of_span)
            else:
                prompt_tokens += len(of_span)
                pairs = len(of_span) * (of_span[0] + len(of_span) / 2)
                milliseconds += COSTS.token_us * 1e-3 * len(of_span)
                milliseconds += COSTS.token_context_ns * 1e-6 * pairs
        if num_decoding and prompt_tokens:
            milliseconds += self.mixing * COSTS.base_ms
        self.seconds += milliseconds / 1e3
        self.steps.append(Step(num_decoding, prompt_tokens, milliseconds))
        return self.model.forward(batch, layers)


def experienced(
    directory: Path, decoder: Decoder, mixing: float = 0.0, **changes: Any
) -> tuple[Driver, TimedModel]:
    """An engine that has seen enough different steps."""
    model = TimedModel(decoder, mixing)
    changes = {"max_num_batched_tokens": BUDGET, "num_blocks": 257, **changes}
    core = make_core(
        directory, model=model, clock=lambda: model.seconds, enable_prefix_caching=False, **changes
    )
    driver = Driver(core)
    for number in range(16):
        long = request(f"long-{number}", prompt(100 + 20 * number, seed=number), greedy(40))
        driver.run(long, request(f"short-{number}", prompt(20, seed=number), greedy(10)))
    model.steps.clear()
    return driver, model


def answers_beside_prompts(driver: Driver) -> list[tuple[int, ...]]:
    """Two answers, and three prompts that come while these run."""
    names = [f"answer-{number}" for number in range(2)]
    for number, name in enumerate(names):
        sampling = greedy(60, ignore_eos=True)
        driver.add(request(name, prompt(30, seed=50 + number), sampling))
    driver.step()
    for number in range(3):
        names.append(f"prompt-{number}")
        driver.add(request(names[-1], prompt(430, seed=60 + number), greedy(4)))
    driver.finish(*names)
    return [driver.result(name).token_ids for name in names]


def test_the_costs_of_steps_are_found_while_the_engine_computes(
    model_dir: Path, decoder: Decoder
) -> None:
    driver, _ = experienced(model_dir, decoder)
    assert driver.core.step_fit.costs is not None
    for found, true in zip(driver.core.step_fit.costs[:4], COSTS, strict=False):
        assert found == pytest.approx(true, rel=0.02)


@pytest.mark.parametrize("mixing", [0.0, 0.3, 1.0])
def test_the_mixing_penalty_is_found_from_prompts_alone_and_beside_answers(
    model_dir: Path, decoder: Decoder, mixing: float
) -> None:
    driver, _ = experienced(model_dir, decoder, mixing)
    for number in range(32):
        driver.add(request(f"answer-{number}", prompt(30, seed=200), greedy(10)))
        driver.step()
        tokens = prompt(100 + 5 * number, seed=300 + number)
        driver.run(request(f"beside-{number}", tokens, greedy(1)))
        driver.finish(f"answer-{number}")
        driver.run(request(f"alone-{number}", tokens, greedy(1)))
    costs = driver.core.step_fit.costs
    assert costs is not None
    assert costs.mixing == pytest.approx(mixing, abs=0.02)


def test_steps_that_decode_end_within_the_target_and_the_answers_are_the_same(
    model_dir: Path, decoder: Decoder
) -> None:
    plain, whole = experienced(model_dir, decoder)
    driver, model = experienced(model_dir, decoder, target_itl_ms=TARGET)
    assert answers_beside_prompts(driver) == answers_beside_prompts(plain)
    longest = max(step.milliseconds for step in model.steps if step.num_decoding)
    assert 0.8 * TARGET < longest <= 0.91 * TARGET
    assert max(step.milliseconds for step in whole.steps if step.num_decoding) > 1.5 * TARGET


def test_a_step_has_a_part_of_a_prompt_however_low_the_target_is(
    model_dir: Path, decoder: Decoder
) -> None:
    driver, model = experienced(model_dir, decoder, target_itl_ms=1.0)
    answers_beside_prompts(driver)
    beside = [step.prompt_tokens for step in model.steps if step.num_decoding > 1]
    beside = [count for count in beside if count]
    assert max(beside) == 64
    assert sum(beside) >= 3 * 430 - 64
    assert beside.count(64) >= len(beside) - 3


def test_without_answers_a_prompt_has_the_whole_budget(model_dir: Path, decoder: Decoder) -> None:
    driver, model = experienced(model_dir, decoder, target_itl_ms=1.0)
    driver.run(request("alone", prompt(430, seed=70), greedy(1)))
    assert [step.prompt_tokens for step in model.steps] == [BUDGET, 430 - BUDGET]


def test_before_the_times_of_steps_are_known_the_budget_alone_counts(
    model_dir: Path, decoder: Decoder
) -> None:
    model = TimedModel(decoder)
    core = make_core(
        model_dir, model=model, target_itl_ms=1.0, num_blocks=257, max_num_batched_tokens=BUDGET
    )
    answers_beside_prompts(Driver(core))
    assert max(step.prompt_tokens for step in model.steps if step.num_decoding) > 200


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_a_target_that_makes_no_sense_is_refused(model_dir: Path, value: float) -> None:
    with pytest.raises(ValueError, match="target_itl_ms"):
        make_core(model_dir, target_itl_ms=value)


@pytest.mark.parametrize("context", [0, 1_000, 100_000])
@pytest.mark.parametrize("pair", [0.0, 1.65])
def test_the_longest_chunk_takes_exactly_the_time_that_is_left(context: int, pair: float) -> None:
    costs = StepCosts(10.6, 52.0, pair, 32.1)
    found = costs.tokens_within(20.0, context)
    taken = costs.token_us * 1e-3 * found + pair * 1e-6 * found * (context + found / 2)
    assert taken == pytest.approx(20.0)
    assert costs.tokens_within(-5.0, context) == 0
