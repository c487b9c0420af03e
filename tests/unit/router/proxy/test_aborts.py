"""Requests of token ids that are ended by their ids: /inference/v1/abort_requests."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.auth.api_keys import digest_of
from scripts.mock_engine import STREAM_HEAD, MockEngine, Peer, Received, chunk
from tests.unit.router.conftest import StartRouter
from tests.unit.router.engine_scripts import hanging, usual_decode
from tests.unit.router.harness import Router, eventually
from tests.unit.router.mock_engine import PARAMS
from tests.unit.router.proxy.test_token_requests import ANSWER, PATH

ABORT = "/inference/v1/abort_requests"
EVENT = b'data: {"request_id":"%s","choices":[{"index":0,"token_ids":[5]}]}\n\n'
KEYS = {"one": "sk-disagg-one", "other": "sk-disagg-other"}


@pytest.fixture(autouse=True)
def prefilling(p: MockEngine) -> None:
    p.usual = lambda request, peer: peer.answer({**ANSWER, "kv_transfer_params": PARAMS})


@pytest.fixture
def left(d: MockEngine) -> asyncio.Event:
    """Set when the router has ended a leg of the decode engine, which never answers."""
    left = asyncio.Event()
    hang = hanging(left=left)

    async def decode(request: Received, peer: Peer) -> None:
        await (hang if request.path == PATH else usual_decode)(request, peer)  # else a release

    d.usual = decode
    return left


def generating(
    router: Router, headers: dict[str, str] | None = None, **fields: Any
) -> asyncio.Task[httpx.Response]:
    body = {"model": "m", "token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 9}, **fields}
    return asyncio.create_task(router.client.post(PATH, json=body, headers=headers))


async def abort(router: Router, *ids: str, **headers: str) -> None:
    answer = await router.client.post(ABORT, json={"request_ids": ids}, headers=headers)
    assert (answer.status_code, answer.content) == (200, b"")


@pytest.mark.parametrize("mode", ["tokens", "text"])
@pytest.mark.parametrize("given", ["mine", "generate-tokens-mine"])
async def test_aborted_request_is_answered_as_by_vllm_and_its_engine_is_left(
    router: Router, d: MockEngine, left: asyncio.Event, given: str, mode: str
) -> None:
    mine = generating(router, {"x-request-id": "mine"}, output_mode=mode)
    others = generating(router, {"x-request-id": "others"})
    await eventually(lambda: len(d.requests) == 2)
    await abort(router, given, "unknown", "None")
    answer = await mine
    assert answer.status_code == 200
    assert answer.headers["x-request-id"] == "mine"
    content = answer.json()
    assert (content["request_id"], content["output_mode"]) == ("generate-tokens-mine", mode)
    ended: Any = {"finish_reason": "abort", "stop_reason": None, "logprobs": None, "token_ids": []}
    text = {"text": ""} if mode == "text" else {}
    assert content["choices"] == [{"index": 0, **ended, **text}]
    await left.wait()
    assert not others.done()
    await abort(router, "others")
    await others
    await router.settled()
    assert router.metric("client_disconnects_total", stage="decode") == 2
    labels = {"endpoint": PATH, "status": "200", "outcome": "disconnected", "flow": "pull"}
    assert router.metric("requests_total", **labels) == 2


async def test_request_is_aborted_during_its_prefill(
    router: Router, p: MockEngine, d: MockEngine
) -> None:
    left = asyncio.Event()
    p.usual = hanging(left=left)
    asking = generating(router, {"x-request-id": "mine"})
    await eventually(lambda: p.requests)
    await abort(router, "mine")
    assert (await asking).json()["choices"][0]["finish_reason"] == "abort"
    await left.wait()
    assert not d.requests


@pytest.mark.parametrize("heartbeat", [0, 0.1])
async def test_stream_that_has_begun_ends_with_the_finish_reason(
    start_router: StartRouter, d: MockEngine, heartbeat: float
) -> None:
    async def begin(request: Received, peer: Peer) -> None:
        engine_id = f"generate-tokens-{request.header('x-request-id')}"
        await peer.send(STREAM_HEAD + chunk(EVENT % engine_id.encode()))
        await peer.wait_left()

    d.usual = begin
    router = await start_router(stream_heartbeat=heartbeat)
    body = {"model": "m", "token_ids": [1], "sampling_params": {"n": 1}, "stream": True}
    async with router.client.stream("POST", PATH, json=body) as answer:
        lines = (line async for line in answer.aiter_lines() if line.startswith("data: "))
        first = json.loads((await anext(lines)).removeprefix("data: "))
        # As a client of vLLM names it: by the id in the answer, which is the leg's.
        await abort(router, first["request_id"])
        rest = [line.removeprefix("data: ") async for line in lines]
    assert rest[1:] == ["[DONE]"]
    assert json.loads(rest[0])["choices"][0]["finish_reason"] == "abort"


@pytest.mark.parametrize("heartbeat", [0, 0.1])
async def test_stream_without_a_token_is_a_stream_when_it_is_aborted(
    start_router: StartRouter, d: MockEngine, left: asyncio.Event, heartbeat: float
) -> None:
    router = await start_router(stream_heartbeat=heartbeat)
    asking = generating(router, {"x-request-id": "mine"}, stream=True, sampling_params={"n": 2})
    await eventually(lambda: d.requests)
    await asyncio.sleep(2 * heartbeat)
    await abort(router, "mine")
    answer = await asking
    assert answer.headers["content-type"].startswith("text/event-stream")
    event, done = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    assert done == "data: [DONE]"
    choices = json.loads(event.removeprefix("data: "))["choices"]
    assert [(one["index"], one["finish_reason"]) for one in choices] == [(0, "abort"), (1, "abort")]


async def test_id_in_the_body_counts_without_a_header(
    router: Router, d: MockEngine, left: asyncio.Event
) -> None:
    asking = generating(router, request_id="in-body")
    named = generating(router, {"x-request-id": "in-head"}, request_id="in-body")
    await eventually(lambda: len(d.requests) == 2)
    await abort(router, "in-body")
    assert (await asking).json()["choices"][0]["finish_reason"] == "abort"
    assert not named.done()
    await abort(router, "in-head")
    await named


async def test_only_requests_of_the_same_api_key_are_aborted(
    start_router: StartRouter, d: MockEngine, left: asyncio.Event, tmp_path: Path
) -> None:
    keys = [{"name": n, "sha256": digest_of(k.encode()).hex()} for n, k in KEYS.items()]
    path = tmp_path / "keys.yaml"
    path.write_text(json.dumps({"keys": keys}))
    router = await start_router(api_keys_file=path)
    bearers = {name: f"Bearer {key}" for name, key in KEYS.items()}
    asking = {
        name: generating(router, {"x-request-id": "same", "authorization": bearer})
        for name, bearer in bearers.items()
    }
    await eventually(lambda: len(d.requests) == 2)
    refused = await router.client.post(ABORT, json={"request_ids": ["same"]})
    assert refused.status_code == 401
    await abort(router, "same", authorization=bearers["one"])
    await asking["one"]
    assert not asking["other"].done()
    await abort(router, "same", authorization=bearers["other"])
    await asking["other"]


async def test_only_requests_with_the_same_credential_of_the_engines_are_aborted(
    router: Router, d: MockEngine, left: asyncio.Event
) -> None:
    asking = generating(router, {"x-request-id": "mine", "authorization": "Bearer a"})
    await eventually(lambda: d.requests)
    await abort(router, "mine")
    await abort(router, "mine", authorization="Bearer b")
    await router.client.get("/health")
    assert not asking.done()
    await abort(router, "mine", authorization="Bearer a")
    await asking


@pytest.mark.parametrize("ids", [None, "mine", [1], {}])
async def test_bodies_without_ids_are_refused(router: Router, ids: Any) -> None:
    answer = await router.client.post(ABORT, json={"request_ids": ids})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "request_ids"


async def test_requests_that_have_ended_are_forgotten(router: Router, d: MockEngine) -> None:
    d.usual = lambda request, peer: peer.answer(ANSWER)
    assert (await generating(router, {"x-request-id": "mine"})).json()["choices"][0]["token_ids"]
    await abort(router, "mine")
    assert (await generating(router, {"x-request-id": "mine"})).json()["choices"][0]["token_ids"]
