"""Windows beside full attention with larger heads (Gemma 4): blocks of a group have another number
of tokens than those of the other group."""

import pytest

from tests.integration.legs import decode, prefill
from tests.integration.oracle import complete, differences, tokens_of
from tests.integration.processes import Server, metric, wait_for
from tests.vllm.gemma4_model import WINDOW, write_gemma4_model
from tests.vllm.measures import FETCHED, counted, nothing_left, prefills_only_what_is_new
from tests.vllm.servers import (
    PUSH,
    SCHEDULER,
    STOCK,
    TRUSTING,
    UNCACHED,
    Fleet,
    Kind,
    chunking_pair,
)
from tests.vllm.test_push import both_legs

pytestmark = pytest.mark.nightly

LENGTHS = (1, 31, 32, 33, WINDOW - 1, WINDOW, WINDOW + 1, 96, 97, 128, 129, 257, 700, 1500)
ENDING = (95, 127, 159, 255)
"""The last token's window begins with the last token of a block."""
PLAIN = (*SCHEDULER, UNCACHED)
PAIR = (
    Kind("gemma4-p", TRUSTING, PLAIN, write_gemma4_model),
    Kind("gemma4-d", TRUSTING, PLAIN, write_gemma4_model),
)


def test_prompts_are_those_of_one_vllm_alone(pair: list[Server]) -> None:
    first, second = pair
    before = metric(second, FETCHED)
    with nothing_left(*pair):
        for length in (*LENGTHS, *ENDING):
            prompt = tokens_of(length, 14_000 + length)
            turn = decode(second, prompt, prefill(first, prompt))
            assert differences([complete(first, prompt)], [turn.answer]) == [], length
    lengths = (*LENGTHS, *ENDING)
    assert metric(second, FETCHED) - before == sum(lengths) - len(lengths)


def test_an_answer_depends_on_the_first_token(pair: list[Server]) -> None:
    """Else equal answers would prove little."""
    plain = tokens_of(500, 14_100)
    right, wrong = (complete(pair[0], [first, *plain[1:]]) for first in (plain[0], plain[0] ^ 1))
    assert differences([right], [wrong]) != []


def test_turns_prefill_only_what_is_new(pair: list[Server]) -> None:
    first, second = pair
    prefills_only_what_is_new(first, second, first, tokens_of(300, 14_200), 14_201)


def test_pushed_prompts_are_those_of_one_vllm_alone(fleet: Fleet) -> None:
    with fleet.servers(*chunking_pair("gemma4-push", PUSH, write_gemma4_model)) as (first, second):
        for length in (*LENGTHS, *ENDING):
            prompt = tokens_of(length, 14_300 + length)
            turn = both_legs(first, second, prompt)
            assert differences([complete(first, prompt)], [turn.answer]) == [], length
        wait_for(lambda: counted(first, "pushes_ok") >= len(LENGTHS), "all were pushed")


def test_with_stock(fleet: Fleet, pair: list[Server]) -> None:
    ours = pair[0]
    with fleet.server(Kind("gemma4-stock", STOCK, (UNCACHED,), write_gemma4_model)) as stock:
        for first, second in ((ours, stock), (stock, ours)):
            for length in LENGTHS:
                prompt = tokens_of(length, 14_400 + length)
                turn = decode(second, prompt, prefill(first, prompt))
                assert differences([complete(first, prompt)], [turn.answer]) == [], length
