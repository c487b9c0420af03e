"""The HTTP server on real sockets: spellings, order, and what goes to the FastAPI application."""

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest
from fastapi.responses import Response, StreamingResponse

from router.proxy.passthrough import FORM_PATHS, JSON_PATHS
from scripts.mock_engine import MockEngine
from tests.unit.router.conftest import StartRouter
from tests.unit.router.engine_scripts import answer_after, hang, usual_prefill
from tests.unit.router.harness import (
    Router,
    eventually,
    post,
    running_router,
    settings_for,
    status_of,
)

BODY = b'{"prompt":"a"}'
SPELLINGS = [
    "/v1/completions?api-version=1",
    "/v1/completions/",
    "/v1%2Fcompletions",
    "http://router/v1/completions",
]


@pytest.mark.parametrize("path", SPELLINGS)
async def test_every_spelling_is_served(router: Router, d: MockEngine, path: str) -> None:
    async with router.socket() as client:
        await client.send(post(BODY, path))
        head, _ = await client.answer()
        assert status_of(head) == 200
    assert d.last.path == "/v1/completions"


@pytest.mark.parametrize("path", ["/v1/completions", *SPELLINGS, "/nowhere"])
async def test_what_follows_a_refused_body_is_never_answered(router: Router, path: str) -> None:
    """However it is spelt: nobody knows where the next request would begin."""
    sent = post(BODY, path)[: -len(BODY)].replace(
        b"content-length: 14", b"content-length: 99999999"
    )
    async with router.socket() as client:
        await client.send(sent + b"x" * 100)
        head, _ = await client.answer()
        assert status_of(head) == (404 if path == "/nowhere" else 413)
        assert b"connection: close" in head
        await client.send(post(BODY))
        assert await client.until_closed() == b""


@pytest.mark.parametrize("path", ["/v1/completions", *SPELLINGS, "/v1/models"])
async def test_a_late_request_is_answered_once(start_router: StartRouter, path: str) -> None:
    router = await start_router(client_read_timeout=0.2)
    async with router.socket() as client:
        await client.send(post(BODY, path)[:-3])
        head, _ = await client.answer()
        # The application knows no POST to that page, and looks at no body to say so.
        assert status_of(head) == (405 if path == "/v1/models" else 408)
        assert await client.until_closed() == b""


async def test_answers_come_in_the_order_of_the_requests(router: Router, p: MockEngine) -> None:
    may_answer = asyncio.Event()
    p.scripts = [answer_after(may_answer, usual_prefill)]
    async with router.socket() as client:
        get = b"GET /version HTTP/1.1\r\nhost: a\r\n\r\n"
        await client.send(get + post(BODY) + get + post(BODY, "/v1/nothing") + get)
        assert b'"version"' in (await client.answer())[1]
        await eventually(lambda: p.requests)
        may_answer.set()
        bodies = [(await client.answer())[1] for _ in range(4)]
        assert b"choices" in bodies[0]
        assert b'"version"' in bodies[1]
        assert b"Not Found" in bodies[2]
        assert b'"version"' in bodies[3]


# What the application does is told as it is.


def serve(router: Router, path: str, answer: object) -> None:
    router.app.add_api_route(path, answer, methods=["GET", "POST"], include_in_schema=False)  # type: ignore[arg-type]


async def get(router: Router, path: str) -> tuple[bytes, bytes]:
    async with router.socket() as client:
        await client.send(b"GET %s HTTP/1.1\r\nhost: a\r\n\r\n" % path.encode())
        return await client.answer()


async def test_a_fault_of_the_application_is_a_500(router: Router) -> None:
    def fails() -> None:
        raise ZeroDivisionError

    serve(router, "/fails", fails)
    head, body = await get(router, "/fails")
    assert status_of(head) == 500
    assert b"InternalServerError" in body
    assert (await router.complete()).status_code == 200


async def test_an_answer_that_breaks_off_ends_its_connection(router: Router) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"some"
        raise ZeroDivisionError

    def breaks() -> Response:
        return StreamingResponse(pieces())

    serve(router, "/breaks", breaks)
    async with router.socket() as client:
        await client.send(b"GET /breaks HTTP/1.1\r\nhost: a\r\n\r\n")
        assert not (await client.until_closed()).endswith(b"0\r\n\r\n")


async def test_an_answer_shorter_than_it_says_ends_its_connection(router: Router) -> None:
    def lies() -> Response:
        return Response(b"short", headers={"content-length": "50"})

    serve(router, "/lies", lies)
    async with router.socket() as client:
        await client.send(b"GET /lies HTTP/1.1\r\nhost: a\r\n\r\n" * 2)
        assert (await client.until_closed()).count(b"HTTP/1.1") <= 1


async def test_a_stream_waits_for_its_reader_and_hears_it_leave(router: Router) -> None:
    sent, has_ended = 0, asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        try:
            while True:
                sent += 1
                yield b"x" * 100_000
                await asyncio.sleep(0)
        finally:
            has_ended.set()

    def streams() -> Response:
        return StreamingResponse(endless())

    serve(router, "/streams", streams)
    async with router.socket() as client:
        await client.send(b"GET /streams HTTP/1.1\r\nhost: a\r\n\r\n")
        await eventually(lambda: sent > 3)
        looks = 0
        before = -1
        while looks < 1000 and before != sent:
            before = sent
            looks += 1
            await asyncio.sleep(0.05)
        assert before == sent, "it writes on, whether anybody reads or not"
    async with asyncio.timeout(5):
        await has_ended.wait()


async def test_a_large_answer_that_nobody_reads_is_given_up(start_router: StartRouter) -> None:
    router = await start_router(stream_idle_timeout=0.2)

    def large() -> Response:
        return Response(b"x" * 12_000_000)

    serve(router, "/large", large)
    async with router.socket() as client:
        await client.send(b"GET /large HTTP/1.1\r\nhost: a\r\n\r\n")
        await eventually(lambda: router.metric("client_connections") == 1)
        await eventually(lambda: router.metric("client_connections") == 0)


async def test_a_body_for_the_application_counts_as_held_until_it_has_answered(
    router: Router,
) -> None:
    goes_on = asyncio.Event()

    async def waits() -> Response:
        await goes_on.wait()
        return Response(b"done")

    serve(router, "/waits", waits)
    async with router.socket() as client:
        await client.send(post(b"x" * 1000, "/waits"))
        await eventually(lambda: router.gateway.memory.bodies.size == 1000)
        goes_on.set()
        assert (await client.answer())[1] == b"done"
        assert router.gateway.memory.bodies.size == 0


# Clients that disconnect.

JSON_BODY = b"""{
    "model": "m", "max_tokens": 9, "input": "x",
    "messages": [{"role": "user", "content": "x"}]
}"""
FORM = b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\nm\r\n--b--\r\n'
TYPES = {
    BODY: b"application/json",
    JSON_BODY: b"application/json",
    FORM: b"multipart/form-data; boundary=b",
}
ASKED = {
    "/v1/completions": BODY,
    "/v1/chat/completions": JSON_BODY,
    "/v1/messages": JSON_BODY,
    "/v1/messages/count_tokens": JSON_BODY,
    "/v1/responses": JSON_BODY,
    **dict.fromkeys(JSON_PATHS, JSON_BODY),
    **dict.fromkeys(FORM_PATHS, FORM),
}


async def test_a_client_that_disconnects_before_the_first_byte_is_no_error_in_the_log(
    p: MockEngine, d: MockEngine, caplog: pytest.LogCaptureFixture
) -> None:
    p.usual = d.usual = hang
    async with running_router(settings_for(p=[p], d=[d])) as router:
        await eventually(lambda: not router.gateway.fleet.unavailable_roles())
        for number, (path, body) in enumerate(ASKED.items(), 1):
            async with router.socket() as client:
                await client.send(post(body, path, b"content-type: %b\r\n" % TYPES[body]))
                await eventually(lambda: len(p.requests) + len(d.requests) == number)  # noqa: B023
            await eventually(lambda: not router.gateway.tasks.running)
        stages = ("prefill", "decode")
        left = [router.metric("client_disconnects_total", stage=stage) for stage in stages]
        assert sum(left) == len(ASKED)
    assert not [
        record.getMessage() for record in caplog.records if record.levelno > logging.WARNING
    ]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_malformed_body_is_an_error_object(router: Router, path: str) -> None:
    answer = await router.client.post(path, content=b"{")
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]
    await router.settled()


async def test_a_client_that_disconnects_in_its_body_is_no_error_in_the_log(
    p: MockEngine, d: MockEngine, caplog: pytest.LogCaptureFixture
) -> None:
    settings = settings_for(p=[p], d=[d], lora_updates=True)
    paths = [*ASKED, "/v1/load_lora_adapter", "/v1/unload_lora_adapter"]
    async with running_router(settings) as router:
        for path in paths:
            async with router.socket() as client:
                body = ASKED.get(path, JSON_BODY)
                kind = b"content-type: %b\r\n" % TYPES[body]
                await client.send(post(body, path, kind)[:-1])
                assert (await router.client.get("/health")).status_code == 200, "it goes on"
    assert not [
        record.getMessage() for record in caplog.records if record.levelno > logging.WARNING
    ]
