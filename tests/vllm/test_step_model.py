"""The step model of an engine with the connector alone: no scheduler class of ours, no router."""

import json
import statistics
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.integration.oracle import complete, tokens_of
from tests.integration.processes import Server, wait_for
from tests.vllm import forced_async, logged_steps
from tests.vllm.servers import CHUNK, CHUNKS, ONE_WAY, UNCACHED, Fleet, Kind

SECONDS = 400.0
KINDS = {(True, False), (False, True), (True, True)}
"""A kind tells whether a step has prompt tokens, and whether it has decoding requests."""
MIN_PREDICTED = 20
MOST = 20
"""At the median of a kind of steps, predicted and measured times differ by less than this factor.
That the fit is exact is tested on made steps: here the machine may become six times slower."""
LENGTHS = (900, 40, 300, 1500, 120, 600)


def send_traffic(server: Server, round_number: int) -> None:
    """Prompts of all lengths, which come while others decode, and some that come alone."""
    with ThreadPoolExecutor(3) as pool:
        answers = [
            pool.submit(complete, server, tokens_of(length, 100 * round_number + place), 20 * place)
            for place, length in enumerate(LENGTHS, 1)
        ]
        for answer in answers:
            answer.result()
    for place, length in enumerate(LENGTHS, 11):
        complete(server, tokens_of(length // 4, 100 * round_number + place), 1)


def ratios_of_times(log: Path) -> dict[tuple[bool, bool], list[float]]:
    """Return what each predicted step of a kind was to take, in units of the time it took."""
    ratios = defaultdict(list)
    for line in log.read_text().splitlines():
        prompt_tokens, _, contexts, milliseconds, predicted = json.loads(line)
        if predicted is not None:
            ratios[prompt_tokens > 0, contexts > 0].append(predicted / milliseconds)
    return ratios


def step_model_of(server: Server) -> Any:
    """None, too, where the engine is late to answer and had none before."""
    (rank,) = server.get("/disagg/identity").json()["ranks"]
    return rank.get("step_model")


@pytest.mark.parametrize("is_ahead", [False, True], ids=["one step at a time", "asynchronous"])
def test_identity_page_has_the_times_of_steps_that_the_engine_measures(
    fleet: Fleet, tmp_path: Path, is_ahead: bool
) -> None:
    log = tmp_path / "steps"
    options: tuple[str, ...] = (*CHUNKS, UNCACHED)
    plugins: tuple[ModuleType, ...] = (logged_steps,)
    if is_ahead:
        options, plugins = (*options, "--async-scheduling"), (*plugins, forced_async)
    environment = {logged_steps.LOG: str(log)}
    kind = Kind("steps", ONE_WAY, options, environment=environment, plugins=plugins)
    with fleet.server(kind) as server:
        (rank,) = server.get("/disagg/identity").json()["ranks"]
        assert (rank["max_step_tokens"], rank["max_num_seqs"]) == (CHUNK, 64)
        assert "step_model" not in rank
        deadline = time.monotonic() + SECONDS
        number = 0
        # With steps of all kinds the mixing penalty can be found, once they are not too noisy.
        while any(len(ratios_of_times(log)[kind]) < MIN_PREDICTED for kind in KINDS):
            assert time.monotonic() < deadline, log.read_text()[-1000:]
            number += 1
            send_traffic(server, number)
        model = wait_for(partial(step_model_of, server), "the page has the step model")
    print(f"step model: {model}")
    steps = [json.loads(line) for line in log.read_text().splitlines()]
    assert model["steps"] <= len(steps)
    longest = max(milliseconds for *_, milliseconds, _ in steps)
    assert 0 < model["base_ms"] < longest
    assert 0 < model["token_us"] * CHUNK / 1e3 < longest
    assert min(model.values()) >= 0
    # A busy machine makes single steps take several times as long, but not the median of a kind. On
    # a CPU the next step's model runs before this step's output is taken, so each step ahead gets
    # the time of its successor.
    medians = {kind: statistics.median(each) for kind, each in ratios_of_times(log).items()}
    assert min(medians.values()) > 1 / MOST, medians
    assert max(medians.values()) < MOST, medians
