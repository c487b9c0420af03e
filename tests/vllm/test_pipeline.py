"""Pipeline parallel in vLLM: a stage reads its layers where the other engine's stages have them."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from tests.integration.legs import decode, decode_body, prefill, take_turn
from tests.integration.oracle import complete, differences, tokens_of
from tests.integration.processes import Server, metric
from tests.vllm import mended_pipeline
from tests.vllm.measures import COMPUTED, FETCHED, nothing_left
from tests.vllm.servers import OURS, SCHEDULER, Fleet, Kind, Writer
from tests.vllm.test_state import Legs, pulled

Servers = dict[str, Server]

STAGES = ("--pipeline-parallel-size", "2")
PAIRS = {
    "unlike": ("even", "uneven"),
    "to one": ("uneven", "one"),
    "from one": ("one", "even"),
}
LENGTHS = (1, 31, 32, 33, 257, 700, 1500)


def in_stages(
    name: str, transfer: Mapping[str, Any], *options: str, model: Writer | None = None
) -> dict[str, Kind]:
    """`even`: two layers in each stage; `uneven`: one in the first, three in the second."""
    whole = (*SCHEDULER, *options)
    staged: dict[str, Any] = {"options": (*whole, *STAGES), "plugins": (mended_pipeline,)}
    uneven = {"VLLM_PP_LAYER_PARTITION": "1,3"}
    return {
        "one": Kind(f"{name}-one", transfer, whole, model),
        "even": Kind(f"{name}-even", transfer, model=model, **staged),
        "uneven": Kind(f"{name}-uneven", transfer, model=model, environment=uneven, **staged),
    }


SERVERS = in_stages("pp", OURS)


def prompts_are_right(
    prefiller: Server, decoder: Server, alone: Server, legs: Legs, seed: int
) -> None:
    """As those of one engine alone; nothing of them is computed at the decode engine but, at most,
    the last token."""
    for length in LENGTHS:
        prompt = tokens_of(length, seed + length)
        fetched = metric(decoder, FETCHED)
        turn = legs(prefiller, decoder, prompt)
        assert metric(decoder, FETCHED) - fetched in (length, length - 1)
        assert differences([complete(alone, prompt)], [turn.answer]) == [], length


def a_turn_is_right(prefiller: Server, decoder: Server, alone: Server, seed: int) -> None:
    """As one engine alone says; P computes only what is new."""
    prompt = tokens_of(300, seed)
    asked = {**prefill(prefiller, prompt), "retain": True}
    turn = decode(decoder, prompt, asked, max_tokens=100)
    assert turn.params is not None
    longer = [*prompt, *turn.answer.tokens, *tokens_of(50, 8)]
    before = metric(prefiller, COMPUTED)
    again = take_turn(prefiller, decoder, longer, turn.params)
    new = len(longer) - turn.params["remote_num_tokens"]
    assert metric(prefiller, COMPUTED) - before <= new
    assert differences([complete(alone, longer)], [again.answer]) == []


@pytest.mark.parametrize("pair", PAIRS)
def test_prompts_are_those_of_one_engine_alone(servers: Servers, pair: str) -> None:
    prefiller, decoder = (servers[name] for name in PAIRS[pair])
    with nothing_left(prefiller, decoder):
        seed = list(PAIRS).index(pair) * 10_000
        prompts_are_right(prefiller, decoder, servers["one"], pulled, seed)


@pytest.mark.parametrize("pair", PAIRS)
def test_turns_prefill_only_what_is_new(servers: Servers, pair: str) -> None:
    """Each stage of P reads its layers of the last turn from D's."""
    prefiller, decoder = (servers[name] for name in PAIRS[pair])
    a_turn_is_right(prefiller, decoder, servers["one"], list(PAIRS).index(pair) * 10_000 + 7)


@pytest.mark.parametrize(("reader", "stages"), [("one", 1), ("one", 3), ("uneven", 1)])
def test_an_engine_that_has_not_all_layers_there_is_not_read(
    servers: Servers, reader: str, stages: int
) -> None:
    """What is told of its stages is not as it is: a part is not taken for the whole."""
    decoder, prompt = servers[reader], tokens_of(300, 40 + stages + len(reader) * 10)
    fetched = metric(decoder, FETCHED)
    params = {**prefill(servers["even"], prompt), "pp_size": stages}
    body = decode_body(prompt, params)
    assert decoder.post("/v1/completions", body).status_code == 500
    assert metric(decoder, FETCHED) == fetched
    again = pulled(servers["even"], decoder, prompt)
    other = servers["uneven" if reader == "one" else "one"]
    assert differences([complete(other, prompt)], [again.answer]) == []


def test_routed_answers_are_those_of_one_engine_alone(fleet: Fleet, servers: Servers) -> None:
    """Several at once, and a conversation."""
    prefiller, decoder = servers["even"], servers["uneven"]
    asked = [tokens_of(length, 11_000 + length) for length in (40, 300, 301, 600, 900)]
    right = [complete(servers["one"], prompt) for prompt in asked]
    with (
        fleet.router([prefiller], [decoder], "--decode-first-turns", "0") as router,
        nothing_left(prefiller, seconds=40),
    ):
        with ThreadPoolExecutor(3) as pool:
            assert differences(right, list(pool.map(partial(complete, router), asked))) == []
        prompt = asked[1]
        for number in range(3):
            answer = complete(router, prompt, conversation_id="stages")
            assert differences([complete(servers["one"], prompt)], [answer]) == []
            prompt = [*prompt, *answer.tokens, *tokens_of(20, 11_100 + number)]
