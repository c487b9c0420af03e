"""What engines may answer, and what the client gets."""

import asyncio
import itertools
import json

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scripts.mock_engine import (
    DONE,
    STREAM_HEAD,
    MockEngine,
    Peer,
    Received,
    Script,
    chunk,
    is_release,
)
from tests.unit.router.conftest import StartRouter
from tests.unit.router.engine_scripts import (
    answer_after,
    answering,
    hang,
    raw,
    reset,
    usual_decode,
)
from tests.unit.router.harness import Router, eventually, post
from tests.unit.router.mock_engine import USUAL, event

WHOLE = b'{"choices":[{}],"kv_transfer_params":{"a":1}}'
FRAMED = b"content-length: %d\r\n\r\n%b" % (len(WHOLE), WHOLE)


def error_of(answer: httpx.Response) -> dict[str, object]:
    assert answer.headers["content-type"] == "application/json"
    error: dict[str, object] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == answer.status_code
    return error


@pytest.fixture(params=["p", "d"])
def engine(request: pytest.FixtureRequest, p: MockEngine, d: MockEngine) -> MockEngine:
    return {"p": p, "d": d}[request.param]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engines_4xx_reaches_the_client_as_it_is(
    router: Router, engine: MockEngine, stream: bool
) -> None:
    content = b'{"object": "error", "its own": "shape"}'
    engine.scripts = [answering(422, content, content_type="application/problem+json", x_a="b")]
    answer = await router.complete(stream=stream)
    assert (answer.status_code, answer.content) == (422, content)
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["x-a"] == "b"
    assert (await router.complete()).status_code == 200, "a 4xx makes no engine unhealthy"
    assert router.metric(
        "requests_total",
        endpoint="/v1/completions", flow="pull", status="422", outcome="refused",
    ) == 1  # fmt: skip


async def test_after_the_prefillers_4xx_the_decoder_is_not_asked(
    router: Router, p: MockEngine, d: MockEngine
) -> None:
    p.scripts = [answering(400, {"error": {"message": "too long"}})]
    assert (await router.complete()).status_code == 400
    assert not d.requests


@pytest.mark.parametrize(("status", "told"), [(500, 502), (503, 503), (599, 502), (302, 502)])
async def test_an_engines_own_failure_is_told_as_an_openai_error(
    router: Router, engine: MockEngine, status: int, told: int
) -> None:
    engine.scripts = [answering(status, {"error": {"message": "CUDA died"}})]
    answer = await router.complete()
    assert answer.status_code == told
    message = str(error_of(answer)["message"])
    assert ("CUDA died" in message) == (status >= 500)


BROKEN = {
    "garbage": b"\x00\xff\x17 no http at all\r\n\r\n",
    "not http": b"220 smtp ready\r\n",
    "early close in head": b"HTTP/1.1 200 OK\r\ncontent-le",
    "early close in body": b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{",
    "two lengths": b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}",
    "length and chunked": b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n"
    b"transfer-encoding: chunked\r\n\r\n{}",
    "bad chunk": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    "unknown encoding": b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\n{}",
    "switching protocols": b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
    "endless head": b"HTTP/1.1 200 OK\r\n" + b"x: " + b"y" * 100_000,
    "many headers": b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 20_000 + b"\r\n",
    "injected header": b"HTTP/1.1 200 OK\r\nx: a\nb: c\r\ncontent-length: 2\r\n\r\n{}",
    "status 0": b"HTTP/1.1 000 Huh\r\ncontent-length: 2\r\n\r\n{}",
    "status 700": b"HTTP/1.1 700 Huh\r\ncontent-length: 2\r\n\r\n{}",
}


@pytest.mark.parametrize("what", BROKEN)
async def test_a_broken_answer_is_a_502(router: Router, engine: MockEngine, what: str) -> None:
    engine.scripts = [raw(BROKEN[what])]
    answer = await router.complete()
    assert answer.status_code == 502
    assert error_of(answer)["type"] == "BadGatewayError"
    assert (await router.complete()).status_code == 200


@pytest.mark.parametrize(
    "content",
    [
        *(b"not json", b"[]", b"", b"null", b"[" * 99_999),
        *(b'{"kv_transfer_params": {"a": "\xff"}}', b"{}", b'{"choices": [ ]}'),
    ],
)
async def test_a_prefill_answer_that_is_none_is_a_502(
    router: Router, p: MockEngine, d: MockEngine, content: bytes
) -> None:
    p.scripts = [answering(200, content)]
    assert (await router.complete()).status_code == 502
    assert not d.requests


@pytest.mark.parametrize("script", [raw(b""), reset])
async def test_a_connection_lost_before_the_answer_is_a_503(
    router: Router, engine: MockEngine, script: Script
) -> None:
    engine.scripts = [script, script]  # one on the connection that a probe left, one on a new one
    answer = await router.complete()
    assert answer.status_code == 503
    assert error_of(answer)["type"] == "ServiceUnavailableError"


async def test_silence_is_a_504_and_ends_the_leg(
    start_router: StartRouter, engine: MockEngine, p: MockEngine
) -> None:
    router = await start_router(prefill_timeout=0.2, decode_first_byte_timeout=0.2)
    engine.scripts = [hang]
    answer = await router.complete()
    assert answer.status_code == 504
    assert error_of(answer)["type"] == "GatewayTimeoutError"
    role = "prefill" if engine is p else "decode"
    assert router.metric("upstream_errors_total", role=role, kind="timeout") == 1


async def test_the_whole_request_has_a_deadline(
    start_router: StartRouter, engine: MockEngine
) -> None:
    router = await start_router(request_timeout=0.2)
    engine.scripts = [hang]
    assert (await router.complete()).status_code == 504


async def test_a_too_large_prefill_answer_is_a_502(
    start_router: StartRouter, p: MockEngine
) -> None:
    router = await start_router(max_answer_size=1000)
    p.scripts = [answering(200, b" " * 1001), answering(200, b" " * 5_000_000)]
    assert (await router.complete()).status_code == 502
    assert (await router.complete()).status_code == 502
    assert (await router.complete()).status_code == 200


@pytest.mark.parametrize(
    "text", [b'"x", "logprobs": [-Infinity, NaN]', b'"\\ud83d"'], ids=["NaN", "half a pair"]
)
async def test_answers_that_only_strict_readers_reject_pass_unchanged(
    router: Router, d: MockEngine, text: bytes
) -> None:
    raw = b'{"choices": [{"index": 0, "finish_reason": "stop", "text": %b}]}' % text
    d.scripts = [answering(200, raw)]
    answer = await router.complete()
    assert (answer.status_code, answer.content) == (200, raw)
    assert len(d.requests) == 1


async def test_a_rejection_is_seen_by_its_stop_reason_as_well(
    router: Router, d: MockEngine
) -> None:
    choice = {"index": 0, "text": "", "finish_reason": "stop", "stop_reason": "cache_threshold"}
    d.scripts = [answering(200, {"choices": [choice]})]
    assert (await router.complete()).status_code == 502, "the router has set no threshold"


@pytest.mark.parametrize("absent", [{}, {"kv_transfer_params": None}, {"kv_transfer_params": {}}])
async def test_without_params_the_decoder_prefills_itself_and_a_counter_says_so(
    start_router: StartRouter, p: MockEngine, d: MockEngine, absent: dict[str, object]
) -> None:
    router = await start_router(without_prefiller="decode")
    p.scripts = [answering(200, USUAL | absent)]
    assert (await router.complete()).status_code == 200
    assert "kv_transfer_params" not in d.last.json
    assert router.metric("prefill_without_params_total") == 1


@pytest.mark.parametrize(
    "strict",
    [{"without_prefiller": "refuse"}, {"without_prefiller": "decode",
                                       "without_prefiller_tokens": 1}],
)  # fmt: skip
@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"conversation_id": "c"}])
async def test_prefill_engine_without_kv_is_an_error_where_no_decoder_may_prefill(
    start_router: StartRouter,
    p: MockEngine,
    d: MockEngine,
    p2: MockEngine,
    strict: dict[str, object],
    fields: dict[str, object],
) -> None:
    prompt = "a prompt of more than one token"
    router = await start_router(ps=[p, p2], **strict)
    p.usual = answering(200, USUAL)
    for _ in range(2):
        assert (await router.complete(prompt=prompt, **fields)).status_code == 200
    assert len([leg for leg in d.requests if not is_release(leg)]) == 2
    assert all("kv_transfer_params" in leg.json for leg in d.requests)
    p2.usual, sent = answering(200, USUAL), len(d.requests)
    answer = await router.complete(prompt=prompt, **fields)
    assert answer.status_code == 503
    assert "kv_transfer_params" in answer.json()["error"]["message"]
    assert len(d.requests) == sent
    assert router.metric("upstream_errors_total", role="prefill", kind="no_kv") == 3
    assert router.metric("prefill_without_params_total") == 3
    assert router.engine(p).breaker.failures == 0


async def test_prefill_engine_whose_token_ends_the_answer_may_keep_no_kv(
    router: Router, p: MockEngine, d: MockEngine
) -> None:
    choice = {"index": 0, "text": "x", "finish_reason": "stop"}
    p.scripts = [answering(200, USUAL | {"choices": [choice]})]
    assert (await router.complete()).status_code == 200
    assert len(d.requests) == 1


async def test_interim_answers_are_skipped(router: Router, engine: MockEngine) -> None:
    usual = engine.usual

    async def script(request: Received, peer: Peer) -> None:
        await peer.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        await peer.send(b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n")
        await usual(request, peer)

    engine.scripts = [script]
    answer = await router.complete()
    assert answer.status_code == 200
    assert "link" not in answer.headers


async def test_an_answer_that_ends_with_its_connection_is_complete(
    router: Router, engine: MockEngine
) -> None:
    engine.scripts = [raw(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n" + WHOLE)]
    assert (await router.complete()).status_code == 200


async def test_no_hop_by_hop_header_of_an_engine_reaches_the_client(
    router: Router, d: MockEngine
) -> None:
    d.scripts = [
        answering(
            200,
            USUAL,
            connection="keep-alive, x-internal",
            keep_alive="timeout=5",
            x_internal="secret",
            x_public="yes",
            server="engine",
            x_request_id="not this one",
        )
    ]
    answer = await router.complete()
    assert not {"x-internal", "keep-alive", "server", "connection"} & set(answer.headers)
    assert answer.headers["x-public"] == "yes"
    assert answer.headers["x-request-id"] != "not this one"


async def test_events_pass_as_they_come(router: Router, d: MockEngine) -> None:
    next_event = asyncio.Event()

    async def script(request: Received, peer: Peer) -> None:
        await peer.send(STREAM_HEAD)
        for block in (event("a"), event("b"), DONE):
            await peer.send(chunk(block))
            await next_event.wait()
            next_event.clear()
        await peer.send(b"0\r\n\r\n")

    d.scripts = [script]
    body = {"model": "m", "prompt": "x", "stream": True}
    async with router.client.stream("POST", "/v1/completions", json=body) as answer:
        seen = []
        async for block in answer.aiter_bytes():
            seen.append(block)
            next_event.set()
    assert seen == [event("a"), event("b"), DONE]


class BreakingStream:
    """Sends an event, and when the client has that, half another one and `then`."""

    def __init__(self, then: bytes, close: bool) -> None:
        self.seen = asyncio.Event()
        self._then = then
        self._close = close

    async def __call__(self, request: Received, peer: Peer) -> None:
        await peer.send(STREAM_HEAD + chunk(event("a")))
        await self.seen.wait()
        await peer.send(chunk(event("b")[:20]) + self._then)
        if self._close:
            peer.close()
        else:
            await peer.wait_left()


@pytest.mark.parametrize(
    ("then", "close", "code"),
    [(b"", True, 502), (b"garbage", False, 502), (b"", False, 504), (b"7\r\nabc", True, 502)],
)
async def test_a_failure_after_the_first_byte_is_a_last_event(
    start_router: StartRouter, d: MockEngine, then: bytes, close: bool, code: int
) -> None:
    router = await start_router(stream_idle_timeout=0.2 if code == 504 else 60)
    script = BreakingStream(then, close)
    d.scripts = [script]
    body = {"model": "m", "prompt": "x", "stream": True}
    async with router.client.stream("POST", "/v1/completions", json=body) as answer:
        blocks = answer.aiter_bytes()
        assert await anext(blocks) == event("a")
        script.seen.set()
        last = b"".join([block async for block in blocks])
    assert answer.status_code == 200
    assert last.startswith(b"data: ")
    assert last.endswith(b"}\n\n")
    assert json.loads(last[6:])["error"]["code"] == code
    assert router.metric(
        "requests_total",
        endpoint="/v1/completions", flow="pull", status="200", outcome="broken_stream",
    ) == 1  # fmt: skip


async def test_a_stream_that_fails_before_its_first_byte_has_an_honest_status(
    router: Router, d: MockEngine
) -> None:
    d.scripts = [raw(STREAM_HEAD)]
    assert (await router.stream()).status_code == 502


@pytest.mark.parametrize("head", [b"content-length: 600000\r\n", b"transfer-encoding: chunked\r\n"])
async def test_an_answer_that_breaks_in_the_middle_never_looks_complete(
    router: Router, d: MockEngine, head: bytes
) -> None:
    start = b"{" + b" " * 500_000
    body = start if b"length" in head else chunk(start)
    kind = b"content-type: application/json\r\n"
    d.scripts = [raw(b"HTTP/1.1 200 OK\r\n" + kind + head + b"\r\n" + body)]
    with pytest.raises(httpx.RemoteProtocolError):
        await router.complete()


@given(cuts=st.lists(st.integers(0, 600), max_size=8), chunked=st.booleans())
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
async def test_however_an_answer_is_cut_the_client_gets_the_same(
    router: Router, d: MockEngine, cuts: list[int], chunked: bool
) -> None:
    events = [event("a"), event("é"), b": comment\r\n\r\n", DONE]
    body = b"".join(events)
    plain = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n"
    data = plain % len(body) + body
    if chunked:
        data = STREAM_HEAD + b"".join(map(chunk, events)) + b"0\r\nx-trailer: 1\r\n\r\n"
    places = sorted({cut % len(data) for cut in cuts} | {0, len(data)})

    async def script(request: Received, peer: Peer) -> None:
        for start, end in itertools.pairwise(places):
            await peer.send(data[start:end])
            await asyncio.sleep(0)  # another read for the router, if it is quick

    d.scripts = [script]
    answer = await router.stream()
    assert (answer.status_code, answer.content) == (200, body)
    assert d.connections <= 2, "one for probes, and one that a proper end keeps open"


async def test_connections_are_reused(router: Router, p: MockEngine, d: MockEngine) -> None:
    """Probes go the same way, so one of them may have the connection that was there."""
    for _ in range(9):
        assert (await router.complete()).status_code == 200
    assert len({request.connection for request in p.requests}) <= 2
    assert len({request.connection for request in d.requests}) <= 2


async def test_a_reused_connection_that_dies_unheard_is_retried_unseen(
    router: Router, engine: MockEngine
) -> None:
    await router.complete()
    used = engine.last.connection
    engine.scripts = [reset]
    assert (await router.complete()).status_code == 200
    first, again = [r for r in engine.requests if not is_release(r)][-2:]
    assert first.connection == used
    assert again.connection != used
    assert again.body == first.body
    assert again.header("x-request-id") != first.header("x-request-id"), "it may have been heard"


async def test_it_is_retried_once(router: Router, engine: MockEngine) -> None:
    await router.complete()
    engine.scripts = [reset, reset]
    assert (await router.complete()).status_code == 503
    assert len([r for r in engine.requests if not is_release(r)]) == 3


@pytest.mark.parametrize(
    "tail",
    [
        b"connection: close\r\n" + FRAMED,
        FRAMED + b"HTTP/1.1 200 OK\r\n" + FRAMED,
        FRAMED + b"garbage",
    ],
)
async def test_a_connection_that_may_not_be_reused_is_not(
    router: Router, engine: MockEngine, tail: bytes
) -> None:
    async def script(request: Received, peer: Peer) -> None:
        await peer.send(b"HTTP/1.1 200 OK\r\n" + tail)
        await peer.wait_left()

    engine.scripts = [script]
    assert (await router.complete()).status_code == 200
    used = engine.last.connection
    assert (await router.complete()).status_code == 200
    assert engine.last.connection != used


async def test_idle_connections_are_closed_after_their_age(start_router: StartRouter) -> None:
    router = await start_router(engine_idle_age=0.1)
    await asyncio.gather(*[router.complete() for _ in range(4)])
    pools = [engine.pool for engine in router.gateway.fleet.engines]
    # A probe may just have given back the one that it keeps in use.
    await eventually(lambda: max(pool.idle_count for pool in pools) <= 1)


async def test_idle_connections_are_bounded(start_router: StartRouter, d: MockEngine) -> None:
    router = await start_router(engine_idle_connections=2)
    together = asyncio.Barrier(5)
    d.scripts = [answer_after(together, usual_decode)] * 5
    await asyncio.gather(*[router.complete() for _ in range(5)])
    pools = [engine.pool for engine in router.gateway.fleet.engines]
    # A probe may have one of them just now.
    await eventually(lambda: max(pool.idle_count for pool in pools) == 2)


async def test_a_slow_client_slows_the_decoder_down(router: Router, d: MockEngine) -> None:
    piece, total = event("x" * 50_000), 64 * 1024 * 1024
    sent = 0

    async def script(request: Received, peer: Peer) -> None:
        nonlocal sent
        await peer.send(STREAM_HEAD)
        while sent < total:
            await peer.send(chunk(piece))
            sent += len(piece)
        await peer.send(b"0\r\n\r\n")

    d.scripts = [script]
    async with router.socket() as client:
        await client.send(
            post(b'{"prompt": "x", "stream": true}', headers=b"connection: close\r\n")
        )
        await client.head()
        before = -1
        while sent != before:
            before = sent
            await asyncio.sleep(0.1)
        assert sent < total / 2, "what the router takes from the decoder is bounded"
        received = 0
        while block := await asyncio.wait_for(client.reader.read(2**20), 5):
            received += len(block)
    assert received > total


async def test_a_client_that_stops_reading_is_given_up(
    start_router: StartRouter, d: MockEngine
) -> None:
    router = await start_router(stream_idle_timeout=0.3)
    left = asyncio.Event()

    async def script(request: Received, peer: Peer) -> None:
        await peer.send(STREAM_HEAD)
        try:
            while True:
                await peer.send(chunk(event("x" * 100_000)))
        except ConnectionError:
            left.set()

    d.scripts = [script]
    async with router.socket() as client:
        await client.send(post(b'{"prompt": "x", "stream": true}'))
        await asyncio.wait_for(left.wait(), 8)
