"""Multi-head latent attention: one row a token for all heads, between engines of two block sizes,
each of which is prefill and decode engine in turn."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from engine_ext.reference.tiny_model import TinyModel, write_tiny_model
from tests.integration.legs import check_three_turns, decode, holders, prefill
from tests.integration.oracle import complete, differences, tokens_of
from tests.integration.processes import (
    BOTH_WAYS,
    CONNECTORS,
    UNCACHED,
    Launcher,
    Server,
    freed,
    metric,
    wait_for,
)

LENGTHS = (1, 15, 16, 17, 31, 32, 33, 65, 300, 1001)
COMPUTED = "disagg_engine_prompt_tokens_computed_total"
FETCHED = "disagg_engine_prompt_tokens_fetched_total"
PLAIN = tokens_of(400, 1)
CHANGED = [*PLAIN[:200], PLAIN[200] ^ 1, *PLAIN[201:]]
SHARED = 192
"""Of their tokens, in whole blocks of either size."""


class Pair(NamedTuple):
    prefiller: Server
    decoder: Server


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("latent"), TinyModel(latent=64))


@pytest.fixture(scope="module")
def alone(launcher: Launcher, latent: Path) -> Iterator[Server]:
    with launcher.engine("latent-alone", model=latent) as server:
        yield server


@pytest.fixture(scope="module", params=CONNECTORS)
def engines(
    request: pytest.FixtureRequest, launcher: Launcher, latent: Path
) -> Iterator[tuple[Server, Server]]:
    """Of 16 and of 32 tokens a block. Without caches of their own, they move what they need."""
    connector = CONNECTORS[request.param]
    with ExitStack() as stack:
        small, large = (
            stack.enter_context(
                launcher.engine(
                    f"latent-{size}",
                    *("--block-size", size, UNCACHED),
                    extra=BOTH_WAYS,
                    connector=connector,
                    model=latent,
                )
            )
            for size in ("16", "32")
        )
        yield small, large


@pytest.fixture(params=["16 to 32", "32 to 16"])
def pair(request: pytest.FixtureRequest, engines: tuple[Server, Server]) -> Pair:
    small, large = engines
    return Pair(small, large) if request.param == "16 to 32" else Pair(large, small)


def test_what_was_prefilled_elsewhere_is_decoded_as_if_here(pair: Pair, alone: Server) -> None:
    prompts = [tokens_of(length, length) for length in LENGTHS]
    right = [complete(alone, prompt) for prompt in prompts]
    before = metric(pair.decoder, COMPUTED)
    got = [decode(pair.decoder, prompt, prefill(pair.prefiller, prompt)) for prompt in prompts]
    assert differences(right, [turn.answer for turn in got]) == []
    assert metric(pair.decoder, COMPUTED) - before == len(prompts)
    wait_for(lambda: freed(pair.prefiller), "P's are freed")


def test_turns_go_back_and_forth(pair: Pair, alone: Server) -> None:
    check_three_turns(pair.prefiller, pair.decoder, alone, tokens_of(600, 1))


@pytest.mark.parametrize("engines", ["pull"], indirect=True)
def test_of_another_prompts_rows_only_those_it_shares_are_taken(pair: Pair, alone: Server) -> None:
    before = metric(pair.decoder, FETCHED)
    turn = decode(pair.decoder, PLAIN, prefill(pair.prefiller, CHANGED))
    assert differences([complete(alone, PLAIN)], [turn.answer]) == []
    assert metric(pair.decoder, FETCHED) - before == SHARED


@pytest.mark.parametrize("engines", ["pull"], indirect=True)
def test_one_block_of_rows_that_are_zero_is_seen(
    engines: tuple[Server, Server], launcher: Launcher, latent: Path, alone: Server
) -> None:
    """The planted error: were it not, equal answers would prove nothing."""
    prompts = [tokens_of(length, length) for length in (65, 300, 1001)]
    corrupt = "tests.integration.corrupting_engine"
    with launcher.engine("latent-corrupt", module=corrupt, model=latent) as decoder:
        got = [decode(decoder, prompt, prefill(engines[0], prompt)).answer for prompt in prompts]
    right = [complete(alone, prompt) for prompt in prompts]
    assert len(differences(right, got)) == len(prompts)


def test_borrowed_rows_give_the_answer_of_one_engine_alone(
    launcher: Launcher, latent: Path, alone: Server
) -> None:
    system = tokens_of(640, 50)
    prompt = [*system, *tokens_of(50, 51)]
    with (
        launcher.engine("latent-holder", extra=BOTH_WAYS, model=latent) as holder,
        launcher.engine("latent-borrower", extra=BOTH_WAYS, model=latent) as borrower,
    ):
        complete(holder, [*system, *tokens_of(20, 52)], 1)
        turn = decode(borrower, prompt, holders(holder, len(system)))
    assert turn.params == {"borrowed_tokens": len(system), "lender": 0}
    assert differences([complete(alone, prompt)], [turn.answer]) == []
