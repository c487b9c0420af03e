"""Prompts are computed in chunks, beside the sequences that decode."""

import pytest

from engine_ext.reference.config import EngineConfig
from tests.unit.reference.core.conftest import MakeDriver
from tests.unit.reference.core.harness import Driver, greedy, prompt, request

PER_STEP = 32
LONG = 400


def busy_driver(make_driver: MakeDriver) -> Driver:
    return make_driver(max_num_batched_tokens=PER_STEP, num_blocks=257, enable_prefix_caching=False)


def num_tokens(driver: Driver, request_id: str) -> int:
    return sum(len(output.token_ids) for output in driver.outputs[request_id])


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


def test_prompts_are_computed_in_the_order_in_which_they_came(make_driver: MakeDriver) -> None:
    driver = busy_driver(make_driver)
    driver.add(request("long", prompt(LONG)), request("short", prompt(20, seed=2)))
    driver.step_until(lambda: num_tokens(driver, "long") == 1)
    assert num_tokens(driver, "short") == 0
    driver.step()
    assert num_tokens(driver, "short") == 1
    driver.finish("long", "short")


@pytest.mark.parametrize(
    ("config", "bound"),
    [
        ({}, 256),
        ({"device": "cuda"}, 2048),
        ({"max_num_batched_tokens": 64}, 64),
    ],
)
def test_a_cpu_takes_prompts_in_small_pieces(config: dict[str, object], bound: int) -> None:
    made = EngineConfig(model=None, **config)  # type: ignore[arg-type]  # not looked at
    assert made.tokens_per_step == bound
