"""Long prompts hold nobody up for longer than a step, and come to their end all the same."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_ext.reference.config import EngineConfig
from engine_ext.reference.scheduler import shares
from tests.unit.reference.core.conftest import MakeDriver
from tests.unit.reference.core.harness import Driver, greedy, prompt, request

PER_STEP = 32
LONG = 400


def busy_driver(make_driver: MakeDriver) -> Driver:
    return make_driver(
        max_prefill_tokens_per_step=PER_STEP, num_blocks=257, enable_prefix_caching=False
    )


def num_tokens(driver: Driver, request_id: str) -> int:
    return sum(len(output.token_ids) for output in driver.outputs[request_id])


def test_a_short_prompt_behind_a_long_one_is_answered_within_a_step(
    make_driver: MakeDriver,
) -> None:
    driver = busy_driver(make_driver)
    driver.add(request("long", prompt(LONG)))
    driver.step()
    driver.step()
    driver.add(request("short", prompt(20, seed=2)))
    driver.step()
    assert num_tokens(driver, "short") == 1
    assert num_tokens(driver, "long") == 0
    driver.finish("long", "short")


def test_who_decodes_has_a_token_in_each_step_of_anothers_prefill(make_driver: MakeDriver) -> None:
    driver = busy_driver(make_driver)
    driver.add(request("first", prompt(10), greedy(200, ignore_eos=True)))
    driver.step()
    driver.add(request("long", prompt(LONG, seed=1)))
    before, steps = num_tokens(driver, "first"), 0
    while not num_tokens(driver, "long"):
        driver.step()
        steps += 1
    assert num_tokens(driver, "first") - before == steps
    assert steps == pytest.approx(LONG / PER_STEP, abs=1)
    driver.finish("first", "long")


def test_a_long_prompt_is_not_starved_by_ever_new_short_ones(make_driver: MakeDriver) -> None:
    driver = busy_driver(make_driver)
    driver.add(request("long", prompt(LONG)))
    steps = 0
    while not num_tokens(driver, "long"):
        driver.add(request(f"short{steps}", prompt(PER_STEP, seed=2 + steps), greedy(1)))
        driver.step()
        steps += 1
    assert steps == pytest.approx(LONG / (PER_STEP / 4), abs=2)
    driver.finish(*driver.outputs)


def test_of_two_long_prompts_the_one_with_less_to_do_ends_first(make_driver: MakeDriver) -> None:
    driver = busy_driver(make_driver)
    driver.add(request("longer", prompt(LONG)), request("long", prompt(LONG // 2, seed=1)))
    driver.step_until(lambda: num_tokens(driver, "long") == 1)
    assert num_tokens(driver, "longer") == 0
    driver.finish("long", "longer")


@given(
    remaining=st.lists(st.integers(1, 500), max_size=20),
    budget=st.integers(1, 300),
    num_new=st.integers(0, 20),
)
def test_shares_are_within_what_is_there_and_leave_nothing_unused(
    remaining: list[int], budget: int, num_new: int
) -> None:
    num_new = min(num_new, len(remaining), budget - 1)
    granted = shares(remaining, budget, num_new)
    assert all(0 <= given <= wanted for given, wanted in zip(granted, remaining, strict=True))
    assert sum(granted) == min(budget, sum(remaining))
    assert all(granted[len(granted) - num_new :])
    if remaining:
        assert granted[0] >= min(remaining[0], (budget - num_new + 3) // 4)


@pytest.mark.parametrize(
    ("config", "bound"),
    [
        ({}, 256),
        ({"device": "cuda"}, 2048),
        ({"max_num_batched_tokens": 64}, 64),
        ({"max_prefill_tokens_per_step": 7}, 7),
        ({"max_prefill_tokens_per_step": 7000}, 2048),
    ],
)
def test_a_cpu_takes_prompts_in_small_pieces(config: dict[str, object], bound: int) -> None:
    made = EngineConfig(model=None, **config)  # type: ignore[arg-type]  # not looked at
    assert made.prefill_tokens_per_step == bound
