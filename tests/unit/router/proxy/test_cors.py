"""CORS headers, and the methods OPTIONS and HEAD."""

import pytest

from router.proxy.exchange import cors_headers, preflight_headers
from router.settings import Settings
from scripts.mock_engine import MockEngine, Peer, Received
from tests.unit.router.conftest import StartRouter
from tests.unit.router.harness import Router
from tests.unit.router.mock_engine import USUAL

PAGE = "https://chat.example"
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}
HOT = "/v1/completions"


@pytest.mark.parametrize("path", [HOT, "/v1/models", "/v1/chat/completions"])
async def test_preflight_of_an_allowed_origin_is_answered(
    start_router: StartRouter, path: str
) -> None:
    router = await start_router(cors_origins=[PAGE])
    answer = await router.client.options(path, headers=PREFLIGHT)
    assert answer.status_code == 204
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers["access-control-allow-headers"] == "authorization,content-type"
    assert answer.headers["vary"] == "origin"
    assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize("origins", [[], ["https://other.example"]])
async def test_origin_that_is_not_allowed_gets_no_headers(
    start_router: StartRouter, origins: list[str]
) -> None:
    router = await start_router(cors_origins=origins)
    answers = [
        await router.client.options(HOT, headers=PREFLIGHT),
        await router.client.post(HOT, json={"prompt": "x"}, headers={"origin": PAGE}),
        await router.client.get("/v1/models", headers={"origin": PAGE}),
    ]
    assert [answer.status_code for answer in answers] == [204, 200, 200]
    for answer in answers:
        assert not [name for name in answer.headers if name.startswith("access-control")]


async def test_answers_streams_and_errors_have_cors_headers(start_router: StartRouter) -> None:
    router = await start_router(cors_origins=[PAGE], max_body_size=2000)
    page = {"origin": PAGE}
    long = {"prompt": "x" * 3000}
    for body, status in (
        ({"prompt": "x"}, 200),
        ({"prompt": "x", "stream": True}, 200),
        ({"prompt": "x", "max_tokens": "abc"}, 400),
        ({"prompt": "x", "model": "nobody's"}, 404),
        (long, 413),
    ):
        answer = await router.client.post(HOT, json=body, headers=page)
        assert answer.status_code == status
        assert answer.headers.get_list("access-control-allow-origin") == [PAGE]
    for path, status in (("/v1/models", 200), ("/nothing", 404), (HOT, 405)):
        answer = await router.client.get(path, headers=page)
        assert answer.status_code == status
        assert answer.headers.get_list("access-control-allow-origin") == [PAGE]


async def test_stream_that_begins_with_a_heartbeat_has_cors_headers(
    start_router: StartRouter,
) -> None:
    router = await start_router(cors_origins="*", stream_heartbeat=0.1)
    answer = await router.client.post(
        HOT, json={"prompt": "x", "stream": True}, headers={"origin": PAGE}
    )
    assert answer.headers["access-control-allow-origin"] == "*"
    assert "vary" not in answer.headers


async def test_cors_headers_of_engines_are_removed(router: Router, d: MockEngine) -> None:
    async def open_to_all(_: Received, peer: Peer) -> None:
        lines = {"access-control-allow-origin": "*", "access-control-allow-credentials": "true"}
        await peer.answer(USUAL, headers=lines)

    d.scripts = [open_to_all]
    answer = await router.client.post(HOT, json={"prompt": "x"}, headers={"origin": PAGE})
    assert answer.status_code == 200
    assert not [name for name in answer.headers if name.startswith("access-control")]


async def test_options_lists_the_methods_of_a_path(router: Router) -> None:
    for path, allowed in (
        (HOT, "OPTIONS, POST"),
        ("/v1/models", "GET, HEAD, OPTIONS"),
        ("/health", "GET, HEAD, OPTIONS"),
    ):
        answer = await router.client.options(path)
        assert (answer.status_code, answer.headers["allow"], answer.content) == (204, allowed, b"")
    assert (await router.client.options("/nothing")).status_code == 404


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/version", "/openapi.json", "/"])
async def test_head_is_answered_like_get_without_a_body(router: Router, path: str) -> None:
    whole, head = await router.client.get(path), await router.client.head(path)
    assert (head.status_code, head.content) == (whole.status_code, b"")
    assert head.headers["content-type"] == whole.headers["content-type"]
    assert (await router.client.get("/version")).status_code == 200


async def test_head_of_a_path_for_post_is_405(router: Router) -> None:
    assert (await router.client.head(HOT)).status_code == 405
    assert (await router.client.head("/nothing")).status_code == 404


async def test_head_of_an_endless_stream_ends(start_router: StartRouter) -> None:
    router = await start_router(ui=True)
    answer = await router.client.head("/ui/events", timeout=5)
    assert answer.content == b""


@pytest.mark.parametrize("wanted", [b"x\r\nset-cookie: a=b", b"\xff", b"", b"a" * 3000])
def test_invalid_requested_headers_are_not_echoed(wanted: bytes) -> None:
    asked = [
        (b"origin", PAGE.encode()),
        (b"access-control-request-method", b"POST"),
        (b"access-control-request-headers", wanted),
    ]
    assert b"access-control-allow-headers" not in dict(preflight_headers(asked, [PAGE]))


def test_origins_are_compared_as_a_whole() -> None:
    for origin in (b"https://chat.example.evil", b"http://chat.example", b"null", b"*", b""):
        found = dict(cors_headers([(b"origin", origin)], [PAGE]))
        assert b"access-control-allow-origin" not in found


@pytest.mark.parametrize("origin", ["chat.example", "https://a/b", "https://", "https://a b", "**"])
def test_invalid_origin_is_rejected_at_start(origin: str) -> None:
    with pytest.raises(ValueError, match="origin"):
        Settings(cors_origins=(origin,))
