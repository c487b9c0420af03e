"""`cache_hit_threshold` inside vLLM, by our scheduler class and our plugin."""

import json
import uuid
from typing import Any

import pytest

from tests.integration.legs import prefill_body
from tests.integration.oracle import complete, differences, tokens_of
from tests.integration.processes import Server, metric
from tests.vllm.measures import COMPUTED
from tests.vllm.servers import Fleet


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("endpoint", ["completions", "chat/completions"])
def test_a_prompt_below_the_threshold_is_refused_and_at_it_is_not(
    decoder: Server, endpoint: str, stream: bool
) -> None:
    text = str(uuid.uuid4()) * 6
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 2, "stream": stream, "ignore_eos": True}
    if endpoint == "completions":
        body["prompt"] = text
    else:
        body["messages"] = [{"role": "user", "content": text}]
    path = f"/v1/{endpoint}"
    assert finish_reason(decoder, path, {**body, "cache_hit_threshold": 0.5}) == "cache_threshold"
    assert finish_reason(decoder, path, body) == "length"
    assert finish_reason(decoder, path, {**body, "cache_hit_threshold": 0.5}) == "length"
    assert finish_reason(decoder, path, {**body, "cache_hit_threshold": 1}) == "cache_threshold"
    wrong = decoder.post(path, {**body, "cache_hit_threshold": 1.5})
    assert wrong.status_code == 400
    assert "cache_hit_threshold" in wrong.text


def finish_reason(server: Server, path: str, body: dict[str, Any]) -> str:
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    if not body["stream"]:
        return str(response.json()["choices"][0]["finish_reason"])
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
    reasons = [c["finish_reason"] for line in lines for c in json.loads(line)["choices"]]
    return str([reason for reason in reasons if reason][-1])


def test_prefill_legs_are_not_measured_by_the_threshold(decoder: Server) -> None:
    body = {**prefill_body(tokens_of(100, 80)), "cache_hit_threshold": 1, "ignore_eos": True}
    response = decoder.post("/v1/completions", body)
    assert response.json()["choices"][0]["finish_reason"] == "length"
    assert response.json()["kv_transfer_params"]["remote_num_tokens"] == 100
    del body["kv_transfer_params"]
    assert finish_reason(decoder, "/v1/completions", body | {"stream": False}) == "cache_threshold"


def test_a_prompt_that_the_decoder_refuses_is_prefilled_and_the_next_time_it_answers_alone(
    fleet: Fleet, prefiller: Server, decoder: Server, alone: Server
) -> None:
    prompt = tokens_of(500, 81)
    right = complete(alone, prompt)
    with fleet.router([prefiller], [decoder], "--decode-first-threshold", "0.5") as router:
        for computed in (len(prompt), 0):
            before = metric(prefiller, COMPUTED)
            assert differences([right], [complete(router, prompt)]) == []
            assert metric(prefiller, COMPUTED) - before == computed
