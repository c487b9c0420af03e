"""Fixtures: mock prefill engines, mock decode engines, a router that uses them, and Redis."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
import uvloop
from redis import Redis

from scripts.mock_engine import MockEngine
from tests.redis_server import RedisServer, running_redis
from tests.unit.router.engine_scripts import usual_decode, usual_prefill
from tests.unit.router.harness import Router, eventually, running_router, settings_for
from tests.unit.router.mock_engine import engine_fixture, running_engines

StartRouter = Callable[..., Awaitable[Router]]
p, p2, p3 = (engine_fixture(lambda: usual_prefill) for _ in range(3))
d, d2, d3 = (engine_fixture(lambda: usual_decode) for _ in range(3))


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loop that the router runs on."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
async def ps() -> AsyncIterator[list[MockEngine]]:
    async with running_engines(usual_prefill, 4) as engines:
        yield engines


@pytest.fixture
async def start_router(p: MockEngine, d: MockEngine) -> AsyncIterator[StartRouter]:
    """Starts a router before `p` and `d`, or others; it is ready when this returns.

    With `identified` it has also asked each engine for its identity page.
    """
    async with contextlib.AsyncExitStack() as stack:

        async def start(
            *,
            ps: list[MockEngine] | None = None,
            ds: list[MockEngine] | None = None,
            identified: bool = False,
            **changes: Any,
        ) -> Router:
            settings = settings_for(p=ps or [p], d=ds or [d], **changes)
            router = await stack.enter_async_context(running_router(settings))
            await eventually(lambda: not router.gateway.fleet.unavailable_roles())
            if identified:
                await router.knows_identities()
            return router

        yield start


@pytest.fixture
async def router(start_router: StartRouter) -> Router:
    return await start_router()


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    """A Redis that may still hold what other tests have written."""
    with running_redis() as server:
        yield server


@pytest.fixture
def writer(redis: RedisServer) -> Iterator[Redis]:
    """A client of an empty Redis."""
    with Redis(port=redis.port, password=redis.password) as client:
        client.flushall()
        yield client
