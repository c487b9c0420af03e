"""An answer that begins on one engine and goes on on another: KV crosses over real NIXL."""

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from engine_ext.common.resume_payload import ResumePayload, read_resume_payload
from tests.integration.legs import PREFILL, coordinates_in, prefill_body
from tests.integration.oracle import Answer, body_of, complete, differences, text_of, tokens_of
from tests.integration.processes import (
    BOTH_WAYS,
    UNCACHED,
    Launcher,
    Server,
    described,
    metric,
    wait_for,
)

PUSH = "DisaggPushConnector"
COMPUTED = "disagg_engine_prompt_tokens_computed_total"
FETCHED = "disagg_engine_prompt_tokens_fetched_total"
RECEIVED = "disagg_engine_kv_blocks_received_total"
LEASES = "disagg_engine_kv_leases_active"
EXPIRED = "disagg_engine_kv_leases_expired_total"


# What it does not load, it computes.
DECODER = described("decode", UNCACHED, extra=BOTH_WAYS, policy="recompute")


def post(server: Server, prompt: Any, params: dict[str, Any], **fields: Any) -> dict[str, Any]:
    request_id = fields.pop("request_id", None)
    body = body_of(prompt, fields) | {"kv_transfer_params": params}
    response = server.post("/v1/completions", body, request_id=request_id)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def start(
    server: Server, prompt: Any, begun: ResumePayload | None = None, **fields: Any
) -> dict[str, Any]:
    """P's leg: its `kv_transfer_params`, with what it hands over."""
    given = {} if begun is None else {"begun": begun.to_wire()}
    params = {**PREFILL, "hand_over": True, **given}
    fields = {"max_tokens": 1, **fields}
    answered: dict[str, Any] = post(server, prompt, params, **fields)["kv_transfer_params"]
    return answered


def go_on(server: Server, params: dict[str, Any], **fields: Any) -> Answer:
    """D's leg, which is not told the prompt in any other way."""
    return Answer.in_body(post(server, "", {"retain": False, **params}, **fields))


def given(prompt: str | list[int], answer: Answer, count: int, spoken: int = 0) -> ResumePayload:
    ids = tuple(prompt.encode() if isinstance(prompt, str) else prompt)
    logprobs = tuple(
        ((token, value), (token, value))
        for token, value in zip(answer.tokens[spoken:count], answer.logprobs[spoken:], strict=False)
    )
    return ResumePayload(ids, answer.tokens[:count], spoken, logprobs)


def is_free(server: Server) -> bool:
    return metric(server, LEASES) == 0 == metric(server, "disagg_engine_blocks_delayed")


@pytest.mark.parametrize("count", [1, 7, 33, 64])
def test_a_running_answer_moves(
    count: int, prefiller: Server, decoder: Server, alone: Server
) -> None:
    """The prefiller computes prompt and answer so far, samples, and hands all of it over."""
    prompt = text_of(140, 4100 + count)
    right = complete(alone, prompt, max_tokens=80)
    params = start(prefiller, "", given(prompt, right, count, spoken=count))
    moved = read_resume_payload(params)
    assert moved is not None
    assert moved.output_token_ids == right.tokens[: count + 1]
    assert (moved.num_sent, params["remote_num_tokens"]) == (count, 140 + count)
    blocks = metric(decoder, RECEIVED)
    rest = go_on(decoder, params, max_tokens=80)
    expected = Answer(right.tokens[count:], right.logprobs[count:], "")
    assert differences([expected], [rest]) == []
    assert metric(decoder, RECEIVED) - blocks == -(-(140 + count) // 32)
    wait_for(lambda: is_free(prefiller), "P's blocks are freed after the read")


def test_only_what_is_proven_is_loaded(prefiller: Server, decoder: Server, alone: Server) -> None:
    """P's blocks are of another prompt from token 64 on."""
    prompt = text_of(200, 4300)
    other = prompt[:64] + "#" + prompt[65:]
    right = complete(alone, other)
    params = start(prefiller, prompt) | {"begun": given(other, right, 3).to_wire()}
    fetched = metric(decoder, FETCHED)
    assert differences([right], [go_on(decoder, params)]) == []
    assert metric(decoder, FETCHED) - fetched == 64
    wait_for(lambda: is_free(prefiller), "P's blocks are freed")


ENDS: dict[str, dict[str, Any]] = {
    "max_tokens": {"max_tokens": 1},
    "a stop string": {},
}


@pytest.mark.parametrize("name", ENDS)
def test_where_the_first_token_ends_the_answer_the_prefillers_blocks_are_given_back_at_once(
    name: str, prefiller: Server, decoder: Server, alone: Server
) -> None:
    prompt = text_of(100, 4400)
    known = complete(alone, prompt, max_tokens=1)
    first, fields = known.tokens, ENDS[name] or {"stop": known.text}
    params = start(prefiller, prompt)
    released = metric(prefiller, "disagg_engine_kv_leases_released_total")
    answer = post(decoder, "", {"retain": False, **params}, **fields)
    choice = answer["choices"][0]
    assert tuple(choice["token_ids"]) == first
    assert choice["finish_reason"] == ("length" if name == "max_tokens" else "stop")
    assert answer["usage"]["completion_tokens"] == 1
    wait_for(lambda: is_free(prefiller), "nobody reads them")
    assert metric(prefiller, "disagg_engine_kv_leases_released_total") == released + 1


def test_what_is_refused_gives_the_prefillers_blocks_back_at_once(
    prefiller: Server, decoder: Server
) -> None:
    for wrong in ({"n": 2}, {"temperature": -1}, None):
        params = start(prefiller, text_of(100, 4500))
        if wrong is None:
            params["begun"]["output_token_ids"] = "AAA"
        body = body_of("", wrong or {}) | {"kv_transfer_params": params}
        response = decoder.post("/v1/completions", body)
        assert response.status_code == 400, response.text
        wait_for(lambda: is_free(prefiller), "nobody reads them")
    assert metric(prefiller, EXPIRED) == 0


def test_without_the_prefiller_prompt_and_answer_are_computed(
    launcher: Launcher, decoder: Server, alone: Server
) -> None:
    prompt = text_of(120, 4600)
    right = complete(alone, prompt)
    with launcher.engine("doomed") as doomed:
        params = start(doomed, prompt)
        doomed.kill()
        computed = metric(decoder, COMPUTED)
        assert differences([right], [go_on(decoder, params)]) == []
    assert metric(decoder, COMPUTED) - computed == 120


def test_a_conversation_goes_on_behind_an_answer_that_was_handed_over(
    prefiller: Server, decoder: Server, alone: Server
) -> None:
    prompt = tokens_of(100, 4800)
    previous: dict[str, Any] = {}
    for turn in range(3):
        params = {**previous, **PREFILL, "hand_over": True}
        computed = metric(prefiller, COMPUTED)
        handed = post(prefiller, prompt, params, max_tokens=1)["kv_transfer_params"]
        if turn:
            assert metric(prefiller, COMPUTED) - computed < 40, "the last turn's KV is D's"
        said = post(decoder, "", {**handed, "retain": True}, max_tokens=40)
        answer, previous = Answer.in_body(said), said["kv_transfer_params"]
        assert differences([complete(alone, prompt, max_tokens=40)], [answer]) == []
        prompt = [*prompt, *answer.tokens, *tokens_of(20, 4900 + turn)]


@pytest.fixture(scope="module")
def pusher(launcher: Launcher) -> Iterator[Server]:
    with launcher.engine("pusher", connector=PUSH) as server:
        yield server


@pytest.fixture(scope="module")
def pushed(launcher: Launcher) -> Iterator[Server]:
    with launcher.engine("pushed", UNCACHED, connector=PUSH) as server:
        yield server


def test_a_first_token_is_handed_over_where_kv_is_pushed(
    pusher: Server, pushed: Server, alone: Server
) -> None:
    prompts = [text_of(length, 5000 + length) for length in (1, 32, 33, 200)]
    right = [complete(alone, prompt) for prompt in prompts]
    assert differences(right, [go_on(pushed, start(pusher, p)) for p in prompts]) == []
    assert metric(pushed, COMPUTED) == 0
    assert metric(pushed, FETCHED) == 266
    assert metric(pushed, "disagg_engine_kv_pushes_missed_total") == 0
    wait_for(lambda: is_free(pusher), "P's blocks are freed")


def test_a_running_answer_moves_with_both_legs_at_once_where_kv_is_pushed(
    pusher: Server, pushed: Server, alone: Server
) -> None:
    """Both are given the same tokens: what P computes is all that D waits for."""
    prompt = text_of(90, 5100)
    right = complete(alone, prompt, max_tokens=60)
    begun = given(prompt, right, 40, spoken=40)
    name = str(uuid.uuid4())
    where = coordinates_in(start(pusher, "hello"))
    params = {"do_remote_prefill": True, "remote_request_id": name, **where}
    fetched = metric(pushed, FETCHED)
    p_body = prefill_body("") | {"kv_transfer_params": {**PREFILL, "begun": begun.to_wire()}}
    with ThreadPoolExecutor(1) as pool:
        p_leg = pool.submit(pusher.post, "/v1/completions", p_body, request_id=name)
        params |= {"begun": begun.to_wire(), "retain": False}
        said = post(pushed, "", params, max_tokens=60, request_id=name)
        assert p_leg.result(timeout=30).status_code == 200
    expected = Answer(right.tokens[40:], right.logprobs[40:], "")
    assert differences([expected], [Answer.in_body(said)]) == []
    assert metric(pushed, FETCHED) - fetched == 90
    assert metric(pushed, "disagg_engine_kv_pushes_missed_total") == 0
