"""The two legs of a request, sent by hand: what a router does, step by step."""

from dataclasses import dataclass
from typing import Any

from tests.integration.oracle import Answer, Prompt, complete, differences, tokens_of
from tests.integration.processes import Server, metric

PREFILL: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
COORDINATES = ("remote_engine_id", "remote_host", "remote_port", "tp_size", "pp_size")
"""Where a prefill engine is, in the words of `kv_transfer_params`."""


@dataclass(frozen=True)
class Turn:
    answer: Answer
    params: dict[str, Any] | None
    """The decode engine's, for the next turn."""


def prefill(
    server: Server,
    prompt: Prompt,
    previous: dict[str, Any] | None = None,
    request_id: str | None = None,
    model: str = "tiny",
) -> dict[str, Any]:
    """The P leg; returns P's kv_transfer_params. `previous`: what D answered to the last turn."""
    body = {**prefill_body(prompt, previous), "model": model}
    response = server.post("/v1/completions", body, request_id=request_id)
    assert response.status_code == 200, response.text
    params: dict[str, Any] = response.json()["kv_transfer_params"]
    return params


def coordinates_in(said: dict[str, Any]) -> dict[str, Any]:
    """A prefill engine's, out of an answer of its own or its identity page."""
    return {key: said[key] for key in COORDINATES}


def holders(server: Server, expected_tokens: int) -> dict[str, Any]:
    """Return the params that name an engine of one rank as a holder."""
    (rank,) = server.get("/disagg/identity").json()["ranks"]
    return {"holders": [{**coordinates_in(rank), "expected_tokens": expected_tokens}]}


def prefill_body(prompt: Prompt, previous: dict[str, Any] | None = None) -> dict[str, Any]:
    params = {**(previous or {}), **PREFILL}
    return {"model": "tiny", "prompt": prompt, "max_tokens": 1, "kv_transfer_params": params}


def decode_body(prompt: Prompt, params: Any, max_tokens: int = 12) -> dict[str, Any]:
    """Nothing is kept for a next turn, unless `params` say so."""
    return {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "logprobs": 1,
        "ignore_eos": True,
        "return_token_ids": True,
        "kv_transfer_params": {"retain": False, **params} if isinstance(params, dict) else params,
    }


def decode(
    server: Server,
    prompt: Prompt,
    params: dict[str, Any],
    max_tokens: int = 12,
    request_id: str | None = None,
    model: str = "tiny",
) -> Turn:
    """The D leg."""
    body = {**decode_body(prompt, params, max_tokens), "model": model}
    response = server.post("/v1/completions", body, request_id=request_id)
    assert response.status_code == 200, response.text
    said = response.json()
    return Turn(Answer.in_body(said), said.get("kv_transfer_params"))


def take_turn(
    prefiller: Server,
    decoder: Server,
    prompt: Prompt,
    previous: dict[str, Any] | None = None,
    max_tokens: int = 12,
) -> Turn:
    """Both legs of one turn of a conversation, whose KV the decoder is asked to keep."""
    params = prefill(prefiller, prompt, previous)
    return decode(decoder, prompt, {**params, "retain": True}, max_tokens)


def check_three_turns(
    prefiller: Server, decoder: Server, alone: Server, prompt: list[int]
) -> list[int]:
    """Take three turns of which `prefiller`, without a prefix cache, computes only what is new.

    Returns the prompt of a fourth turn.
    """
    computed, turn = (
        "disagg_engine_prompt_tokens_computed_total",
        Turn(complete(alone, "x", 1), None),
    )
    for number in range(3):
        before = metric(prefiller, computed)
        held = turn.params["remote_num_tokens"] if turn.params else 0
        turn = take_turn(prefiller, decoder, prompt, turn.params)
        assert differences([complete(alone, prompt)], [turn.answer]) == []
        assert metric(prefiller, computed) - before == len(prompt) - held
        prompt = [*prompt, *turn.answer.tokens, *tokens_of(50, 10 + number)]
    assert turn.params is not None
    return prompt
