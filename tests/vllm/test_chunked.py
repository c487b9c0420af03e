"""Chunked local attention (Llama 4). vLLM gives such layers' blocks up chunk by chunk; without its
hybrid KV-cache manager each layer keeps all of them, and all are moved."""

import pytest

from tests.integration.legs import decode, prefill, take_turn
from tests.integration.oracle import complete, differences, tokens_of
from tests.integration.processes import Server, metric
from tests.vllm.chunked_model import CHUNK, write_chunked_model
from tests.vllm.measures import COMPUTED, FETCHED, nothing_left, prefills_only_what_is_new
from tests.vllm.servers import OURS, chunking_pair

LENGTHS = (1, CHUNK - 1, CHUNK, CHUNK + 1, 129, 500, 1500)


PAIR = [
    pytest.param(chunking_pair("by-chunk", OURS, write_chunked_model), id="by-chunk"),
    pytest.param(
        chunking_pair("kept", OURS, write_chunked_model, "--disable-hybrid-kv-cache-manager"),
        id="kept",
        marks=pytest.mark.nightly,
    ),
]


def gives_up(server: Server) -> bool:
    return server.name.startswith("by-chunk")


def test_prompts_are_those_of_one_engine_alone(pair: list[Server]) -> None:
    """Of blocks that are given up, D computes the last token itself."""
    prefiller, decoder = pair
    fetched = metric(decoder, FETCHED)
    with nothing_left(*pair):
        for length in LENGTHS:
            prompt = tokens_of(length, 10_000 + length)
            right = complete(prefiller, prompt, max_tokens=2 * CHUNK)
            turn = decode(decoder, prompt, prefill(prefiller, prompt), max_tokens=2 * CHUNK)
            assert differences([right], [turn.answer]) == [], length
    computed = len(LENGTHS) if gives_up(decoder) else 1
    assert metric(decoder, FETCHED) - fetched == sum(LENGTHS) - computed


def test_an_answer_depends_on_tokens_of_other_chunks(pair: list[Server]) -> None:
    """Else equal answers would prove little."""
    plain = tokens_of(500, 10_100)
    changed = [*plain[:100], plain[100] ^ 1, *plain[101:]]
    right, wrong = (complete(pair[0], prompt) for prompt in (plain, changed))
    assert differences([right], [wrong]) != []


def test_turns_prefill_only_what_is_new(pair: list[Server]) -> None:
    prefiller, decoder = pair
    prefills_only_what_is_new(prefiller, decoder, prefiller, tokens_of(300, 10_200), 10_201)


def test_a_turn_that_goes_back_a_chunk_is_computed_again(pair: list[Server]) -> None:
    """The decoder has given up what that chunk's layers would need."""
    prefiller, decoder = pair
    prompt = tokens_of(300, 10_300)
    asked = {**prefill(prefiller, prompt), "retain": True}
    turn = decode(decoder, prompt, asked, max_tokens=CHUNK)
    assert turn.params is not None
    edited = [*prompt[:290], prompt[290] ^ 1, *tokens_of(50, 10_301)]
    right, before = complete(prefiller, edited), metric(prefiller, COMPUTED)
    again = take_turn(prefiller, decoder, edited, turn.params)
    assert differences([right], [again.answer]) == []
    found = 0 if gives_up(decoder) else 288
    assert metric(prefiller, COMPUTED) - before == len(edited) - found
