"""Parts that are each tested alone, together: the server with API keys, streams and shutdown."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import yaml
from fastapi.responses import Response, StreamingResponse

from router.auth.api_keys import digest_of
from scripts.mock_engine import DONE, MockEngine, Peer, Received
from tests.unit.router.conftest import StartRouter
from tests.unit.router.engine_scripts import answer_after, answering, streaming_until, usual_prefill
from tests.unit.router.harness import Router, eventually, post, running_router, settings_for
from tests.unit.router.mock_engine import event
from tests.unit.router.processes import serving_router, until_refused

KEY, OTHER, THIRD = "sk-disagg-one", "sk-disagg-other", "sk-disagg-third"
GET = b"GET /version HTTP/1.1\r\nhost: a\r\n\r\n"
WHOLE = post(b'{"prompt": "x"}')
STREAM = post(b'{"prompt": "x", "stream": true}')


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys.yaml"
    listed = [("one", KEY, "a"), ("other", OTHER, "a"), ("third", THIRD, "b")]
    entries = [
        {
            "name": name,
            "sha256": digest_of(key.encode()).hex(),
            "tenant": tenant,
            "requests_per_minute": 1000,
            "tokens_per_minute": 100000,
            "concurrency": 2,
        }
        for name, key, tenant in listed
    ]
    path.write_text(yaml.safe_dump({"keys": entries}))
    return path


# Keys.


async def test_a_callers_key_is_not_told_to_engines_that_load_an_adapter(
    start_router: StartRouter, keys: Path, p: MockEngine, d: MockEngine
) -> None:
    router = await start_router(
        api_keys_file=keys, engine_api_key="of-the-engines", lora_updates=True
    )
    p.usual = d.usual = answering(200, b"done")
    asked = {"lora_name": "pirate", "lora_path": "/adapters/pirate"}
    for shown in ({"authorization": f"Bearer {KEY}"}, {"x-api-key": KEY}):
        path = "/v1/load_lora_adapter"
        assert (await router.client.post(path, json=asked, headers=shown)).is_success
        for engine in (p, d):
            assert KEY not in str(engine.last.headers)
            assert engine.last.header("authorization") == "Bearer of-the-engines"


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/tokenize", "/v1/nothing"])
@pytest.mark.parametrize("expects", [b"", b"expect: 100-continue\r\n"])
async def test_a_strangers_body_is_waited_for_nowhere(
    p: MockEngine, d: MockEngine, keys: Path, path: str, expects: bytes
) -> None:
    async with running_router(settings_for(p=[p], d=[d], api_keys_file=keys)) as router:
        async with router.socket() as client:
            asked = post(b"x" * 1000, path, expects)
            await client.send(asked[:-900])
            head, _ = await client.answer()
            assert b" 401 " in head.split(b"\r\n")[0]
        assert router.metric("unauthorized_total", reason="missing") == 1


async def test_what_is_open_to_all_is_open_to_who_is_slow(
    p: MockEngine, d: MockEngine, keys: Path
) -> None:
    async with running_router(settings_for(p=[p], d=[d], api_keys_file=keys)) as router:
        async with router.socket() as client:
            await client.send(GET.replace(b"\r\n\r\n", b"\r\ncontent-length: 10\r\n\r\nx"))
            head, _ = await client.answer()
            assert b" 200 " in head.split(b"\r\n")[0]
        assert router.metric("unauthorized_total", reason="missing") == 0


async def test_a_page_may_read_what_its_keys_limits_say(
    start_router: StartRouter, keys: Path
) -> None:
    router = await start_router(api_keys_file=keys, cors_origins=("https://a.example",))
    headers = {"origin": "https://a.example", "authorization": f"Bearer {KEY}"}
    answer = await router.client.post("/v1/completions", json={"prompt": "x"}, headers=headers)
    readable = set(answer.headers["access-control-expose-headers"].split(", "))
    told = {name for name in answer.headers if name.startswith("x-ratelimit-")}
    assert len(told) == 6
    assert told <= readable


# A connection.


async def test_a_pipeline_is_read_no_further_while_requests_of_it_wait(
    router: Router, p: MockEngine
) -> None:
    """However many answers there are: with each, as much as one read brings would be added."""
    sent, gate = 0, asyncio.Event()
    p.usual = answer_after(gate, usual_prefill)
    async with router.socket() as client:
        await client.send(WHOLE)
        await eventually(lambda: p.requests)

        async def feed() -> None:
            nonlocal sent
            while True:
                await client.send(WHOLE * 100)
                sent += 100

        feeding = asyncio.create_task(feed())
        before, quiet = -1, 0
        while quiet < 5:  # one quiet look may be a machine that stood still
            quiet = quiet + 1 if before == sent else 0
            before = sent
            await asyncio.sleep(0.05)
        held = router.gateway.memory.bodies.size
        gate.set()
        for _ in range(50):
            await client.answer()
        assert router.gateway.memory.bodies.size <= held + 15
        feeding.cancel()


async def test_a_stream_that_outlives_the_order_to_end_ends_its_connection(
    p: MockEngine, d: MockEngine
) -> None:
    may_end = asyncio.Event()
    d.scripts = [streaming_until(may_end, event("a"), DONE)]
    async with serving_router(p, d, "--shutdown-delay=0", "--keep-alive-timeout=60") as router:
        port = int(router.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(STREAM)
        await reader.readuntil(b'"a"')
        router.process.terminate()
        await router.until("shutting down")
        await until_refused(router.url)
        may_end.set()
        async with asyncio.timeout(5):
            assert (await reader.read()).endswith(b"0\r\n\r\n")
            assert await router.ended() == 0
        writer.close()


async def test_a_request_that_does_not_come_holds_up_no_end(p: MockEngine, d: MockEngine) -> None:
    flags = ("--shutdown-delay=0", "--shutdown-timeout=1", "--client-read-timeout=60")
    async with serving_router(p, d, *flags) as router:
        port = int(router.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(STREAM[:-3])
        await writer.drain()
        await eventually(lambda: _has_come(router.url), 10)
        router.process.terminate()
        async with asyncio.timeout(5):
            assert b" 503 " in (await reader.read()).partition(b"\r\n")[0]
            writer.close()
            assert await router.ended() == 0


def _has_come(url: str) -> bool:
    """Ours, beside the one that asks."""
    return b"client_connections 2" in bytes(httpx.get(f"{url}/metrics").content)


@pytest.mark.parametrize(
    "sent",
    [
        b"DELETE /acts HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"DELETE /acts HTTP/1.1\r\nhost: a\r\ncontent-length: 999999999\r\n\r\n{",
        b"POST /acts HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
)
async def test_what_is_refused_does_nothing(router: Router, sent: bytes) -> None:
    acted: list[str] = []

    def acts() -> Response:
        acted.append("acted")
        return Response(b"done")

    router.app.add_api_route("/acts", acts, methods=["DELETE", "POST"])
    async with router.socket() as client:
        await client.send(sent)
        head, _ = await client.answer()
        assert head.split(b" ")[1] in (b"400", b"413")
        assert await client.until_closed() == b""
    assert not acted


async def test_an_answer_of_nothing_has_no_length(router: Router, d: MockEngine) -> None:
    async def nothing(request: Received, peer: Peer) -> None:
        await peer.send(b"HTTP/1.1 204 No Content\r\n\r\n")

    d.usual = nothing
    async with router.socket() as client:
        get = b"GET /version HTTP/1.1\r\nhost: a\r\n\r\n"
        await client.send(post(b'{"model":"m","input":"a"}', "/v1/embeddings") + get)
        head = await client.head()
        assert head.split(b" ")[1] == b"204"
        assert b"content-length" not in head.lower()
        assert b'"version"' in (await client.answer())[1]


async def test_who_does_not_read_gains_no_time_by_asking_more(start_router: StartRouter) -> None:
    router = await start_router(stream_idle_timeout=0.3)
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 1
            yield b"x" * 100_000
            await asyncio.sleep(0)

    def streams() -> Response:
        return StreamingResponse(endless())

    router.app.add_api_route("/streams", streams, methods=["GET"])
    async with router.socket() as client:
        await client.send(GET.replace(b"/version", b"/streams"))
        before = -1
        while not sent or before != sent:
            before = sent
            await asyncio.sleep(0.05)
        await client.send(GET)
        await eventually(lambda: router.metric("client_connections") == 0)
