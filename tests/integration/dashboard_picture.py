"""Writes a picture of the dashboard under load:
`python -m tests.integration.dashboard_picture PNG`.

The engines are scripted (tests/integration/dashboard_fleet.py) and the router is real, so that the
picture needs no GPU and no model. The browser is Chromium (scripts/install_browser).
"""

import argparse
import asyncio
from pathlib import Path

import httpx

from tests.browser import running_browser
from tests.integration.dashboard_fleet import MODEL, Load, ScriptedFleet, running_fleet
from tests.unit.router.processes import running_router

LOAD_S = 12.0
# Before the picture, the decode engine of a long answer restarts, so that another one resumes it.
RESTART_S = 2.5
QUESTION = "What does the decode engine do?"


async def stream_long_answer(url: str) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Tell me more."}],
        "max_tokens": 2000,
        "stream": True,
    }
    async with (
        httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client,
        client.stream("POST", "/v1/chat/completions", json=body) as answer,
    ):
        async for _ in answer.aiter_bytes():
            pass


async def restart_busiest(fleet: ScriptedFleet) -> None:
    engine = max(fleet.decoders, key=lambda one: one.busy_blocks).engine
    port = engine.port
    await engine.stop()
    await engine.start(port)


async def write_picture(options: argparse.Namespace) -> None:
    async with (
        running_fleet(options.prefillers, options.decoders) as fleet,
        running_router(*fleet.flags, "--ui", "--port", "0", engines=len(fleet.engines)) as router,
        running_browser() as browser,
        Load(router.url, options.concurrency).running(),
    ):
        page = await browser.new_page(
            viewport={"width": options.width, "height": options.height},
            color_scheme="dark" if options.dark else "light",
        )
        await page.goto(f"{router.url}/ui")
        await asyncio.sleep(LOAD_S)
        await page.evaluate("document.getElementById('chat-max-tokens').value = 24")
        await page.get_by_label("Message", exact=True).fill(QUESTION)
        await page.keyboard.press("Enter")
        await page.evaluate("document.activeElement.blur()")
        async with asyncio.TaskGroup() as group:
            long = group.create_task(stream_long_answer(router.url))
            await asyncio.sleep(1.5)
            await restart_busiest(fleet)
            await asyncio.sleep(RESTART_S)
            picture = await page.screenshot(path=options.path, full_page=options.full)
            long.cancel()
        print(f"{options.path}: {len(picture) // 1000} kB")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("path", type=Path, metavar="PNG")
    add("--dark", action="store_true", help="the dark colour scheme")
    add("--width", type=int, default=1360, metavar="PIXELS", help="default: 1360")
    add("--height", type=int, default=880, metavar="PIXELS", help="default: 880")
    add("--full", action="store_true", help="the whole page, whatever its height")
    add("--prefillers", type=int, default=2, metavar="N", help="default: 2")
    add("--decoders", type=int, default=2, metavar="N", help="default: 2")
    add("--concurrency", type=int, default=12, metavar="N", help="chats at a time; default: 12")
    asyncio.run(write_picture(parser.parse_args()))


if __name__ == "__main__":
    main()
