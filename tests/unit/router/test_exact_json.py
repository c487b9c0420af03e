"""Numbers reach the other side as they were written, whichever way a request or an answer takes."""

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.common.exact_json import SLOW_LIMIT, dumps, loads, number
from router.proxy.kv_params import KvParams
from scripts.mock_engine import DONE, MockEngine, Peer, Received
from tests.unit.router.conftest import StartRouter
from tests.unit.router.conversations.engines import KEPT, stream, whole
from tests.unit.router.harness import Router
from tests.unit.router.mock_engine import PARAMS

NUMBERS = (
    "0", "1", "1.0", "1.50", "-0", "-0.0", "0.10", "1e5", "1E+05", "1e-7", "0.00001", "1e400",
    "-1E400", "1e-400", "0.1000000000000000055511151231257827021181583404541015625",
    "9007199254740993", "9007199254740993.0", "-9223372036854775809", "18446744073709551615",
    "18446744073709551616", "25000000000000000001", str(2**256 - 1), "1" + "0" * 400,
)  # fmt: skip
ODD = ("1.50", "-0", "1e400", "25000000000000000001", "1" + "0" * 400)
ALL = b"[" + ", ".join(NUMBERS).encode() + b"]"
HOLE = "NUMBERS"
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
HI = [{"role": "user", "content": "hi"}]


def filled(content: object) -> bytes:
    """As JSON, with all numbers in each hole."""
    return json.dumps(content).encode().replace(json.dumps(HOLE).encode(), ALL)


def as_written(raw: bytes | str) -> Any:
    """JSON with each number as its text, in a tuple, which JSON has not."""
    return json.loads(raw, parse_int=lambda text: (text,), parse_float=lambda text: (text,))


WRITTEN = as_written(ALL)


def data_in(raw: bytes | str) -> Iterator[Any]:
    for line in (raw if isinstance(raw, str) else raw.decode()).splitlines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield as_written(line[6:])


def answering_exactly(*contents: object) -> Any:
    """An engine that answers one content whole, or several as a stream."""

    async def script(request: Received, peer: Peer) -> None:
        if request.json.get("stream"):
            events = [b"data: " + filled(content) + b"\n\n" for content in contents]
            await peer.stream(*events, DONE)
        else:
            await peer.answer(filled(contents[0]))

    return script


@pytest.mark.parametrize("value", [*NUMBERS, "7" * 5000])
@pytest.mark.parametrize("form", ["[%s]", '{"a":[{"b":%s},"-0, 1e5"]}'])
def test_a_number_is_written_as_it_was_read(value: str, form: str) -> None:
    text = (form % value).encode()
    assert dumps(loads(text)) == text
    assert dumps(loads(text), orjson.OPT_SORT_KEYS) == text
    assert dumps(loads(text.replace(b":", b" :\n\t").replace(b"]", b"\r]"))) == text


@pytest.mark.parametrize("value", [one for one in NUMBERS if one != "-0"])
def test_numbers_of_a_large_text_are_written_as_they_were_read(value: str) -> None:
    text = f'{{"a":[{{"b":{value}}}],"c":{value}}}'.encode()
    content = loads(text + b" " * SLOW_LIMIT)
    assert dumps(content) == text
    assert content["c"] == number(content["a"][0]["b"]) == json.loads(value)


@given(
    st.lists(
        st.from_regex(
            r"-?(0|[1-9][0-9]{0,40})(\.[0-9]{1,40})?([eE][+-]?[0-9]{1,4})?", fullmatch=True
        )
    ),
    st.text(st.characters(exclude_categories=["Cs"])),
)
def test_all_numbers_are_written_as_they_were_read(numbers: list[str], text: str) -> None:
    raw = orjson.dumps({"a": text, "b": ["#"]}).replace(b'"#"', ",".join(numbers).encode())
    assert dumps(loads(raw)) == raw


def test_the_same_texts_are_json_as_for_orjson() -> None:
    chance = random.Random(31)
    text = rb'{"a":[1,2.5,-0.0,1e5,-0,"x\u00e9\ud83d\ude00\n",null],"b":{"c":' + '"ä"}}'.encode()
    for _ in range(20_000):
        raw = bytearray(text)
        for _ in range(chance.randint(1, 3)):
            at = chance.randrange(len(raw))
            raw[at : at + chance.randint(0, 1)] = chance.choice(
                (b"", b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"-", b"+", b".", b"e", b"0",
                 b"9", b" ", b"\0", b"\xed\xa0\x80", b"\xff", b"\\ud800", b"NaN")
            )  # fmt: skip
        try:
            expected = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            if "infinity" in str(error):
                continue
            with pytest.raises(orjson.JSONDecodeError):
                loads(bytes(raw))
        else:
            assert orjson.loads(dumps(loads(bytes(raw)))) == expected


@pytest.mark.parametrize(
    "raw", [b"[" * 100_000, b'{"a":' * 100_000, b"[" + b"7" * 5000 + b', "\xff"]',
            b"[" + b"7" * 5000 + b", NaN]", b"[-0, " + b"[" * 2000 + b"]" * 2000 + b"]"]
)  # fmt: skip
def test_what_is_no_json_is_refused_with_one_error(raw: bytes) -> None:
    with pytest.raises(orjson.JSONDecodeError):
        loads(raw)


def test_what_is_nested_too_deep_cannot_be_written() -> None:
    deep = loads(b"[" * 400 + str(2**64).encode() + b"]" * 400)
    with pytest.raises(orjson.JSONEncodeError):
        dumps(deep)


# Through the router.


@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
@pytest.mark.parametrize("is_turn", [False, True])
async def test_numbers_of_a_body_reach_both_engines(
    router: Router, p: MockEngine, d: MockEngine, path: str, is_turn: bool
) -> None:
    arguments = '{"x": 25000000000000000001, "y": -0}'
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    body = {
        "model": "m",
        **({"messages": [*HI, {"role": "assistant", "tool_calls": [call]}, *HI]}
           if path == CHAT else {"prompt": "hi"}),
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"enum": HOLE}}}],
        "chat_template_kwargs": {"deep": [{"er": HOLE}]},
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"const": HOLE}}},
        "vllm_xargs": {"x": HOLE},
        "logit_bias": HOLE,
        **({"conversation_id": "c"} if is_turn else {}),
    }  # fmt: skip
    raw = filled(body)
    raw = raw[:-1] + b', "seed": 25000000000000000001, "temperature": 0.70, "max_tokens": 7.0}'
    answer = await router.client.post(path, content=raw)
    assert answer.status_code == 200, answer.text
    sent = as_written(raw)
    for engine in (p, d):
        got = as_written(engine.last.body)
        for name in (body.keys() | {"seed", "temperature"}) - {"conversation_id"}:
            assert got[name] == sent[name], name
    assert as_written(d.last.body)["max_tokens"] == ("7.0",)


async def test_numbers_of_a_large_body_reach_both_engines(
    router: Router, p: MockEngine, d: MockEngine
) -> None:
    fields = (
        b'"model": "m", "temperature": 0.70, "min_tokens": 1.0, "max_tokens": 7.0, "stream": true',
        b'"stream_options": {"include_usage": 1.0}, "seed": 25000000000000000001',
        b'"odd": {"a": [1.50, -0.0, 1e400]}, "prompt": "%s"' % (b"x" * SLOW_LIMIT),
    )
    raw = b"{%s}" % b", ".join(fields)
    assert (await router.client.post("/v1/completions", content=raw)).status_code == 200
    sent = as_written(raw)
    prefill, decode = as_written(p.last.body), as_written(d.last.body)
    assert {name: decode[name] for name in sent} == sent
    assert {name: prefill[name] for name in ("temperature", "seed", "odd", "prompt")} == {
        name: sent[name] for name in ("temperature", "seed", "odd", "prompt")
    }


async def test_a_threshold_reaches_the_decoder_as_it_was_written(
    router: Router, d: MockEngine
) -> None:
    raw = b'{"model": "m", "prompt": "hi", "cache_hit_threshold": 0.50}'
    await router.client.post("/v1/completions", content=raw)
    assert as_written(d.requests[0].body)["cache_hit_threshold"] == ("0.50",)


@pytest.mark.parametrize("streams", [False, True])
async def test_numbers_of_a_turn_reach_its_client_and_its_params_the_next_prefiller(
    router: Router, p: MockEngine, d: MockEngine, streams: bool
) -> None:
    params = {**KEPT, "next_year": HOLE}
    said = {"role": "assistant", "content": "fine"}
    if streams:
        *_, last, _ = stream(said, params, False)
        contents: list[Any] = [{**json.loads(last.removeprefix(b"data: ")), "odd": HOLE}]
    else:
        contents = [{**whole(Received("POST", CHAT, [], b"", 1), said, params), "odd": HOLE}]
    d.scripts = [answering_exactly(*contents)]
    body = {"model": "m", "messages": HI, "conversation_id": "c", "stream": streams}
    answer = await router.client.post(CHAT, json=body)
    (told,) = data_in(answer.text) if streams else [as_written(answer.text)]
    assert told["odd"] == WRITTEN
    assert "kv_transfer_params" not in told
    await router.settled()
    if not streams:  # of the stream above, nothing but its end was said
        again = {**body, "messages": [*HI, said, *HI]}
        await router.client.post(CHAT, json=again)
        assert as_written(p.last.body)["kv_transfer_params"]["next_year"] == WRITTEN


async def test_numbers_of_params_reach_the_decoder(
    router: Router, p: MockEngine, d: MockEngine
) -> None:
    async def prefills(request: Received, peer: Peer) -> None:
        await peer.answer(filled({"choices": [], "kv_transfer_params": {**PARAMS, "x": HOLE}}))

    p.usual = prefills
    await router.complete()
    assert as_written(d.last.body)["kv_transfer_params"]["x"] == WRITTEN
    params = KvParams(filled({"begun": {"a": 1}, "x": HOLE})).without_generated_tokens()
    assert as_written(params.raw) == {"x": WRITTEN}


async def test_numbers_of_an_answer_that_becomes_a_stream(
    start_router: StartRouter, d: MockEngine
) -> None:
    """As a turn that is streamed exactly, and behind a comment that was sent meanwhile."""
    router, is_heard = await start_router(stream_heartbeat=0.1), asyncio.Event()
    said = whole(Received("POST", CHAT, [], b"", 1), {"role": "assistant", "content": "x"}, None)
    said["choices"][0]["logprobs"] = {"content": HOLE}

    async def answers(request: Received, peer: Peer) -> None:
        if request.json.get("stream"):
            await is_heard.wait()
        await peer.answer(filled(said))

    d.usual = answers
    body = {"model": "m", "messages": HI, "stream": True}
    turn = {"conversation_id": "c", "conversation_stream": "exact"}
    told = await router.client.post(CHAT, json={**body, **turn})
    assert list(data_in(told.text))[-1]["choices"][0]["logprobs"] == {"content": WRITTEN}
    async with router.client.stream("POST", CHAT, json=body) as answer:
        lines = answer.aiter_lines()
        assert (await anext(lines)).startswith(":")
        is_heard.set()
        rest = "\n".join([line async for line in lines])
    assert list(data_in(rest))[-1]["choices"][0]["logprobs"] == {"content": WRITTEN}


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/m"])
async def test_numbers_of_models_are_listed_as_engines_wrote_them(
    router: Router, p: MockEngine, d: MockEngine, path: str
) -> None:
    p.contexts = d.contexts = {"m": 25000000000000000001}
    answer = await router.client.get(path)
    assert answer.headers["content-type"] == "application/json"
    assert '"max_model_len":25000000000000000001' in answer.text


ASKS: dict[str, tuple[str, object]] = {
    "/v1/completions": ("prompt", "hi"),
    CHAT: ("messages", HI),
    MESSAGES: ("messages", HI),
    RESPONSES: ("input", "hi"),
}
MESSAGE = {"model": "m", "max_tokens": 5, "messages": HI}


@pytest.mark.parametrize("streams", [False, True])
async def test_numbers_in_messages(
    router: Router, p: MockEngine, d: MockEngine, streams: bool
) -> None:
    used = {"type": "tool_use", "id": "c", "name": "f", "input": {"x": HOLE}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "1"}
    asked = {
        **MESSAGE,
        "messages": [*HI, {"role": "assistant", "content": [used]},
                     {"role": "user", "content": [result]}],
        "tools": [{"name": "f", "input_schema": {"type": "object", "enum": HOLE}}],
        "output_config": {"format": {"type": "json_schema", "schema": {"const": HOLE}}},
        "chat_template_kwargs": {"a": HOLE},
        "seed": HOLE,
        "stream": streams,
    }  # fmt: skip
    function = {"name": "f", "arguments": f'{{"x": {ALL.decode()}}}'}
    call = {"index": 0, "id": "c", "type": "function", "function": function}
    end = {"index": 0, "finish_reason": "tool_calls", "odd": HOLE}
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    said = {"model": "m", "object": "x", "usage": usage}
    d.scripts = [
        answering_exactly({**said, "choices": [{**end, "message": {"tool_calls": [call]}}]})
        if not streams
        else answering_exactly(
            {**said, "choices": [{"index": 0, "delta": {"tool_calls": [call]}, "odd": HOLE}]},
            {**said, "choices": [{**end, "delta": {}}]},
        )
    ]
    answer = await router.client.post(MESSAGES, content=filled(asked))
    assert answer.status_code == 200, answer.text
    for engine in (p, d):
        got = as_written(engine.last.body)
        assert as_written(got["messages"][1]["tool_calls"][0]["function"]["arguments"]) == {
            "x": WRITTEN
        }
        assert got["tools"][0]["function"]["parameters"]["enum"] == WRITTEN
        assert got["response_format"]["json_schema"]["schema"] == {"const": WRITTEN}
        assert got["chat_template_kwargs"] == {"a": WRITTEN}
        assert got["seed"] == WRITTEN
    if streams:
        pieces = [e["delta"].get("partial_json", "") for e in data_in(answer.text) if "delta" in e]
        assert as_written("".join(pieces)) == {"x": WRITTEN}
    else:
        assert as_written(answer.text)["content"][0]["input"] == {"x": WRITTEN}


@pytest.mark.parametrize("streams", [False, True])
async def test_numbers_in_responses(
    router: Router, p: MockEngine, d: MockEngine, streams: bool
) -> None:
    arguments = f'{{"x": {ALL.decode()}}}'
    called = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
    asked = {
        "model": "m",
        "input": [{"role": "user", "content": "hi"}, called],
        "tools": [{"type": "function", "name": "f", "parameters": {"enum": HOLE}}],
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"const": HOLE}}},
        "metadata": {"m": HOLE},
        "chat_template_kwargs": {"a": HOLE},
        "include": ["message.output_text.logprobs"],
        "seed": HOLE,
        "stream": streams,
    }
    logprobs = {"content": [{"token": "x", "logprob": HOLE}]}
    said = {"model": "m", "object": "x"}
    choice = {"index": 0, "finish_reason": "stop", "logprobs": logprobs}
    name = "delta" if streams else "message"
    d.scripts = [answering_exactly({**said, "choices": [{**choice, name: {"content": "x"}}]})]
    answer = await router.client.post(RESPONSES, content=filled(asked))
    assert answer.status_code == 200, answer.text
    for engine in (p, d):
        got = as_written(engine.last.body)
        assert got["messages"][1]["tool_calls"][0]["function"]["arguments"] == arguments
        assert got["tools"][0]["function"]["parameters"]["enum"] == WRITTEN
        assert got["response_format"]["json_schema"]["schema"] == {"const": WRITTEN}
        assert got["chat_template_kwargs"] == {"a": WRITTEN}
        assert got["seed"] == WRITTEN
    told = list(data_in(answer.text))[-1]["response"] if streams else as_written(answer.text)
    kept = as_written((await router.client.get(f"{RESPONSES}/{told['id']}")).text)
    for response in (told, kept):
        assert response["tools"][0]["parameters"]["enum"] == WRITTEN
        assert response["metadata"] == {"m": WRITTEN}
        assert response["output"][0]["content"][0]["logprobs"][0]["logprob"] == WRITTEN


FIELDS = ("max_tokens", "max_completion_tokens", "min_tokens", "n", "best_of", "logprobs",
          "priority", "cache_hit_threshold", "prompt", "stream", "conversation_id", "echo",
          "prompt_logprobs", "truncate_prompt_tokens", "model", "stop", "messages")  # fmt: skip


@pytest.mark.parametrize("number", ODD)
async def test_no_number_in_any_field_is_too_much_for_the_router(
    router: Router, number: str
) -> None:
    for name in FIELDS:
        for value in (number, f"[{number}]", f'{{"content": {number}}}'):
            raw = f'{{"model": "m", "prompt": "hi", "{name}": {value}}}'.encode()
            for path in ("/v1/completions", CHAT, MESSAGES, RESPONSES, "/v1/embeddings"):
                answer = await router.client.post(path, content=raw)
                assert answer.status_code in (200, 400, 404), (name, path, answer.text)


@pytest.mark.parametrize("number", ODD)
async def test_no_number_of_an_engine_is_too_much_for_the_router(
    router: Router, p: MockEngine, d: MockEngine, number: str
) -> None:
    """In usage and params, by which the router counts and times."""
    names = ("remote_num_tokens", "remote_port", "tp_size", "retained_until", "remote_block_ids")
    counts = ("prompt_tokens", "completion_tokens", "cached_tokens")
    usage = dict.fromkeys(counts, HOLE) | {"prompt_tokens_details": {"cached_tokens": HOLE}}
    params = {**KEPT, **dict.fromkeys(names, HOLE)}

    def said(content: object) -> bytes:
        return json.dumps(content).encode().replace(b'"NUMBERS"', number.encode())

    async def prefills(request: Received, peer: Peer) -> None:
        await peer.answer(said({"choices": [], "usage": usage, "kv_transfer_params": params}))

    async def decodes(request: Received, peer: Peer) -> None:
        content = {**whole(request, {"content": "x"}, params), "usage": usage}
        if request.json.get("stream"):
            content["choices"][0]["delta"] = {"content": "x"}
            await peer.stream(said(content).join([b"data: ", b"\n\n"]), DONE)
        else:
            await peer.answer(said(content))

    p.usual, d.usual = prefills, decodes
    for path in ASKS:
        for more in ({}, {"stream": True}, {"cache_hit_threshold": 0.5}):
            for _ in range(2):
                body = {"model": "m", ASKS[path][0]: ASKS[path][1], "max_tokens": 5, **more}
                body["conversation_id"] = "c"
                answer = await router.client.post(path, json=body)
                assert answer.status_code == 200, (path, answer.text)
                assert "error" not in answer.text or '"error":null' in answer.text
