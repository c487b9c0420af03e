"""Engines whose blocks hold another number of tokens: the same tokens as one engine alone."""

import pytest

from tests.integration.legs import check_three_turns, decode, prefill
from tests.integration.oracle import complete, differences, tokens_of
from tests.integration.processes import (
    BOTH_WAYS,
    UNCACHED,
    Description,
    Server,
    described,
    freed,
    metric,
    wait_for,
)

LENGTHS = (1, 15, 16, 17, 63, 64, 65, 300, 1001)


def of_blocks(prefill_size: str, decode_size: str) -> tuple[Description, Description]:
    size = "--block-size"
    return (
        described("prefill", size, prefill_size, UNCACHED, extra=BOTH_WAYS),
        described("decode", size, decode_size, extra=BOTH_WAYS),
    )


pytestmark = pytest.mark.parametrize(
    ("prefiller", "decoder"),
    [of_blocks("16", "64"), of_blocks("64", "48")],
    ids=["16-64", "64-48"],
    indirect=True,
    scope="module",
)


def test_what_was_prefilled_elsewhere_is_decoded_as_if_here(
    prefiller: Server, decoder: Server, alone: Server
) -> None:
    prompts = [tokens_of(length, length) for length in LENGTHS]
    right = [complete(alone, prompt) for prompt in prompts]
    got = [decode(decoder, prompt, prefill(prefiller, prompt)).answer for prompt in prompts]
    assert differences(right, got) == []
    assert metric(decoder, "disagg_engine_prompt_tokens_computed_total") == len(prompts)
    wait_for(lambda: freed(prefiller), "P's blocks are freed")


def test_only_what_the_decoders_cache_lacks_is_fetched(
    prefiller: Server, decoder: Server, alone: Server
) -> None:
    start = tokens_of(400, 7)
    for length in (400, 450, 700):
        prompt = [*start, *tokens_of(length - 400, length)]
        answer = decode(decoder, prompt, prefill(prefiller, prompt)).answer
        assert differences([complete(alone, prompt)], [answer]) == []
    assert metric(decoder, "disagg_engine_prompt_tokens_cached_total") >= 2 * 384


def test_turns_go_back_and_forth(prefiller: Server, decoder: Server, alone: Server) -> None:
    check_three_turns(prefiller, decoder, alone, tokens_of(600, 1))
