"""Ours as one of vLLM's several connectors (MultiConnector), beside one that keeps KV elsewhere.

The other is vLLM's example, which writes files: OffloadingConnector copies from a GPU alone.
"""

from pathlib import Path
from typing import Any

from tests.integration.oracle import complete, differences, tokens_of
from tests.integration.processes import Server, metric
from tests.integration.talk import Talk, turns
from tests.vllm.measures import COMPUTED, FETCHED, counted, nothing_left
from tests.vllm.servers import OURS, SCHEDULER, TRUSTING, UNCACHED, Kind, Kinds


def beside_files(ours: dict[str, Any], folder: Path) -> dict[str, Any]:
    files = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [ours, files]},
    }


def both_beside_files(folder: Path) -> Kinds:
    return (
        Kind("multi-p", beside_files(TRUSTING, folder / "p"), (*SCHEDULER, UNCACHED)),
        Kind("multi-d", beside_files(OURS, folder / "d"), (*SCHEDULER, UNCACHED)),
    )


PAIR = both_beside_files


def test_it_says_of_itself_what_it_says_alone(pair: list[Server], prefiller: Server) -> None:
    said, expected = (server.get("/disagg/identity").json() for server in (pair[0], prefiller))
    for what in ("transfer_modes", "capabilities", "features", "missing"):
        assert said[what] == expected[what], what


def test_prompts_are_those_of_one_vllm_alone(
    router: Server, pair: list[Server], alone: Server
) -> None:
    lengths = (1, 31, 33, 64, 257, 700)
    fetched = metric(pair[1], FETCHED)
    with nothing_left(*pair):
        for length in lengths:
            prompt = tokens_of(length, 500 + length)
            assert differences([complete(alone, prompt)], [complete(router, prompt)]) == []
    assert metric(pair[1], FETCHED) - fetched >= sum(lengths) - 1
    assert counted(pair[1], "pulls_failed") == 0


def test_turns_prefill_only_what_is_new(router: Server, pair: list[Server], alone: Server) -> None:
    talk, prompt = Talk(router, "several connectors", stream=True), tokens_of(600, 520)
    for number in range(3):
        before = metric(pair[0], COMPUTED)
        answer = talk.say(prompt)
        assert differences([complete(alone, prompt)], [answer]) == []
        computed = metric(pair[0], COMPUTED) - before
        assert computed == 600 if number == 0 else computed <= 51
        prompt += [*answer.tokens, *tokens_of(50, 530 + number)]
    assert turns(router, "hit") == 2
