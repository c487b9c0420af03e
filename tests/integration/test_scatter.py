"""Several decoders asked at once, over real engines: one answers, and the others keep nothing."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from tests.integration.oracle import complete, complete_all, differences, streamed, text_of
from tests.integration.processes import BOTH_WAYS, Launcher, Server, is_settled, metric, wait_for

COMPUTED = "disagg_engine_prompt_tokens_computed_total"
SCATTERED = 'disagg_router_scattered_total{outcome="%s"}'
FLAGS = (
    "--hedged-decoders",
    "3",
    "--decode-first-threshold",
    "0.5",
    "--prefill-policy",
    "round_robin",
)
LENGTH = 600


@pytest.fixture(scope="module")
def others(launcher: Launcher) -> Iterator[Server]:
    with launcher.engine("other", extra=BOTH_WAYS) as server:
        yield server


@pytest.fixture(scope="module")
def router(
    launcher: Launcher, prefiller: Server, decoder: Server, others: Server
) -> Iterator[Server]:
    with launcher.router([prefiller], [decoder, others], *FLAGS) as server:
        wait_for(lambda: _knows(server), "its decoders are known", 30)
        yield server


def _knows(router: Server) -> bool:
    """That they understand the threshold, as their pages say."""
    streamed(router, text_of(64, 1), 2)
    return legs(router, "rejected") + legs(router, "won") > 0


def legs(router: Server, outcome: str) -> float:
    return router.metrics().get(SCATTERED % outcome, 0)


def nothing_left(*servers: Server) -> None:
    for server in servers:
        wait_for(partial(_is_back, server), f"{server.name} has its blocks back", 30)


def _is_back(server: Server) -> bool:
    return is_settled(server.metrics())


@pytest.mark.parametrize("holder", [0, 1])
def test_whoever_holds_the_prompt_answers_and_nobody_computes_it(
    router: Server, prefiller: Server, decoder: Server, others: Server, alone: Server, holder: int
) -> None:
    prompt = text_of(LENGTH, 100 + holder)
    engines = (decoder, others)
    complete(engines[holder], prompt)
    servers = (prefiller, *engines)
    before = [metric(server, COMPUTED) for server in servers]
    won = legs(router, "won")
    got = streamed(router, prompt, 12)
    assert differences([complete(alone, prompt)], [got]) == []
    wait_for(lambda: legs(router, "won") == won + 1, "it is counted", 10)
    after = [metric(server, COMPUTED) for server in servers]
    assert sum(after) - sum(before) <= 64, "the end of the prompt, which is no whole block"
    nothing_left(*servers)


def test_where_nobody_holds_it_a_prefiller_computes_it_once(
    router: Server, prefiller: Server, decoder: Server, others: Server, alone: Server
) -> None:
    prompt = text_of(LENGTH, 110)
    servers = (decoder, others)
    rejected = legs(router, "rejected")
    before = metric(prefiller, COMPUTED), [metric(server, COMPUTED) for server in servers]
    assert differences([complete(alone, prompt)], [streamed(router, prompt, 12)]) == []
    assert legs(router, "rejected") == rejected + 2
    assert metric(prefiller, COMPUTED) - before[0] == LENGTH
    assert [metric(server, COMPUTED) for server in servers] == before[1]
    nothing_left(prefiller, *servers)


def test_of_two_that_hold_it_one_answers_and_the_other_keeps_no_block(
    router: Server, prefiller: Server, decoder: Server, others: Server, alone: Server
) -> None:
    prompts = [text_of(LENGTH, 120 + number) for number in range(8)]
    for server in (decoder, others):
        complete_all(server, prompts)
    right = complete_all(alone, prompts, at_once=1, max_tokens=40)
    won, left = legs(router, "won"), legs(router, "stopped")
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda prompt: streamed(router, prompt, 40), prompts))
    assert differences(right, got) == []
    wait_for(lambda: legs(router, "won") == won + 8, "they are counted", 10)
    assert legs(router, "stopped") == left + 8
    nothing_left(prefiller, decoder, others)


def test_a_frozen_decoder_holds_nobody_up(
    router: Server, prefiller: Server, decoder: Server, others: Server, alone: Server
) -> None:
    prompt, held = text_of(LENGTH, 140), text_of(LENGTH, 141)
    complete(decoder, held)
    right = [complete(alone, held), complete(alone, prompt)]
    with others.frozen():
        first = streamed(router, held, 12)
    second = streamed(router, prompt, 12)
    assert differences(right, [first, second]) == []
    nothing_left(prefiller, decoder, others)
