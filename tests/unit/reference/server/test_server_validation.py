import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_ext.reference.server.job import ServedModel
from tests.unit.reference.server.fake_engine import FakeEngine, in_process, saying

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}


@pytest.fixture
async def client(model: ServedModel, engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with in_process(model, engine) as client:
        yield client


WRONG_IN_BOTH: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_tokens": 257}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": [1]}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"n": 2}, "n"),
    ({"seed": 2**63}, "seed"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["a"] * 65}, "stop"),
    ({"stop": ["a" * 1025]}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop": {}}, "stop"),
    ({"stop_token_ids": [1]}, "stop_token_ids"),
    ({"stream": "perhaps"}, "stream"),
    ({"stream": True, "stream_options": 1}, "stream_options"),
    ({"kv_transfer_params": [1]}, "kv_transfer_params"),
    ({"kv_transfer_params": "x"}, "kv_transfer_params"),
    ({"kv_transfer_params": 0}, "kv_transfer_params"),
    ({"cache_hit_threshold": -0.1}, "cache_hit_threshold"),
    ({"cache_hit_threshold": 1.1}, "cache_hit_threshold"),
    ({"cache_hit_threshold": "0.5"}, "cache_hit_threshold"),
    ({"cache_hit_threshold": True}, "cache_hit_threshold"),
    ({"cache_hit_threshold": [0.5]}, "cache_hit_threshold"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": 7}, "cache_salt"),
    ({"cache_salt": "a/b"}, "cache_salt"),
    ({"cache_salt": "a" * 129}, "cache_salt"),
    ({"model": 7}, "model"),
    ({"logit_bias": {"1": 2}}, "logit_bias"),
    ({"presence_penalty": 0.5}, "presence_penalty"),
]
WRONG_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": 7}, "prompt"),
    ({"prompt": {}}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [[1], [None]]}, "prompt"),
    ({"prompt": ["a", "b"]}, "prompt"),
    ({"prompt": [259]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [10**40]}, "prompt"),
    ({"prompt": "a" * 257}, "input_tokens"),
    ({"prompt": "a" * 1_000_000}, "input_tokens"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"echo": True}, "echo"),
    ({"suffix": "x"}, "suffix"),
]


def _tools(parameters: Any) -> list[Any]:
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]


TOOLS = _tools({"type": "object"})
WRONG_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [None]}, "messages"),
    ({"messages": ["hi"]}, "messages"),
    ({"messages": [{"content": "hi"}]}, "messages"),
    ({"messages": [{"role": 1, "content": "hi"}]}, "messages"),
    ({"messages": [{"role": "user", "content": 7}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": [7]}]}, "messages"),
    ({"messages": [{**USER, "tool_calls": 7}]}, "messages"),
    ({"messages": [{**USER, "tool_calls": [7]}]}, "messages"),
    ({"messages": [{**USER, "tool_calls": [{"type": "retrieval", "function": {}}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": "a" * 300}]}, "input_tokens"),
    ({"tools": "x"}, "tools"),
    ({"tools": [1]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "sometimes", "tools": TOOLS}, "tool_choice"),
    ({"tool_choice": ["f"], "tools": TOOLS}, "tool_choice"),
    ({"tool_choice": {"function": {"name": ""}}, "tools": TOOLS}, "tool_choice"),
    ({"tool_choice": {"function": {"name": "g"}}, "tools": TOOLS}, "tool_choice"),
    ({"tool_choice": {"type": "function"}, "tools": TOOLS}, "tool_choice"),
    ({"tool_choice": "required", "tools": [{"type": "custom"}]}, "tool_choice"),
    ({"tool_choice": "required", "tools": _tools(7)}, "tool_choice"),
    ({"tool_choice": "required", "tools": TOOLS * 2}, "tool_choice"),
    ({"tool_choice": "required", "tools": _tools({"type": "nothing"})}, "tool_choice"),
    ({"chat_template": "{{ x }}"}, "chat_template"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"max_completion_tokens": 0}, "max_tokens"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 5}, "logprobs"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"add_generation_prompt": False}, "add_generation_prompt"),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
]
CASES = [
    *((COMPLETIONS, {"prompt": "hi", **wrong}, param) for wrong, param in WRONG_IN_BOTH),
    *((CHAT, {"messages": [USER], **wrong}, param) for wrong, param in WRONG_IN_BOTH),
    *((COMPLETIONS, {"prompt": "hi", **wrong}, param) for wrong, param in WRONG_COMPLETIONS),
    *((CHAT, {"messages": [USER], **wrong}, param) for wrong, param in WRONG_CHAT),
]


@pytest.mark.parametrize(("path", "body", "param"), CASES, ids=lambda value: str(value)[:60])
async def test_a_wrong_field_is_a_400_that_names_it_and_never_reaches_the_engine(
    path: str, body: dict[str, Any], param: str, client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    response = await client.post(path, json=body)
    error = response.json()["error"]
    assert response.status_code == error["code"] == 400
    assert error["type"] == "BadRequestError"
    assert error["param"] == param
    assert 10 < len(error["message"]) < 500
    assert engine.requests == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"hi",
        b"[]",
        b"null",
        b'"x"',
        b'{"prompt": NaN}',
        b'{"prompt": 1e999}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\xff"}',
        b'{"prompt": ' + b"[" * 100_000,
        b'{"x":' * 5_000 + b"1" + b"}" * 5_000,
    ],
    ids=lambda value: repr(value)[:30],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize"])
async def test_what_is_no_json_object_is_a_400(
    path: str, body: bytes, client: httpx.AsyncClient
) -> None:
    response = await client.post(path, content=body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "BadRequestError"


async def _refusal(client: httpx.AsyncClient, path: str, **body: Any) -> tuple[str, str]:
    error = (await client.post(path, json=body)).json()["error"]
    return error["message"], error["param"]


async def test_what_is_too_long_is_refused_in_vllms_words(client: httpx.AsyncClient) -> None:
    context = "This model's maximum context length is 256 tokens. However, your prompt contains "
    shorter = "Please reduce the length of the input prompt."
    assert await _refusal(client, COMPLETIONS, prompt="a" * 300) == (
        f"{context}300 input tokens, which exceeds this limit even without any output tokens. "
        f"{shorter}",
        "input_tokens",
    )
    message, param = await _refusal(client, COMPLETIONS, prompt="a" * 280_000)
    assert (message.startswith(f"{context}at least "), param) == (True, "input_tokens")
    assert await _refusal(client, COMPLETIONS, prompt="a" * 256) == (
        "max_tokens must be at least 1, got 0.",
        "max_tokens",
    )
    for path, name in (
        (COMPLETIONS, "max_tokens"),
        (CHAT, "max_tokens"),
        (CHAT, "max_completion_tokens"),
    ):
        body = {"prompt": "a", "messages": [USER], name: 257}
        assert await _refusal(client, path, **body) == (
            f"{name}=257 cannot be greater than max_model_len=256. "
            "Please request fewer output tokens.",
            name,
        )


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_more_tokens_than_fit_are_cut_to_those_that_do(
    path: str, client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    body = {"prompt": "a" * 200, "messages": [USER], "max_tokens": 250}
    assert (await client.post(path, json=body)).status_code == 200
    room = {COMPLETIONS: 256 - 200, CHAT: 256 - 21}[path]
    assert {request.sampling.max_tokens for request in engine.requests} == {room}


async def test_min_tokens_must_fit_beside_the_prompt(client: httpx.AsyncClient) -> None:
    body = {"prompt": "a" * 200, "max_tokens": 250, "min_tokens": 57}
    message, _ = await _refusal(client, COMPLETIONS, **body)
    assert message == "min_tokens must be at most max_tokens=56, not 57."


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/v1/models", "/health", "/tokenize"])
async def test_a_slash_too_many_is_redirected(path: str, client: httpx.AsyncClient) -> None:
    method = "GET" if path in ("/v1/models", "/health") else "POST"
    response = await client.request(method, path + "/", follow_redirects=False)
    assert response.status_code == 307
    assert httpx.URL(response.headers["location"]).path == path


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_an_unknown_model_is_a_404(path: str, client: httpx.AsyncClient) -> None:
    body = {"prompt": "hi", "messages": [USER], "model": "gpt-7"}
    response = await client.post(path, json=body)
    assert response.status_code == 404
    assert response.json() == {
        "error": {
            "message": "The model `gpt-7` does not exist. Valid aliases: tiny, alias.",
            "type": "NotFoundError",
            "param": "model",
            "code": 404,
        }
    }


@pytest.mark.parametrize(
    "neutral",
    [
        {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1},
        {"logit_bias": {}, "best_of": 1, "min_p": 0, "suffix": None},
        {"response_format": {"type": "text"}, "tool_choice": "none", "n": 1, "temperature": 0},
        {"stream_options": None, "kv_transfer_params": None, "stop": None},
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_an_option_that_asks_for_nothing_is_accepted(
    path: str, neutral: dict[str, Any], client: httpx.AsyncClient
) -> None:
    body = {"prompt": "hi", "messages": [USER], **neutral}
    assert (await client.post(path, json=body)).status_code == 200


FIELDS = (
    "prompt", "messages", "model", "n", "max_tokens", "max_completion_tokens", "min_tokens",
    "temperature", "top_p", "top_k", "seed", "stop", "stop_token_ids", "ignore_eos", "stream",
    "stream_options", "logprobs", "top_logprobs", "echo", "tools", "tool_choice", "request_id",
    "kv_transfer_params", "chat_template_kwargs", "add_generation_prompt", "return_token_ids",
    "continue_final_message", "add_special_tokens",
)  # fmt: skip
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-2, 300),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=12),
    st.sampled_from(["user", "text", "\x00", "<|im_end|>", "include_usage", "prompt_token_ids"]),
)
KEYS = st.one_of(
    st.text(max_size=6),
    st.sampled_from(
        ["role", "content", "type", "text", "tool_calls", "function", "prompt_token_ids"]
    ),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.text(max_size=5), "content": VALUES}), min_size=1, max_size=3
)
BODIES = st.builds(
    lambda base, fuzz: {**base, **fuzz},
    st.fixed_dictionaries({"prompt": st.text(max_size=5), "messages": MESSAGES}),
    st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4),
)


@pytest.mark.slow
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize"])
def test_no_body_makes_a_500(path: str, model: ServedModel) -> None:
    engine = FakeEngine(saying("a"))

    async def answer(body: object) -> httpx.Response:
        async with in_process(model, engine) as client:
            return await client.post(path, content=json.dumps(body))

    with asyncio.Runner() as runner:

        @settings(max_examples=150, deadline=None)
        @given(BODIES)
        def answered(body: object) -> None:
            response = runner.run(answer(body))
            assert response.status_code in (200, 400, 404)

        answered()
