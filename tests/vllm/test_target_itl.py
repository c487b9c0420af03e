"""Conditional disaggregation by load (--target-itl) before two vLLM engines: which prompts the
decode engine computes itself while chats stream there.

The decisions are asserted; the gaps between the chats' tokens are printed (pytest -s), because a
machine of CI is no place to judge times.
"""

import math
from pathlib import Path

import pytest

from engine_ext.reference.tiny_model import TinyModel, write_tiny_model
from router.fleet.step_model import StepModel
from scripts.benchmarks.common import Sample
from tests.integration.oracle import body_of, tokens_of
from tests.integration.processes import Server, metric, wait_for
from tests.vllm.gaps import Chats
from tests.vllm.measures import COMPUTED
from tests.vllm.servers import OURS, SCHEDULER, UNCACHED, Fleet, Kind

BUDGET = 2048
SHORT, LONG, TRIAL = 60, 1500, 450
CHATS, ROUNDS = 2, 6
# Slow enough that the prompts' time is more than a machine's noise: 12 million parameters.
MODEL = TinyModel(layers=8, hidden=320, heads=10, kv_heads=10, intermediate=1024)


def write_slower_model(directory: Path) -> Path:
    return write_tiny_model(directory, MODEL)


OPTIONS = (*SCHEDULER, UNCACHED, "--max-num-batched-tokens", str(BUDGET))
PAIR = tuple(Kind(f"itl-{side}", OURS, OPTIONS, write_slower_model) for side in "pd")


@pytest.fixture(scope="module")
def steps(fleet: Fleet, pair: list[Server]) -> StepModel:
    """The times of the decode engine's steps, which the router has it measure by trials."""
    prefiller, decoder = pair
    with fleet.router([prefiller], [decoder], "--target-itl", "0.05") as router:
        numbers = iter(range(100))

        def has_measured() -> bool:
            number = next(numbers)
            # Answers with contexts of different lengths show what a token of context costs.
            for length in (30, TRIAL - 5 * (number % 10)):
                prompt = tokens_of(length, 900 + number)
                answer = router.post("/v1/completions", body_of(prompt, {"max_tokens": 24}))
                assert answer.status_code == 200, answer.text
            return step_model(decoder) is not None

        wait_for(has_measured, "the decode engine knows its steps", 300, 0)
        assert alone(router, "trial") > 0
    found = step_model(decoder)
    assert found is not None
    return found


def step_model(engine: Server) -> StepModel | None:
    [rank] = engine.get("/disagg/identity").json()["ranks"]
    assert rank["max_step_tokens"] == BUDGET
    return StepModel.parse(rank.get("step_model"))


def alone(router: Server, reason: str) -> float:
    found = router.metrics()
    return found.get(f'disagg_router_decode_only_total{{reason="{reason}"}}', 0.0)


def measure(name: str, router: Server, prefiller: Server) -> dict[int, float]:
    """Send short and long prompts in turn while the chats stream. Return how many tokens of each
    length the prefill engine computed."""
    chats, computed = Chats(router.url, CHATS, 1800), dict.fromkeys((SHORT, LONG), 0.0)
    with chats.running():
        for number in range(ROUNDS):
            for length in (SHORT, LONG):
                before = metric(prefiller, COMPUTED)
                prompt = tokens_of(length, 1000 * number + length)
                answer = router.post("/v1/completions", body_of(prompt, {"max_tokens": 2}))
                assert answer.status_code == 200, answer.text
                computed[length] += metric(prefiller, COMPUTED) - before
    p50, p99, worst = (Sample(chats.gaps).percentile(part) * 1e3 for part in (50, 99, 100))
    print(f"{name}: gaps p50 {p50:.0f}, p99 {p99:.0f}, worst {worst:.0f} ms")
    return computed


def test_the_decode_engine_computes_what_keeps_the_target_and_no_more(
    fleet: Fleet, pair: list[Server], steps: StepModel, tmp_path: Path
) -> None:
    prefiller, decoder = pair
    # Midway between the two, for the steps are measured again while the chats run.
    short, long = steps.worst_step(SHORT, SHORT, CHATS * 200), steps.worst_step(LONG, LONG, 0)
    assert long > 4 * short, "the prompts are not different enough"
    target = math.sqrt(short * long)
    print(f"\n{steps}, target {target * 1e3:.0f} ms")
    by_load = ("--target-itl", f"{target:.4f}")
    with fleet.router([prefiller], [decoder], *by_load) as router:
        computed = measure("by load", router, prefiller)
        assert computed == {SHORT: 0, LONG: ROUNDS * LONG}
        assert alone(router, "sooner") == ROUNDS
    by_tokens = ("--target-itl", "0", "--min-remote-prefill-tokens", str(BUDGET))
    with fleet.router([prefiller], [decoder], *by_tokens) as router:
        computed = measure("by tokens", router, prefiller)
        assert computed == {SHORT: 0, LONG: 0}
    with fleet.router([prefiller], [decoder], "--target-itl", "0") as router:
        computed = measure("off", router, prefiller)
        assert computed == {SHORT: ROUNDS * SHORT, LONG: ROUNDS * LONG}
