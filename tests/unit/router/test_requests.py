"""What clients may send, well-formed or not, and what becomes of it."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from scripts.mock_engine import DONE, STREAM_HEAD, MockEngine, Peer, Received, chunk, is_release
from tests.unit.router.conftest import StartRouter
from tests.unit.router.engine_scripts import hanging
from tests.unit.router.harness import RawClient, Router, eventually, post, status_of
from tests.unit.router.mock_engine import USUAL, event

BODY = b'{"prompt": "x"}'


def check_error(head: bytes, body: bytes, status: int) -> None:
    assert status_of(head) == status
    assert b"content-type: application/json" in head.lower()
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status


# Bodies.


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"null",
        b"7",
        b'{"a": NaN}',
        b'{"a": "\\ud800"}',
        b'{"a": "\xff"}',
        b'{"a": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"a": ' + b"[" * 500 + b"]" * 500 + b"}",
        b"\xef\xbb\xbf{}",
    ],
)
async def test_a_body_that_cannot_be_forwarded_is_a_400(router: Router, body: bytes) -> None:
    answer = await router.client.post("/v1/completions", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "BadRequestError"
    assert (await router.complete()).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "a", "prompt": "b"}',
        b'{"seed": 12345678901234567890123}',
        b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}",
        b'{"a": "\\u0000\\ud83d\\ude00"}',
        b'{"max_tokens": "7", "n": null, "stream": "yes", "vllm_xargs": 7, "prompt": {}}',
    ],
)
async def test_a_strange_body_is_the_engines_business(router: Router, body: bytes) -> None:
    assert (await router.client.post("/v1/completions", content=body)).status_code == 200


@pytest.mark.parametrize("size", [1000, 1001, 400_000])
async def test_a_body_over_the_limit_is_a_413(start_router: StartRouter, size: int) -> None:
    router = await start_router(max_body_size=1000)
    body = b'{"prompt": "' + b"x" * (size - 14) + b'"}'
    assert len(body) == size

    async def pieces() -> AsyncIterator[bytes]:
        yield body[:500]
        yield body[500:]

    for content in (body, pieces()):
        answer = await router.client.post("/v1/completions", content=content)
        assert answer.status_code == (413 if size > 1000 else 200)
    assert (await router.complete()).status_code == 200


async def test_what_is_refused_unread_is_still_counted_and_has_an_id(
    start_router: StartRouter,
) -> None:
    router = await start_router(max_body_size=10)
    headers = {"x-request-id": "mine"}
    answer = await router.client.post("/v1/completions", content=BODY, headers=headers)
    assert (answer.status_code, answer.headers["x-request-id"]) == (413, "mine")
    assert router.metric(
        "requests_total",
        endpoint="/v1/completions", flow="none", status="413", outcome="refused",
    ) == 1  # fmt: skip


async def test_a_client_that_sends_on_after_a_413_still_reads_it(start_router: StartRouter) -> None:
    router = await start_router(max_body_size=1000)
    answer = await router.client.post("/v1/completions", content=b"x" * 20_000_000)
    assert answer.status_code == 413


# HTTP.


async def test_a_pipelined_request_may_be_cut_anywhere(router: Router) -> None:
    data = post(BODY) + post(BODY)
    for cut in range(1, len(data), 17):
        async with router.socket() as client:
            await client.send(data[:cut])
            await asyncio.sleep(0)
            await client.send(data[cut:])
            assert status_of((await client.answer())[0]) == 200
            assert status_of((await client.answer())[0]) == 200


async def test_expect_100_continue_is_honoured(router: Router) -> None:
    async with router.socket() as client:
        request = post(BODY, headers=b"Expect: 100-continue\r\n")
        await client.send(request[: -len(BODY)])
        assert status_of(await client.head()) == 100
        await client.send(BODY)
        assert status_of((await client.answer())[0]) == 200


async def test_a_body_too_large_is_refused_before_it_is_sent(start_router: StartRouter) -> None:
    router = await start_router(max_body_size=10)
    async with router.socket() as client:
        request = post(BODY, headers=b"Expect: 100-continue\r\n")
        await client.send(request[: -len(BODY)])
        check_error(*await client.answer(), 413)


async def test_a_1_0_client_gets_an_answer_that_ends_with_the_connection(router: Router) -> None:
    for body in (BODY, b'{"prompt": "x", "stream": true}'):
        async with router.socket() as client:
            await client.send(post(body).replace(b"HTTP/1.1", b"HTTP/1.0"))
            head, _, content = (await client.until_closed()).partition(b"\r\n\r\n")
        assert status_of(head) == 200
        assert b"transfer-encoding" not in head
        assert content.endswith(b"data: [DONE]\n\n" if b"stream" in body else b"}")


async def test_connection_close_closes(router: Router) -> None:
    async with router.socket() as client:
        await client.send(post(BODY, headers=b"connection: close\r\n"))
        answer = await client.until_closed()
    assert status_of(answer) == 200
    assert b"connection: close" in answer.lower()


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"POST /v1/completions HTTP/1.1\r\nx: a\nb: c\r\n\r\n",
        b"POST /v1/completions HTTP/9.9\r\n\r\n",
        b"CONNECT example.org:443 HTTP/1.1\r\n\r\n",
        b"GET http:///\xff HTTP/1.1\r\n\r\n",
    ],
)
async def test_what_is_not_http_is_a_400(router: Router, data: bytes, p: MockEngine) -> None:
    async with router.socket() as client:
        await client.send(data)
        check_error(*await client.answer(), 400)
        assert await client.until_closed() == b""
    assert not p.requests


async def test_garbage_behind_a_request_does_not_spoil_its_answer(router: Router) -> None:
    async with router.socket() as client:
        await client.send(post(BODY) + b"\x00garbage\r\n\r\n")
        head, _ = await client.answer()
        assert status_of(head) == 200
        assert await client.until_closed() == b""


@pytest.mark.parametrize(
    "head",
    [
        b"x: " + b"y" * 100_000,
        b"x: y\r\n" * 20_000,
        b"x: " + b"y" * 100_000 + b"\r\ncontent-length: 0\r\n\r\n",
    ],
)
async def test_an_endless_head_is_a_431(router: Router, head: bytes) -> None:
    async with router.socket() as client:
        await client.send(b"POST /v1/completions HTTP/1.1\r\n" + head)
        check_error(*await client.answer(), 431)


@pytest.mark.parametrize("sent", [b"POST /v1/comp", post(BODY)[:-3]])
async def test_a_request_that_does_not_come_is_a_408(
    start_router: StartRouter, sent: bytes
) -> None:
    router = await start_router(client_read_timeout=0.2)
    async with router.socket() as client:
        await client.send(sent)
        check_error(*await client.answer(), 408)


async def test_a_connection_without_a_request_is_closed(start_router: StartRouter) -> None:
    router = await start_router(client_read_timeout=0.2)
    async with router.socket() as client:
        assert await client.until_closed() == b""


async def test_blank_lines_are_no_request_that_a_connection_waits_for(
    start_router: StartRouter,
) -> None:
    """RFC 9112, section 2.2 lets a client send some before a request."""
    router = await start_router(client_read_timeout=0.2, keep_alive_timeout=0.2)
    async with router.socket() as client:
        await client.send(b"\r\n\r\n\r\n")
        assert await client.until_closed() == b""
    async with router.socket() as client:
        await client.send(post(BODY) + b"\r\n")
        assert status_of((await client.answer())[0]) == 200
        await client.send(b"\r\n\r\n")
        assert await client.until_closed() == b""


async def test_an_upgrade_request_is_served_as_the_request_that_it_is(
    router: Router, d: MockEngine
) -> None:
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    async with router.socket() as client:
        await client.send(post(BODY, headers=upgrade) + post(BODY))
        for _ in range(2):
            assert status_of((await client.answer())[0]) == 200
    assert d.requests[0].json["prompt"] == "x"
    assert d.requests[0].header("upgrade") is None


@pytest.mark.parametrize("path", [b"/v1/responses", b"/v1/nothing", b"/health"])
async def test_a_websocket_handshake_is_answered_with_426(router: Router, path: bytes) -> None:
    async with router.socket() as client:
        await client.send(
            b"GET %s HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
            b"\x81\x85\x37\xfa\x21\x3d\x7f\x9f\x4d\x51\x58" % path
        )
        answer = await client.until_closed()
    assert status_of(answer) == 426
    assert b"\r\nupgrade: HTTP/1.1\r\n" in answer
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == 426


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1", 404),
        ("POST", "/v1/nothing", 404),
        ("POST", "/v1/responses/compact", 404),
        ("POST", "/v1/responses/resp_1/cancel", 404),
        ("GET", "/v1/responses/resp_1/input_items", 404),
        ("POST", "/v1/completions//", 404),
        ("GET", "/v1/completions", 405),
        ("PUT", "/v1/chat/completions", 405),
        ("POST", "/health", 405),
    ],
)
async def test_unknown_paths_and_wrong_methods_are_openai_errors(
    router: Router, method: str, path: str, status: int
) -> None:
    answer = await router.client.request(method, path, content=b"{}")
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == status


# Headers.


async def test_client_headers_reach_both_engines(
    router: Router, p: MockEngine, d: MockEngine
) -> None:
    passed = {
        "authorization": "Bearer secret",
        "x-session-id": "s1",
        "x-data-parallel-rank": "3",
        "x-vllm-priority": "2",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "tracestate": "a=b",
        "baggage": "c=d",
        "user-agent": "me/1",
        "x-forwarded-for": "203.0.113.7, 10.0.0.9",
        "x-forwarded-proto": "https",
        "x-forwarded-host": "llm.example",
        "forwarded": "for=203.0.113.7",
        "x-anything": "else",
    }
    kept_back = {
        "connection": "keep-alive, x-nominated",
        "x-nominated": "1",
        "te": "trailers",
        "proxy-authorization": "Basic x",
        "content-encoding": "identity",
        "keep-alive": "timeout=5",
    }
    replaced = {"accept-encoding": "gzip"}
    headers = passed | kept_back | replaced
    answer = await router.client.post("/v1/completions", content=BODY, headers=headers)
    assert answer.status_code == 200
    for engine in (p, d):
        assert {name: engine.last.header(name) for name in passed} == passed
        assert all(engine.last.header(name) is None for name in kept_back)
        assert engine.last.header("accept-encoding") == "identity"
        assert engine.last.header("content-type") == "application/json"
        assert engine.last.header("host") == f"127.0.0.1:{engine.port}"


async def test_a_sane_request_id_is_echoed_and_every_leg_has_its_own(
    router: Router, p: MockEngine, d: MockEngine
) -> None:
    """Two clients may send the same one, and engines match a push by it."""
    headers = {"X-Request-Id": "my-id_1.2:3"}
    for _ in range(2):
        answer = await router.client.post("/v1/completions", content=BODY, headers=headers)
        assert answer.headers["x-request-id"] == "my-id_1.2:3"
    ids = [r.header("x-request-id") or "" for r in (*p.requests, *d.requests)]
    assert all(name.startswith("my-id_1.2:3.") for name in ids)
    assert len(set(ids)) == 4


@pytest.mark.parametrize("name", ["", "two words", "x" * 129, "ünd", 'a"b', "a\tb"])
async def test_another_request_id_is_replaced(router: Router, d: MockEngine, name: str) -> None:
    async with router.socket() as client:
        await client.send(post(BODY, headers=b"x-request-id: " + name.encode() + b"\r\n"))
        head, _ = await client.answer()
    assert status_of(head) == 200
    given = (d.last.header("x-request-id") or "").partition(".")[0]
    assert given != name
    assert len(given) == 32
    assert f"x-request-id: {given}".encode() in head


async def test_every_request_without_an_id_gets_its_own(router: Router) -> None:
    answers = [await router.complete() for _ in range(3)]
    assert len({answer.headers["x-request-id"] for answer in answers}) == 3


# kv_transfer_params and decode-only plans.

FORGED = {"remote_host": "evil.example", "remote_port": 1, "do_remote_prefill": True}


@pytest.mark.parametrize(
    "fields",
    [
        {"kv_transfer_params": FORGED},
        {"vllm_xargs": {"kv_transfer_params": FORGED, "other": 1}},
        {"kv_transfer_params": None, "vllm_xargs": {"kv_transfer_params": FORGED}},
    ],
)
@pytest.mark.parametrize("n", [1, 2])
async def test_a_client_cannot_supply_params(
    router: Router, p: MockEngine, d: MockEngine, fields: dict[str, object], n: int
) -> None:
    assert (await router.complete(n=n, **fields)).status_code == 200
    for request in p.requests + d.requests:
        assert b"evil.example" not in request.body
        assert request.json.get("vllm_xargs", {"other": 1}) in ({"other": 1}, {})


async def test_a_trusted_client_can(
    start_router: StartRouter, d: MockEngine, p: MockEngine
) -> None:
    router = await start_router(trust_client_kv_params=True)
    assert (await router.complete(kv_transfer_params=FORGED)).status_code == 200
    assert d.last.json["kv_transfer_params"] == FORGED
    assert not p.requests
    assert router.metric("decode_only_total", reason="client_params") == 1


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"n": 2}, "n"),
        ({"best_of": 3}, "best_of"),
        ({"use_beam_search": True}, "beam_search"),
        ({"echo": True, "max_tokens": 0}, "echo"),
        ({"prompt": ["a", "b"]}, "prompt_list"),
        ({"prompt": [[1, 2], [3]]}, "prompt_list"),
    ],
)
async def test_what_becomes_several_sequences_goes_to_the_decoder_alone(
    router: Router, p: MockEngine, d: MockEngine, fields: dict[str, object], reason: str
) -> None:
    assert (await router.complete(**fields)).status_code == 200
    assert not p.requests
    assert d.last.json.items() >= fields.items()
    assert "kv_transfer_params" not in d.last.json
    assert router.metric("decode_only_total", reason=reason) == 1


@pytest.mark.parametrize(
    "fields",
    [{"prompt": [1, 2, 3]}, {"prompt": ["a"]}, {"n": 1}, {"max_tokens": 1}, {"echo": True}],
)
async def test_what_is_one_sequence_is_prefilled_elsewhere(
    router: Router, p: MockEngine, d: MockEngine, fields: dict[str, object]
) -> None:
    assert (await router.complete(**fields)).status_code == 200
    assert p.last.json["prompt"] == fields.get("prompt", "hello")
    assert d.last.json["kv_transfer_params"]["remote_host"] == "10.9.8.7"


# Clients that leave.


async def _leave(client: RawClient, reset: bool) -> None:
    if reset:
        client.writer.transport.abort()
    else:
        client.writer.close()


@pytest.mark.parametrize("stage", ["prefill", "decode", "stream"])
async def test_a_client_that_leaves_ends_the_leg_that_runs(
    router: Router, p: MockEngine, d: MockEngine, stage: str
) -> None:
    reached, left = asyncio.Event(), asyncio.Event()

    async def script(request: Received, peer: Peer) -> None:
        if stage == "stream":
            await peer.send(STREAM_HEAD + chunk(event("a")))
        reached.set()
        await peer.wait_left()
        left.set()

    (p if stage == "prefill" else d).scripts = [script]
    async with router.socket() as client:
        await client.send(post(b'{"prompt": "x", "stream": true}'))
        await asyncio.wait_for(reached.wait(), 5)
        if stage == "stream":
            await client.head()
        await _leave(client, reset=stage == "decode")
        await asyncio.wait_for(left.wait(), 5)
    await eventually(lambda: router.metric("client_disconnects_total", stage=stage) == 1)
    legs = [request for request in d.requests if not is_release(request)]
    assert len(legs) == (0 if stage == "prefill" else 1)
    assert (await router.complete()).status_code == 200


@pytest.mark.parametrize("conversation", [{}, {"conversation_id": "c"}])
async def test_a_client_that_leaves_at_the_last_event_had_it_all(
    router: Router, d: MockEngine, conversation: dict[str, str]
) -> None:
    """Most clients close when they have read [DONE], and the body may end a little later."""
    left = asyncio.Event()

    async def script(request: Received, peer: Peer) -> None:
        await peer.send(STREAM_HEAD + chunk(event("a")) + chunk(DONE))
        await peer.wait_left()
        left.set()

    d.scripts = [script]
    async with router.socket() as client:
        body = json.dumps({"prompt": "x", "stream": True, **conversation}).encode()
        await client.send(post(body))
        await client.reader.readuntil(DONE)
        client.writer.close()
        await asyncio.wait_for(left.wait(), 5)
    await router.settled()
    stream = {"endpoint": "/v1/completions", "status": "200"}
    flow = "turn" if conversation else "pull"
    assert router.metric("requests_total", outcome="ok", flow=flow, **stream) == 1
    assert not router.metric("client_disconnects_total", stage="stream")


async def test_a_client_that_leaves_takes_its_pipelined_requests_along(
    router: Router, p: MockEngine
) -> None:
    left = asyncio.Event()
    p.scripts = [hanging(left=left)]
    async with router.socket() as client:
        await client.send(post(BODY) + post(BODY)[:-2])
        await eventually(lambda: p.requests)
        client.writer.transport.abort()
    await asyncio.wait_for(left.wait(), 5)
    assert len(p.requests) == 1


async def test_many_requests_at_once_do_not_mix(router: Router, d: MockEngine) -> None:
    async def echo(request: Received, peer: Peer) -> None:
        await peer.answer(USUAL | {"echo": request.json["prompt"]})

    d.usual = echo
    answers = await asyncio.gather(*[router.complete(prompt=f"{i}") for i in range(50)])
    assert [answer.json()["echo"] for answer in answers] == [f"{i}" for i in range(50)]
