"""A step computes as many prompt tokens as fit into the target, and a queue that the target would
let grow is bounded."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from engine_ext.common.step_budget import MAX_WAIT_S, MIN_PROMPT_TOKENS, StepBudget, parse_target
from engine_ext.common.step_costs import StepCosts, StepWork

COSTS = StepCosts(10.0, 50.0, 1.65, 32.0)
"""As of Qwen3-32B on two H200."""
BUDGET = 2048
ANSWERS, CONTEXTS = 32, 64_000


def budget(target_ms: float, costs: StepCosts | None = COSTS) -> StepBudget:
    fit: Any = SimpleNamespace(costs=costs)
    return StepBudget(target_ms, fit, BUDGET)


def milliseconds(*chunks: tuple[int, int]) -> float:
    return COSTS.milliseconds(StepWork.of(chunks, CONTEXTS))


def test_chunks_of_several_prompts_fill_the_step_behind_whatever_context() -> None:
    step = budget(50.0)
    step.begin(ANSWERS, CONTEXTS, 0.0)
    chunks = [(step.take(wanted, context), context) for wanted, context in ((100, 9000), (5000, 0))]
    assert chunks[0][0] == 100
    assert 44.9 < milliseconds(*chunks) <= 45.0
    assert step.is_used_up
    assert step.take(500, 0) == 0


def test_a_deep_context_makes_the_chunk_shorter() -> None:
    found = []
    for context in (0, 100_000):
        step = budget(50.0)
        step.begin(ANSWERS, CONTEXTS, 0.0)
        found.append(step.take(5000, context))
        assert 44.7 < milliseconds((found[-1], context)) <= 45.0
    assert found[1] < found[0] / 3


def test_a_step_computes_some_tokens_however_low_the_target_is() -> None:
    step = budget(5.0)
    step.begin(ANSWERS, CONTEXTS, 0.0)
    assert [step.take(40, 0), step.take(900, 0), step.take(900, 0)] == [40, 24, 0]
    assert MIN_PROMPT_TOKENS == 64


@pytest.mark.parametrize(("costs", "decoding"), [(None, ANSWERS), (COSTS, 0)])
def test_without_answers_or_known_times_nothing_is_cut(
    costs: StepCosts | None, decoding: int
) -> None:
    step = budget(5.0, costs)
    step.begin(decoding, CONTEXTS, 0.0)
    assert (step.take(BUDGET, 0), step.is_used_up) == (BUDGET, False)


@pytest.mark.parametrize(
    ("waited", "least"), [(MAX_WAIT_S, 64), (1.5 * MAX_WAIT_S, 1024), (60.0, BUDGET)]
)
def test_steps_compute_more_the_longer_the_next_prompt_waits(waited: float, least: int) -> None:
    step = budget(5.0)
    step.begin(ANSWERS, CONTEXTS, waited)
    assert step.take(BUDGET, 0) == least


def longest_wait(target_ms: float, prompts_per_s: float, tokens: int, wait_counts: bool) -> float:
    """Return the longest time in seconds that a prompt waits for its first step in five minutes, in
    an engine where 32 answers always run."""
    step, clock, longest = budget(target_ms), 0.0, 0.0
    held_since: float | None = None
    arrivals = deque(number / prompts_per_s for number in range(int(300 * prompts_per_s)))
    left = 0
    """Tokens of the prompt that is being computed."""
    while clock < 300 and arrivals:
        waited = 0.0 if held_since is None or not wait_counts else clock - held_since
        step.begin(ANSWERS, CONTEXTS, waited)
        room, chunks = BUDGET, []
        while room and not step.is_used_up and (left or (arrivals and arrivals[0] <= clock)):
            if not left:
                longest, left = max(longest, clock - arrivals.popleft()), tokens
            count = step.take(min(left, room), tokens - left)
            chunks.append((count, tokens - left))
            left, room = left - count, room - count
        is_held_up = step.is_used_up and arrivals and arrivals[0] <= clock
        held_since = arrivals[0] if is_held_up else None
        clock += milliseconds(*chunks) / 1e3
    return longest


def test_a_target_that_is_too_low_does_not_let_the_queue_grow_without_end() -> None:
    """6 prompts of 2,000 tokens a second: steps of 2,048 tokens can compute 8, steps of 64 tokens
    2."""
    assert longest_wait(5.0, 6.0, 2000, wait_counts=False) > 100
    assert longest_wait(5.0, 6.0, 2000, wait_counts=True) < 2 * MAX_WAIT_S
    assert longest_wait(50.0, 6.0, 2000, wait_counts=True) < 1


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan"), True, "50", None])
def test_a_target_that_makes_no_sense_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="target_itl_ms"):
        parse_target(value)
