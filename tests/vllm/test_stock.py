"""A fleet may mix stock vLLM (NixlConnector, turns on both sides) and ours, either way round, in
each release. Pushed: test_stock_push."""

from collections.abc import Iterator

import pytest

from tests.integration.legs import decode, prefill
from tests.integration.oracle import complete, differences, tokens_of
from tests.integration.processes import Server, metric
from tests.integration.talk import Talk, turns
from tests.vllm.measures import COMPUTED, FETCHED, nothing_left
from tests.vllm.releases import BUILD, RELEASES, of_next
from tests.vllm.servers import OURS, SCHEDULER, STOCK, TRUSTING, UNCACHED, Fleet, Kind

BESIDE = Kind("stock", STOCK, (UNCACHED,))


@pytest.fixture(scope="module", params=RELEASES)
def three(fleet: Fleet, request: pytest.FixtureRequest) -> Iterator[list[Server]]:
    """A prefill and a decode engine of ours, and a stock one."""
    if request.param == BUILD:
        ours = [request.getfixturevalue(name) for name in ("prefiller", "decoder")]
        with fleet.server(BESIDE) as stock:
            yield [*ours, stock]
        return
    with of_next(fleet).servers(
        Kind("next-p", TRUSTING, (*SCHEDULER, UNCACHED)), Kind("next-d", OURS, SCHEDULER), BESIDE
    ) as servers:
        # A stock decoder gives nothing back to a prefiller that it has never pulled from.
        prompt = tokens_of(40, 7400)
        decode(servers[2], prompt, prefill(servers[0], prompt))
        yield servers


@pytest.fixture(params=["our P, stock D", "stock P, our D"])
def pair(request: pytest.FixtureRequest, three: list[Server]) -> tuple[Server, Server]:
    prefiller, decoder, stock = three
    return (prefiller, stock) if request.param == "our P, stock D" else (stock, decoder)


@pytest.fixture
def alone(pair: tuple[Server, Server], three: list[Server]) -> Server:
    """Without params, and without a prefix cache, either answers by itself: the one that does not
    prefill here, for that one's work is counted."""
    prefiller, _, stock = three
    return stock if pair[0] is prefiller else prefiller


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
    with nothing_left(first):  # A lease lasts longer.
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
    with fleet.router([first], [second], "--decode-first-turns", "0") as router:
        for number, change in enumerate(("none", "edited", "stripped", "regenerated")):
            talk = Talk(router, change)
            prompt = tokens_of(1000, 140 + number)
            said = talk.say(prompt).tokens
            new = tokens_of(40, 150)
            longer, most = {
                "none": ([*prompt, *said, *new], 42),
                "edited": (
                    [*prompt[:500], prompt[500] ^ 1, *prompt[501:], *said, *new],
                    1052 - 480,
                ),
                "stripped": ([*prompt, *said[6:], *new], 46 + 48),
                "regenerated": (prompt, 48),
            }[change]
            before = metric(first, COMPUTED)
            answer = talk.say(longer)
            assert differences([complete(alone, longer)], [answer]) == [], change
            assert metric(first, COMPUTED) - before <= most, change
        assert (turns(router, "hit"), turns(router, "cut")) == (1, 3)
