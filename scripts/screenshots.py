"""Pictures of the page for the README: light, dark and narrow, of a router that is at work.

    python scripts/screenshots.py http://127.0.0.1:8000 DIRECTORY

It asks a question, waits for the answer, and writes light.png, dark.png, narrow.png.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from pathlib import Path
from typing import Literal, NamedTuple

from playwright.async_api import Browser, Error, Page

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.browser import running_browser

QUESTIONS = ("What is the capital of France?", "And what river is it on?")
PATIENCE_MS = 60_000
MOVED_MS = 3_000


class Shot(NamedTuple):
    name: str
    width: int
    height: int
    scheme: Literal["light", "dark"]


SHOTS = (
    Shot("light", 1360, 860, "light"),
    Shot("dark", 1360, 860, "dark"),
    Shot("narrow", 360, 760, "light"),
)


async def take(browser: Browser, url: str, shot: Shot, directory: Path) -> Path:
    viewport = {"width": shot.width, "height": shot.height}
    context = await browser.new_context(
        viewport=viewport,  # type: ignore[arg-type] # a TypedDict of theirs
        color_scheme=shot.scheme,
        device_scale_factor=2,
    )
    page = await context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    await page.goto(f"{url}/ui")
    for number, question in enumerate(QUESTIONS, 1):
        await _ask(page, question, number)
    with contextlib.suppress(Error):  # stock engines do not say what moved
        moved = page.locator(".assistant .fact").last.filter(has_text="move")
        await moved.wait_for(timeout=MOVED_MS)
    await page.locator("#requests-list .outcome-ok .row").first.click()
    await page.evaluate("window.scrollTo(0, 0)")
    path = directory / f"{shot.name}.png"
    await page.screenshot(path=path)
    await context.close()
    return path


async def _ask(page: Page, question: str, number: int) -> None:
    """Until its facts are there."""
    await page.locator("#chat-send").wait_for()
    await page.locator("#chat-text").fill(question)
    await page.keyboard.press("Enter")
    fact = page.locator(".assistant .fact").nth(number - 1).filter(has_text="first token")
    await fact.wait_for()


async def run(url: str, directory: Path) -> None:
    async with running_browser() as browser:
        for shot in SHOTS:
            print(await take(browser, url, shot, directory))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("url", help="of a router with --ui, and engines that talk")
    parser.add_argument("directory", type=Path)
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    try:
        asyncio.run(run(options.url.rstrip("/"), options.directory))
    except Error as error:
        print(f"screenshots: {error.message.splitlines()[0]}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
