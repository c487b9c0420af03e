"""target_itl_ms in vLLM: eight answers stream while long prompts come.

Asserted are the answers and what each step computes. The gaps are printed (pytest -s): a machine of
CI is no place to judge times.
"""

import json
import statistics
from pathlib import Path

from engine_ext.common.step_budget import MIN_PROMPT_TOKENS, TARGET_SHARE
from engine_ext.reference.tiny_model import TinyModel, write_tiny_model
from tests.vllm import logged_steps
from tests.vllm.gaps import CHAT_PROMPT_TOKENS, Measured, measure
from tests.vllm.servers import OURS, SCHEDULER, UNCACHED, Fleet, Kind

# Slow enough that the prompts' time is more than a machine's noise: 12 million parameters.
MODEL = TinyModel(layers=8, hidden=320, heads=10, kv_heads=10, intermediate=1024)
CHATS, MAX_TOKENS = 8, 1900
PROMPTS = [1500] * 6
WARM_UP = [300 * (1 + number % 5) for number in range(20)]
PAIRS_OF_CHATS = CHATS * CHAT_PROMPT_TOKENS**2 / 2
TARGET_MS = 100


def stock(budget: int, model: Path) -> Kind:
    options = (UNCACHED, "--max-num-batched-tokens", str(budget))
    return Kind(f"stock-{budget}", None, options, model)


def with_target(model: Path, log: Path) -> Kind:
    """An engine that keeps the target, and logs its steps."""
    ours = {**OURS, "kv_connector_extra_config": {"target_itl_ms": TARGET_MS}}
    options = (UNCACHED, "--max-num-batched-tokens", "2048", *SCHEDULER)
    environment = {logged_steps.LOG: str(log)}
    return Kind("target", ours, options, model, environment, (logged_steps,))


def test_steps_that_decode_keep_the_target_and_answers_are_those_of_stock(
    fleet: Fleet, tmp_path: Path
) -> None:
    model = write_tiny_model(tmp_path, MODEL)
    found: dict[str, Measured] = {}
    for budget in (2048, 512, 256):
        with fleet.server(stock(budget, model)) as server:
            found[server.name] = measure(server.url, PROMPTS, CHATS, MAX_TOKENS)
    log = tmp_path / "steps"
    with fleet.server(with_target(model, log)) as server:
        rounds = 0
        while "step_model" not in server.get("/disagg/identity").json()["ranks"][0]:
            rounds += 1
            assert rounds < 10, "the times of steps are not known"
            measure(server.url, WARM_UP, CHATS, MAX_TOKENS)
        num_before = len(log.read_text().splitlines())
        found[server.name] = measure(server.url, PROMPTS, CHATS, MAX_TOKENS)
        [rank] = server.get("/disagg/identity").json()["ranks"]
        assert rank["target_itl_ms"] == TARGET_MS
    for name, measured in found.items():
        print(f"{name}: {measured}, {measured.num_different(found['stock-2048'])} answers differ")
    assert found["target"].num_different(found["stock-2048"]) == 0
    steps = [json.loads(line) for line in log.read_text().splitlines()[num_before:]]
    # Not the prompts of the answers: on a slow machine they wait until the target is given up.
    mixed = [step for step in steps if step[1] > PAIRS_OF_CHATS and step[2]]
    assert len(mixed) > 5
    limit = TARGET_SHARE * TARGET_MS
    cut = [predicted for tokens, *_, predicted in mixed if tokens > MIN_PROMPT_TOKENS]
    # The times are predicted again when the step has ended, perhaps by a newer fit.
    assert max(cut, default=0.0) < 1.1 * limit
    # A machine on which the least chunk takes most of the target computes no other.
    least = [predicted for tokens, *_, predicted in mixed if tokens == MIN_PROMPT_TOKENS]
    assert len(cut) > 5 or statistics.median(least) > limit / 2
