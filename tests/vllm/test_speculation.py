"""Decoders that guess ahead: what they had guessed wrongly is in nobody's KV, and nobody's answer.

Greedy: then what is guessed changes no token. By the prompt's own words (`ngram`), which only the
decoder need do; by a draft model, whose KV moves with the model's: the same one here, so that what
it guesses is mostly right; and by EAGLE, whose layers stand behind the model's and move as they do.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.legs import decode, decode_body, prefill
from tests.integration.oracle import complete, differences, tokens_of
from tests.integration.processes import Server, metric
from tests.integration.talk import Talk, turns
from tests.vllm.eagle_model import write_eagle_model
from tests.vllm.measures import COMPUTED, FETCHED, counted, nothing_left
from tests.vllm.releases import NEXT
from tests.vllm.servers import OURS, SCHEDULER, TRUSTING, UNCACHED, Fleet, Kind

DRAFTED = r"vllm:spec_decode_num_draft_tokens_total\{.*"
ACCEPTED = r"vllm:spec_decode_num_accepted_tokens_total\{.*"
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}
LENGTHS = (5, 31, 33, 64, 100, 257, 700)


def speculating(**config: Any) -> tuple[str, ...]:
    return (*SCHEDULER, "--speculative-config", json.dumps(config))


def repeating(length: int, seed: int) -> list[int]:
    """Of few tokens, so that much of it was there before."""
    return [65 + token % 3 for token in tokens_of(length, seed)]


@pytest.fixture(scope="module")
def guessing(fleet: Fleet) -> Iterator[Server]:
    with fleet.server(Kind("guessing", OURS, speculating(**NGRAM))) as server:
        yield server


@pytest.fixture(scope="module")
def drafting(fleet: Fleet) -> Iterator[list[Server]]:
    options = speculating(method="draft_model", model=str(fleet.model), num_speculative_tokens=3)
    with fleet.servers(
        Kind("drafting-p", TRUSTING, (*options, UNCACHED)),
        Kind("drafting-d", OURS, options),
    ) as servers:
        yield servers


@pytest.fixture(scope="module")
def eagles(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    draft = write_eagle_model(tmp_path_factory.mktemp("eagle"), fleet.model)
    options = speculating(method="eagle", model=str(draft), num_speculative_tokens=3)
    with fleet.servers(
        Kind("eagle-p", TRUSTING, (*options, UNCACHED)), Kind("eagle-d", OURS, options)
    ) as servers:
        yield servers


@pytest.fixture(params=["ngram", "drafting", pytest.param("eagles", marks=pytest.mark.nightly)])
def pair(request: pytest.FixtureRequest) -> list[Server]:
    if request.param == "ngram":
        return [request.getfixturevalue("prefiller"), request.getfixturevalue("guessing")]
    servers: list[Server] = request.getfixturevalue(request.param)
    return servers


def test_prompts_are_those_of_one_vllm_alone(pair: list[Server], alone: Server) -> None:
    first, second = pair
    drafted, accepted = metric(second, DRAFTED), metric(second, ACCEPTED)
    fetched = metric(second, FETCHED)
    with nothing_left(first):
        for length in LENGTHS:
            prompt = repeating(length, 400 + length)
            turn = decode(second, prompt, prefill(first, prompt), max_tokens=40)
            assert differences([complete(alone, prompt, max_tokens=40)], [turn.answer]) == []
    assert metric(second, FETCHED) - fetched == sum(LENGTHS)
    assert counted(second, "pulls_failed") == 0
    drafted, accepted = metric(second, DRAFTED) - drafted, metric(second, ACCEPTED) - accepted
    assert 0 < accepted < drafted


def test_a_turn_pulls_no_guess(fleet: Fleet, pair: list[Server], alone: Server) -> None:
    first, second = pair
    with fleet.router([first], [second], "--decode-first-turns", "0") as router:
        talk, prompt = Talk(router, f"guessed by {second.name}", stream=True), repeating(500, 450)
        for number in range(3):
            before = metric(first, COMPUTED)
            answer = talk.say(prompt, max_tokens=30)
            assert differences([complete(alone, prompt, max_tokens=30)], [answer]) == []
            computed = metric(first, COMPUTED) - before
            assert computed == 500 if number == 0 else computed <= 40 + 16
            prompt += [*answer.tokens, *repeating(40, 460 + number)]
        assert turns(router, "hit") == 2


def test_what_was_guessed_behind_an_answers_end_is_not_told_of(drafting: list[Server]) -> None:
    """A stock reader has no other word for how far the blocks are the answer's. One of four
    lengths, one after the other, ends in the midst of each step's guesses: there the answer's last
    token has KV too, for it was guessed; in vLLM 0.33 none does."""
    prompt, beyond = repeating(60, 480), []
    for max_tokens in range(20, 24):
        turn = decode(drafting[1], prompt, {"retain": True}, max_tokens)
        assert turn.params is not None
        beyond.append(turn.params["remote_num_tokens"] - len(prompt) - max_tokens)
    is_next = drafting[1].get("/version").json()["version"] == NEXT
    assert (min(beyond), max(beyond)) == (-1, -1 if is_next else 0)


def test_a_draft_models_kv_is_asked_of_nobody_who_has_none(
    prefiller: Server, drafting: list[Server]
) -> None:
    prompt = repeating(100, 470)
    params = prefill(prefiller, prompt)
    answer = drafting[1].post("/v1/completions", decode_body(prompt, params))
    assert answer.status_code == 500  # kv_load_failure_policy says so
    assert "number of layers differs: 8 here, 4 there" in drafting[1].log.read_text()
