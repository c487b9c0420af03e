"""Engines whose blocks hold another number of tokens: the same tokens as one engine alone."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.integration.legs import check_three_turns, decode, prefill
from tests.integration.oracle import complete, differences, tokens_of
from tests.integration.processes import BOTH_WAYS, Launcher, Server, metric, wait_for

LENGTHS = (1, 15, 16, 17, 63, 64, 65, 300, 1001)


@pytest.fixture(scope="module", params=[("16", "64"), ("64", "16")], ids=lambda p: "-".join(p))
def pair(request: pytest.FixtureRequest, launcher: Launcher) -> Iterator[tuple[Server, Server]]:
    with ExitStack() as stack:
        yield tuple(
            stack.enter_context(
                launcher.engine(name, "--block-size", size, *options, extra=BOTH_WAYS)
            )
            for name, size, options in (
                ("prefill", request.param[0], ("--no-enable-prefix-caching",)),
                ("decode", request.param[1], ()),
            )
        )  # type: ignore[misc] # two


def freed(server: Server) -> bool:
    return metric(server, "disagg_engine_blocks_delayed") == 0


def test_what_was_prefilled_elsewhere_is_decoded_as_if_here(
    pair: tuple[Server, Server], alone: Server
) -> None:
    prefiller, decoder = pair
    prompts = [tokens_of(length, length) for length in LENGTHS]
    right = [complete(alone, prompt) for prompt in prompts]
    got = [decode(decoder, prompt, prefill(prefiller, prompt)).answer for prompt in prompts]
    assert differences(right, got) == []
    assert metric(decoder, "disagg_engine_prompt_tokens_computed_total") == len(prompts)
    wait_for(lambda: freed(prefiller), "P's blocks are freed")


def test_only_what_the_decoders_cache_lacks_is_fetched(
    pair: tuple[Server, Server], alone: Server
) -> None:
    prefiller, decoder = pair
    start = tokens_of(400, 7)
    for length in (400, 450, 700):
        prompt = [*start, *tokens_of(length - 400, length)]
        answer = decode(decoder, prompt, prefill(prefiller, prompt)).answer
        assert differences([complete(alone, prompt)], [answer]) == []
    assert metric(decoder, "disagg_engine_prompt_tokens_cached_total") >= 2 * 384


def test_turns_go_back_and_forth(pair: tuple[Server, Server], alone: Server) -> None:
    check_three_turns(*pair, alone, tokens_of(600, 1))
