"""Multi-head latent attention in vLLM: one latent vector a token, the same on every tensor-parallel
rank; see tests/vllm/mla_model.py for why the model is as it is."""

import pytest

from tests.integration.legs import decode, prefill, take_turn
from tests.integration.oracle import Answer, complete, differences, tokens_of
from tests.integration.processes import Server, metric
from tests.vllm.measures import COMPUTED, FETCHED, nothing_left
from tests.vllm.mla_model import BACKEND, write_mla_model
from tests.vllm.servers import OURS, SCHEDULER, STOCK, TRUSTING, Fleet, Kind

LENGTHS = (1, 15, 16, 17, 33, 100, 257, 700, 1500)
PAIRS = {
    "2 ranks to 1": ("ranks", "one"),
    "1 to 2 ranks": ("one", "ranks"),
    "our P, stock D": ("one", "stock"),
    "stock P, our D": ("stock", "one"),
}
PLAIN = tokens_of(400, 1)
CHANGED = [*PLAIN[:200], PLAIN[200] ^ 1, *PLAIN[201:]]
FIRST_TURN, SECOND_TURN = tokens_of(300, 3), tokens_of(50, 4)

Right = dict[tuple[int, ...], Answer]


SERVERS = {
    "stock": Kind("stock", STOCK, BACKEND, write_mla_model),
    "one": Kind("one", TRUSTING, (*SCHEDULER, *BACKEND), write_mla_model),
    "ranks": Kind(
        "ranks", OURS, (*SCHEDULER, *BACKEND, "--tensor-parallel-size", "2"), write_mla_model
    ),
}


@pytest.fixture(scope="module", autouse=True)
def right(fleet: Fleet) -> Right:
    """It has ended before the others start: they need much memory."""
    prompts = [PLAIN, CHANGED, FIRST_TURN, *(tokens_of(length, length) for length in LENGTHS)]
    with fleet.server(Kind("mla-alone", None, BACKEND, write_mla_model)) as alone:
        answers = {tuple(prompt): complete(alone, prompt) for prompt in prompts}
        longer = [*FIRST_TURN, *answers[tuple(FIRST_TURN)].tokens, *SECOND_TURN]
        return {**answers, tuple(longer): complete(alone, longer)}


@pytest.mark.parametrize("pair", PAIRS)
def test_prompts_are_those_of_one_vllm_alone(
    servers: dict[str, Server], right: Right, pair: str
) -> None:
    first, second = (servers[name] for name in PAIRS[pair])
    before = metric(second, FETCHED)
    with nothing_left(first):
        for length in LENGTHS:
            prompt = tokens_of(length, length)
            turn = decode(second, prompt, prefill(first, prompt))
            assert differences([right[tuple(prompt)]], [turn.answer]) == [], length
    assert metric(second, FETCHED) - before == sum(LENGTHS) - 1


def test_another_prompts_latents_are_seen(servers: dict[str, Server], right: Right) -> None:
    """The planted error, else equal tokens would prove nothing: a prefill engine that proves
    nothing, and a decode engine that trusts it. One token of 400 is another, not the last: the
    answer is the other prompt's."""
    planted = decode(servers["one"], PLAIN, prefill(servers["stock"], CHANGED))
    assert differences([right[tuple(PLAIN)]], [planted.answer]) != []
    assert differences([right[tuple(CHANGED)]], [planted.answer]) == []


def test_a_turn_is_that_of_one_vllm_alone(servers: dict[str, Server], right: Right) -> None:
    prefiller, decoder = servers["ranks"], servers["one"]
    turn = take_turn(prefiller, decoder, FIRST_TURN)
    assert differences([right[tuple(FIRST_TURN)]], [turn.answer]) == []
    assert turn.params is not None
    longer = [*FIRST_TURN, *turn.answer.tokens, *SECOND_TURN]
    before = metric(prefiller, COMPUTED)
    again = take_turn(prefiller, decoder, longer, turn.params)
    assert differences([right[tuple(longer)]], [again.answer]) == []
    assert metric(prefiller, COMPUTED) - before == len(longer) - turn.params["remote_num_tokens"]
