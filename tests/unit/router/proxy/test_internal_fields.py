"""Fields and headers by which engines agree on a transfer pass neither from clients nor to them."""

import json
from itertools import product
from typing import Any

import pytest

from router.http_client.errors import BrokenAnswerError
from router.proxy.internal_fields import (
    LongAnswerFields,
    answer_without_internal_fields,
    take_fields_from_events,
)
from scripts.mock_engine import DONE, MockEngine, Peer, Received
from tests.unit.router.conftest import StartRouter
from tests.unit.router.harness import Router
from tests.unit.router.mock_engine import event

EVIL = "evil.example"
FIELDS = (
    "kv_transfer_params", "ec_transfer_params", "disaggregated_params", "bootstrap_host",
    "bootstrap_port", "bootstrap_room", "bootstrap_other",
)  # fmt: skip
OTHER_FIELDS = (
    "decode_tp_size", "disagg_prefill_dp_rank", "backend_instance_id", "prefill_worker_id",
    "decode_worker_id", "prefill_dp_rank", "prefill_result",
)  # fmt: skip
REQUEST_FIELDS = (*FIELDS, *OTHER_FIELDS)
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": CHAT,
    "/v1/responses": {"input": "a"},
    "/v1/embeddings": {"input": "a"},
    "/tokenize": {"prompt": "a"},
}
AUDIO = "/v1/audio/transcriptions"
ROUTING_HEADERS = (
    "X-Prefiller-Host-Port", "x-encoder-hosts-ports", "x-gateway-destination-endpoint",
    "x-gateway-destination-endpoint-subset", "x-gateway-destination-endpoint-any",
    "x-llm-d-prefiller-host-port", "x-kv-cache-source-host-port", "x-data-parallel-host-port",
    "x-prefill-instance-id", "x_prefiller_host_port", "X-Override-Bootstrap-Host",
)  # fmt: skip


def spelled(name: str, how: str) -> str:
    value = json.dumps({"remote_host": EVIL})
    if how == "escaped":
        name = f"\\u{ord(name[0]):04x}{name[1:]}"
    if how in ("vllm_xargs", "extra_body", "nvext"):
        return f'"{how}": {{"{name}": {value}, "other": 1}}'
    if how == "nested twice":
        return f'"extra_body": {{"vllm_xargs": {{"{name}": {value}}}, "other": 1}}'
    if how == "twice":
        return f'"{name}": null, "{name}": {value}'
    return f'"{name}": {value}'


@pytest.mark.parametrize(
    "how", ["plain", "escaped", "vllm_xargs", "extra_body", "nvext", "nested twice", "twice"]
)
async def test_no_internal_field_of_a_client_reaches_an_engine(
    router: Router, p: MockEngine, d: MockEngine, how: str
) -> None:
    paths = BODIES if how == "plain" else ("/v1/completions", "/v1/messages", "/v1/embeddings")
    for path in paths:
        for name in REQUEST_FIELDS:
            whole = json.dumps({"model": "m"} | BODIES[path])[:-1] + f", {spelled(name, how)}}}"
            headers = {"content-type": "application/json"}
            before = len(d.requests)
            await router.client.post(path, content=whole, headers=headers)
            assert len(d.requests) > before, path
    for request in p.requests + d.requests:
        assert EVIL.encode() not in request.body
        assert not request.json.keys() & {*REQUEST_FIELDS[1:]}
        for container in ("vllm_xargs", "extra_body", "nvext"):
            assert request.json.get(container, {"other": 1}) == {"other": 1}


@pytest.mark.parametrize("name", [*FIELDS, "vllm_xargs", "vllm_xargs[kv_transfer_params]"])
@pytest.mark.parametrize("is_first", [True, False])
async def test_no_internal_field_of_a_form_reaches_an_engine(
    router: Router, d: MockEngine, name: str, is_first: bool
) -> None:
    d.usual = replying(False, {"text": "a"})
    value = json.dumps({"bootstrap_host": EVIL})
    parts: dict[str, Any] = {name: (None, value), "model": (None, "m"), "file": ("a", b"RIFF")}
    if not is_first:
        parts = dict(reversed(parts.items()))
    answer = await router.client.post(AUDIO, files=parts)
    assert answer.status_code == 200
    assert EVIL.encode() not in d.last.body
    assert name.encode() not in d.last.body
    assert b"RIFF" in d.last.body
    assert d.last.body.count(b"form-data") == 2
    assert d.last.body.startswith(b"--")


async def test_harmless_engine_arguments_of_a_form_pass(router: Router, d: MockEngine) -> None:
    d.usual = replying(False, {"text": "a"})
    parts = {"model": (None, "m"), "vllm_xargs": (None, '{"a": 1}')}
    await router.client.post(AUDIO, files=parts)
    assert b'{"a": 1}' in d.last.body


@pytest.mark.parametrize("is_trusted", [False, True])
async def test_routing_headers_pass_only_from_trusted_clients(
    start_router: StartRouter, p: MockEngine, d: MockEngine, is_trusted: bool
) -> None:
    router = await start_router(trust_client_kv_params=is_trusted)
    headers = dict.fromkeys(ROUTING_HEADERS, EVIL) | {"x-other": "1"}
    await router.client.post("/v1/completions", json={"prompt": "a"}, headers=headers)
    for request in (p.last, d.last):
        assert "x-other" in dict(request.headers)
        found = {name for name, value in request.headers if value == EVIL}
        assert found == ({h.lower() for h in ROUTING_HEADERS} if is_trusted else set())


def replying(stream: bool, content: dict[str, Any], status: int = 200) -> Any:
    async def script(_: Received, peer: Peer) -> None:
        if stream:
            await peer.stream(event("a"), b"data: %b\n\n" % json.dumps(content).encode(), DONE)
        else:
            await peer.answer(content, status)

    return script


NAMED: dict[str, Any] = {"remote_host": EVIL, "remote_block_ids": [1, 2]}
CHOICE = {"index": 0, "text": "b", "finish_reason": "stop"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", [{"n": 1}, {"n": 2}, {"max_tokens": 1}])
async def test_no_internal_field_of_an_engine_reaches_a_client(
    router: Router, d: MockEngine, fields: dict[str, Any], stream: bool
) -> None:
    for name in FIELDS:
        d.usual = replying(
            stream, {"id": "1", "choices": [CHOICE | {name: NAMED}], "usage": {}, name: NAMED}
        )
        answer = await router.complete(stream=stream, **fields)
        assert answer.status_code == 200, name
        assert EVIL not in answer.text, name
        assert name not in answer.text
        assert '"text":"b"' in answer.text, name
        assert stream is answer.text.endswith("data: [DONE]\n\n"), name


PLACES: dict[str, Any] = {
    "choice": {"choices": [CHOICE | {"FIELD": NAMED}]},
    "message": {"choices": [CHOICE | {"message": {"role": "assistant", "FIELD": NAMED}}]},
    "usage": {"usage": {"FIELD": NAMED}},
    "a list": {"metrics": {"x": [{"FIELD": NAMED}]}},
    "nvext": {"nvext": {"worker_id": {"FIELD": NAMED}}},
}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
@pytest.mark.parametrize("stream", [False, True])
async def test_no_internal_field_reaches_a_client_from_any_place(
    router: Router, d: MockEngine, stream: bool, path: str
) -> None:
    asked = {"model": "m", "prompt": "a", "input": "a", "stream": stream}
    for name, place in product([FIELDS[0], FIELDS[1], *OTHER_FIELDS], PLACES):
        written = json.dumps({"choices": [CHOICE], "data": []} | PLACES[place])
        d.usual = replying(stream, json.loads(written.replace("FIELD", name)))
        answer = await router.client.post(path, json=asked)
        assert answer.status_code == 200, (name, place)
        assert EVIL not in answer.text, (name, place)
        assert '"text":"b"' in answer.text.replace(": ", ":"), (name, place)


async def test_no_routing_header_of_an_engine_reaches_a_client(
    router: Router, d: MockEngine
) -> None:
    async def script(_: Received, peer: Peer) -> None:
        await peer.answer({"choices": [CHOICE]}, 200, dict.fromkeys(ROUTING_HEADERS, EVIL))

    d.usual = script
    answer = await router.complete()
    assert answer.status_code == 200
    assert EVIL not in answer.headers.values()


@pytest.mark.parametrize("status", [200, 400])
async def test_no_internal_field_of_a_passed_answer_or_an_error_reaches_a_client(
    router: Router, d: MockEngine, status: int
) -> None:
    error = {"message": "m", "input": {"ec_transfer_params": NAMED}}
    d.usual = replying(False, {"data": [], "kv_transfer_params": NAMED, "error": error}, status)
    path = "/v1/embeddings" if status == 200 else "/v1/completions"
    answer = await router.client.post(path, json={"input": "a", "prompt": "a"})
    assert EVIL not in answer.text


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_request_id_with_the_address_of_an_engine_is_not_used(
    router: Router, p: MockEngine, d: MockEngine, role: str
) -> None:
    headers = {"x-request-id": f"a___{role}_addr_{EVIL}:1___decode_addr_{EVIL}:2_0123"}
    answer = await router.client.post("/v1/completions", json={"prompt": "a"}, headers=headers)
    assert answer.status_code == 200
    for request in p.requests + d.requests:
        assert EVIL not in str(request.headers)


@pytest.mark.parametrize("status", [200, 400, 500])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
async def test_error_that_quotes_params_is_not_shown(
    router: Router, p: MockEngine, d: MockEngine, path: str, status: int
) -> None:
    """vLLM quotes an invalid request, to which the router has added its params."""
    message = f"1 validation error: 'input': {{'kv_transfer_params': {NAMED!r}}}"
    p.usual = d.usual = replying(False, {"error": {"message": message}}, status)
    answer = await router.client.post(path, json=BODIES[path])
    assert answer.status_code == (400 if status == 400 else 502)
    assert EVIL not in answer.text
    assert answer.json()["error"]["message"]


async def test_trusted_client_sees_the_params_of_its_answer(
    start_router: StartRouter, d: MockEngine
) -> None:
    router = await start_router(trust_client_kv_params=True)
    d.usual = replying(False, {"choices": [CHOICE], "kv_transfer_params": NAMED})
    answer = await router.complete(ec_transfer_params={"a": 1})
    assert answer.json()["kv_transfer_params"] == NAMED
    assert d.last.json["ec_transfer_params"] == {"a": 1}
    assert EVIL not in (await router.complete()).text, "it has sent none"


@pytest.mark.parametrize(
    "raw",
    [
        b'{ "choices":[], "kv_transfer_params" : null }',
        b'{"text": "\\"kv_transfer_params\\": {\\"a\\": 1}"}',
        b'{"token": "kv_transfer_params", "a": 1}',
        b'WEBVTT "kv_transfer_params": 1',
    ],
)
def test_answer_without_internal_values_stays_as_it_is(raw: bytes) -> None:
    assert answer_without_internal_fields(raw) == raw


def test_unreadable_answer_with_params_neither_passes_nor_vanishes() -> None:
    raw = b'{"a": x, "kv_transfer_params": {"b": 1}}'
    with pytest.raises(BrokenAnswerError):
        answer_without_internal_fields(raw)
    passed, taken = take_fields_from_events(b"data: %b\n\ndata: [DONE]\n\n" % raw)
    assert b'"error"' in passed
    assert b"kv_transfer_params" not in passed
    assert not taken


async def test_long_answer_shows_no_params(router: Router, d: MockEngine) -> None:
    long = [CHOICE | {"text": "w" * 300_000}] * 2
    d.usual = replying(False, {"choices": long, "kv_transfer_params": NAMED, "usage": {}})
    answer = await router.complete(n=2)
    assert answer.json() == {"choices": long, "kv_transfer_params": {}, "usage": {}}


def test_params_of_a_long_answer_are_emptied_however_it_is_cut() -> None:
    named = NAMED | {"a": '"}\\\\\\"', "b": [[{"c": "]"}]]}
    content = {"text": '"kv_transfer_params": {', "kv_transfer_params": named, "z": {"y": 1}}
    raw = json.dumps(content | {"ec_transfer_params": [named]}).encode()
    for size in range(1, len(raw)):
        watch = LongAnswerFields()
        passed = b"".join(watch.passing(raw[at : at + size]) for at in range(0, len(raw), size))
        assert len(passed) == len(raw)
        expected = content | {"kv_transfer_params": {}, "ec_transfer_params": []}
        assert json.loads(passed) == expected
