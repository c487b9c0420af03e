"""What has a port of its own is on no other."""

import re

import httpx
import pytest

from scripts.mock_engine import MockEngine
from tests.unit.router.processes import RouterProcess, serving_router

BODY = {"model": "m", "prompt": "hello"}


def url_of(router: RouterProcess, what: str) -> str:
    """Where the log says that it is."""
    found = next(
        m for line in router.lines if (m := re.search(rf"{what} on (http://[^/\s]+)", line))
    )
    return found[1]


@pytest.mark.parametrize("options", [[], ["--workers=2", "--conversation-store=off"]])
async def test_metrics_and_the_page_have_ports_of_their_own(
    p: MockEngine, d: MockEngine, options: list[str]
) -> None:
    given = ["--metrics-port=0", "--liveness-port=0", "--ui", "--ui-port=0", *options]
    async with serving_router(p, d, *given) as router, httpx.AsyncClient() as client:
        others = ("metrics", "liveness", "dashboard")
        clients, (metrics, liveness, page) = router.url, (url_of(router, what) for what in others)
        assert len({clients, metrics, liveness, page}) == 4

        async def status(where: str, path: str) -> int:
            return (await client.get(where + path)).status_code

        assert "disagg_router_requests_total" in (await client.get(f"{metrics}/metrics")).text
        for where in (clients, liveness, page):
            assert await status(where, "/metrics") == 404
            assert await status(where, "/metrics?x=1") == 404
        assert await status(page, "/ui/") == 200
        for where in (clients, metrics, liveness):
            for path in ("/ui/", "/ui", "/ui/events", "/ui/index.html"):
                assert await status(where, path) == 404, (where, path)
        # A Host header does not say where one is.
        lie = {"host": page.removeprefix("http://")}
        assert (await client.get(f"{clients}/ui/", headers=lie)).status_code == 404
        assert await status(liveness, "/health") == await status(clients, "/health") == 200
        # The page's chat asks where the page is.
        for where in (clients, page):
            answer = await client.post(f"{where}/v1/completions", json=BODY)
            assert answer.status_code == 200
