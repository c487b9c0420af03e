"""Prompts of embeddings: no token tells what their KV is of, so it is told to nobody and taken from
nobody, and each is computed where it is decoded. Here they are a prompt's tokens, looked up."""

import base64
import io

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.legs import Turn, decode_body, prefill, prefill_body
from tests.integration.oracle import Answer, complete, differences, tokens_of
from tests.integration.processes import Server, metric
from tests.vllm.measures import COMPUTED, FETCHED, nothing_left
from tests.vllm.servers import OURS, SCHEDULER, UNCACHED, Fleet, Kind

EMBEDDED = (*SCHEDULER, UNCACHED, "--enable-prompt-embeds")


PAIR = (Kind("embeds-p", OURS, EMBEDDED), Kind("embeds-d", OURS, EMBEDDED))


@pytest.fixture(scope="module")
def table(fleet: Fleet) -> torch.Tensor:
    return load_file(fleet.model / "model.safetensors")["model.embed_tokens.weight"]


def embedded(table: torch.Tensor, prompt: list[int]) -> str:
    buffer = io.BytesIO()
    torch.save(table[prompt].clone(), buffer)
    return base64.b64encode(buffer.getvalue()).decode()


def asked(server: Server, table: torch.Tensor, prompt: list[int], params: object) -> Turn:
    body = {**decode_body(prompt, params), "prompt": None}
    body["prompt_embeds"] = embedded(table, prompt)
    response = server.post("/v1/completions", body)
    assert response.status_code == 200, response.text
    said = response.json()
    return Turn(Answer.in_body(said), said.get("kv_transfer_params"))


def test_nothing_is_told_of_them(pair: list[Server], table: torch.Tensor) -> None:
    prefiller, _ = pair
    body = prefill_body(tokens_of(300, 9900))
    body |= {"prompt": None, "prompt_embeds": embedded(table, tokens_of(300, 9900))}
    with nothing_left(prefiller):
        response = prefiller.post("/v1/completions", body)
        assert response.status_code == 200, response.text
        assert response.json().get("kv_transfer_params") is None


def test_nothing_is_taken_for_them(pair: list[Server], table: torch.Tensor) -> None:
    """Not even of the very tokens that they stand for; nor is their answer kept for a next turn."""
    prefiller, decoder = pair
    prompt = tokens_of(300, 9901)
    right, fetched = complete(prefiller, prompt), metric(decoder, FETCHED)
    with nothing_left(prefiller):
        params = {**prefill(prefiller, prompt), "retain": True}
        turn = asked(decoder, table, prompt, params)
    assert differences([right], [turn.answer]) == []
    assert turn.params is None
    assert metric(decoder, FETCHED) == fetched


def test_the_router_has_one_engine_do_it(
    fleet: Fleet, pair: list[Server], table: torch.Tensor
) -> None:
    prefiller, decoder = pair
    prompt = tokens_of(300, 9902)
    with fleet.router([prefiller], [decoder]) as router, nothing_left(prefiller):
        before = metric(prefiller, COMPUTED)
        fetched, computed = metric(decoder, FETCHED), metric(decoder, COMPUTED)
        turn = asked(router, table, prompt, None)
        assert metric(decoder, FETCHED) == fetched
        assert metric(decoder, COMPUTED) - computed == len(prompt)
        assert metric(prefiller, COMPUTED) == before
    assert differences([complete(prefiller, prompt)], [turn.answer]) == []
