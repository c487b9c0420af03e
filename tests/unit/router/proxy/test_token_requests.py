"""Requests of token ids: what each engine gets, and what the router refuses itself."""

from typing import Any

import pytest

from scripts.mock_engine import DONE, MockEngine, Peer, Received
from tests.unit.router.harness import Router
from tests.unit.router.mock_engine import PARAMS

PATH = "/inference/v1/generate"
ANSWER = {"request_id": "g-1", "choices": [{"index": 0, "token_ids": [5], "finish_reason": "stop"}]}


@pytest.fixture(autouse=True)
def engines(p: MockEngine, d: MockEngine) -> None:
    async def decode(request: Received, peer: Peer) -> None:
        if request.json.get("stream"):
            await peer.stream(b'data: {"choices":[{"index":0,"token_ids":[5]}]}\n\n', DONE)
        else:
            await peer.answer({**ANSWER, "kv_transfer_params": None})

    p.usual = lambda request, peer: peer.answer({**ANSWER, "kv_transfer_params": PARAMS})
    d.usual = decode


async def generate(router: Router, **fields: Any) -> Any:
    body = {"model": "m", "token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 9}, **fields}
    return await router.client.post(PATH, json=body)


@pytest.mark.parametrize("stream", [False, True])
async def test_prefill_engine_samples_one_token_and_decode_engine_gets_the_clients_fields(
    router: Router, p: MockEngine, d: MockEngine, stream: bool
) -> None:
    sampling = {"max_tokens": 9, "min_tokens": 4, "temperature": 0.5, "stop_token_ids": [7]}
    answer = await generate(router, stream=stream, sampling_params=sampling)
    assert answer.status_code == 200
    assert (p.last.path, d.last.path) == (PATH, PATH)
    first = p.last.json
    assert first["sampling_params"] == {"max_tokens": 1, "temperature": 0.5, "stop_token_ids": [7]}
    assert (first["stream"], first["token_ids"]) == (False, [1, 2, 3])
    assert first["kv_transfer_params"]["do_remote_decode"] is True
    assert "max_tokens" not in first
    second = d.last.json
    assert (second["sampling_params"], second.get("stream", False)) == (sampling, stream)
    assert second["kv_transfer_params"]["remote_block_ids"] == PARAMS["remote_block_ids"]
    assert "remote_block_ids" not in answer.text


@pytest.mark.parametrize("alone", [{"n": 2}, {"prompt_logprobs": 1}])
async def test_what_two_engines_cannot_share_one_answers(
    router: Router, p: MockEngine, d: MockEngine, alone: dict[str, Any]
) -> None:
    sampling = {"max_tokens": 9, **alone}
    assert (await generate(router, sampling_params=sampling)).status_code == 200
    assert not p.requests
    assert d.last.json["sampling_params"] == sampling


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"token_ids": None}, "token_ids"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": "1 2"}, "token_ids"),
        ({"sampling_params": None}, "sampling_params"),
        ({"sampling_params": [1]}, "sampling_params"),
    ],
)
async def test_bodies_without_ids_or_sampling_params_are_refused(
    router: Router, p: MockEngine, d: MockEngine, wrong: dict[str, Any], param: str
) -> None:
    answer = await generate(router, **wrong)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert not p.requests
    assert not d.requests


async def test_clients_kv_transfer_params_do_not_pass(router: Router, p: MockEngine) -> None:
    own = {"do_remote_prefill": True, "remote_host": "10.0.0.1"}
    assert (await generate(router, kv_transfer_params=own)).status_code == 200
    assert "10.0.0.1" not in p.last.body.decode()
