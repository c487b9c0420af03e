"""Answers that begin in the middle, inside unmodified vLLM: right as one vLLM alone."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from engine_ext.common.resume_payload import KEY, MAX_ID, ResumePayload, read_resume_payload
from engine_ext.reference.tiny_model import IM_END_ID
from tests.integration.legs import take_turn
from tests.integration.oracle import text_of, tokens_of
from tests.integration.processes import Server, metric
from tests.integration.talk import TOOLS
from tests.vllm.measures import COMPUTED, FETCHED, nothing_left
from tests.vllm.resumed_answers import (
    HAND_OVER,
    PATHS,
    Said,
    ask,
    begin,
    body_of,
    differ,
    hand_over,
    pairs,
    prompt_ids,
    streamed,
    taken_over,
)
from tests.vllm.servers import SCHEDULER, Fleet, Kind

KINDS = ("chat", "completion")


def begun_with(prompt: Any, said: Said, spoken: int = 0) -> ResumePayload:
    """As if `said` had been said elsewhere."""
    scores = tuple(pairs(score) for score in said.scores[spoken:])
    return ResumePayload(tuple(prompt), said.tokens, spoken, scores)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_prefillers_own_token_is_the_answers_first(
    prefiller: Server, decoder: Server, alone: Server, kind: str, stream: bool
) -> None:
    body = body_of(kind, tokens_of(300, 12_000 + stream))
    fetched, computed = metric(decoder, FETCHED), metric(decoder, COMPUTED)
    with nothing_left(prefiller, decoder):
        params, first = hand_over(prefiller, kind, body)
        body = streamed(body) if stream else body
        # As a router finds it: P has told its token's log-probabilities too.
        whole = ask(decoder, kind, {**body, "kv_transfer_params": {**params, "retain": False}})
    assert taken_over(params, first)[KEY]["output_token_ids"] == params[KEY]["output_token_ids"]
    right = ask(alone, kind, body)
    assert differ(right, whole) == []
    assert whole.roles == right.roles
    assert metric(decoder, FETCHED) > fetched
    assert metric(decoder, COMPUTED) == computed


@pytest.mark.parametrize("given", [1, 5, 11])
@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_with_none_of_the_kv_goes_on_and_says_what_is_new(
    decoder: Server, alone: Server, kind: str, given: int
) -> None:
    body = streamed(body_of(kind, tokens_of(100, 12_010 + given)))
    right, said = ask(alone, kind, body), ask(alone, kind, {**body, "max_tokens": given})
    prompt = prompt_ids(alone, kind, body)
    for spoken in (0, given):
        got = ask(decoder, kind, begin(body, begun_with(prompt, said, spoken)))
        assert differ(right.behind(said) if spoken else right, got) == []
        assert got.roles == (0 if spoken else right.roles)


@pytest.mark.parametrize("given", [1, 2, 3, 4, 5])
def test_a_character_and_a_stop_string_may_lie_across_the_seam(
    decoder: Server, alone: Server, given: int
) -> None:
    bytes_of_e_acute = [0xC3, 0xA9]
    fields: dict[str, Any] = {"allowed_token_ids": bytes_of_e_acute, "presence_penalty": 2}
    body = streamed(body_of("completion", tokens_of(40, 12_030), **fields))
    right = ask(alone, "completion", body)
    said = ask(alone, "completion", {**body, "max_tokens": given})
    begun = begun_with(body["prompt"], said, given)
    assert "é" in right.text
    assert differ(right.behind(said), ask(decoder, "completion", begin(body, begun))) == []
    stop = next(right.text[at : at + 3] for at in range(9) if "é" in right.text[at : at + 3])
    stopped = {**body, "stop": [stop]}
    right = ask(alone, "completion", stopped)
    assert right.stop_reason == stop
    begun = begun_with(body["prompt"], said)
    assert differ(right, ask(decoder, "completion", begin(stopped, begun))) == []


SAMPLING: dict[str, dict[str, Any]] = {
    "penalties": {"presence_penalty": 1.9, "frequency_penalty": 1.5, "repetition_penalty": 1.4},
    "seeded": {"temperature": 1.0, "seed": 7},
    "seeded, narrowed": {"temperature": 0.8, "seed": 8, "top_p": 0.9, "top_k": 40},
    "least tokens": {"min_tokens": 9, "ignore_eos": False, "logit_bias": {IM_END_ID: 100}},
    "guided": {"structured_outputs": {"regex": "[a-z]{4}-[0-9]{4}-[a-z]{40}"}},
}


@pytest.mark.parametrize("how", SAMPLING)
def test_sampling_goes_on_where_it_was(
    prefiller: Server, decoder: Server, alone: Server, how: str
) -> None:
    body = body_of("completion", tokens_of(120, 12_040), **SAMPLING[how])
    right = ask(alone, "completion", body)
    least = bool(body.get("min_tokens"))
    said = ask(alone, "completion", {**body, "max_tokens": 6, "min_tokens": 6 * least})
    begun = begun_with(body["prompt"], said)
    assert differ(right, ask(decoder, "completion", begin(body, begun))) == []
    params, first = hand_over(prefiller, "completion", {**body, "min_tokens": 1 * least})
    given = taken_over(params, first)
    assert differ(right, ask(decoder, "completion", {**body, "kv_transfer_params": given})) == []


ENDS: dict[str, dict[str, Any]] = {
    "end of sequence": {"ignore_eos": False, "min_tokens": 3, "logit_bias": {IM_END_ID: 100}},
    "stop token": {"stop_token_ids": [7], "min_tokens": 3, "logit_bias": {7: 100}},
    "max_tokens": {"max_tokens": 4},
    "stop string": {},
}


@pytest.mark.parametrize("spoken", [0, 4])
@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_has_ended_is_not_continued_and_the_prefiller_hears_of_it(
    prefiller: Server, decoder: Server, alone: Server, kind: str, how: str, spoken: int
) -> None:
    plain = streamed(body_of(kind, tokens_of(200, 12_050)))
    body = plain | ENDS[how]
    if how == "stop string":
        body["stop"] = [ask(alone, kind, {**body, "max_tokens": 4}).text[-2:]]
    right = ask(alone, kind, body)
    assert right.finish_reason == ("length" if how == "max_tokens" else "stop")
    computed = metric(decoder, COMPUTED)
    with nothing_left(prefiller, decoder):
        params, _ = hand_over(prefiller, kind, plain)
        handed_over = read_resume_payload(params)
        assert handed_over is not None
        begun = begun_with(handed_over.prompt_token_ids, right, min(spoken, len(right.tokens)))
        got = ask(decoder, kind, begin(body, begun, params))
    assert (got.finish_reason, got.stop_reason) == (right.finish_reason, right.stop_reason)
    assert got.usage == right.usage
    if spoken:
        assert (got.text, got.tokens, got.scores, got.roles) == ("", (), (), 0)
    else:
        assert differ(right, got) == []
        assert got.roles == right.roles
    assert metric(decoder, COMPUTED) == computed


def test_given_tokens_behind_an_end_are_no_part_of_the_answer(
    decoder: Server, alone: Server
) -> None:
    body = body_of("completion", tokens_of(60, 12_060), max_tokens=5)
    right = ask(alone, "completion", body)
    more = ask(alone, "completion", {**body, "max_tokens": 9})
    got = ask(decoder, "completion", begin(body, begun_with(body["prompt"], more)))
    assert differ(right, got) == []


def test_a_prefiller_goes_on_with_an_answer_and_hands_it_over_again(
    prefiller: Server, decoder: Server, alone: Server
) -> None:
    """Also where the KV that it was to load is gone: it computes prompt and answer."""
    prompt = tokens_of(150, 12_070)
    turn = take_turn(prefiller, decoder, prompt)
    body = body_of("completion", [*prompt, *turn.answer.tokens, *tokens_of(30, 12_071)])
    right = ask(alone, "completion", body)
    said = ask(alone, "completion", {**body, "max_tokens": 6})
    for spoken, source in ((0, {}), (6, {**(turn.params or {}), "remote_port": 1})):
        begun = begun_with(body["prompt"], said, spoken)
        asked = begin({**body, "max_tokens": 1}, begun, {**source, **HAND_OVER})
        with nothing_left(prefiller):
            answer = prefiller.post(PATHS["completion"], asked)
            assert answer.status_code == 200, answer.text
            (choice,) = answer.json()["choices"]
            assert tuple(choice["token_ids"]) == right.tokens[spoken:7]
            params = answer.json()["kv_transfer_params"]
            assert params["remote_num_tokens"] == len(body["prompt"]) + 6
            handed_over = read_resume_payload(params)
            assert handed_over is not None
            assert handed_over.output_token_ids == right.tokens[:7]
            assert handed_over.num_sent == spoken
            taken = streamed({**body, "kv_transfer_params": {**params, "retain": False}})
            rest = ask(decoder, "completion", taken)
        assert differ(right.behind(said) if spoken else right, rest) == []


def test_a_prefiller_says_what_no_stop_string_can_take_back(
    prefiller: Server, decoder: Server, alone: Server
) -> None:
    body = body_of("completion", text_of(90, 12_075), allowed_token_ids=[97, 98, 99])
    plain = ask(alone, "completion", body)
    body["stop"] = [plain.text[:2] + "z", plain.text[4:7]]
    params, first = hand_over(prefiller, "completion", body)
    assert (first.tokens, first.text) == (plain.tokens[:1], "")
    right = ask(alone, "completion", streamed(body))
    begun = {**params[KEY], "spoken": 1, "logprobs": []}
    taken = {**body, "kv_transfer_params": {**params, "retain": False, KEY: begun}}
    rest = ask(decoder, "completion", streamed(taken))
    assert differ(right.behind(first), rest) == []
    assert rest.text == right.text


def test_more_than_the_prompt_may_be_in_the_cache(decoder: Server) -> None:
    """vLLM asserts that it is not."""
    body = body_of("completion", tokens_of(70, 12_080), max_tokens=60, logprobs=None)
    begun = ResumePayload(tuple(body["prompt"]), tuple(tokens_of(50, 12_081)))
    first, second = (ask(decoder, "completion", begin(body, begun)) for _ in range(2))
    assert differ(first, second) == []
    assert second.tokens[:50] == begun.output_token_ids


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 12}}\n</tool_call>'


@pytest.fixture(scope="module")
def parsing(fleet: Fleet) -> Iterator[Server]:
    """Without a connector: to begin in mid-answer needs none."""
    options = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    kind = Kind("parsing", None, (*SCHEDULER, *options))
    with fleet.server(kind) as server:
        yield server


def test_a_tool_call_goes_on_in_the_middle(parsing: Server) -> None:
    """What is given is all of the answer, so that it is known what the parser should say: as of an
    engine's tokens, one by one."""
    tokens = tuple(CALL.encode())
    fields: dict[str, Any] = {"max_tokens": len(tokens), "logprobs": None, "top_logprobs": None}
    fields |= {"tools": TOOLS, "tool_choice": "auto"}
    body = streamed(body_of("chat", "x", **fields))
    whole = deltas(parsing, begin(body, ResumePayload((1, 2, 3), tokens)))
    expected = {"role": "assistant", "name": "f", "arguments": '{"a": 12}', "content": ""}
    assert whole == expected
    left = []
    for spoken in (11, 28, 44, 46, 48, len(tokens)):
        rest = deltas(parsing, begin(body, ResumePayload((1, 2, 3), tokens, spoken)))
        assert rest["role"] == rest["content"] == ""
        assert expected["name"].endswith(rest["name"])
        assert expected["arguments"].endswith(rest["arguments"])
        left.append(rest["name"] + rest["arguments"])
    assert left[0] == 'f{"a": 12}'
    assert left[-1] == ""
    assert len({*left}) > 2, left


LIST = {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 4}
TOOL = {"type": "object", "properties": {"list": LIST}, "required": ["list"]}
CHOICE = [{"type": "function", "function": {"name": name, "parameters": TOOL}} for name in "fg"]
FORMS: dict[str, dict[str, Any]] = {
    "object": {"response_format": {"type": "json_object"}},
    "schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": LIST}}
    },
    "choice": {"structured_outputs": {"choice": ["red or green", "red or blue"]}},
}
CALLING: dict[str, dict[str, Any]] = {
    "any": {"tools": CHOICE, "tool_choice": "required"},
    "one": {"tools": CHOICE, "tool_choice": {"type": "function", "function": {"name": "g"}}},
}


def in_form(fields: dict[str, Any]) -> dict[str, Any]:
    fields = {"max_tokens": 60, "ignore_eos": False, **fields}
    return streamed(body_of("chat", "Say it.", logprobs=None, top_logprobs=None, **fields))


@pytest.mark.parametrize("how", FORMS)
def test_an_answer_keeps_its_form_from_the_prefillers_token_on_and_from_its_middle(
    prefiller: Server, decoder: Server, alone: Server, how: str
) -> None:
    body = in_form(FORMS[how])
    right = deltas(alone, body)
    params, _ = hand_over(prefiller, "chat", body)
    given = {**params, "do_remote_decode": False, "do_remote_prefill": True}
    assert deltas(decoder, {**body, "kv_transfer_params": given}) == right
    assert_the_rest_is_said(decoder, alone, body)


@pytest.mark.parametrize("how", CALLING)
def test_calls_that_are_insisted_on_go_on_in_the_middle(parsing: Server, how: str) -> None:
    assert_the_rest_is_said(parsing, parsing, in_form(CALLING[how]))


def assert_the_rest_is_said(server: Server, alone: Server, body: dict[str, Any]) -> None:
    """Of what is given and was said: by a client's count of all, nothing is missing or twice."""
    right, tokens = deltas(alone, body), ask(alone, "chat", body).tokens
    prompt = prompt_ids(alone, "chat", body)
    for given in (1, len(tokens) // 2, len(tokens) - 1):
        said = deltas(alone, {**body, "max_tokens": given})
        rest = deltas(server, begin(body, ResumePayload(prompt, tokens[:given], given)))
        together = {name: said[name] + rest[name] for name in right}
        assert together == right, (given, said, rest)
        unsaid = deltas(server, begin(body, ResumePayload(prompt, tokens[:given])))
        assert unsaid == right, given


def deltas(server: Server, body: dict[str, Any]) -> dict[str, str]:
    """What a stream says, by field."""
    text = server.post(PATHS["chat"], body).text
    found = dict.fromkeys(("role", "name", "arguments", "content"), "")
    for event in text.split("\n\n")[:-2]:
        for choice in json.loads(event.removeprefix("data: "))["choices"]:
            delta = choice["delta"]
            calls = [call["function"] for call in delta.get("tool_calls") or ()]
            for said in (delta, *calls):
                for name in found:
                    found[name] += said.get(name) or ""
    return found


def test_a_token_that_was_not_the_answers_is_seen(decoder: Server, alone: Server) -> None:
    body = body_of("completion", tokens_of(80, 12_090))
    right = ask(alone, "completion", body)
    wrong = (*right.tokens[:3], right.tokens[3] ^ 1)
    scores = begun_with(body["prompt"], right).logprobs[:3]
    begun = ResumePayload(
        tuple(body["prompt"]), wrong, 0, (*scores, ((wrong[3], -1.0), *scores[0]))
    )
    got = ask(decoder, "completion", begin(body, begun))
    assert got.tokens[:4] == wrong
    assert got.tokens[4:] != right.tokens[4:]


MALFORMED: dict[str, Any] = {
    "no object": 7,
    "no ids": {},
    "no base64": {"prompt_token_ids": "%%%%"},
    "a list": {"prompt_token_ids": [1, 2]},
    "cut": {"prompt_token_ids": "AAA="},
    "outside the vocabulary": ResumePayload((1, 2), (MAX_ID,)).to_wire(),
    "a prompt outside the vocabulary": ResumePayload((5000,), (1,)).to_wire(),
    "too long": ResumePayload((1,) * 2048, (1,)).to_wire(),
    "far too long": {"prompt_token_ids": "AAAA" * 100_000},
    "spoken what is not there": {**ResumePayload((1,), (2,)).to_wire(), "spoken": 2},
    "spoken, not streamed": ResumePayload((1,), (2,), 1).to_wire(),
    "no log-probabilities": ResumePayload((1,), (2,)).to_wire(),
    "odd log-probabilities": {**ResumePayload((1,), (2,)).to_wire(), "logprobs": [[[2, "x"]]]},
}
FIELDS_NOT_RESUMED: dict[str, dict[str, Any]] = {
    "n": {"n": 2, "temperature": 1},
    "echo": {"echo": True},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "several prompts": {"prompt": [[1], [2]]},
    "use_beam_search": {"use_beam_search": True},
    "cache_hit_threshold": {"cache_hit_threshold": 0.5},
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_makes_no_sense_is_refused_and_the_engine_lives(
    decoder: Server, alone: Server, kind: str
) -> None:
    body = body_of(kind, tokens_of(50, 12_100))
    for name, begun in MALFORMED.items():
        answer = decoder.post(PATHS[kind], {**body, "kv_transfer_params": {KEY: begun}})
        assert answer.status_code == 400, f"{name}: {answer.text}"
        assert KEY in answer.json()["error"]["message"], name
    assert differ(ask(alone, kind, body), ask(decoder, kind, body)) == []


@pytest.mark.parametrize("name", FIELDS_NOT_RESUMED)
def test_fields_that_it_does_not_go_with_are_named(decoder: Server, name: str) -> None:
    body = body_of("completion", tokens_of(50, 12_100), logprobs=None) | FIELDS_NOT_RESUMED[name]
    answer = decoder.post(PATHS["completion"], begin(body, ResumePayload((1,), (2,))))
    assert answer.status_code == 400, answer.text
    assert name in answer.json()["error"]["message"]


def test_forged_sampling_params_and_other_grammars_cost_their_request(
    decoder: Server, alone: Server
) -> None:
    body = body_of("completion", tokens_of(50, 12_110), logprobs=None)
    forged = {**body, "vllm_xargs": {"disagg_begun": [1, 2, 3]}}
    right = ask(alone, "completion", body)
    assert differ(right, ask(decoder, "completion", forged)) == []
    guided = {**body, "structured_outputs": {"regex": "[0-9]{40}"}}
    other = decoder.post(PATHS["completion"], begin(guided, ResumePayload((1, 2), (3,))))
    assert other.status_code == 500, other.text
    assert differ(right, ask(decoder, "completion", body)) == []


def test_an_engine_without_our_scheduler_says_that_it_cannot(alone: Server) -> None:
    body = body_of("completion", tokens_of(50, 12_120), logprobs=None)
    answer = alone.post(PATHS["completion"], begin(body, ResumePayload((1,), (2,))))
    assert answer.status_code == 400
    assert "does not support" in answer.json()["error"]["message"]
    assert "begun" not in alone.get("/disagg/identity").json()["capabilities"]


def test_engines_say_that_they_can_and_what_they_render_with(
    prefiller: Server, decoder: Server, alone: Server
) -> None:
    pages = [each.get("/disagg/identity").json() for each in (prefiller, decoder, alone)]
    for page in pages[:2]:
        assert {"hand_over", "begun"} <= set(page["capabilities"])
    assert pages[0]["renders"] == pages[1]["renders"] == pages[2]["renders"]
    assert set(pages[0]["renders"]) == {"model", "tokenizer", "chat_template"}
