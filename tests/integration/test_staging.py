"""Host buffers: KV that travels between mirrors of the caches is as right as without them."""

import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.integration.legs import coordinates_in, decode, prefill, prefill_body, take_turn
from tests.integration.oracle import Answer, complete, differences, text_of, tokens_of
from tests.integration.processes import (
    BOTH_WAYS,
    CONNECTORS,
    Description,
    Launcher,
    Server,
    described,
    metric,
)

STAGING = "tests.integration.staging_engine"
FETCHED = "disagg_engine_prompt_tokens_fetched_total"
COMPUTED = "disagg_engine_prompt_tokens_computed_total"


def staging(mode: str) -> tuple[Description, Description]:
    both: dict[str, Any] = {"module": STAGING, "extra": BOTH_WAYS, "connector": CONNECTORS[mode]}
    # A small step, so that a prompt takes several.
    small = ("--max-num-batched-tokens", "128")
    return described("prefill", *small, **both), described("decode", **both)


by_pull_and_push = pytest.mark.parametrize(
    ("mode", "prefiller", "decoder"),
    [(mode, *staging(mode)) for mode in CONNECTORS],
    ids=CONNECTORS,
    indirect=["prefiller", "decoder"],
    scope="module",
)


def both_legs(prefiller: Server, decoder: Server, prompt: str, mode: str) -> Answer:
    if mode == "pull":
        return decode(decoder, prompt, prefill(prefiller, prompt)).answer
    name = str(uuid.uuid4())
    answer = prefill(prefiller, "hello")
    params = coordinates_in(answer)
    params |= {"do_remote_prefill": True, "remote_request_id": name, "transfer_id": name}
    body = prefill_body(prompt)
    body["kv_transfer_params"]["transfer_id"] = name
    with ThreadPoolExecutor(1) as pool:
        p_leg = pool.submit(prefiller.post, "/v1/completions", body)
        turn = decode(decoder, prompt, params)
        assert p_leg.result(timeout=60).status_code == 200
    return turn.answer


@by_pull_and_push
@pytest.mark.parametrize("length", [1, 31, 33, 300, 700])
def test_tokens_and_logprobs_are_those_of_one_engine_alone(
    prefiller: Server, decoder: Server, alone: Server, mode: str, length: int
) -> None:
    prompt = text_of(length, 800 + length)
    fetched = metric(decoder, FETCHED)
    assert (
        differences([complete(alone, prompt)], [both_legs(prefiller, decoder, prompt, mode)]) == []
    )
    assert metric(decoder, FETCHED) == fetched + length


@by_pull_and_push
def test_what_the_prefillers_cache_held_is_saved_too(
    prefiller: Server, decoder: Server, alone: Server, mode: str
) -> None:
    """Computed for a request that nobody was to read from."""
    prompt = text_of(320, 900)
    complete(prefiller, prompt)
    cached = metric(prefiller, "disagg_engine_prompt_tokens_cached_total")
    answer = both_legs(prefiller, decoder, prompt + " and more", mode)
    assert differences([complete(alone, prompt + " and more")], [answer]) == []
    assert metric(prefiller, "disagg_engine_prompt_tokens_cached_total") - cached >= 320


def test_turns_come_back_and_are_handed_on(
    prefiller: Server, decoder: Server, alone: Server
) -> None:
    prompt = tokens_of(300, 901)
    turn = take_turn(prefiller, decoder, prompt)
    longer = [*prompt, *turn.answer.tokens, *tokens_of(70, 902)]
    computed = metric(prefiller, COMPUTED)
    again = take_turn(prefiller, decoder, longer, turn.params)
    assert differences([complete(alone, longer)], [again.answer]) == []
    assert metric(prefiller, COMPUTED) - computed < 100


def test_blocks_that_were_not_saved_are_seen_by_the_oracle(
    launcher: Launcher, alone: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISAGG_TEST_UNSAVED", "1")
    prompt = text_of(100, 903)
    with (
        launcher.engine("unsaved", module=STAGING) as prefiller,
        launcher.engine("decode") as decoder,
    ):
        answer = decode(decoder, prompt, prefill(prefiller, prompt)).answer
        assert differences([complete(alone, prompt)], [answer]) != []
