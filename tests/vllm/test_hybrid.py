"""Full and sliding-window layers in one model: two KV-cache groups, with ours and with stock."""

from collections.abc import Iterator

import pytest

from tests.integration.legs import decode, prefill, take_turn
from tests.integration.oracle import complete, differences, tokens_of
from tests.integration.processes import Server
from tests.vllm.hybrid_model import WINDOW, write_hybrid_model
from tests.vllm.measures import counted, nothing_left
from tests.vllm.servers import OURS, SCHEDULER, STOCK, Fleet, Kind

LENGTHS = (1, 33, 63, 64, 65, 96, 97, 128, 129, 200, 500, 1500)
ENDING = (95, 127, 159, 191, 255, 319)
"""The last token's window begins with the last token of a block. A stock D answers these wrong,
whoever computed them: when it computes that token, it has given the block up. A stock P gives it up
too, so that our D computes those prompts itself."""


@pytest.fixture(scope="module")
def servers(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    """Stock; P; D; one vLLM without a connector, which is what the right answer is."""
    model = write_hybrid_model(tmp_path_factory.mktemp("hybrid"))
    uncached = "--no-enable-prefix-caching"
    kinds = (
        Kind("hybrid-stock", STOCK, (uncached,), model),
        Kind("hybrid-p", OURS, (*SCHEDULER, uncached), model),
        Kind("hybrid-d", OURS, SCHEDULER, model),
        Kind("hybrid-alone", None, (uncached,), model),
    )
    # Two at a time: a vLLM that starts keeps a core busy for most of a minute.
    with fleet.servers(*kinds[:2]) as first, fleet.servers(*kinds[2:]) as second:
        yield [*first, *second]


def test_one_token_in_the_middle_of_the_prompt_changes_the_answer(servers: list[Server]) -> None:
    """Else equal tokens would prove nothing."""
    prompt = tokens_of(400, 1)
    changed = [*prompt[:200], prompt[200] ^ 1, *prompt[201:]]
    alone = servers[-1]
    one, other = complete(alone, prompt).tokens, complete(alone, changed).tokens
    assert one != other
    assert len(set(one)) > 4


@pytest.mark.parametrize("pair", ["ours", "our P, stock D", "stock P, our D"])
def test_prompts_are_those_of_one_vllm_alone(servers: list[Server], pair: str) -> None:
    stock, ours_p, ours_d, alone = servers
    first = stock if pair.startswith("stock") else ours_p
    second = stock if pair.endswith("stock D") else ours_d
    with nothing_left(first):
        for length in LENGTHS if second is stock else LENGTHS + ENDING:
            prompt = tokens_of(length, 2000 * len(pair) + length)
            params = prefill(first, prompt)
            assert len(params["remote_block_ids"]) == 2, "a list for each group"
            turn = decode(second, prompt, params)
            assert differences([complete(alone, prompt)], [turn.answer]) == [], length


def test_of_a_window_only_its_blocks_move(servers: list[Server]) -> None:
    _, prefiller, decoder, _ = servers
    before = counted(decoder, "blocks_received")
    prompt = tokens_of(1500, 2)
    decode(decoder, prompt, prefill(prefiller, prompt))
    moved = counted(decoder, "blocks_received") - before
    everything = -(-1500 // 32)
    assert everything < moved <= everything + WINDOW // 32 + 1


def test_a_turn_is_that_of_one_vllm_alone(servers: list[Server]) -> None:
    _, prefiller, decoder, alone = servers
    prompt = tokens_of(300, 3)
    turn = take_turn(prefiller, decoder, prompt)
    longer = [*prompt, *turn.answer.tokens, *tokens_of(40, 4)]
    pulled = counted(prefiller, "pulls_ok")
    again = take_turn(prefiller, decoder, longer, turn.params)
    assert differences([complete(alone, longer)], [again.answer]) == []
    assert counted(prefiller, "pulls_ok") == pulled + 1
