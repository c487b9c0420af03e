"""The page in a real browser, before a router of its own process with engines that are mocks."""

import json
import re
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio
from playwright.async_api import Browser, BrowserContext, Page, expect

from scripts.mock_engine import DONE, STREAM_HEAD, MockEngine, Peer, Received, chunk
from tests.browser import Seen, opened
from tests.integration.processes import BOTH_WAYS, Launcher
from tests.unit.router.mock_engine import PARAMS, USUAL, running_engine
from tests.unit.router.processes import RouterProcess, serving_router

WORDS = ("The capital ", "of France ", "is ", "Paris", ".")
USAGE = {
    "prompt_tokens": 46,
    "completion_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 12},
}
TOKEN = "open-sesame-open-sesame"

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def prefill(request: Received, peer: Peer) -> None:
    await peer.answer(USUAL | {"kv_transfer_params": PARAMS, "usage": USAGE})


async def decode(request: Received, peer: Peer) -> None:
    if not request.json.get("stream"):
        return await peer.answer(USUAL | {"usage": USAGE})
    await peer.send(STREAM_HEAD)
    for word in WORDS:
        await peer.send(chunk(_event({"choices": [{"index": 0, "delta": {"content": word}}]})))
    await peer.send(chunk(_event({"choices": [], "usage": USAGE})) + chunk(DONE) + b"0\r\n\r\n")


def _event(content: dict[str, object]) -> bytes:
    whole = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", **content}
    return b"data: " + json.dumps(whole).encode() + b"\n\n"


@pytest_asyncio.fixture(loop_scope="module")
async def p() -> AsyncIterator[MockEngine]:
    async with running_engine(prefill) as engine:
        yield engine


@pytest_asyncio.fixture(loop_scope="module")
async def d() -> AsyncIterator[MockEngine]:
    async with running_engine(decode) as engine:
        engine.pages = {"/metrics": b"vllm:kv_cache_usage_perc 0.37\n"}
        yield engine


@pytest_asyncio.fixture(loop_scope="module")
async def context(browser: Browser) -> AsyncIterator[BrowserContext]:
    context = await browser.new_context(viewport={"width": 1280, "height": 900})
    yield context
    await context.close()


def is_well(seen: Seen, router: RouterProcess) -> bool:
    assert seen.hosts == {router.url.removeprefix("http://")}, "it asks nobody else"
    assert seen.errors == []
    return True


async def chat(page: Page, text: str) -> None:
    await page.get_by_label("Message", exact=True).fill(text)
    await page.keyboard.press("Enter")


async def test_it_shows_the_fleet_chats_and_says_what_happened(
    p: MockEngine, d: MockEngine, context: BrowserContext
) -> None:
    async with serving_router(p, d, "--ui") as router, opened(context, f"{router.url}/ui") as found:
        page, seen = found
        await expect(page.get_by_role("status")).to_have_text("live")
        fleet = page.locator("#fleet-graph .engine.is-healthy")
        await expect(fleet).to_have_count(2)
        decoder = page.get_by_role("list", name="Decode engines").get_by_role("listitem")
        await expect(decoder).to_contain_text("KV cache 37 %")
        await chat(page, "What is the capital of France?")
        log = page.get_by_role("log")
        await expect(log.locator(".assistant .text")).to_have_text("".join(WORDS))
        fact = log.locator(".assistant .fact")
        await expect(fact).to_contain_text("prefilled 34 tokens on P1 in ")
        await expect(fact).to_contain_text("12 of 46 tokens reused")
        await chat(page, "And of Spain?")
        await expect(log.locator(".assistant .fact")).to_contain_text(["tokens", "tokens"])
        first, second = [r.json for r in d.requests if r.json.get("stream")]
        assert [m["role"] for m in second["messages"]] == ["user", "assistant", "user"]
        assert second["messages"][1]["content"] == "".join(WORDS)
        # conversation_id is for the router alone; that there was one, the page says.
        assert "conversation_id" not in first
        await expect(page.locator("#turns-tables")).to_contain_text("new")
        assert is_well(seen, router)


async def test_what_real_engines_moved_is_seen_in_bytes_and_told_of_each_request(
    launcher: Launcher, context: BrowserContext
) -> None:
    with (
        launcher.engine("prefill", extra=BOTH_WAYS) as prefiller,
        launcher.engine("decode", extra=BOTH_WAYS) as decoder,
        launcher.router([prefiller], [decoder], "--ui") as router,
    ):
        async with opened(context, f"{router.url}/ui") as found:
            page, seen = found
            await expect(page.locator("#fleet-graph .is-healthy")).to_have_count(2)
            await page.get_by_text("Options").click()
            await page.get_by_label("Max tokens").fill("40")
            await chat(page, "Say something. " * 20)
            fact = page.get_by_role("log").locator(".assistant .fact")
            await expect(fact).to_have_text(re.compile(r"P1 in .*, \d+ blocks moved in [\d.]+ m?s"))
            flow = page.locator("#fleet-stage .flow.prompt")
            await expect(flow).to_have_text(re.compile(r"[\d.]+ [kM]B/s"))
            await chat(page, "And something else. " * 20)
            reused = re.compile(r"tokens reused from D1 \(\d+ blocks? moved in [\d.]+ m?s\)")
            await expect(fact.last).to_have_text(reused)
            await expect(page.locator("#requests-list .waterfall .transfer")).to_have_count(3)
            await page.locator("#requests-list .row").first.click()
            details = page.locator("#requests-list .details").first
            await expect(details).to_contain_text(re.compile(r"D1 → P1: .* moved in .*[kM]B"))
            await expect(details).to_contain_text(re.compile(r"P1 → D1: .* moved in .*[kM]B"))
            assert seen.errors == []


NOBODY = {
    "version": "1",
    "settings": [],
    "ended": [],
    "conversations": {"store": "memory"},
    "ttl": 1,
    **{name: {} for name in ("engines", "groups", "ways", "running")},
    "totals": {"requests": 0, "in_flight": 0, "by": {}},
    "turns": {"outcomes": {}, "kept": {}, "entries": 0},
    "workers": {"answered": 1, "known": 1},
}


async def test_how_many_requests_were_left_out_is_said(
    p: MockEngine, d: MockEngine, context: BrowserContext
) -> None:
    told = [("snapshot", NOBODY), ("ended", {"requests": [], "untold": 7})]
    body = "".join(f"event: {name}\ndata: {json.dumps(content)}\n\n" for name, content in told)
    async with serving_router(p, d, "--ui") as router:
        page = await context.new_page()
        await page.route(
            "**/ui/events",
            lambda route: route.fulfill(content_type="text/event-stream", body=body),
        )
        await page.goto(f"{router.url}/ui")
        await expect(page.locator("#requests-missed")).to_contain_text("7 more requests ended than")


async def test_requests_open_by_keyboard_to_what_became_of_them(
    p: MockEngine, d: MockEngine, context: BrowserContext
) -> None:
    async with serving_router(p, d, "--ui") as router, opened(context, f"{router.url}/ui") as found:
        page, seen = found
        await expect(page.get_by_role("status")).to_have_text("live")
        async with httpx.AsyncClient(base_url=router.url) as client:
            body = {"model": "<b>nobody</b>", "prompt": "x"}
            refused = await client.post("/v1/completions", json=body)
        assert refused.status_code == 404
        row = page.locator("#requests-list .row")
        await expect(row).to_contain_text("rejected 404")
        await row.focus()
        await page.keyboard.press("Enter")
        await expect(row).to_have_attribute("aria-expanded", "true")
        details = page.locator("#requests-list .details")
        await expect(details).to_contain_text(refused.headers["x-request-id"])
        await expect(details).to_contain_text("<b>nobody</b>")  # as text, never as markup
        await page.keyboard.press("Enter")
        await expect(details).to_be_hidden()
        assert is_well(seen, router)


async def test_an_engine_that_is_killed_is_seen(
    p: MockEngine, d: MockEngine, context: BrowserContext
) -> None:
    async with serving_router(p, d, "--ui") as router, opened(context, f"{router.url}/ui") as found:
        page, seen = found
        await expect(page.locator("#fleet-graph .is-healthy")).to_have_count(2)
        await d.stop()
        dead = page.locator("#fleet-graph .is-unhealthy")
        await expect(dead).to_contain_text("unhealthy")
        await expect(page.locator("#fleet-changes")).to_have_text("D1 is unhealthy")
        await chat(page, "Are you there?")
        await expect(page.get_by_role("log").locator(".error")).to_be_visible()
        await d.start(d.port)
        await expect(page.locator("#fleet-graph .is-healthy")).to_have_count(2)
        assert seen.hosts == {router.url.removeprefix("http://")}


async def test_it_asks_for_its_token_once(
    p: MockEngine, d: MockEngine, context: BrowserContext
) -> None:
    arguments = ("--ui", f"--ui-token={TOKEN}")
    async with (
        serving_router(p, d, *arguments) as router,
        opened(context, f"{router.url}/ui") as found,
    ):
        page, _ = found
        for token in ("wrong", TOKEN):
            await page.get_by_role("textbox", name="Token").fill(token)
            await page.keyboard.press("Enter")
            if token == "wrong":
                await expect(page.locator("#ask-text")).to_contain_text("Wrong token")
        await expect(page.get_by_role("status")).to_have_text("live")
        await page.reload()
        await expect(page.get_by_role("status")).to_have_text("live")
        assert TOKEN not in await page.content()
        assert TOKEN not in page.url
