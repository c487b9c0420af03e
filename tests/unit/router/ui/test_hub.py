"""The feed: what who looks is told, who is let in, and that nothing goes on while nobody looks."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from router.ui import hub as hub_module
from router.ui import site as site_module
from router.ui.engine_reports import hash_request_id
from router.ui.hub import MAX_QUEUED_BYTES, MAX_QUEUED_EVENTS, DashboardHub, Viewer
from router.ui.site import MAX_VIEWERS
from scripts.mock_engine import DONE, MockEngine, Peer, Received
from tests.unit.router.conftest import StartRouter
from tests.unit.router.engine_scripts import answering, usual_decode
from tests.unit.router.harness import Router, eventually
from tests.unit.router.mock_engine import running_engine

TOKEN = "a token of more than sixteen"
Event = tuple[str, Any]


@pytest.fixture
async def router(start_router: StartRouter) -> Router:
    return await start_router(ui=True)


def hub_of(router: Router) -> DashboardHub:
    hub = router.state.dashboard
    assert hub is not None
    return hub


def is_watched(router: Router) -> bool:
    return router.gateway.watch is not None


@contextlib.asynccontextmanager
async def looking(router: Router, **headers: str) -> AsyncIterator[AsyncIterator[Event]]:
    """Events as they come; one that looks, until the block ends."""
    async with router.client.stream("GET", "/ui/events", headers=headers) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield fed_events(answer)


async def fed_events(answer: httpx.Response) -> AsyncIterator[Event]:
    name = ""
    async for line in answer.aiter_lines():
        if line.startswith("event: "):
            name = line[7:]
        elif line.startswith("data: "):
            yield name, json.loads(line[6:])


async def until_sent(events: AsyncIterator[Event], wanted: str) -> Any:
    async with asyncio.timeout(30):  # a worker that restarts on a busy machine takes that long
        async for name, content in events:
            if name == wanted:
                return content
    raise AssertionError(f"no {wanted}")


CHUNKS = [
    b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n',
    b'data: {"choices": [{"index":0,"delta":{"content":"a \\"choices\\":[{"}}]}\n\n',
    b'data: {"choices":[{"index":0,"delta":{"content":"b"}}]}\n\n'
    b'data: {"choices":[{"index":0,"delta":{"content":"c"},"finish_reason":"stop"}]}\n\n' + DONE,
]


async def talks(received: Received, peer: Peer) -> None:
    await peer.stream(*CHUNKS)


@pytest.mark.parametrize("conversation", [{}, {"conversation_id": "c"}])
async def test_events_of_a_stream_without_usage_are_counted_while_somebody_looks(
    start_router: StartRouter, d: MockEngine, conversation: dict[str, str]
) -> None:
    d.usual = talks
    router = await start_router(ui=True)
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    async with looking(router) as events:
        await until_sent(events, "snapshot")
        answer = await router.client.post("/v1/chat/completions", json=body | conversation)
        assert answer.text.endswith("[DONE]\n\n"), answer.text
        (request,) = (await until_sent(events, "ended"))["requests"]
    assert (request["completion_tokens"], request["counted"]) == (3, "events")


async def test_first_everything_then_what_ended(router: Router) -> None:
    async with looking(router) as events:
        whole = await until_sent(events, "snapshot")
        assert [e["role"] for e in whole["engines"].values()] == ["prefill", "decode"]
        assert whole["ended"] == []
        answer = await router.complete()
        (request,) = (await until_sent(events, "ended"))["requests"]
        assert request["id"] == answer.headers["x-request-id"]
        assert request["outcome"] == "ok"
        assert request["ms"]["prefill_started"] <= request["ms"]["prefill_done"]
    await eventually(lambda: not hub_of(router).num_viewers)
    async with looking(router) as events:  # a later viewer sees the latest requests, too
        (again,) = (await until_sent(events, "snapshot"))["ended"]
        assert again["id"] == request["id"]


async def test_an_engine_that_dies_is_told(router: Router, d: MockEngine) -> None:
    name = router.engine(d).name
    async with looking(router) as events:
        await until_sent(events, "snapshot")
        await d.stop()
        while True:
            engine = (await until_sent(events, "change")).get("engines", {}).get(name, {})
            if engine.get("health") == "unhealthy":
                assert engine["reason"]
                assert abs(time.time() - engine["since"]) < 60
                return


async def test_failures_on_the_way_are_told_with_what_followed(
    start_router: StartRouter, d: MockEngine
) -> None:
    d.usual = answering(500, {})
    async with running_engine(usual_decode) as other:
        router = await start_router(ui=True, ds=[d, other])
        async with looking(router) as events:
            await until_sent(events, "snapshot")
            failures: list[str] = []
            for _ in range(2):  # one of them begins at the one that fails
                assert (await router.complete()).status_code == 200
                (request,) = (await until_sent(events, "ended"))["requests"]
                failures += request["failures"]
    name = router.engine(d).name
    assert failures == [f"decode at {name}: status_5xx; prefilled again"]


async def test_what_an_engine_says_that_it_moved_is_told_of_its_request(
    router: Router, d: MockEngine
) -> None:
    router.engine(d).capabilities.lists_capabilities = True
    async with looking(router) as events:
        await until_sent(events, "snapshot")
        await router.complete()
        (request,) = (await until_sent(events, "ended"))["requests"]
        transfer = {
            "what": "READ",
            "found_by": hash_request_id(request["id"]),
            "engine_id": "p",
            "blocks": 3,
            "bytes": 300,
            "seconds": 0.002,
            "age_seconds": 0.0,
        }
        d.pages["/metrics"] = b"\n"
        page = {"ranks": [{"transfers": [transfer | {"found_by": "x"}, transfer]}]}
        d.pages["/disagg/leases"] = json.dumps(page).encode()
        moved = (await until_sent(events, "moved"))[request["key"]]
        assert (moved["prompt"]["blocks"], moved["prompt"]["ms"], moved["turn"]) == (3, 2.0, None)
        async with looking(router) as others:  # who comes later hears it with the request
            (later,) = (await until_sent(others, "snapshot"))["ended"]
            assert later["moved"] == moved


async def test_nothing_is_gathered_while_nobody_looks(router: Router, d: MockEngine) -> None:
    hub = hub_of(router)
    before = asyncio.all_tasks()
    assert not is_watched(router)
    async with looking(router) as events:
        await until_sent(events, "snapshot")
        assert is_watched(router)
        await eventually(lambda: d.looks)
    await eventually(lambda: not is_watched(router))  # its task ends after the last who looked
    assert not hub.num_viewers
    await eventually(lambda: not _ours(asyncio.all_tasks() - before))
    assert (await router.complete()).status_code == 200
    assert not is_watched(router)


def _ours(tasks: set[asyncio.Task[Any]]) -> list[str]:
    names = [task.get_coro().__qualname__ for task in tasks]  # type: ignore[union-attr]
    return [
        name
        for name in names
        if name.startswith(("DashboardHub.", "EnginePoller.", "DashboardFeed."))
    ]


async def test_without_ui_there_is_none(start_router: StartRouter) -> None:
    router = await start_router()
    for path in ("/ui", "/ui/", "/ui/events", "/ui/app.js"):
        assert (await router.client.get(path)).status_code == 404


@pytest.mark.parametrize(
    "shown", [None, "", "Bearer", "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN} x"]
)
async def test_a_wrong_token_is_401(start_router: StartRouter, shown: str | None) -> None:
    router = await start_router(ui=True, ui_token=TOKEN.replace(" ", "-"))
    headers = {} if shown is None else {"authorization": shown.strip()}
    answer = await router.client.get("/ui/events", headers=headers)
    assert answer.status_code == 401
    assert answer.json()["error"]["type"] == "AuthenticationError"
    assert answer.headers["www-authenticate"] == "Bearer"
    assert (await router.client.get("/ui/")).status_code == 200  # which asks for it


async def test_the_token_lets_in(start_router: StartRouter) -> None:
    token = TOKEN.replace(" ", "-")
    router = await start_router(ui=True, ui_token=token)
    async with looking(router, authorization=f"Bearer {token}") as events:
        whole = await until_sent(events, "snapshot")
    assert token not in json.dumps(whole)


async def test_other_sites_are_not_let_in(router: Router) -> None:
    headers = {"sec-fetch-site": "cross-site"}
    assert (await router.client.get("/ui/events", headers=headers)).status_code == 403


@pytest.mark.parametrize("path", ["/ui/events", "/ui/requests/x"])
async def test_rebound_name_reads_nothing_of_the_dashboard(router: Router, path: str) -> None:
    answer = await router.client.get(path, headers={"host": "rebound.page:8000"})
    assert answer.status_code == 403
    for open_path in ("/ui/", "/health", "/ready", "/metrics"):
        answer = await router.client.get(open_path, headers={"host": "router.example"})
        assert answer.status_code == 200


async def test_so_many_may_look_and_no_more(router: Router) -> None:
    async with contextlib.AsyncExitStack() as stack:
        held = [await stack.enter_async_context(looking(router)) for _ in range(MAX_VIEWERS)]
        for events in held:
            await until_sent(events, "snapshot")
        answer = await router.client.get("/ui/events")
        assert answer.status_code == 503
        assert answer.json()["error"]["message"]
    await eventually(lambda: not hub_of(router).num_viewers)
    async with looking(router) as events:
        await until_sent(events, "snapshot")


async def test_who_does_not_read_is_cut_off(
    start_router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site_module, "SEND_TIMEOUT_S", 0.2)
    monkeypatch.setattr(hub_module, "UPDATE_INTERVAL_S", 0.01)
    router = await start_router(ui=True)
    hub = hub_of(router)
    async with router.socket() as client:
        await client.send(b"GET /ui/events HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await eventually(lambda: hub.num_viewers == 1)
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        big = hub_module.encode_event("change", {"x": "y" * 1_000_000})
        async with asyncio.timeout(10):
            while hub.num_viewers:
                hub._send(big)
                await asyncio.sleep(0.01)
    await eventually(lambda: not is_watched(router))


async def test_a_router_that_shuts_down_says_so_and_ends_the_feed(router: Router) -> None:
    async with looking(router) as events:
        await until_sent(events, "snapshot")
        router.gateway.tasks.is_draining = True
        async with asyncio.timeout(5):
            rest = [(name, content) async for name, content in events]
    assert [name for name, _ in rest] == ["change"]
    assert rest[0][1]["ready"]["blocking"] == {"router": "shutting down"}
    async with looking(router) as events, asyncio.timeout(5):  # one that comes now
        rest = [(name, content) async for name, content in events]
    assert [name for name, _ in rest] == ["snapshot"]
    assert rest[0][1]["ready"]["blocking"] == {"router": "shutting down"}


async def test_changed_settings_are_sent(router: Router) -> None:
    async with looking(router) as events:
        await until_sent(events, "snapshot")
        gateway = router.gateway
        gateway.tune(gateway.settings.model_copy(update={"max_engine_requests": 7}))
        again = await until_sent(events, "snapshot")
    values = {one["flag"]: one["value"] for one in again["settings"]}
    assert values["--max-engine-requests"] == "7"


async def test_a_late_viewer_sees_why_requests_were_refused(router: Router, d: MockEngine) -> None:
    await d.stop()
    assert (await router.complete()).status_code == 503
    async with looking(router) as events:
        whole = await until_sent(events, "snapshot")
    (refused,) = whole["refusals"]
    assert (refused["status"], refused["count"]) == (503, 1)
    assert refused["text"]


async def test_a_fault_of_ours_ends_the_feed_and_nothing_else(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(hub_module, "merge_snapshots", lambda *_: 1 / 0)
        async with looking(router) as events:
            async with asyncio.timeout(5):
                assert [event async for event in events] == []
        assert (await router.complete()).status_code == 200
    async with looking(router) as events:
        await until_sent(events, "snapshot")


async def test_a_queue_has_bounds() -> None:
    watcher = Viewer()
    watcher.put(b"x" * (2 * MAX_QUEUED_BYTES))  # the first may be large
    assert len(await watcher.next(1)) == 2 * MAX_QUEUED_BYTES
    for _ in range(MAX_QUEUED_EVENTS):
        watcher.put(b"x")
    assert len(await watcher.next(1)) == MAX_QUEUED_EVENTS
    for _ in range(MAX_QUEUED_EVENTS + 1):
        watcher.put(b"x")
    assert watcher.is_cut_off
    assert await watcher.next(1) == b""
    watcher = Viewer()
    watcher.put(b"x" * MAX_QUEUED_BYTES)
    watcher.put(b"x")
    assert watcher.is_cut_off
    assert await Viewer().next(0.01) == b"", "time is over"


async def test_its_files_are_safe_and_name_no_other_host(router: Router) -> None:
    answer = await router.client.get("/ui")
    assert (answer.status_code, answer.headers["location"]) == (307, "ui/")
    page = await router.client.get("/ui/")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    for name in ("app.js", "style.css", "icon.svg", "chat.js"):
        file = await router.client.get(f"/ui/{name}")
        assert file.status_code == 200
        again = {"if-none-match": file.headers["etag"]}
        assert (await router.client.get(f"/ui/{name}", headers=again)).status_code == 304
    for path in ("/ui/nothing", "/ui/..%2fhub.py", "/ui/%2e%2e/hub.py", "/ui/a/b"):
        missing = await router.client.get(path)
        assert missing.status_code == 404
        assert missing.json()["error"]["message"]
