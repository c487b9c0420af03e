"""A fleet may mix stock vLLM (NixlConnector, turns on both sides) and ours, either way round."""

from collections.abc import Iterator

import pytest

from tests.integration.legs import decode, prefill
from tests.integration.oracle import complete, differences, tokens_of
from tests.integration.processes import Launcher, Server, metric
from tests.integration.talk import Talk, turns
from tests.vllm.measures import COMPUTED, FETCHED, nothing_left
from tests.vllm.servers import STOCK, Fleet, Kind


@pytest.fixture(scope="module")
def stock(fleet: Fleet) -> Iterator[Server]:
    with fleet.server(Kind("stock", STOCK, ("--no-enable-prefix-caching",))) as server:
        yield server


@pytest.fixture(name="pair", params=["our P, stock D", "stock P, our D"])
def either_way(
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


def test_the_router_lets_nobody_pull_what_is_not_surely_the_same(
    fleet: Fleet, pair: tuple[Server, Server], alone: Server
) -> None:
    """One of the two proves nothing: what may be pulled is the router's to judge."""
    first, second = pair
    launcher = Launcher(fleet.logs, fleet.model, fleet.free_ports)
    with launcher.router([first], [second], "--decode-first-turns", "0") as router:
        for number, change in enumerate(("none", "edited", "stripped", "regenerated")):
            talk = Talk(router, change)
            prompt = tokens_of(1000, 140 + number)
            said = talk.say(prompt).tokens
            new = tokens_of(40, 150)
            longer, most = {
                "none": ([*prompt, *said, *new], 42),
                "edited": ([*prompt[:500], prompt[500] ^ 1, *prompt[501:], *said, *new], 1052),
                "stripped": ([*prompt, *said[6:], *new], 46 + 48),
                "regenerated": (prompt, 48),
            }[change]
            before = metric(first, COMPUTED)
            answer = talk.say(longer)
            assert differences([complete(alone, longer)], [answer]) == [], change
            assert metric(first, COMPUTED) - before <= most, change
        assert (turns(router, "hit"), turns(router, "cut")) == (1, 2)
        assert turns(router, "mismatch") == 1
