"""Who is let in to the admin API."""

from __future__ import annotations

import json

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import Message, Receive, Scope, Send

from router.admin import endpoints as gate_module
from router.admin.endpoints import MAX_BODY_BYTES, AdminGate

TOKEN = "0123456789abcdef"


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    body = await Request(scope, receive).body()
    await PlainTextResponse(body)(scope, receive, send)


def client(token: str | None = TOKEN) -> httpx.AsyncClient:
    gate = AdminGate(echo, lambda: token)
    return httpx.AsyncClient(transport=httpx.ASGITransport(gate), base_url="http://x")


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {TOKEN}"},
        {"authorization": f"bearer  {TOKEN}"},
        {"authorization": f"Bearer {TOKEN}", "origin": "http://a.page"},
    ],
)
async def test_who_shows_the_token_comes_in(headers: dict[str, str]) -> None:
    async with client() as asking:
        answer = await asking.post("/", content="x", headers=headers)
    assert (answer.status_code, answer.text) == (200, "x")


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("authorization", "Bearer")],
        [("authorization", "Bearer ")],
        [("authorization", TOKEN)],
        [("authorization", f"Basic {TOKEN}")],
        [("authorization", f"Bearer {TOKEN}x")],
        [("authorization", f"Bearer {TOKEN[:-1]}")],
        [("authorization", f"Bearer {TOKEN}"), ("authorization", f"Bearer {TOKEN}")],
        [("authorization", b"Bearer \xff\xfe")],
        [("proxy-authorization", f"Bearer {TOKEN}")],
    ],
)
async def test_nobody_else_does(headers: list[tuple[str, str | bytes]]) -> None:
    async with client() as asking:
        answer = await asking.get(
            "/", headers=httpx.Headers([(k.encode(), _raw(v)) for k, v in headers])
        )
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    error = json.loads(answer.content)["error"]
    assert (error["type"], error["code"]) == ("AuthenticationError", 401)
    assert TOKEN not in answer.text


def _raw(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode()


async def test_without_a_token_pages_in_browsers_stay_out() -> None:
    async with client(None) as asking:
        assert (await asking.post("/", content="x")).text == "x"
        answer = await asking.post("/", headers={"origin": "http://localhost:8002"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, 403)


async def test_bodies_are_bounded() -> None:
    async def endless() -> object:
        while True:
            yield b"x" * 1024

    headers = {"authorization": f"Bearer {TOKEN}"}
    async with client() as asking:
        whole = await asking.post("/", content=b"x" * MAX_BODY_BYTES, headers=headers)
        assert len(whole.content) == MAX_BODY_BYTES
        for content in (b"x" * (MAX_BODY_BYTES + 1), endless()):
            answer = await asking.post("/", content=content, headers=headers)  # type: ignore[arg-type]
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, 413)
        absurd = headers | {"content-length": "9" * 30}
        assert (await asking.post("/", content=b"", headers=absurd)).status_code == 413


async def test_a_body_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    monkeypatch.setattr(gate_module, "BODY_TIMEOUT_S", 0.05)
    sent: list[Message] = []

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "headers": [(b"authorization", f"Bearer {TOKEN}".encode())]}
    await AdminGate(echo, lambda: TOKEN)(scope, receive, send)
    assert sent[0]["status"] == 408


async def test_a_caller_that_leaves_meanwhile_costs_nothing() -> None:
    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(_: Message) -> None:
        raise AssertionError

    scope = {"type": "http", "headers": [(b"authorization", f"Bearer {TOKEN}".encode())]}
    await AdminGate(echo, lambda: TOKEN)(scope, receive, send)
