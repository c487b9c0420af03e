"""Pull, turns, the threshold and answers that begin in the middle, inside the newest release:
right as one of its engines alone."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from engine_ext.vllm.compat.vllm_symbols import PROMISED
from engine_ext.vllm.optional import TIER_2
from tests.integration.legs import decode, decode_body, holders, prefill
from tests.integration.oracle import complete, differences, tokens_of
from tests.integration.processes import Server, metric
from tests.integration.talk import Talk, turns
from tests.vllm.measures import COMPUTED, FETCHED, counted, nothing_left
from tests.vllm.releases import BUILD, LENGTHS, NEXT
from tests.vllm.servers import OURS, SCHEDULER, TRUSTING, UNCACHED, Kind

# They ask for a prefiller, a decoder and one that answers alone: here for this file's.
from tests.vllm.test_resumed_answers import (  # noqa: F401
    test_a_character_and_a_stop_string_may_lie_across_the_seam,
    test_a_prefillers_own_token_is_the_answers_first,
    test_an_engine_with_none_of_the_kv_goes_on_and_says_what_is_new,
    test_sampling_goes_on_where_it_was,
    test_what_has_ended_is_not_continued_and_the_prefiller_hears_of_it,
)
from tests.vllm.test_threshold import (  # noqa: F401
    test_a_prompt_below_the_threshold_is_refused_and_at_it_is_not,
    test_prefill_legs_are_not_measured_by_the_threshold,
)

OPTIONAL = [each.name for each in PROMISED + TIER_2]


RELEASE = NEXT
PAIR = (Kind("next-p", TRUSTING, (*SCHEDULER, UNCACHED)), Kind("next-d", OURS, SCHEDULER))


@pytest.fixture(scope="module")
def prefiller(pair: list[Server]) -> Server:
    return pair[0]


@pytest.fixture(scope="module")
def alone(prefiller: Server) -> Server:
    """Without params, and without a prefix cache, it answers by itself."""
    return prefiller


@pytest.fixture(scope="module")
def decoder(pair: list[Server]) -> Server:
    return pair[1]


def test_it_says_that_all_of_ours_fits(pair: list[Server]) -> None:
    said = pair[0].get("/disagg/identity").json()
    assert said["versions"]["vllm"] == NEXT
    assert said["versions"]["connector"] == "15"
    assert said["features"][3:] == OPTIONAL
    assert said["missing"] == {}
    promised = {"begun", "cache_hit_threshold", "streamed_kv_transfer_params", "turns"}
    assert promised <= set(said["capabilities"])


def test_a_prefix_is_borrowed_from_an_idle_engine(pair: list[Server]) -> None:
    prefiller, decoder = pair
    system = tokens_of(640, 900)
    complete(decoder, [*system, *tokens_of(20, 901)])
    prompt, fetched = [*system, *tokens_of(50, 902)], metric(prefiller, FETCHED)
    with nothing_left(prefiller, decoder):
        params = prefill(prefiller, prompt, holders(decoder, 640))
        assert params["borrowed_tokens"] == 640
        assert metric(prefiller, FETCHED) - fetched == 640
        turn = decode(decoder, prompt, params)
    assert differences([complete(prefiller, prompt)], [turn.answer]) == []


def test_prompts_through_the_router_are_those_of_one_engine_alone(
    router: Server, pair: list[Server]
) -> None:
    prefiller, decoder = pair
    prompts = [tokens_of(length, 7000 + length) for length in LENGTHS]
    right = [complete(prefiller, prompt) for prompt in prompts]
    before = metric(decoder, FETCHED)
    with nothing_left(prefiller), ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda prompt: complete(router, prompt), prompts))
    assert differences(right, got) == []
    assert metric(decoder, FETCHED) - before > 2500
    assert counted(decoder, "pulls_failed") == 0


@pytest.mark.parametrize("stream", [True, False])
def test_turns_prefill_only_what_is_new(router: Server, pair: list[Server], stream: bool) -> None:
    prefiller, _ = pair
    talk = Talk(router, f"next-{stream}", stream)
    prompt, hits = tokens_of(700, 7100 + stream), turns(router, "hit")
    for number in range(3):
        right, before = complete(prefiller, prompt), metric(prefiller, COMPUTED)
        answer = talk.say(prompt)
        assert differences([right], [answer]) == []
        computed = metric(prefiller, COMPUTED) - before
        assert computed == 700 if number == 0 else computed <= 51
        prompt += [*answer.tokens, *tokens_of(50, 7110 + number)]
    assert turns(router, "hit") - hits == 2


def test_an_edited_history_is_answered_right(router: Server, pair: list[Server]) -> None:
    talk, prompt = Talk(router, "next-edited", True), tokens_of(600, 7200)
    whole = [*prompt, *talk.say(prompt).tokens]
    changed = [*whole[:300], whole[300] ^ 1, *whole[301:], *tokens_of(40, 7201)]
    assert differences([complete(pair[0], changed)], [talk.say(changed)]) == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("endpoint", ["completions", "chat/completions"])
def test_a_refusal_is_said_once(decoder: Server, endpoint: str, stream: bool) -> None:
    text = f"{endpoint} {stream} of a prompt that nobody has asked for before. " * 4
    chat = [{"role": "user", "content": text}]
    body = {"model": "tiny", "max_tokens": 2, "stream": stream, "cache_hit_threshold": 0.5}
    body |= {"prompt": text} if endpoint == "completions" else {"messages": chat}
    assert decoder.post(f"/v1/{endpoint}", body).text.count('"cache_threshold"') == 1


def test_streams_say_their_params_once(pair: list[Server]) -> None:
    prefiller, decoder = pair
    prompt = tokens_of(100, 7300)
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "stream": True}
    params = {**prefill(prefiller, prompt), "retain": True}
    said = decoder.post("/v1/completions", {**body, "kv_transfer_params": params})
    assert said.text.count('"kv_transfer_params"') == 1
    assert said.text.endswith("data: [DONE]\n\n")


def test_engines_of_two_releases_part_in_words(trio: list[Server], decoder: Server) -> None:
    prompt = tokens_of(100, 7900)
    response = decoder.post("/v1/completions", decode_body(prompt, prefill(trio[1], prompt)))
    assert response.status_code == 500
    assert f"vllm_version ({NEXT} here, {BUILD} there)" in decoder.log.read_text()
