"""Every path also works through uvicorn's own HTTP protocol, without the router's fast path."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.unit.router.harness import Router, eventually, running_router, settings_for
from tests.unit.router.mock_engine import MockEngine


@pytest.fixture
async def asgi_router(p: MockEngine, d: MockEngine) -> AsyncIterator[Router]:
    async with running_router(settings_for(p=[p], d=[d]), plain_asgi=True) as router:
        await eventually(lambda: not router.gateway.fleet.unavailable_roles())
        yield router


async def test_completion_takes_both_legs(
    asgi_router: Router, p: MockEngine, d: MockEngine
) -> None:
    answer = await asgi_router.complete()
    assert answer.status_code == 200
    assert answer.json()["choices"]
    assert p.last.json["kv_transfer_params"]["do_remote_decode"] is True
    assert d.last.json["kv_transfer_params"]["do_remote_prefill"] is True


async def test_stream_is_relayed_to_its_end(asgi_router: Router) -> None:
    answer = await asgi_router.stream()
    assert answer.status_code == 200
    assert answer.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_malformed_body_is_an_error_object(asgi_router: Router, path: str) -> None:
    answer = await asgi_router.client.post(path, content=b"{")
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]
    await asgi_router.settled()


async def test_models_are_listed(asgi_router: Router) -> None:
    answer = await asgi_router.client.get("/v1/models")
    assert answer.status_code == 200
