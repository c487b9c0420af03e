"""A fleet may mix stock vLLM (NixlConnector, turns on both sides) and ours, either way round."""

from collections.abc import Iterator

import pytest

from tests.integration.legs import decode, prefill
from tests.integration.oracle import complete, differences, tokens_of
from tests.integration.processes import Server, metric
from tests.vllm.measures import COMPUTED, FETCHED, nothing_left
from tests.vllm.servers import STOCK, Fleet, Kind


@pytest.fixture(scope="module")
def stock(fleet: Fleet) -> Iterator[Server]:
    with fleet.server(Kind("stock", STOCK, ("--no-enable-prefix-caching",))) as server:
        yield server


@pytest.fixture(params=["our P, stock D", "stock P, our D"])
def pair(
    request: pytest.FixtureRequest, prefiller: Server, decoder: Server, stock: Server
) -> tuple[Server, Server]:
    return (prefiller, stock) if request.param == "our P, stock D" else (stock, decoder)


def test_prompts_are_those_of_one_vllm_alone(pair: tuple[Server, Server], alone: Server) -> None:
    first, second = pair
    before = metric(second, FETCHED)
    lengths = (1, 33, 200, 1500)
    with nothing_left(first):
        for length in lengths:
            prompt = tokens_of(length, 70 + length)
            turn = decode(second, prompt, prefill(first, prompt))
            assert differences([complete(alone, prompt)], [turn.answer]) == []
    assert metric(second, FETCHED) - before == sum(lengths) - 1


def test_a_request_that_the_decoder_rejects_frees_the_prefiller(
    pair: tuple[Server, Server],
) -> None:
    first, second = pair
    with nothing_left(first, seconds=2):
        params = prefill(first, tokens_of(300, 90))
        body = {"model": "nobody's", "prompt": [1], "max_tokens": 1, "kv_transfer_params": params}
        assert second.post("/v1/completions", body).status_code == 404


def test_two_turns_are_those_of_one_vllm_alone(pair: tuple[Server, Server], alone: Server) -> None:
    first, second = pair
    prompt = tokens_of(300, 80)
    with nothing_left(first):
        turn = decode(second, prompt, {**prefill(first, prompt), "retain": True})
        assert turn.params is not None
        assert differences([complete(alone, prompt)], [turn.answer]) == []
        longer = [*prompt, *turn.answer.tokens, *tokens_of(40, 81)]
        before = metric(first, COMPUTED)
        params = prefill(first, longer, turn.params)
        computed = metric(first, COMPUTED) - before
        again = decode(second, longer, params)
        assert differences([complete(alone, longer)], [again.answer]) == []
    # D holds all but the last token of its answer.
    assert computed <= len(longer) - (len(prompt) + len(turn.answer.tokens) - 1) + 1
