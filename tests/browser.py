"""A real browser, for as long as a block runs; what it should not do, it tells."""

import contextlib
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from playwright.async_api import Browser, BrowserContext, Page, async_playwright, expect

expect.set_options(timeout=20_000)  # a slow machine's figures come late

# It asks nobody but whom the page asks.
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@dataclass
class Seen:
    """Of one page: errors that it told, and hosts that it asked."""

    errors: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)

    def watch(self, page: Page) -> None:
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.hosts.add(urlsplit(request.url).netloc))
        page.on(
            "console",
            lambda told: self.errors.append(told.text) if told.type == "error" else None,
        )


@contextlib.asynccontextmanager
async def running_browser() -> AsyncIterator[Browser]:
    path = shutil.which("chromium")
    assert path, "no chromium: run scripts/install_browser"
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=FLAGS)
        try:
            yield browser
        finally:
            await browser.close()


@contextlib.asynccontextmanager
async def opened(context: BrowserContext, url: str) -> AsyncIterator[tuple[Page, Seen]]:
    page, seen = await context.new_page(), Seen()
    seen.watch(page)
    page.set_default_timeout(20_000)
    await page.goto(url)
    try:
        yield page, seen
    finally:
        await page.close()
