"""Fixtures: an engine, and pools of connections that leave nothing behind."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from router.common.deadlines import Deadlines
from router.http_client.pool import EnginePool, PoolLimits
from scripts.mock_engine import MockEngine
from tests.unit.router.engine_scripts import usual_decode
from tests.unit.router.harness import eventually
from tests.unit.router.mock_engine import engine_fixture

HEADER_LIMIT = 16 * 1024
StartPool = Callable[..., EnginePool]
engine = engine_fixture(lambda: usual_decode)


@pytest.fixture
async def start_pool() -> AsyncIterator[StartPool]:
    """Every answer of a test must be over at its end."""
    pools: list[EnginePool] = []
    deadlines = Deadlines()

    def start(port: int, host: str = "127.0.0.1", connect_timeout: float = 5.0) -> EnginePool:
        limits = PoolLimits(connect_timeout, 8, 60.0, HEADER_LIMIT)
        pools.append(EnginePool(host, port, limits, deadlines))
        return pools[-1]

    yield start
    for pool in pools:
        pool.close()
    await eventually(lambda: not any(pool.open_count for pool in pools))
    assert not deadlines.watched_count
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.fixture
def pool(start_pool: StartPool, engine: MockEngine) -> EnginePool:
    return start_pool(engine.port)
