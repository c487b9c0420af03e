"""Full and sliding-window layers in one model: two KV-cache groups, with ours and with stock."""

from dataclasses import dataclass, field

import pytest

from tests.integration.legs import decode, prefill, take_turn
from tests.integration.oracle import Answer, complete, differences, tokens_of
from tests.integration.processes import Server, metric
from tests.vllm.hybrid_model import WINDOW, write_hybrid_model
from tests.vllm.measures import FETCHED, counted, nothing_left
from tests.vllm.servers import OURS, SCHEDULER, STOCK, UNCACHED, Fleet, Kind

LENGTHS = (1, 33, 63, 64, 65, 96, 97, 128, 129, 200, 500, 1500)
ENDING = (95, 127, 159, 191, 255, 319)
"""The last token's window begins with the last token of a block. A stock D answers these wrong,
whoever computed them: when it computes that token, it has given the block up. A stock P gives it up
too, so that our D computes those prompts itself."""


PAIRS = ("ours", "our P, stock D", "stock P, our D")
FIRST_TURN, NEW = tokens_of(300, 3), tokens_of(40, 4)
PLAIN = tokens_of(400, 1)
CHANGED = [*PLAIN[:200], PLAIN[200] ^ 1, *PLAIN[201:]]


def prompts_of(pair: str) -> list[list[int]]:
    lengths = LENGTHS if pair.endswith("stock D") else LENGTHS + ENDING
    return [tokens_of(length, 2000 * len(pair) + length) for length in lengths]


@dataclass(frozen=True)
class Oracle:
    """What one vLLM without a connector answers."""

    answers: dict[tuple[int, ...], Answer] = field(default_factory=dict)

    def learn(self, alone: Server, prompt: list[int]) -> Answer:
        self.answers[tuple(prompt)] = complete(alone, prompt)
        return self(prompt)

    def __call__(self, prompt: list[int]) -> Answer:
        return self.answers[tuple(prompt)]


# Stock; P; D.
SERVERS = (
    Kind("hybrid-stock", STOCK, (UNCACHED,), write_hybrid_model),
    Kind("hybrid-p", OURS, (*SCHEDULER, UNCACHED), write_hybrid_model),
    Kind("hybrid-d", OURS, SCHEDULER, write_hybrid_model),
)


@pytest.fixture(scope="module", autouse=True)
def right(fleet: Fleet) -> Oracle:
    """It has ended before the others start: four vLLMs more than there are already need much
    memory."""
    oracle = Oracle()
    with fleet.server(Kind("hybrid-alone", None, (UNCACHED,), write_hybrid_model)) as alone:
        for prompt in (PLAIN, CHANGED, *(one for pair in PAIRS for one in prompts_of(pair))):
            oracle.learn(alone, prompt)
        said = oracle.learn(alone, FIRST_TURN)
        oracle.learn(alone, [*FIRST_TURN, *said.tokens, *NEW])
    return oracle


@pytest.mark.parametrize("pair", PAIRS)
def test_prompts_are_those_of_one_vllm_alone(
    servers: list[Server], right: Oracle, pair: str
) -> None:
    stock, ours_p, ours_d = servers
    first = stock if pair.startswith("stock") else ours_p
    second = stock if pair.endswith("stock D") else ours_d
    fetched = metric(second, FETCHED)
    with nothing_left(first):
        for prompt in prompts_of(pair):
            params = prefill(first, prompt)
            assert len(params["remote_block_ids"]) == 2, "a list for each group"
            turn = decode(second, prompt, params)
            assert differences([right(prompt)], [turn.answer]) == [], len(prompt)
    # Of one token nothing is fetched; where P may have given up a block, D computes the prompt.
    assert metric(second, FETCHED) - fetched >= sum(LENGTHS) - len(LENGTHS)


def test_of_a_window_only_its_blocks_move(servers: list[Server]) -> None:
    _, prefiller, decoder = servers
    before = counted(decoder, "blocks_received")
    prompt = tokens_of(1500, 2)
    decode(decoder, prompt, prefill(prefiller, prompt))
    moved = counted(decoder, "blocks_received") - before
    everything = -(-1500 // 32)
    assert everything < moved <= everything + WINDOW // 32 + 1


def test_a_turn_is_that_of_one_vllm_alone(servers: list[Server], right: Oracle) -> None:
    _, prefiller, decoder = servers
    turn = take_turn(prefiller, decoder, FIRST_TURN)
    assert differences([right(FIRST_TURN)], [turn.answer]) == []
    longer = [*FIRST_TURN, *turn.answer.tokens, *NEW]
    pulled = counted(prefiller, "pulls_ok")
    again = take_turn(prefiller, decoder, longer, turn.params)
    assert differences([right(longer)], [again.answer]) == []
    assert counted(prefiller, "pulls_ok") == pulled + 1
