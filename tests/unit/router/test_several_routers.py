"""Several routers that share a Redis know each other's load and prompts."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis import Redis

from router.coordination.redis_stream import STREAM
from scripts.mock_engine import MockEngine
from tests.redis_server import KEY, RedisServer
from tests.unit.router.engine_scripts import answer_after, usual_prefill
from tests.unit.router.harness import Router, eventually, running_router, settings_for

pytestmark = pytest.mark.slow  # a Redis server

PROMPT = "A long system prompt that many users share. " * 200


@contextlib.asynccontextmanager
async def routers(
    count: int, redis: RedisServer, ps: list[MockEngine], d: MockEngine, **changes: Any
) -> AsyncIterator[list[Router]]:
    usual = {"prefill_policy": "prefix", **redis.settings}
    async with contextlib.AsyncExitStack() as stack:
        made = []
        for _ in range(count):
            settings = settings_for(p=ps, d=[d], **(usual | changes))
            router = await stack.enter_async_context(running_router(settings))
            made.append(router)
        await eventually(lambda: not any(r.gateway.fleet.unavailable_roles() for r in made))
        yield made


def meets(router: Router, others: int) -> bool:
    return router.metric("peer_routers") == others


async def test_prompt_goes_to_the_engine_that_another_router_has_chosen(
    redis: RedisServer, writer: Redis, ps: list[MockEngine], d: MockEngine
) -> None:
    async with routers(2, redis, ps, d) as (one, other):
        await eventually(lambda: meets(one, 1) and meets(other, 1))
        assert (await one.complete(prompt=PROMPT)).status_code == 200
        (holder,) = [engine for engine in ps if engine.requests]
        chunks = len(one.gateway.routes.index)
        await eventually(lambda: len(other.gateway.routes.index) >= chunks > 0)
        for _ in range(4):
            assert (await other.complete(prompt=PROMPT + "more")).status_code == 200
        assert len(holder.requests) == 5


async def test_load_that_another_router_causes_is_seen_and_ends(
    redis: RedisServer, writer: Redis, ps: list[MockEngine], d: MockEngine
) -> None:
    release = asyncio.Event()
    for engine in ps:
        engine.usual = answer_after(release, usual_prefill)
    async with routers(2, redis, ps, d) as (one, other):
        running = asyncio.create_task(one.complete(prompt=PROMPT))
        (busy,) = await busy_engines(one)
        seen = next(e for e in other.gateway.fleet.engines if e.name == busy.name)
        await eventually(lambda: seen.total_legs == 1)
        assert seen.in_flight == 0
        assert seen.total_tokens == busy.tokens_in_flight > 1000
        release.set()
        assert (await running).status_code == 200
        await eventually(lambda: seen.total_legs == seen.total_tokens == 0)


async def busy_engines(router: Router) -> list[Any]:
    def found() -> list[Any]:
        return [engine for engine in router.gateway.fleet.engines if engine.in_flight]

    await eventually(found)
    return found()


async def test_router_that_has_gone_counts_no_longer(
    redis: RedisServer, writer: Redis, ps: list[MockEngine], d: MockEngine
) -> None:
    async with routers(1, redis, ps, d) as (one,):
        async with routers(1, redis, ps, d):
            await eventually(lambda: meets(one, 1))
        await eventually(lambda: meets(one, 0))


@pytest.mark.parametrize("key", [KEY, "another secret, as long as it has to be"])
async def test_only_routers_with_the_same_secret_are_believed(
    redis: RedisServer, writer: Redis, ps: list[MockEngine], d: MockEngine, key: str
) -> None:
    async with (
        routers(1, redis, ps, d) as (one,),
        routers(1, redis, ps, d, conversation_store_key=key) as (other,),
    ):
        if key == KEY:
            await eventually(lambda: meets(one, 1) and meets(other, 1))
        else:
            await eventually(lambda: errors(one, "invalid") > 0 and errors(other, "invalid") > 0)
            assert meets(one, 0)
            assert meets(other, 0)


def errors(router: Router, result: str) -> float:
    return router.metric("peer_exchange_errors_total", operation="exchange", result=result)


async def test_stream_that_is_spoilt_by_others_costs_the_exchange_alone(
    redis: RedisServer, writer: Redis, ps: list[MockEngine], d: MockEngine
) -> None:
    async with routers(2, redis, ps, d) as (one, other):
        await eventually(lambda: meets(one, 1) and meets(other, 1))
        writer.xadd(STREAM, {"report": b"\xff" * 1000})
        writer.xadd(STREAM, {"other": "x"})
        writer.xadd(STREAM, {"report": ""})
        await eventually(lambda: errors(one, "invalid") >= 3)
        assert meets(one, 1)
        writer.delete(STREAM)
        writer.set(STREAM, "no stream")
        await eventually(lambda: errors(one, "failed") > 0)
        await eventually(lambda: meets(one, 0))
        assert (await one.complete(prompt=PROMPT)).status_code == 200


async def test_routers_meet_again_after_a_change_to_a_redis_whose_clock_is_behind(
    redis: RedisServer, writer: Redis, ps: list[MockEngine], d: MockEngine
) -> None:
    async with routers(2, redis, ps, d) as (one, other):
        await eventually(lambda: meets(one, 1) and meets(other, 1))
        writer.xadd(STREAM, {"report": "x"}, id="99999999999999-0")
        await eventually(lambda: errors(one, "invalid") > 0 and errors(other, "invalid") > 0)
        writer.delete(STREAM)
        before = len(one.gateway.routes.index)
        assert (await other.complete(prompt=PROMPT)).status_code == 200
        await eventually(lambda: len(one.gateway.routes.index) > before)
        assert meets(one, 1)


async def test_exchange_can_be_turned_off(
    redis: RedisServer, writer: Redis, ps: list[MockEngine], d: MockEngine
) -> None:
    async with routers(1, redis, ps, d, share_routing=False) as (one,):
        assert (await one.complete(prompt=PROMPT)).status_code == 200
        assert not writer.exists(STREAM)
