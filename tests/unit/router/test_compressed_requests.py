"""Compressed requests: engines get uncompressed bodies, and the router refuses bombs."""

import asyncio
import gzip
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from router.auth.api_keys import digest_of
from scripts.mock_engine import MockEngine, Peer, Received, chunk
from tests.unit.router.conftest import StartRouter
from tests.unit.router.engine_scripts import answer_after, answering
from tests.unit.router.harness import Router, eventually, post, status_of

BODY = {"model": "m", "prompt": "hello", "max_tokens": 7}
CHAT = {"model": "m", "max_tokens": 7, "messages": [{"role": "user", "content": "hello"}]}
PACKERS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress}
AUDIO = "/v1/audio/transcriptions"
JSON_LINE = b"content-type: application/json\r\n"
MIB = 1024 * 1024


async def embeds(_: Received, peer: Peer) -> None:
    await peer.answer({"data": []})


async def chats(_: Received, peer: Peer) -> None:
    choice = {"index": 0, "message": {"role": "assistant", "content": "a"}, "finish_reason": "stop"}
    await peer.answer({"id": "c", "object": "chat.completion", "model": "m", "choices": [choice]})


async def counts(_: Received, peer: Peer) -> None:
    await peer.answer({"count": 3})


async def post_coded(
    router: Router, body: object, coding: str = "gzip", path: str = "/v1/completions", **more: str
) -> Any:
    headers = {"content-type": "application/json", "content-encoding": coding, **more}
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    packed = PACKERS[coding](raw) if coding in PACKERS else raw
    return await router.client.post(path, content=packed, headers=headers)


def assert_is_plain(engine: MockEngine) -> None:
    assert engine.last.header("content-encoding") is None
    assert int(engine.last.header("content-length") or -1) == len(engine.last.body)


@pytest.mark.parametrize("coding", PACKERS)
async def test_both_engines_get_the_plain_body(
    router: Router, p: MockEngine, d: MockEngine, coding: str
) -> None:
    for prompt in ("hello", "other", "a" * 400_000):  # on one connection, in one read and in many
        answer = await post_coded(router, {**BODY, "prompt": prompt}, coding)
        assert answer.status_code == 200, answer.text
        for engine in (p, d):
            assert_is_plain(engine)
            assert engine.last.json["prompt"] == prompt
    assert (await router.complete()).status_code == 200
    await eventually(lambda: not router.gateway.memory.bodies.size)


@pytest.mark.parametrize(
    ("path", "body", "script", "at"),
    [
        ("/v1/chat/completions", CHAT, chats, "/v1/chat/completions"),
        ("/v1/responses", {"model": "m", "input": "hello"}, chats, "/v1/chat/completions"),
        ("/v1/messages", CHAT, chats, "/v1/chat/completions"),
        ("/v1/messages/count_tokens", CHAT, counts, "/tokenize"),
        ("/v1/embeddings", {"model": "m", "input": "hello"}, embeds, "/v1/embeddings"),
    ],
)
async def test_every_endpoint_accepts_compressed_json(
    router: Router, d: MockEngine, path: str, body: object, script: Any, at: str
) -> None:
    d.usual = script
    answer = await post_coded(router, body, path=path)
    assert answer.status_code == 200, answer.text
    assert_is_plain(d)
    assert d.last.path == at
    assert b"hello" in d.last.body


async def test_compressed_form_reaches_the_engine_as_the_form_that_it_is(
    router: Router, d: MockEngine
) -> None:
    d.usual = embeds
    files = {"file": ("speech.wav", b"\x00RIFF" * 100_000, "audio/wav")}
    built = router.client.build_request("POST", AUDIO, files=files, data={"model": "m"})
    form, kind = built.read(), built.headers["content-type"]
    answer = await post_coded(router, form, path=AUDIO, **{"content-type": kind})
    assert answer.status_code == 200, answer.text
    assert_is_plain(d)
    assert (d.last.body, d.last.header("content-type")) == (form, kind)


@pytest.mark.parametrize(
    ("packed", "coding", "status", "text"),
    [
        (b"{}", "gzip", 400, "the compressed body is broken"),
        (gzip.compress(b'{"prompt":"a"}', mtime=0)[:-4], "gzip", 400, "it ends too early"),
        (b"", "gzip", 400, "it ends too early"),
        (gzip.compress(b"not JSON", mtime=0), "gzip", 400, "not valid JSON"),
        (b"{}", "br", 415, "one of gzip and deflate"),
        (b"{}", "zstd", 415, "one of gzip and deflate"),
        (gzip.compress(b"{}", mtime=0), "gzip, gzip", 415, "one of gzip and deflate"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/v1/embeddings"])
async def test_body_that_cannot_be_decompressed_reaches_no_engine(
    router: Router,
    p: MockEngine,
    d: MockEngine,
    path: str,
    packed: bytes,
    coding: str,
    status: int,
    text: str,
) -> None:
    headers = {"content-type": "application/json", "content-encoding": coding}
    answer = await router.client.post(path, content=packed, headers=headers)
    assert answer.status_code == status
    assert text in answer.json()["error"]["message"]
    if path == "/v1/messages":
        assert answer.json()["type"] == "error"
    if status == 415:
        assert answer.headers["accept-encoding"] == "gzip, deflate"
    assert not p.requests
    assert not d.requests


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", AUDIO])
async def test_bomb_is_refused_by_its_plain_size(
    start_router: StartRouter, p: MockEngine, d: MockEngine, path: str
) -> None:
    router = await start_router(max_body_size=MIB)
    answer = await post_coded(router, b" " * (MIB + 1), path=path)
    assert answer.status_code == 413
    assert f"larger than {MIB} bytes without compression" in answer.json()["error"]["message"]
    bombs = [post_coded(router, b"a" * 100 * MIB, path=path) for _ in range(3)]
    assert [one.status_code for one in await asyncio.gather(*bombs)] == [413] * 3
    assert not p.requests
    assert not d.requests
    body = json.dumps(BODY).encode()
    assert (await post_coded(router, body + b" " * (MIB - len(body)))).status_code == 200


async def test_plain_bytes_count_among_the_held_bodies(
    start_router: StartRouter, d: MockEngine
) -> None:
    router = await start_router(max_body_size=MIB, max_held_bodies=MIB)
    may_answer = asyncio.Event()
    d.usual = answer_after(may_answer, answering(200, {"data": []}))
    large = {"model": "m", "input": "a" * (MIB * 3 // 4)}
    first = asyncio.ensure_future(post_coded(router, large, path="/v1/embeddings"))
    await eventually(lambda: d.requests)
    assert router.gateway.memory.bodies.size == len(json.dumps(large))
    second = await post_coded(router, large, path="/v1/embeddings")
    assert second.status_code == 503
    assert "too many request bodies" in second.json()["error"]["message"]
    may_answer.set()
    assert (await first).status_code == 200
    await eventually(lambda: not router.gateway.memory.bodies.size)


async def test_client_that_leaves_while_its_body_is_decompressed_leaves_no_memory_behind(
    router: Router,
) -> None:
    packed = gzip.compress(json.dumps({**BODY, "prompt": "a" * 32 * MIB}).encode())
    async with router.socket() as client:
        await client.send(post(packed, headers=JSON_LINE + b"content-encoding: gzip\r\n"))
        await eventually(lambda: router.gateway.memory.bodies.size)
    await eventually(lambda: not router.gateway.memory.bodies.size)
    await router.settled()
    assert (await router.complete()).status_code == 200


# Before anything is decompressed.


@pytest.mark.parametrize("coding", ["gzip", "br"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", AUDIO])
async def test_without_a_valid_key_nothing_is_decompressed(
    start_router: StartRouter,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    path: str,
    coding: str,
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("the body was decompressed")

    monkeypatch.setattr("router.server.client_connection.decompress", fail)
    keys = tmp_path / "keys.yaml"
    keys.write_text(json.dumps({"keys": [{"name": "one", "sha256": digest_of(b"k").hex()}]}))
    router = await start_router(api_keys_file=keys)
    answer = await post_coded(router, b"a" * MIB, coding, path, authorization="Bearer wrong")
    assert answer.status_code == 401


async def test_unknown_coding_is_refused_before_the_body_is_sent(router: Router) -> None:
    head = b"content-encoding: br\r\nexpect: 100-continue\r\n"
    asked = post(b"x" * 1000, headers=JSON_LINE + head)[:-1000]
    async with router.socket() as client:
        await client.send(asked)
        assert status_of(await client.head()) == 415


@pytest.mark.parametrize("packed", [False, True])
async def test_coding_in_a_trailer_is_none(router: Router, d: MockEngine, packed: bool) -> None:
    raw = json.dumps(BODY).encode()
    body = gzip.compress(raw) if packed else raw
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n"
    async with router.socket() as client:
        await client.send(head + JSON_LINE + b"\r\n" + chunk(body))
        await client.send(b"0\r\ncontent-encoding: gzip\r\n\r\n")
        assert status_of(await client.head()) == (400 if packed else 200)
    assert len(d.requests) == (not packed)


async def test_compressed_body_may_come_in_chunks(router: Router, d: MockEngine) -> None:
    packed = gzip.compress(json.dumps(BODY).encode())
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n"
    pieces = b"".join(chunk(packed[at : at + 7]) for at in range(0, len(packed), 7))
    async with router.socket() as client:
        await client.send(head + JSON_LINE + b"content-encoding: gzip\r\n\r\n" + pieces)
        await client.send(b"0\r\n\r\n")
        assert status_of(await client.head()) == 200
    assert_is_plain(d)


async def test_next_request_of_a_connection_is_judged_by_its_own_head(
    router: Router, d: MockEngine
) -> None:
    raw = json.dumps(BODY).encode()
    packed = post(gzip.compress(raw), headers=JSON_LINE + b"content-encoding: gzip\r\n")
    async with router.socket() as client:
        for sent in (packed, packed, post(raw, headers=JSON_LINE), packed):
            await client.send(sent)
            head, _ = await client.answer()
            assert status_of(head) == 200
            assert d.last.json["prompt"] == "hello"


async def test_endpoint_that_changes_all_engines_accepts_no_compressed_body(
    start_router: StartRouter, d: MockEngine
) -> None:
    router = await start_router(lora_updates=True)
    answer = await post_coded(
        router, {"lora_name": "a", "lora_path": "/a"}, path="/v1/load_lora_adapter"
    )
    assert answer.status_code == 415
    assert not d.requests
