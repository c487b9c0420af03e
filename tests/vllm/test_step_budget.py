"""target_itl_ms in vLLM: eight answers stream while long prompts come.

Answers and the effect of the target are asserted. The figures are printed (pytest -s): a machine of
CI is no place to judge times.
"""

from pathlib import Path
from typing import Any

import pytest

from engine_ext.reference.tiny_model import TinyModel, write_tiny_model
from tests.vllm.gaps import Measured, measure
from tests.vllm.servers import OURS, SCHEDULER, UNCACHED, Fleet, Kind

# Slow enough that the prompts' time is more than a machine's noise: 12 million parameters.
MODEL = TinyModel(layers=8, hidden=320, heads=10, kv_heads=10, intermediate=1024)
CHATS, MAX_TOKENS = 8, 1900
PROMPTS = [1500] * 6
WARM_UP = [300 * (1 + number % 5) for number in range(20)]
TARGET_MS = 100


def kind(name: str, budget: int, model: Path, target_ms: int | None = None) -> Kind:
    options = (UNCACHED, "--max-num-batched-tokens", str(budget))
    if target_ms is None:
        return Kind(name, None, options, model)
    extra: dict[str, Any] = {"target_itl_ms": target_ms}
    ours = {**OURS, "kv_connector_extra_config": extra}
    return Kind(name, ours, (*options, *SCHEDULER), model)


def test_steps_that_decode_keep_the_target_and_answers_are_those_of_stock(
    fleet: Fleet, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = write_tiny_model(tmp_path_factory.mktemp("slower"), MODEL)
    found: dict[str, Measured] = {}
    kinds = [kind(f"stock-{budget}", budget, model) for budget in (2048, 512, 256)]
    for each in (*kinds, kind("target", 2048, model, TARGET_MS)):
        with fleet.server(each) as server:
            if each.transfer:
                number = 0
                while "step_model" not in server.get("/disagg/identity").json()["ranks"][0]:
                    number += 1
                    assert number < 6, "the times of steps are not known"
                    measure(server.url, WARM_UP, CHATS, MAX_TOKENS)
            found[each.name] = measure(server.url, PROMPTS, CHATS, MAX_TOKENS)
        print(f"{each.name}: {found[each.name]}")
    stock, ours = found["stock-2048"], found["target"]
    assert ours.num_different(stock) == 0
    assert ours.gaps.percentile(99) < stock.gaps.percentile(99) / 2
