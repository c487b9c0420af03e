"""The pages `/` and `/docs`, for browsers and for curl, without any other host."""

import re

import pytest

from tests.unit.router.harness import Router

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}


async def test_curl_gets_json_that_names_every_endpoint(router: Router) -> None:
    answer = await router.client.get("/")
    content = answer.json()
    assert content["name"] == "disagg-router"
    for endpoint in ("POST /v1/chat/completions", "GET /metrics", "GET /v1/models", "GET /ready"):
        assert content["endpoints"][endpoint]
    for path in (content["docs"], content["openapi"]):
        assert (await router.client.get(path)).status_code == 200


async def test_a_browser_gets_a_page_whose_links_work(router: Router) -> None:
    answer = await router.client.get("/", headers=BROWSER)
    assert answer.headers["content-type"].startswith("text/html")
    links = set(re.findall(r'href="([^"]+)"', answer.text))
    assert {"/docs", "/metrics", "/v1/models"} <= links
    for link in links:
        assert (await router.client.get(link)).status_code == 200, link


async def test_the_docs_are_of_this_router_alone(router: Router) -> None:
    answer = await router.client.get("/docs")
    assert answer.status_code == 200
    for text in ("/v1/completions", "stream_options", "No engine of a role is healthy", "array of"):
        assert text in answer.text
    for page in (answer.text, (await router.client.get("/", headers=BROWSER)).text):
        assert "<script" not in page
        assert not re.search(r"(https?:)?//\w", page), "a page works offline"


@pytest.mark.parametrize("path", ["/redoc", "/docs/oauth2-redirect"])
async def test_nothing_comes_from_elsewhere(router: Router, path: str) -> None:
    assert (await router.client.get(path)).status_code == 404


async def test_what_is_not_there_is_still_an_error_object(router: Router) -> None:
    answer = await router.client.post("/")
    assert answer.status_code == 405
    assert answer.json()["error"]["message"]
