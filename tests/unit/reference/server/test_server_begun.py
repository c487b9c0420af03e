"""Answers that begin in the middle, as clients see them: two streams are as good as one."""

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_ext.common.resume_payload import ResumePayload, encode_token_ids
from engine_ext.reference.server.job import ServedModel, prepare, remote_params
from engine_ext.reference.server.requests import ChatBody, CompletionBody, EngineBadRequestError
from tests.unit.reference.server.fake_engine import (
    FakeEngine,
    RunningServer,
    events_of,
    in_process,
    saying,
)

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PATHS = (COMPLETIONS, CHAT)
BODY: dict[str, Any] = {
    "prompt": "Once upon a time",
    "messages": [{"role": "user", "content": "Once upon a time"}],
    "max_tokens": 24,
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
}
STREAMED: dict[str, Any] = {
    "stream": True,
    "stream_options": {"include_usage": True},
}
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "logprobs": {"logprobs": 2},
    "ids for names": {"logprobs": 1, "return_tokens_as_token_ids": True},
    "seeded": {"temperature": 1.0, "seed": 3, "max_tokens": 40},
    "schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"schema": {"type": "string", "pattern": "^(ab|é){3,9}$"}},
        },
        "temperature": 1.0,
        "seed": 1,
        "ignore_eos": False,
    },
}


# It has none of the KV: nothing is kept between requests.
ENGINE = {"num_blocks": 129, "enable_prefix_caching": False}
MAX_LENGTH = 2048


@dataclass
class Told:
    """What a client makes of chunks, of one stream or of several."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    calls: list[list[Any]] = field(default_factory=list)
    roles: int = 0
    prompts: int = 0
    finishes: list[tuple[Any, Any]] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    ends: list[int] = field(default_factory=list)
    """How many tokens were told after each chunk."""

    def hear(self, chunks: Sequence[dict[str, Any]]) -> "Told":
        for chunk in chunks:
            self.usage = chunk.get("usage") or self.usage
            self.prompts += "prompt_token_ids" in chunk
            for choice in chunk["choices"]:
                self._hear(choice)
            self.ends.append(len(self.tokens))
        return self

    def _hear(self, choice: dict[str, Any]) -> None:
        delta = choice.get("delta", {})
        self.roles += "role" in delta
        self.prompts += bool(choice.get("prompt_token_ids"))
        self.text += delta.get("content") or choice.get("text") or ""
        self.tokens += choice.get("token_ids") or ()
        self.logprobs += entries_of(choice.get("logprobs"))
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                self.calls.append([call["function"]["name"], ""])
            self.calls[call["index"]][1] += call["function"]["arguments"]
        if choice["finish_reason"] is not None:
            self.finishes.append((choice["finish_reason"], choice.get("stop_reason")))


def entries_of(logprobs: dict[str, Any] | None) -> list[Any]:
    """In either dialect, an entry per token."""
    if logprobs is None:
        return []
    if "content" in logprobs:
        return list(logprobs["content"])
    columns = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return list(zip(*(logprobs[name] for name in columns), strict=True))


def in_dialect(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    count = fields.get("logprobs")
    if path == CHAT and count is not None:
        return {**fields, "logprobs": True, "top_logprobs": count}
    return fields


def rounded(value: Any) -> Any:
    """Other batch shapes, other noise."""
    return json.loads(json.dumps(value), parse_float=lambda text: round(float(text), 2))


async def stream(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    response = await client.post(path, json={**body, **STREAMED})
    assert response.status_code == 200, response.text
    return events_of(response)


def prompt_in(chunks: Sequence[dict[str, Any]]) -> list[int]:
    first = chunks[0]
    prompt: list[int] = first.get("prompt_token_ids") or first["choices"][0]["prompt_token_ids"]
    return prompt


def logprobs_in(path: str, told: Told, start: int, end: int) -> list[list[list[float]]]:
    """The wire's, out of an answer in which tokens are called by their ids."""

    def token_id(name: str) -> int:
        return int(name.removeprefix("token_id:"))

    entries = told.logprobs[start:end]
    if path == CHAT:
        return [
            [[token_id(one["token"]), one["logprob"]] for one in (entry, *entry["top_logprobs"])]
            for entry in entries
        ]
    return [
        [[token_id(name), value], *([token_id(n), p] for n, p in top.items())]
        for name, value, top, _ in entries
    ]


def begun_with(tokens: Sequence[int], prompt: Sequence[int], spoken: int, **more: Any) -> Any:
    wire = ResumePayload(tuple(prompt), tuple(tokens), spoken).to_wire()
    return {"kv_transfer_params": {"begun": {**wire, **more}}}


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("form", FORMS)
async def test_two_streams_are_one(path: str, form: str, client: httpx.AsyncClient) -> None:
    body = in_dialect(path, BODY | FORMS[form])
    chunks = await stream(client, path, body)
    alone = Told().hear(chunks)
    named = {**body, "return_tokens_as_token_ids": True}
    known = Told().hear(await stream(client, path, named)) if "logprobs" in body else alone
    prompt = prompt_in(chunks)
    seams = sorted({end for end in alone.ends if 0 < end <= len(alone.tokens)})
    assert len(seams) > 1, "chunks of a token each, or of some where the reader is late"
    for seam in seams:
        logprobs = logprobs_in(path, known, 0, seam) if "logprobs" in body else None
        params = begun_with(alone.tokens[:seam], prompt, 0, logprobs=logprobs)
        whole = Told().hear(await stream(client, path, body | params))
        first = chunks[: alone.ends.index(seam) + 1]
        rest = await stream(client, path, body | begun_with(alone.tokens[:seam], prompt, seam))
        both = Told().hear(first).hear(rest)
        for told in (whole, both):
            assert told.text == alone.text
            assert told.tokens == alone.tokens
            assert rounded(told.logprobs) == rounded(alone.logprobs)
            assert (told.roles, told.prompts) == (alone.roles, alone.prompts)
            assert told.usage == alone.usage
        assert whole.finishes == alone.finishes
        # Where the last token was told, its finish was, too.
        assert both.finishes == alone.finishes * (2 if seam == len(alone.tokens) else 1)
        assert set(both.finishes) == set(alone.finishes)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("form", FORMS)
async def test_an_answer_that_is_not_streamed_is_whole(
    path: str, form: str, client: httpx.AsyncClient
) -> None:
    body = in_dialect(path, BODY | FORMS[form])
    alone = (await client.post(path, json=body)).json()
    (choice,) = alone["choices"]
    named = (await client.post(path, json={**body, "return_tokens_as_token_ids": True})).json()
    known = Told(logprobs=entries_of(named["choices"][0]["logprobs"]))
    prompt = alone.get("prompt_token_ids") or choice["prompt_token_ids"]
    for count in range(0, len(choice["token_ids"]) + 1, 3):
        logprobs = logprobs_in(path, known, 0, count) if "logprobs" in body else None
        params = begun_with(choice["token_ids"][:count], prompt, 0, logprobs=logprobs)
        answer = (await client.post(path, json=body | params)).json()
        names = {"id": alone["id"], "created": alone["created"]}
        assert rounded(answer | names) == rounded(alone)


async def test_one_wrong_token_is_seen(client: httpx.AsyncClient) -> None:
    chunks = await stream(client, CHAT, BODY)
    alone = Told().hear(chunks)
    wrong = [(alone.tokens[0] + 1) % 256, *alone.tokens[1:8]]
    params = begun_with(wrong, prompt_in(chunks), 8)
    told = Told().hear(await stream(client, CHAT, BODY | params))
    assert told.tokens != alone.tokens[8:]


async def test_a_prefill_samples_a_token_however_many_it_is_given(
    client: httpx.AsyncClient,
) -> None:
    """A router's prefill asks for one token; what is given are five."""
    alone = (await client.post(COMPLETIONS, json=BODY)).json()["choices"][0]
    params = begun_with(alone["token_ids"][:5], alone["prompt_token_ids"], 5)
    params["kv_transfer_params"]["do_remote_decode"] = True
    for asked in (1, 5, 6):
        body = BODY | params | {"max_tokens": asked}
        (choice,) = (await client.post(COMPLETIONS, json=body)).json()["choices"]
        assert choice["token_ids"] == alone["token_ids"][5:6]
        assert choice["finish_reason"] == "length"


def ids(*tokens: int) -> str:
    return encode_token_ids(tokens)


PROMPT = {"prompt_token_ids": ids(65, 66)}
WRONG: dict[str, Any] = {
    "no object": "begun",
    "a list": [PROMPT],
    "nothing": {},
    "no prompt": {"output_token_ids": ids(65)},
    "an empty prompt": {"prompt_token_ids": ""},
    "a list of ids": {"prompt_token_ids": [65, 66]},
    "no base64": {"prompt_token_ids": "é"},
    "cut": {"prompt_token_ids": ids(65)[:-1]},
    "half an id": {"prompt_token_ids": base64.b64encode(b"1234").decode()},
    "spoken before": {**PROMPT, "spoken": -1},
    "spoken beyond": {**PROMPT, "output_token_ids": ids(65), "spoken": 2},
    "spoken truly": {**PROMPT, "output_token_ids": ids(65), "spoken": True},
    "a prompt of other tokens": {"prompt_token_ids": ids(65, 259)},
    "an answer of other tokens": {**PROMPT, "output_token_ids": ids(1 << 23)},
    "a prompt too long": {"prompt_token_ids": ids(*[65] * 257)},
    "a prompt without room": {"prompt_token_ids": ids(*[65] * 256)},
    "an answer too long": {**PROMPT, "output_token_ids": ids(*[65] * 255)},
    "logprobs of none": {**PROMPT, "output_token_ids": ids(65), "logprobs": []},
    "logprobs of another": {**PROMPT, "output_token_ids": ids(65), "logprobs": [[[66, -1.0]]]},
    "logprobs that are none": {**PROMPT, "output_token_ids": ids(65), "logprobs": [[[65, 1.0]]]},
}
REMOTE = {"do_remote_prefill": True, "remote_engine_id": "p", "remote_request_id": "r"}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", WRONG)
async def test_what_makes_no_sense_is_refused_and_the_remote_hears_of_it(
    name: str, path: str, server: RunningServer
) -> None:
    params = {**REMOTE, "begun": WRONG[name]}
    response = await server.post(path, **BODY, kv_transfer_params=params)
    assert response.status_code == 400
    error = response.json()["error"]
    assert "\n" not in error["message"]
    assert any(word in error["message"].lower() for word in ("begun", "token"))
    assert len(error["message"]) < 300
    assert server.engine.declined == [params]
    assert server.engine.requests == []


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
some_ids = st.lists(st.integers(0, 300), max_size=20).map(encode_token_ids)
pairs = st.lists(st.tuples(st.integers(-1, 300), st.floats(-9, 0.5)), max_size=3)
begun_or_not = st.fixed_dictionaries(
    {"prompt_token_ids": some_ids | anything, "output_token_ids": some_ids | anything},
    optional={
        "spoken": st.integers(-1, 20) | anything,
        "logprobs": st.lists(pairs, max_size=4) | anything,
        "more": anything,
    },
)


@given(params=anything | st.fixed_dictionaries({"begun": begun_or_not}), is_chat=st.booleans())
@settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_whatever_is_given_is_taken_or_refused(
    params: Any, is_chat: bool, model: ServedModel
) -> None:
    """Nothing else is raised, and whatever is taken can be gone on with."""
    fields = in_dialect(CHAT if is_chat else COMPLETIONS, BODY | {"logprobs": 1})
    body = json.dumps({**fields, "kv_transfer_params": params}).encode()
    try:
        job = prepare(ChatBody if is_chat else CompletionBody, model, body, None)
    except EngineBadRequestError:
        remote_params(body)
        return
    if job.resumed is not None:
        assert all(0 <= token < model.vocab_size for token in job.resumed.token_ids)
        assert len(job.resumed.logprobs) == len(job.resumed.unsent_token_ids)
        assert job.resumed.finish or job.resumed.answer.accept(65)


ASKED: dict[str, tuple[str, dict[str, Any], str]] = {
    "two answers": (CHAT, {"n": 2}, "n"),
    "logprobs": (CHAT, {"logprobs": True}, "kv_transfer_params"),
    "logprobs of a completion": (COMPLETIONS, {"logprobs": 0}, "kv_transfer_params"),
    "another form": (
        CHAT,
        {"response_format": {"type": "json_object"}},
        "kv_transfer_params",
    ),
}


@pytest.mark.parametrize("name", ASKED)
async def test_what_cannot_go_on_is_refused_by_name(name: str, server: RunningServer) -> None:
    path, fields, param = ASKED[name]
    params = {**REMOTE, "begun": {**PROMPT, "output_token_ids": ids(65)}}
    response = await server.post(path, **(BODY | fields), kv_transfer_params=params)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert server.engine.declined == [params]


async def test_whoever_names_no_remote_is_refused_without_its_hearing(
    server: RunningServer,
) -> None:
    nameless: list[dict[str, Any]] = [{"begun": {}}, {"do_remote_decode": True, "begun": {}}]
    for params in nameless:
        response = await server.post(CHAT, **BODY, kv_transfer_params=params)
        assert response.status_code == 400
    assert (await server.post(CHAT, messages=[], kv_transfer_params=7)).status_code == 400
    assert server.engine.declined == []


async def test_any_refusal_lets_the_remote_know(server: RunningServer) -> None:
    await server.post(CHAT, **(BODY | {"temperature": -1}), kv_transfer_params=REMOTE)
    assert server.engine.declined == [REMOTE]


async def test_the_engine_is_not_given_what_only_the_server_reads(model: ServedModel) -> None:
    engine = FakeEngine(saying("Hé", "l", "lo"))
    async with in_process(model, engine) as client:
        params = {**REMOTE, "begun": PROMPT}
        await client.post(CHAT, json=BODY | {"kv_transfer_params": params})
    assert [request.kv_transfer_params for request in engine.requests] == [REMOTE]
    assert engine.requests[0].prompt_token_ids == (65, 66)
