"""Who is let in to the admin API."""

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import Message, Receive, Scope, Send

from router.admin import api
from router.admin.api import MAX_BODY_BYTES, AdminGate, application
from tests.unit.router.admin.test_control import A, control_of

TOKEN = "0123456789abcdef"


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    body = await Request(scope, receive).body()
    await PlainTextResponse(body)(scope, receive, send)


def gated_client(token: str | None = TOKEN) -> httpx.AsyncClient:
    gate = AdminGate(echo, lambda: token)
    return httpx.AsyncClient(transport=httpx.ASGITransport(gate), base_url="http://localhost")


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {TOKEN}"},
        {"authorization": f"bearer  {TOKEN}"},
        {"authorization": f"Bearer {TOKEN}", "origin": "http://a.page"},
    ],
)
async def test_who_shows_the_token_comes_in(headers: dict[str, str]) -> None:
    async with gated_client() as asking:
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
    async with gated_client() as asking:
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
    async with gated_client(None) as asking:
        assert (await asking.post("/", content="x")).text == "x"
        answer = await asking.post("/", headers={"origin": "http://localhost:8002"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, 403)


@pytest.mark.parametrize(
    ("host", "token", "status"),
    [
        ("localhost:8002", None, 200),
        ("127.0.0.1", None, 200),
        ("[::1]:8002", None, 200),
        ("rebound.page:8002", None, 403),
        ("10.0.0.1:8002", None, 403),
        ("localhost.page", None, 403),
        ("", None, 403),
        ("router.example", TOKEN, 200),
    ],
)
async def test_without_a_token_no_rebound_name_reads_the_admin_api(
    host: str, token: str | None, status: int
) -> None:
    headers = {"host": host} | ({} if token is None else {"authorization": f"Bearer {token}"})
    async with gated_client(token) as asking:
        assert (await asking.get("/", headers=headers)).status_code == status


def admin_client() -> httpx.AsyncClient:
    control, _, _ = control_of([A], flags={"admin_token": TOKEN})
    transport = httpx.ASGITransport(application(control))
    headers = {"authorization": f"Bearer {TOKEN}"}
    return httpx.AsyncClient(transport=transport, base_url="http://x", headers=headers)


async def test_bodies_are_bounded() -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 1024

    async with admin_client() as asking:
        whole = await asking.post("/admin/engines", content=b" " * MAX_BODY_BYTES)
        assert whole.status_code == 400
        for content in (b"x" * (MAX_BODY_BYTES + 1), endless()):
            answer = await asking.post("/admin/engines", content=content)
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, 413)


async def test_a_body_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    monkeypatch.setattr(api, "BODY_TIMEOUT_S", 0.05)
    async with admin_client() as asking:
        answer = await asking.post("/admin/engines", content=silent())
    assert answer.status_code == 408


async def test_a_caller_that_leaves_meanwhile_changes_nothing_and_is_no_fault() -> None:
    control, processes, _ = control_of([A], flags={"admin_token": TOKEN})

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(_: Message) -> None:
        pass

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/admin/engines",
        "query_string": b"",
        "headers": [(b"authorization", f"Bearer {TOKEN}".encode())],
    }
    await application(control)(scope, receive, send)
    assert not processes.told
