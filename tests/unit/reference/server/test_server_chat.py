import re
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest

from engine_ext.reference.server.job import ServedModel
from engine_ext.reference.tokenizer import ChatTemplate
from tests.unit.reference.server.fake_engine import (
    FakeEngine,
    RunningServer,
    events_of,
    in_process,
)

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
RENDERED = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def prompt_of(server: RunningServer) -> str:
    (request,) = server.engine.requests
    ids = list(request.prompt_token_ids)
    return bytes(i for i in ids if i < 256).decode() if 257 not in ids else _spelled(ids)


def _spelled(ids: list[int]) -> str:
    names = {256: b"<|endoftext|>", 257: b"<|im_start|>", 258: b"<|im_end|>"}
    return b"".join(names.get(i) or bytes([i]) for i in ids).decode()


async def test_a_whole_answer_has_the_members_that_clients_read(server: RunningServer) -> None:
    response = await server.post(PATH, messages=[USER], return_token_ids=True)
    answer = response.json()
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{32}", answer.pop("id"))
    assert answer.pop("created") > 1_700_000_000
    assert len(answer.pop("prompt_token_ids")) == answer["usage"]["prompt_tokens"] == 21
    assert answer == {
        "object": "chat.completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "Héllo",
                    "tool_calls": [],
                },
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
                "token_ids": list("Héllo".encode()),
            }
        ],
        "usage": {
            "prompt_tokens": 21,
            "completion_tokens": 6,
            "total_tokens": 27,
            "prompt_tokens_details": {"cached_tokens": 3},
        },
        "kv_transfer_params": None,
    }


async def test_a_stream_opens_with_a_role(server: RunningServer) -> None:
    chunks = events_of(await server.post(PATH, messages=[USER], stream=True))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta["content"] for delta in deltas) == "Héllo"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


async def test_a_stream_says_what_the_whole_answer_says(server: RunningServer) -> None:
    body: dict[str, Any] = {
        "messages": [USER],
        "logprobs": True,
        "top_logprobs": 2,
        "return_token_ids": True,
        "kv_transfer_params": {"a": 1},
    }
    whole = (await server.post(PATH, **body)).json()
    options = {"include_usage": True}
    chunks = events_of(await server.post(PATH, **body, stream=True, stream_options=options))
    role, *middle, last = chunks
    choices = [chunk["choices"][0] for chunk in middle]
    expected = whole["choices"][0]
    assert role["prompt_token_ids"] == whole["prompt_token_ids"]
    assert [*chain.from_iterable(c["token_ids"] for c in choices)] == expected["token_ids"]
    assert [*chain.from_iterable(c["logprobs"]["content"] for c in choices)] == expected[
        "logprobs"
    ]["content"]
    assert choices[-1]["finish_reason"] == expected["finish_reason"]
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert last["kv_transfer_params"] == whole["kv_transfer_params"] == {"answer_to": {"a": 1}}


async def test_logprobs_give_the_true_bytes_of_half_a_character(server: RunningServer) -> None:
    answer = (await server.post(PATH, messages=[USER], logprobs=True, top_logprobs=1)).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]) == "Héllo".encode()
    assert all(len(entry["top_logprobs"]) == 1 for entry in content)


async def test_logprobs_without_alternatives_name_the_chosen_token(server: RunningServer) -> None:
    answer = (await server.post(PATH, messages=[USER], logprobs=True)).json()
    assert answer["choices"][0]["logprobs"]["content"][0] == {
        "token": "H",
        "logprob": -0.5,
        "bytes": [72],
        "top_logprobs": [],
    }


async def test_a_chat_may_fill_the_rest_of_the_context(server: RunningServer) -> None:
    await server.post(PATH, messages=[USER])
    assert server.engine.requests[0].sampling.max_tokens == 256 - 21


async def test_max_completion_tokens_wins_over_max_tokens(server: RunningServer) -> None:
    await server.post(PATH, messages=[USER], max_tokens=9, max_completion_tokens=5)
    assert server.engine.requests[0].sampling.max_tokens == 5


@pytest.mark.parametrize(
    "content",
    ["hi", [{"type": "text", "text": "hi"}], ["hi"], [{"type": "text", "text": "hi"}, ""]],
)
async def test_text_parts_are_text(content: Any, server: RunningServer) -> None:
    await server.post(PATH, messages=[{"role": "user", "content": content}])
    assert prompt_of(server).split("<|im_end|>")[0].rstrip("\n") == "<|im_start|>user\nhi"


async def test_the_template_writes_the_prompt(server: RunningServer) -> None:
    await server.post(PATH, messages=[USER], tools=[{"type": "function"}], tool_choice="auto")
    tools = '<|im_start|>tools\n[{"type": "function"}]<|im_end|>\n'
    assert prompt_of(server) == tools + RENDERED


async def test_a_tool_conversation_is_accepted(server: RunningServer) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "42"},
    ]
    assert (await server.post(PATH, messages=messages)).status_code == 200
    assert "<|im_start|>tool\n42<|im_end|>" in prompt_of(server)


@pytest.mark.parametrize("content", [{"content": None}, {}, {"content": []}, {"content": ""}])
async def test_no_content_beside_tool_calls_is_no_text_for_a_template_that_adds_strings(
    content: dict[str, Any], model: ServedModel, engine: FakeEngine
) -> None:
    source = "{% for m in messages %}{{ m.role + ':' + m['content'] + ';' }}{% endfor %}"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        USER,
        {"role": "assistant", "tool_calls": [call], **content},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "42"}]},
    ]
    adding = replace(model, chat_template=ChatTemplate(source))
    async with in_process(adding, engine) as client:
        response = await client.post(PATH, json={"messages": messages})
    assert response.status_code == 200
    assert bytes(engine.requests[0].prompt_token_ids).decode() == "user:hi;assistant:;tool:42;"


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [('{"a": 1}', '{"a": 1}'), ({"a": 1}, '{"a": 1}'), ('{"a', "{}"), ("[1]", "{}"), (None, "{}")],
)
async def test_arguments_of_a_tool_call_are_an_object_however_they_were_written(
    arguments: Any, shown: str, model: ServedModel, engine: FakeEngine
) -> None:
    source = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    async with in_process(replace(model, chat_template=ChatTemplate(source)), engine) as client:
        await client.post(PATH, json={"messages": [message]})
    assert bytes(engine.requests[0].prompt_token_ids).decode() == shown


async def test_the_request_id_is_the_base_of_the_engines(server: RunningServer) -> None:
    response = await server.client.post(
        PATH, json={"messages": [USER]}, headers={"X-Request-Id": "abc"}
    )
    assert response.json()["id"] == "chatcmpl-abc"
    assert re.fullmatch(r"chatcmpl-abc-[0-9a-f]{8}", server.engine.requests[0].request_id)
