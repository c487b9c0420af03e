"""Two engines serve a request of token ids (/inference/v1/generate), and an engine without
--enable-scale-out names that flag in its error."""

import json
from typing import Any

import pytest

from tests.integration.oracle import complete, tokens_of
from tests.integration.processes import Server, metric
from tests.vllm.measures import COMPUTED, FETCHED, nothing_left
from tests.vllm.servers import OURS, SCHEDULER, STOCK, UNCACHED, Fleet, Kind

PATH = "/inference/v1/generate"
OPEN = (UNCACHED, "--enable-scale-out")
PAIR = [
    (Kind("ids-p", OURS, (*SCHEDULER, *OPEN)), Kind("ids-d", OURS, (*SCHEDULER, *OPEN))),
    (Kind("stock-ids-p", STOCK, OPEN), Kind("stock-ids-d", STOCK, OPEN)),
]


def body_for(prompt: list[int], **sampling: Any) -> dict[str, Any]:
    fields = {"max_tokens": 12, "temperature": 0, "min_tokens": 3, **sampling}
    return {"model": "tiny", "token_ids": prompt, "sampling_params": fields}


def streamed_ids(text: str) -> list[int]:
    events = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    assert not any("kv_transfer_params" in chunk for chunk in chunks)
    return [token for chunk in chunks for one in chunk["choices"] for token in one["token_ids"]]


def test_ids_are_those_of_one_vllm_alone(pair: list[Server], router: Server, alone: Server) -> None:
    p, d = pair
    before, asked = (metric(p, COMPUTED), metric(d, FETCHED)), 0
    with nothing_left(p):  # a stock D keeps the KV of answers for a next turn
        for length in (2, 33, 200, 1500):
            prompt = tokens_of(length, 100 + length)
            right = list(complete(alone, prompt, min_tokens=3).tokens)
            answer = router.post(PATH, body_for(prompt))
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["token_ids"] == right
            assert answer.json().get("kv_transfer_params") is None
            streamed = router.post(PATH, {**body_for(prompt), "stream": True})
            assert streamed_ids(streamed.text) == right
            asked += 2 * length
    assert metric(p, COMPUTED) - before[0] == asked
    assert metric(d, FETCHED) - before[1] >= asked - 8


def test_several_answers_come_from_the_decode_engine(pair: list[Server], router: Server) -> None:
    before = metric(pair[0], COMPUTED)
    answer = router.post(PATH, body_for(tokens_of(50, 7), n=2, temperature=1))
    assert [one["index"] for one in answer.json()["choices"]] == [0, 1]
    assert metric(pair[0], COMPUTED) == before


@pytest.mark.parametrize("path", [PATH, "/v1/completions/render"])
def test_engine_that_does_not_serve_them_says_what_to_do(
    fleet: Fleet, trio: list[Server], path: str
) -> None:
    body = {**body_for(tokens_of(50, 8)), "prompt": "hello"}
    with fleet.router(trio[1:2], trio[2:]) as router:
        answer = router.post(path, body)
    assert answer.status_code == 403
    assert "--enable-scale-out" in answer.json()["error"]["message"]
