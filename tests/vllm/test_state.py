"""Layers that keep a state of all tokens, not keys and values of each: Mamba-2 beside attention.

The model is that of tests/vllm/state_model.py. The prefill engine stops before the prompt's last
token, which the decode engine computes.
"""

import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from tests.integration.legs import Turn, decode, decode_body, prefill, prefill_body
from tests.integration.oracle import Prompt, complete, differences, tokens_of
from tests.integration.processes import Server, metric, wait_for
from tests.vllm import planted_state
from tests.vllm.measures import COMPUTED, FETCHED, counted, nothing_left
from tests.vllm.servers import OURS, SCHEDULER, UNCACHED, WAITS_BRIEFLY, Fleet, Kind, chunking_pair
from tests.vllm.state_model import write_state_model
from tests.vllm.test_push import both_legs, where

Legs = Callable[[Server, Server, Prompt], Turn]

LENGTHS = (1, 2, 31, 32, 33, 128, 129, 257, 700, 1500)


PAIR = chunking_pair("state", OURS, write_state_model)
PUSHING = chunking_pair("state-push", WAITS_BRIEFLY, write_state_model)


def prompts_are_right(
    servers: list[Server], legs: Legs, seed: int, lengths: Sequence[int] = LENGTHS
) -> None:
    """As those of one engine alone; of each the decode engine computes the last token."""
    prefiller, decoder = servers
    fetched, computed = metric(decoder, FETCHED), metric(decoder, COMPUTED)
    with nothing_left(*servers):
        for length in lengths:
            prompt = tokens_of(length, seed + length)
            right = complete(prefiller, prompt)
            turn = legs(prefiller, decoder, prompt)
            assert differences([right], [turn.answer]) == [], length
    assert metric(decoder, FETCHED) - fetched == sum(lengths) - len(lengths)
    assert metric(decoder, COMPUTED) - computed == len(lengths)


def pulled(prefiller: Server, decoder: Server, prompt: Prompt) -> Turn:
    return decode(decoder, prompt, prefill(prefiller, prompt))


def test_prompts_are_those_of_one_engine_alone(pair: list[Server]) -> None:
    prompts_are_right(pair, pulled, 9000)


@pytest.mark.parametrize("asked", [{"prompt_logprobs": 0}, {"echo": True, "logprobs": 0}], ids=str)
def test_a_prompt_whose_log_probabilities_are_asked_for_keeps_its_last_token(
    pair: list[Server], asked: dict[str, int]
) -> None:
    """Its state is then of one token too many, and the decode engine computes the prompt."""
    prefiller, decoder = pair
    prompt = tokens_of(300, 9070 + len(asked))
    right = complete(prefiller, prompt)
    alone = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0, **asked}
    with nothing_left(*pair):
        said = prefiller.post("/v1/completions", alone).json()
        told = prefiller.post("/v1/completions", {**prefill_body(prompt), **alone}).json()
        assert told["usage"] == said["usage"]
        assert told["choices"] == said["choices"]
        turn = decode(decoder, prompt, told["kv_transfer_params"])
        assert differences([right], [turn.answer]) == []


@pytest.mark.nightly
def test_a_state_that_is_another_is_seen(fleet: Fleet, pair: list[Server]) -> None:
    """The planted error, else equal tokens would prove nothing of states."""
    options = (*SCHEDULER, UNCACHED)
    kind = Kind("spoilt", OURS, options, write_state_model, plugins=(planted_state,))
    with fleet.server(kind) as spoilt:
        for prompt in (tokens_of(length, 9050 + length) for length in LENGTHS[2:]):
            turn = pulled(pair[0], spoilt, prompt)
            assert differences([complete(pair[0], prompt)], [turn.answer]), len(prompt)


def test_a_prompt_that_only_begins_alike_takes_no_state(pair: list[Server]) -> None:
    """Keys and values of what is alike would do; the state is of all."""
    prefiller, decoder = pair
    prompt = tokens_of(300, 9100)
    other = [*prompt[:250], *tokens_of(50, 9101)]
    right, fetched = complete(prefiller, other), metric(decoder, FETCHED)
    with nothing_left(*pair):
        turn = decode(decoder, other, prefill(prefiller, prompt))
    assert differences([right], [turn.answer]) == []
    assert metric(decoder, FETCHED) == fetched


def test_routed_answers_are_those_of_one_engine_alone(fleet: Fleet, pair: list[Server]) -> None:
    """Several at once, and a conversation, whose second turn is computed as if it were a first."""
    prefiller, decoder = pair
    asked = [tokens_of(length, 9200 + length) for length in (40, 300, 301, 600, 900)]
    right = [complete(prefiller, prompt) for prompt in asked]
    with (
        fleet.router([prefiller], [decoder], "--decode-first-turns", "0") as router,
        nothing_left(*pair),
    ):
        fetched = metric(decoder, FETCHED)
        with ThreadPoolExecutor(3) as pool:
            got = list(pool.map(partial(complete, router), asked))
        assert differences(right, got) == []
        assert metric(decoder, FETCHED) - fetched == sum(map(len, asked)) - len(asked)
        first = complete(router, asked[1], conversation_id="states")
        longer = [*asked[1], *first.tokens, *tokens_of(20, 9300)]
        second = complete(router, longer, conversation_id="states")
        assert differences([complete(prefiller, longer)], [second]) == []
    said = set(decoder.get("/disagg/identity").json()["capabilities"])
    assert said & {"prefix_proof", "turns", "begun", "hand_over", "hand_back"} == {"prefix_proof"}


def test_pushed_prompts_are_those_of_one_engine_alone(pushing: list[Server]) -> None:
    """Written when the last of it is computed: there is one state, which changes till then."""
    prompts_are_right(pushing, both_legs, 9400)
    assert counted(pushing[0], "early_blocks") == 0


def is_not_written(servers: list[Server], asked: Prompt, prompt: Prompt, **more: Any) -> None:
    """P computes the one where D awaits the other; `more` is told to P."""
    prefiller, decoder = servers
    request_id, fetched = str(uuid.uuid4()), metric(decoder, FETCHED)
    told = {"do_remote_prefill": True, "remote_request_id": request_id, **where(prefiller)}
    body = prefill_body(asked)
    body["kv_transfer_params"] |= more
    with nothing_left(*servers), ThreadPoolExecutor(2) as legs:
        p_leg = legs.submit(prefiller.post, "/v1/completions", body, request_id)
        d_leg = legs.submit(decoder.post, "/v1/completions", decode_body(prompt, told), request_id)
        assert p_leg.result(timeout=60).status_code == 200
        assert d_leg.result(timeout=60).status_code == 500
    assert metric(decoder, FETCHED) == fetched


def test_a_state_of_another_prompt_is_not_written(pushing: list[Server]) -> None:
    """Nor one of the same prompt with a token more, which P computes where it is to hand over what
    it samples."""
    prefiller, decoder = pushing
    prompt = tokens_of(300, 9500)
    other = [*prompt[:298], prompt[298] ^ 1, prompt[299]]
    right = complete(prefiller, prompt)
    is_not_written(pushing, other, prompt)
    is_not_written(pushing, prompt, prompt, hand_over=True)
    assert differences([right], [both_legs(prefiller, decoder, prompt).answer]) == []


def test_routed_pushes_are_those_of_one_engine_alone(fleet: Fleet, pushing: list[Server]) -> None:
    prefiller, decoder = pushing
    asked = [tokens_of(length, 9600 + length) for length in (40, 300, 301, 600, 900)]
    right = [complete(prefiller, prompt) for prompt in asked]
    pushed = counted(prefiller, "pushes_ok")
    with fleet.router([prefiller], [decoder]) as router, nothing_left(*pushing):
        with ThreadPoolExecutor(3) as pool:
            got = list(pool.map(partial(complete, router), asked))
        assert differences(right, got) == []
        wait_for(lambda: counted(prefiller, "pushes_ok") == pushed + len(asked), "all were pushed")
