"""The step model of an engine with the connector alone: no scheduler class of ours, no router."""

import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.integration.oracle import complete, tokens_of
from tests.integration.processes import Server
from tests.vllm import forced_async, logged_steps
from tests.vllm.plugins import found_in, write_plugin
from tests.vllm.servers import CHUNK, CHUNKS, ONE_WAY, UNCACHED, Fleet, Kind

SECONDS = 360.0
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


@pytest.mark.parametrize("is_ahead", [False, True], ids=["one step at a time", "asynchronous"])
def test_identity_page_has_the_times_of_steps_that_the_engine_measures(
    fleet: Fleet, tmp_path: Path, is_ahead: bool
) -> None:
    log = tmp_path / "steps"
    plugins = write_plugin(tmp_path, logged_steps)
    options: tuple[str, ...] = (*CHUNKS, UNCACHED)
    if is_ahead:
        write_plugin(tmp_path, forced_async)
        options += ("--async-scheduling",)
    environment = {**found_in(plugins), logged_steps.LOG: str(log)}
    with fleet.server(Kind("steps", ONE_WAY, options, environment=environment)) as server:
        (rank,) = server.get("/disagg/identity").json()["ranks"]
        assert (rank["max_step_tokens"], rank["max_num_seqs"]) == (CHUNK, 64)
        assert "step_model" not in rank
        deadline = time.monotonic() + SECONDS
        number = 0
        while rank.get("step_model", {}).get("steps", 0) < 400:
            assert time.monotonic() < deadline, rank
            number += 1
            send_traffic(server, number)
            (rank,) = server.get("/disagg/identity").json()["ranks"]
    model = rank["step_model"]
    print(f"step model: {model}")
    steps = [json.loads(line) for line in log.read_text().splitlines()]
    assert model["steps"] <= len(steps)
    # With steps of all kinds the mixing penalty can be found, once they are not too noisy.
    kinds = {(prompt_tokens > 0, contexts > 0) for prompt_tokens, _, contexts, *_ in steps}
    assert kinds == {(True, False), (False, True), (True, True)}
    longest = max(milliseconds for *_, milliseconds, _ in steps)
    assert 0 < model["base_ms"] < longest
    assert 0 < model["token_us"] * CHUNK / 1e3 < longest
    assert min(model.values()) >= 0
    errors = [
        abs(predicted / milliseconds - 1)
        for *_, milliseconds, predicted in steps
        if predicted is not None
    ]
    # On a CPU the next step's model runs before this step's output is taken: each step ahead gets
    # the time of its successor, and the prediction is less exact than on a GPU.
    assert statistics.median(errors) < (1.0 if is_ahead else 0.7)
