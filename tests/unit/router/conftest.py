"""Fixtures: a prefiller, a decoder, and a router before them on either front."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import uvloop

from tests.unit.router.harness import Router, eventually, running_router, settings_for
from tests.unit.router.mock_engine import (
    MockEngine,
    running_engine,
    usual_decode,
    usual_prefill,
)

StartRouter = Callable[..., Awaitable[Router]]


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loop that the router runs on."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(params=["protocol", "asgi"])
def front(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def p() -> AsyncIterator[MockEngine]:
    async with running_engine(usual_prefill) as engine:
        yield engine


@pytest.fixture
async def d() -> AsyncIterator[MockEngine]:
    async with running_engine(usual_decode) as engine:
        yield engine


@pytest.fixture
async def start_router(front: str, p: MockEngine, d: MockEngine) -> AsyncIterator[StartRouter]:
    """Starts a router before `p` and `d`, or others; it is ready when this returns."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(
            *,
            ps: list[MockEngine] | None = None,
            ds: list[MockEngine] | None = None,
            **changes: Any,
        ) -> Router:
            settings = settings_for(p=ps or [p], d=ds or [d], **changes)
            router = await stack.enter_async_context(running_router(settings, front))
            await eventually(lambda: not router.gateway.fleet.missing())
            return router

        yield start


@pytest.fixture
async def router(start_router: StartRouter) -> Router:
    return await start_router()


@pytest.fixture
async def hot(p: MockEngine, d: MockEngine) -> AsyncIterator[Router]:
    """For what is decided before a request is one: behind ASGI that is the server's business."""
    async with running_router(settings_for(p=[p], d=[d]), "protocol") as router:
        await eventually(lambda: not router.gateway.fleet.missing())
        yield router
