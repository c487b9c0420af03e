"""Layers that keep a state, in engines that cache prefixes: beside a request's own state they list
states of earlier tokens, and holes.

`plain` caches nothing. What it answers by itself is right, and it is a decode engine, too.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from tests.integration.legs import decode, prefill
from tests.integration.oracle import complete, differences, tokens_of
from tests.integration.processes import Server, metric
from tests.vllm import mended_states
from tests.vllm.measures import COMPUTED, FETCHED, nothing_left
from tests.vllm.servers import CHUNKS, OURS, PUSH, SCHEDULER, UNCACHED, WAITS_BRIEFLY, Fleet, Kind
from tests.vllm.state_model import write_state_model
from tests.vllm.test_push import both_legs
from tests.vllm.test_state import LENGTHS, is_not_written, pulled
from tests.vllm.test_threshold import finish_reason

CACHED = "--enable-prefix-caching"
BLOCK = 32
RECOMPUTING = {**OURS, "kv_load_failure_policy": "recompute"}


MENDED: dict[str, Any] = {"model": write_state_model, "plugins": (mended_states,)}
SERVERS = (
    Kind("cached-p", OURS, (*SCHEDULER, CACHED, *CHUNKS), **MENDED),
    Kind("cached-d", RECOMPUTING, (*SCHEDULER, CACHED), **MENDED),
    Kind("plain-d", OURS, (*SCHEDULER, UNCACHED, *CHUNKS), write_state_model),
)
PUSHING = (
    Kind("cached-push-p", PUSH, (*SCHEDULER, CACHED, *CHUNKS), **MENDED),
    Kind("cached-push-d", WAITS_BRIEFLY, (*SCHEDULER, CACHED), **MENDED),
)


@pytest.mark.parametrize("of", ["cached", "plain"])
def test_prompts_are_those_of_one_engine_alone(servers: list[Server], of: str) -> None:
    """Whether D caches prefixes or not."""
    prefiller, cached, plain = servers
    decoder = cached if of == "cached" else plain
    for length in LENGTHS:
        prompt = tokens_of(length, len(of) * 10_000 + length)
        right, fetched = complete(plain, prompt), metric(decoder, FETCHED)
        with nothing_left(prefiller, decoder):
            turn = pulled(prefiller, decoder, prompt)
        assert differences([right], [turn.answer]) == [], length
        assert metric(decoder, FETCHED) - fetched == length - 1


def test_a_history_that_both_have_is_neither_computed_nor_moved(servers: list[Server]) -> None:
    """Three turns of a conversation, each of which begins with all of the last one. Both find the
    state at the end of the last prompt's last whole block, or later; the state moves each time."""
    prefiller, decoder, plain = servers
    prompt = tokens_of(700, 9700)
    for turn in range(3):
        right = complete(plain, prompt)
        computed, fetched = metric(prefiller, COMPUTED), metric(decoder, FETCHED)
        with nothing_left(prefiller, decoder):
            answer = pulled(prefiller, decoder, prompt).answer
        assert differences([right], [answer]) == []
        new = len(prompt) if turn == 0 else len(answer.tokens) + 40 + 2 * BLOCK
        assert metric(prefiller, COMPUTED) - computed <= new
        assert metric(decoder, FETCHED) - fetched <= new
        prompt += [*answer.tokens, *tokens_of(40, 9701 + turn)]


def test_of_a_prompt_that_begins_alike_the_state_is_its_own(servers: list[Server]) -> None:
    """D holds the first one's states and P its own: neither is taken for the other's."""
    prefiller, decoder, plain = servers
    prompt = tokens_of(500, 9800)
    others = [[*prompt[:at], prompt[at] ^ 1, *prompt[at + 1 :]] for at in (31, 32, 250, 480, 498)]
    for asked in (prompt, *others, prompt[:480], prompt):
        with nothing_left(prefiller, decoder):
            answer = pulled(prefiller, decoder, asked).answer
        assert differences([complete(plain, asked)], [answer]) == []


def test_another_prompts_state_is_not_taken(servers: list[Server]) -> None:
    """P has computed what only begins alike: D computes all but what it has a state of."""
    prefiller, decoder, plain = servers
    prompt = tokens_of(300, 9810)
    other = [*prompt[:250], *tokens_of(50, 9811)]
    fetched = metric(decoder, FETCHED)
    with nothing_left(prefiller, decoder):
        answer = decode(decoder, other, prefill(prefiller, prompt)).answer
    assert differences([complete(plain, other)], [answer]) == []
    assert metric(decoder, FETCHED) == fetched


def test_after_a_load_that_failed_all_is_computed_from_a_state_that_is_there(
    servers: list[Server],
) -> None:
    prefiller, decoder, plain = servers
    prompt = tokens_of(600, 9820)
    with nothing_left(prefiller, decoder):
        pulled(prefiller, decoder, prompt)
        longer = [*prompt, *tokens_of(90, 9821)]
        params = prefill(prefiller, longer)
        decode(decoder, longer, params)
        # P holds it no more.
        answer = decode(decoder, [*longer, 7], {**params, "remote_request_id": "nobody"}).answer
        again = decode(decoder, longer, params).answer
    assert differences([complete(plain, [*longer, 7])], [answer]) == []
    assert differences([complete(plain, longer)], [again]) == []


def test_keys_without_a_state_are_no_hit(servers: list[Server]) -> None:
    """D has all but the last block's keys and values, and the state behind them all: none that goes
    on from where the keys end."""
    prefiller, decoder, plain = servers
    prompt = tokens_of(610, 9825)
    decode(decoder, prompt, prefill(prefiller, prompt), max_tokens=1)
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "stream": False}
    threshold = {"cache_hit_threshold": 0.5}
    asked = partial(finish_reason, decoder, "/v1/completions")
    assert asked(body | threshold) == "cache_threshold"
    assert differences([complete(plain, prompt)], [complete(decoder, prompt)]) == []
    assert asked(body | threshold) == "length"


def test_routed_answers_are_those_of_one_engine_alone(fleet: Fleet, servers: list[Server]) -> None:
    """Several at once, half of which begin alike, and a conversation."""
    prefiller, decoder, plain = servers
    common = tokens_of(400, 9830)
    asked = [[*common[: 80 * n], *tokens_of(100 + n, 9831 + n)] for n in range(8)]
    right = [complete(plain, prompt) for prompt in asked]
    with fleet.router([prefiller], [decoder]) as router, nothing_left(prefiller, decoder):
        with ThreadPoolExecutor(4) as pool:
            assert differences(right, list(pool.map(partial(complete, router), asked))) == []
        prompt = common
        for number in range(3):
            answer = complete(router, prompt, conversation_id="cached states")
            assert differences([complete(plain, prompt)], [answer]) == []
            prompt = [*prompt, *answer.tokens, *tokens_of(20, 9840 + number)]


def test_pushed_prompts_are_those_of_one_engine_alone(
    servers: list[Server], pushing: list[Server]
) -> None:
    prefiller, decoder = pushing
    plain = servers[-1]
    for length in LENGTHS:
        prompt = tokens_of(length, 9900 + length)
        for asked in (prompt, [*prompt, *tokens_of(40, 9950 + length)]):
            fetched = metric(decoder, FETCHED)
            with nothing_left(*pushing):
                turn = both_legs(prefiller, decoder, asked)
            assert differences([complete(plain, asked)], [turn.answer]) == [], len(asked)
            assert metric(decoder, FETCHED) > fetched or len(asked) == 1


def test_a_state_of_another_prompt_is_not_written(
    servers: list[Server], pushing: list[Server]
) -> None:
    prefiller, decoder = pushing
    prompt = tokens_of(300, 9990)
    other = [*prompt[:298], prompt[298] ^ 1, prompt[299]]
    is_not_written(pushing, other, prompt)
    answer = both_legs(prefiller, decoder, prompt).answer
    assert differences([complete(servers[-1], prompt)], [answer]) == []
