"""The dashboard shows an operator each problem, and every screen is readable.

Pictures of each state are written to build/dashboard.
"""

import asyncio
import contextlib
import json
import os
import re
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.async_api import Browser, Page, expect

from router.ui.site import MAX_VIEWERS
from tests.browser import Seen, opened
from tests.integration.dashboard_fleet import MODEL, Load, ScriptedFleet, running_fleet
from tests.unit.router.processes import RouterProcess, running_router

pytestmark = pytest.mark.asyncio(loop_scope="module")

PICTURES = Path(__file__).parents[2] / "build" / "dashboard"
SCREENS: list[tuple[int, Any]] = [(1360, "light"), (1360, "dark"), (390, "light"), (390, "dark")]
WAIT_FOR_FRAMES = (
    "() => new Promise((go) => requestAnimationFrame(() => requestAnimationFrame(go)))"
)
# The pairs of texts that cover each other, of all texts that can be seen.
FIND_OVERLAPS = """() => {
  const texts = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, parent = node.parentElement;
    if (!node.data.trim() || parent.closest(".unseen, [hidden], option, noscript, .skip")) continue;
    if (!parent.checkVisibility()) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    for (let { left, right, top, bottom } of range.getClientRects()) {
      for (let box = parent; box; box = box.parentElement) {
        if (getComputedStyle(box).overflow === "visible") continue;
        const clip = box.getBoundingClientRect();
        left = Math.max(left, clip.left); right = Math.min(right, clip.right);
        top = Math.max(top, clip.top); bottom = Math.min(bottom, clip.bottom);
      }
      if (right - left < 1 || bottom - top < 1) continue;
      texts.push({ node, text: node.data.trim(), left, right, top, bottom });
    }
  }
  const found = [];
  texts.forEach((a, at) => texts.slice(at + 1).forEach((b) => {
    if (a.node === b.node) return;
    const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (wide > 1 && high > 4) found.push(`${a.text} / ${b.text}`);
  }));
  return { found, count: texts.length };
}"""
# The texts whose contrast with what is behind them is below WCAG's 4.5 (AA).
FIND_FAINT = """() => {
  const numbers = (text) => (text.match(/[\\d.]+/g) ?? []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((one) => one / 255)
    .map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4))
    .reduce((sum, one, at) => sum + one * [0.2126, 0.7152, 0.0722][at], 0);
  const behind = (element) => {
    for (let one = element; one; one = one.parentElement) {
      const colour = numbers(getComputedStyle(one).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const found = [], unseen = ".unseen, option, .skip, .is-gone, noscript, script";
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((one) => one.nodeType === 3 && one.data.trim());
    if (!own || !element.checkVisibility() || element.closest(unseen)) continue;
    const style = getComputedStyle(element), isDrawn = element.namespaceURI.endsWith("svg");
    const ink = light(numbers(isDrawn ? style.fill : style.color));
    const ground = light(behind(element));
    const contrast = (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05);
    if (contrast >= 4.5) continue;
    found.push(`${element.textContent.trim().slice(0, 40)}: ${contrast.toFixed(2)}`);
  }
  return [...new Set(found)];
}"""


async def save(page: Page, name: str) -> None:
    """Write a picture of the whole page, for people to look at."""
    await page.screenshot(path=PICTURES / f"{name}.png", full_page=True)


async def find_overlaps(page: Page) -> list[str]:
    """Return the pairs of texts that cover each other, once the page is drawn."""
    await page.evaluate(WAIT_FOR_FRAMES)
    overlaps = await page.evaluate(FIND_OVERLAPS)
    assert overlaps["count"] > 50
    found: list[str] = overlaps["found"]
    return found


def router_of(fleet: ScriptedFleet, *flags: str, port: int = 0) -> Any:
    arguments = (*fleet.flags, "--ui", f"--port={port}", "--health-timeout=5", *flags)
    return running_router(*arguments, engines=len(fleet.engines))


Watched = tuple[ScriptedFleet, RouterProcess, Page, Seen]


@contextlib.asynccontextmanager
async def watched(
    browser: Browser, prefillers: int, decoders: int, *flags: str
) -> AsyncIterator[Watched]:
    """Scripted engines, a router before them, and a page that shows its dashboard."""
    context = await browser.new_context(viewport={"width": 1360, "height": 900})
    async with (
        running_fleet(prefillers, decoders) as fleet,
        router_of(fleet, *flags) as router,
        opened(context, f"{router.url}/ui") as (page, seen),
    ):
        yield fleet, router, page, seen


def port_of(router: RouterProcess) -> int:
    return int(router.url.rpartition(":")[2])


def chat(max_tokens: int = 8) -> dict[str, Any]:
    messages = [{"role": "user", "content": "word " * 200}]
    return {"model": MODEL, "messages": messages, "max_tokens": max_tokens, "stream": True}


def problems(page: Page) -> Any:
    return page.locator("#problems-list li")


@pytest.mark.parametrize("engines", [2, 4])
async def test_no_text_covers_another_and_all_can_be_read(browser: Browser, engines: int) -> None:
    async with (
        running_fleet(engines, engines) as fleet,
        router_of(fleet) as router,
        Load(router.url, 3 * engines).running(),
    ):
        for width, scheme in SCREENS:
            context = await browser.new_context(
                viewport={"width": width, "height": 900}, color_scheme=scheme
            )
            async with opened(context, f"{router.url}/ui") as (page, seen):
                await all_can_be_read(page, engines, width, f"{engines}+{engines}-{width}-{scheme}")
                assert seen.errors == []


async def all_can_be_read(page: Page, engines: int, width: int, name: str) -> None:
    arcs = page.locator("#fleet-stage .arc")
    await expect(arcs.nth(2 * engines)).to_be_attached()
    if width > 1000:
        await expect(page.locator("#fleet-stage .flow").nth(engines)).to_be_visible()
    await page.locator("#requests-list .outcome-ok .row").nth(5).click()
    await page.get_by_text(re.compile("KV transfers: ")).click()
    for _ in range(5):  # while everything moves
        assert await find_overlaps(page) == []
        await page.wait_for_timeout(200)
    await save(page, f"load-{name}")
    assert await page.evaluate(FIND_FAINT) == []
    assert await page.evaluate("document.documentElement.scrollWidth") <= width


async def test_a_lost_connection_greys_the_dashboard_until_it_is_back(browser: Browser) -> None:
    context = await browser.new_context(viewport={"width": 1360, "height": 900})
    async with running_fleet(2, 2) as fleet:
        async with router_of(fleet) as router:
            port = port_of(router)
            page = await context.new_page()
            await page.goto(f"{router.url}/ui")
            async with Load(router.url, 6).running():
                await expect(page.locator("#requests-list .outcome-ok").nth(3)).to_be_visible()
                router.process.kill()
                banner = page.locator("#lost")
                await expect(banner).to_contain_text("No connection to the router since")
                await expect(banner).to_contain_text("The figures below are from before")
        await expect(page.get_by_role("status")).to_have_text("disconnected, reconnecting")
        await expect(page.locator("body")).to_have_class(re.compile("is-lost"))
        assert "grayscale" in await page.locator("main").evaluate("e => getComputedStyle(e).filter")
        assert await page.title() == "(disconnected) disagg-router"
        bars = page.locator("#requests-list .outcome-running .waterfall rect")
        widths = "bars => bars.map((bar) => bar.getAttribute('width'))"
        before = await bars.evaluate_all(widths)
        assert before, "requests were running"
        await save(page, "lost-1360")
        await page.wait_for_timeout(1200)  # time passes, and the bars do not grow
        assert await bars.evaluate_all(widths) == before
        async with router_of(fleet, port=port):
            await expect(banner).to_be_hidden()
            await expect(page.get_by_role("status")).to_have_text("live")
            await expect(page.locator("body")).not_to_have_class(re.compile("is-lost"))
            await expect(page.locator("#fleet-graph .is-healthy")).to_have_count(4)


async def test_a_router_that_hangs_is_noticed(browser: Browser) -> None:
    async with watched(browser, 1, 1) as (_, router, page, _):
        await expect(page.get_by_role("status")).to_have_text("live")
        os.kill(router.process.pid, signal.SIGSTOP)
        try:
            banner = page.locator("#lost")
            await expect(banner).to_contain_text("has sent nothing")
        finally:
            os.kill(router.process.pid, signal.SIGCONT)
        await expect(banner).to_be_hidden()


async def test_a_dead_engine_is_a_problem_with_reason_and_time(browser: Browser) -> None:
    async with watched(browser, 2, 2) as (fleet, _, page, _):
        await expect(page.locator("#fleet-graph .is-healthy")).to_have_count(4)
        await expect(page.locator("#problems")).to_be_hidden()
        dead = fleet.decoders[1]
        port = dead.engine.port
        await dead.engine.stop()
        problem = problems(page)
        since = re.compile(rf"D2 unhealthy since \d\d:\d\d:\d\d \(\d+ s\) 127.0.0.1:{port}: .+")
        await expect(problem).to_have_text(since)
        card = page.get_by_role("list", name="Decode engines").get_by_role("listitem").nth(1)
        await expect(card).to_contain_text("unhealthy")
        await expect(card).to_contain_text("since ")
        await expect(page.locator("#checks-list")).to_contain_text(
            "decode engines: warning, 1 of 2 healthy"
        )
        assert await page.title() == "(1) disagg-router"
        await save(page, "unhealthy-1360")
        await page.set_viewport_size({"width": 390, "height": 844})
        await save(page, "unhealthy-390")
        assert await find_overlaps(page) == []
        await dead.engine.start(port)
        await expect(page.locator("#problems")).to_be_hidden()


async def test_no_decode_engine_is_why_requests_are_refused(browser: Browser) -> None:
    async with watched(browser, 1, 2) as (fleet, router, page, _):
        await expect(page.locator("#fleet-graph .is-healthy")).to_have_count(3)
        for one in fleet.decoders:
            await one.engine.stop()
        await expect(page.locator("#fleet-graph .is-unhealthy")).to_have_count(2)
        await expect(problems(page).first).to_contain_text("Requests are refused with 503")
        await expect(problems(page).first).to_contain_text("none of 2 decode engines can serve")
        unhealthy = problems(page).filter(has_text="unhealthy since")
        await expect(unhealthy).to_have_count(1)  # one for both engines
        await expect(unhealthy).to_contain_text("D1, D2 unhealthy")
        for one in fleet.decoders:
            await expect(unhealthy).to_contain_text(f"127.0.0.1:{one.engine.port}")
        answer = await _ask(router.url)
        assert answer.status_code == 503
        refused = problems(page).filter(has_text="1 request refused with 503 in the last 10 s")
        await expect(refused).to_contain_text("no decode engine is healthy")
        await save(page, "refused-1360")
        await expect(refused).to_have_count(0)


async def test_a_full_queue_is_why_requests_are_refused(browser: Browser) -> None:
    context = await browser.new_context(viewport={"width": 1360, "height": 900})
    limits = ("--max-engine-requests=1", "--queue-size=2")
    async with (
        running_fleet(1, 1) as fleet,
        router_of(fleet, *limits) as router,
        opened(context, f"{router.url}/ui") as (page, _),
        Load(router.url, 8).running(),
    ):
        refused = problems(page).filter(has_text="refused with 503 in the last 10 s")
        await expect(refused.first).to_contain_text("too many requests are queued already")
        await expect(page.locator("#totals")).to_contain_text(re.compile(r"queue\s*[12]\s*of 2"))
        await expect(page.locator("#requests-list .outcome-failed").first).to_contain_text(
            "failed 503"
        )
        await page.set_viewport_size({"width": 390, "height": 844})
        await save(page, "queue-full-390")


async def test_a_router_that_shuts_down_says_so(browser: Browser) -> None:
    async with watched(browser, 1, 1, "--shutdown-delay=4") as (_, router, page, _):
        await expect(page.get_by_role("status")).to_have_text("live")
        router.process.terminate()
        await expect(problems(page).first).to_contain_text("The router is shutting down")
        await expect(page.get_by_role("status")).to_have_text("shutting down")
        await save(page, "drain-1360")
        await expect(page.locator("#lost")).to_be_hidden()
        assert await router.ended() == 0
        await expect(page.locator("#lost")).to_contain_text("The router has shut down since")


async def test_engines_that_differ_are_degraded_with_the_difference(browser: Browser) -> None:
    context = await browser.new_context(viewport={"width": 1360, "height": 900})
    async with running_fleet(1, 2) as fleet:
        [first, second] = fleet.decoders
        for one in (fleet.prefillers[0], first, second):
            rank = one.identity["ranks"][0]
            rank["compatibility_factors"] = {"num_layers": 36 if one is second else 28}
            rank["compatibility_hash"] = "decaf" if one is second else "c0ffee"
        async with router_of(fleet) as router, opened(context, f"{router.url}/ui") as (page, _):
            card = page.locator("#fleet-graph .is-degraded")
            await expect(card).to_contain_text("num_layers 28 and 36")
            await expect(problems(page)).to_have_count(1)
            for place in (problems(page), page.locator("#checks-list .check-failed")):
                await expect(place).to_contain_text("cannot exchange KV, because they differ")
                await expect(place).to_contain_text("To do: ")
            await save(page, "degraded-1360")


async def test_a_resumed_stream_has_a_mark(browser: Browser) -> None:
    async with (
        watched(browser, 1, 2) as (fleet, router, page, _),
        httpx.AsyncClient(base_url=router.url, timeout=30, trust_env=False) as client,
    ):
        await expect(page.locator("#fleet-graph .is-healthy")).to_have_count(3)
        async with client.stream("POST", "/v1/chat/completions", json=chat(300)) as answer:
            texts = answer.aiter_text()
            await anext(texts)
            await expect(page.locator("#requests-list .row")).to_contain_text("streaming")
            serving = next(one for one in fleet.decoders if one.busy_blocks)
            await serving.engine.stop()
            mark = page.locator("#requests-list .mark")
            await expect(mark).to_have_text("↻ resumed")
            rest = "".join([text async for text in texts])
        assert "[DONE]" in rest
        row = page.locator("#requests-list .row")
        await expect(row).to_contain_text("ok ↻ resumed")
        await expect(row.locator(".waterfall .resumed")).to_have_count(1)
        await row.click()
        details = page.locator("#requests-list .details")
        await expect(details).to_contain_text("1 time by another decode engine")
        await expect(details).to_contain_text("resumed on another engine")
        await save(page, "resumed-1360")


async def test_a_viewer_too_many_sees_why_there_are_no_figures(browser: Browser) -> None:
    context = await browser.new_context()
    async with (
        running_fleet(1, 1) as fleet,
        router_of(fleet) as router,
        httpx.AsyncClient(base_url=router.url, timeout=30, trust_env=False) as client,
        contextlib.AsyncExitStack() as stack,
    ):
        for _ in range(MAX_VIEWERS):
            viewer = await stack.enter_async_context(client.stream("GET", "/ui/events"))
            assert viewer.status_code == 200
        async with opened(context, f"{router.url}/ui") as (page, _):
            banner = page.locator("#lost")
            await expect(banner).to_contain_text("The router sends no figures since")
            await expect(banner).to_contain_text(f"{MAX_VIEWERS} viewers already")
            await stack.aclose()
            await page.get_by_role("button", name="Retry now").click()
            await expect(banner).to_be_hidden()


HOSTS = "{role}-{number}-6d9f7c5b8d-x2v9q.vllm-{role}.production-llm.svc.cluster.local:8000"
STATES: list[dict[str, Any]] = [
    {},
    {"health": "unhealthy", "reason": "no answer within 2 s: " + "a long reason " * 12},
    {"degraded": "engines differ: num_layers 28 and 36"},
    {"intent": "draining"},
    {"circuit": "open", "circuit_reason": "answered with an error: 500"},
    {"cooling": True},
    {"cold": True},
    {"health": "unknown", "reason": "not probed yet"},
]


def large_fleet(engines_per_role: int) -> dict[str, Any]:
    """A snapshot with long names, large numbers and every state of engines and requests."""
    gauge = {"kv_usage": 0.97, "waiting": 1234, "bytes_per_second": 1.23e9}
    names = {
        role: [HOSTS.format(role=role, number=number) for number in range(engines_per_role)]
        for role in ("prefill", "decode")
    }
    engines = {
        name: {
            "name": name,
            "role": role,
            "group": "a" if number % 2 else "llama-3.3-70b-fp8",
            "models": ["m"],
            "health": "healthy",
            "reason": "",
            "since": 1.7e9,
            "degraded": "",
            "intent": "serving",
            "cold": False,
            "cooling": False,
            "in_flight": 123,
            "holding": 12,
            "circuit": "closed",
            "circuit_reason": "",
            "drained": False,
            "gauge": gauge,
            **STATES[number % len(STATES) if role == "decode" else 0],
        }
        for role, listed in names.items()
        for number, name in enumerate(listed)
    }
    p, d = names["prefill"][0], names["decode"][0]
    way = {"from": p, "to": d, "kind": "prompt", "rate": 1234.5}
    times = {"prefill_started": 2.0, "prefill_done": 100.0, "decode_started": 101.0}
    ms = {**times, "queued": None, "admitted": None, "first_byte": 130.0, "ended": 9000.0}
    request = {
        "id": "x",
        "at": 1.7e9,
        "endpoint": "/v1/chat/completions",
        "flow": "pull",
        "stage": "done",
        "status": 200,
        "prefiller": p,
        "decoder": d,
        "model": "m",
        "retries": 0,
        "resumes": 3,
        "conversation": "",
        "reused_from": "",
        "ms": ms,
        "without_transfer": "",
        "prompt_tokens": 123456,
        "completion_tokens": 12345,
        "counted": "usage",
        "cached_tokens": 123000,
        "failures": [],
        "error": "",
    }
    outcomes = ("ok", "broken_stream", "engine_error", "failed", "refused", "disconnected")
    return {
        "version": "1.2.3",
        "refusal_window": 10,
        "settings": [],
        "ttl": 450,
        "conversations": {"store": "redis"},
        "ended": [{**request, "key": one, "outcome": one} for one in outcomes],
        "engines": engines,
        "engines_unlisted": 3,
        "groups": {},
        "running": {},
        "ways": {"one": {**way, "bytes_per_second": 12.3e9}},
        "totals": {
            "requests": 123456789,
            "in_flight": 12345,
            "queue": {"depth": 1000, "size": 1000},
            "by": {"ok": 123456789, "failed": 12345, "refused": 1234567, "disconnected": 99999},
        },
        "ready": {"blocking": {}, "degrading": {"prefill": "a; decode engines answer alone"}},
        "refusals": [{"status": 503, "text": "too many requests are queued", "count": 12345}],
        "checks": [{"name": "discovery: dns", "state": "warning", "text": "NXDOMAIN", "cure": ""}],
        "turns": {"outcomes": {"cut a_long_reason": 77777777}, "kept": {}, "entries": 12345},
        "workers": {"answered": 3, "known": 4},
    }


@contextlib.asynccontextmanager
async def showing(browser: Browser, snapshot: dict[str, Any]) -> AsyncIterator[Page]:
    """A dashboard that gets this snapshot alone."""
    feed = f"event: snapshot\ndata: {json.dumps(snapshot)}\n\n"
    context = await browser.new_context(viewport={"width": 1360, "height": 900})
    await context.route(
        "**/ui/events", lambda route: route.fulfill(content_type="text/event-stream", body=feed)
    )
    async with (
        running_fleet(1, 1) as fleet,
        router_of(fleet) as router,
        opened(context, f"{router.url}/ui") as (page, _),
    ):
        yield page


async def test_output_leases_and_refusals_are_counted_in_one_way(browser: Browser) -> None:
    snapshot = large_fleet(1)
    now = time.time()
    [request, *_] = snapshot["ended"]
    ms = {**request["ms"], "first_byte": 1000.0, "ended": 2000.0}
    request |= {"at": now - 5, "ms": ms, "prompt_tokens": None, "cached_tokens": None}
    request |= {"completion_tokens": 101, "counted": "events", "resumes": 0}
    texts = ("p:1 does not answer", "p:2 does not answer")
    snapshot |= {
        "now": now,
        "ended": [request],
        "refusals": [{"status": 502, "text": text, "count": 3} for text in texts],
    }
    async with showing(browser, snapshot) as page:
        row = page.locator("#requests-list .row").first
        await expect(row).to_contain_text("101 events")
        await row.click()
        details = page.locator("#requests-list .details").first
        await expect(details).to_contain_text("output: 101 events of the stream")
        await expect(details).to_contain_text("ITL, mean10 ms")
        await expect(details).to_contain_text("Events/s100.0")
        totals = page.locator("#totals")
        await expect(totals).to_contain_text(re.compile(r"output1\.7/stokens and events"))
        await expect(totals).to_contain_text(re.compile(r"ITL10 ms.*1 stream"))
        await expect(totals).to_contain_text("completed requests")
        failed = problems(page).filter(has_text="6 requests failed with 502")
        await expect(failed).to_contain_text("; ".join(texts))
        card = page.locator("#fleet-graph .engine").first
        await expect(card).to_contain_text("12 KV leases")


async def test_the_arc_and_the_row_of_a_slow_pair_show_its_rate(browser: Browser) -> None:
    snapshot = large_fleet(2)
    (way,) = snapshot["ways"].values()
    other = {**way, "to": [*snapshot["engines"]][-1], "bytes_per_second": 1.2e9}
    text = "p -> d moves KV at 1.2 GB/s, its neighbours at 40 GB/s"
    snapshot["ways"] = {"one": {**way, "slow": ""}, "two": {**other, "slow": text}}
    async with showing(browser, snapshot) as page:
        await expect(page.locator("#fleet-stage .arc")).to_have_count(2)
        await expect(page.locator("#fleet-stage .arc.slow title")).to_have_text(text)
        await expect(page.locator("#fleet-stage .flow.slow")).to_have_text("1.2 GB/s, slow")
        # A click would wait for the notice of the lost connection, which may cover the table.
        await page.locator("#transfers-summary").dispatch_event("click")
        await expect(page.locator("#transfers-table")).to_contain_text(f"prompt: {text}")


async def test_engines_of_both_roles_show_what_they_do_now_and_why(browser: Browser) -> None:
    snapshot = large_fleet(3)
    reason = "prompts need 1.3 engines and answers 0.4"
    free = "mixing prompts and answers costs little: 0.10 weight reads per step"
    for name, engine in snapshot["engines"].items():
        is_free = "2-" in name  # the last one of each role
        engine |= {
            "group": "free" if is_free else "divided",
            "role": "both",
            "preferred_role": "both" if is_free else engine["role"],
            "role_reason": free if is_free else reason,
            "step_limit_ms": 45.0,
            "mixing": 0.1 if is_free else None,
            "health": "healthy",
            "degraded": "",
        }
    snapshot["groups"] = {
        name: {"name": name, "weight": 1, "needed": {"prefill": 1.3, "decode": 0.004}}
        for name in ("free", "divided")
    }
    async with showing(browser, snapshot) as page:
        sides = page.locator("#fleet-graph .side")
        left, right, both = sides.nth(0), sides.nth(1), sides.nth(2)
        await expect(left.locator(".engine")).to_have_count(2)
        await expect(left.locator(".engine").first).to_contain_text("computes prompts now")
        await expect(left.locator(".engine").first).to_have_attribute("title", re.compile(reason))
        await expect(right.locator(".engine").first).to_contain_text("decodes now")
        await expect(right.locator(".engine").first).to_contain_text("steps up to 45 ms")
        await expect(both.locator(".engine")).to_have_count(2)
        await expect(both.locator(".engine").first).to_contain_text("computes prompts and decodes")
        await expect(both.locator(".engine").first).to_contain_text("0.10 weight reads")
        titles = page.locator("#fleet-graph h4:visible")
        needed = ["Prefill: 1.3 engines needed", "Decode: <0.1 engines needed"]
        needed.append("Prefill and decode: 1.3 + <0.1 engines needed")
        await expect(titles).to_have_text(needed)
        await expect(page.locator("#fleet-graph .empty:visible")).to_have_count(0)
        await save(page, "both-roles")
        for width in (320, 1360):
            await page.set_viewport_size({"width": width, "height": 900})
            assert await find_overlaps(page) == [], width


@pytest.mark.parametrize("engines_per_role", [4, 60])
async def test_long_names_and_large_numbers_fit_at_every_width(
    browser: Browser, engines_per_role: int
) -> None:
    async with showing(browser, large_fleet(engines_per_role)) as page:
        await expect(page.locator("#fleet-graph .engine")).to_have_count(2 * engines_per_role)
        if engines_per_role > len(STATES):
            avoided = page.locator("#fleet-graph .is-avoided").first
            await expect(avoided).to_contain_text("failed there: answered with an error: 500")
        for width in (320, 390, 768, 1090, 1360, 1920):
            await page.set_viewport_size({"width": width, "height": 900})
            assert await find_overlaps(page) == [], width
            assert await page.evaluate("document.documentElement.scrollWidth") <= width


async def _ask(url: str) -> httpx.Response:
    async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as client:
        async with asyncio.timeout(30):
            return await client.post("/v1/chat/completions", json=chat())
