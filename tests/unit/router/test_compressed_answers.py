"""Engines are asked for uncompressed answers, and a compressed one is named as that."""

import gzip
import json

import pytest

from scripts.mock_engine import MockEngine, Peer, Received
from tests.unit.router.engine_scripts import refuses
from tests.unit.router.harness import Router, eventually
from tests.unit.router.mock_engine import USUAL


async def test_every_request_to_an_engine_asks_for_an_uncompressed_answer(
    router: Router, p: MockEngine, d: MockEngine
) -> None:
    given = {"accept-encoding": "gzip, br"}
    for path in ("/v1/completions", "/v1/embeddings"):
        body = b'{"model":"m","prompt":"a","input":"a"}'
        assert (await router.client.post(path, content=body, headers=given)).status_code == 200
    assert {one.header("accept-encoding") for one in (*p.requests, *d.requests)} == {"identity"}


@pytest.mark.parametrize(
    "coding", ["gzip", "GZIP", "br", "identity, gzip", "gzip\r\ncontent-encoding: identity"]
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
@pytest.mark.parametrize("status", [200, 400])
async def test_compressed_answer_is_named_as_one(
    router: Router,
    d: MockEngine,
    caplog: pytest.LogCaptureFixture,
    path: str,
    coding: str,
    status: int,
) -> None:
    async def compresses(_: Received, peer: Peer) -> None:
        packed = gzip.compress(json.dumps(USUAL).encode())
        await peer.answer(packed, status, {"content-encoding": coding})

    d.usual = compresses
    body = {"model": "m", "prompt": "a", "input": "a"}
    answer = await router.client.post(path, json=body)
    assert answer.status_code == 502
    text = "the decode engine sent a compressed answer"
    assert answer.json()["error"]["message"] == text
    name = coding.partition("\r")[0].lower()
    assert f"the engine's answer is compressed with {name} although the request" in caplog.text
    assert f"127.0.0.1:{d.port} sent a compressed answer" in caplog.text


@pytest.mark.parametrize("coding", ["identity", "Identity", ""])
async def test_answer_may_say_that_it_is_uncompressed(
    router: Router, d: MockEngine, coding: str
) -> None:
    async def answer_plainly(_: Received, peer: Peer) -> None:
        await peer.answer(USUAL, headers={"content-encoding": coding})

    d.usual = answer_plainly
    answer = await router.complete()
    assert (answer.status_code, answer.json()["choices"]) == (200, USUAL["choices"])


async def test_connection_that_carried_a_compressed_answer_is_not_used_again(
    router: Router, d: MockEngine
) -> None:
    async def compresses(_: Received, peer: Peer) -> None:
        await peer.answer(gzip.compress(b"{}"), headers={"content-encoding": "gzip"})

    d.scripts = [compresses, refuses]
    assert (await router.complete()).status_code == 502
    await eventually(lambda: not router.engine(d).in_flight)
    assert (await router.complete()).status_code == 400
