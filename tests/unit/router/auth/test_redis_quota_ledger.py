"""Limits that several routers count together, in a real Redis; and what is done without it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Counter

from router.auth.api_keys import ApiKey, Keyring
from router.auth.authenticator import Authenticator, QuotaPermit
from router.auth.quota_ledger import LedgerUnavailableError
from router.auth.redis_quota_ledger import LEASE_S, RedisQuotaLedger
from router.common.deadlines import Deadlines
from scripts.mock_engine import MockEngine
from tests.redis_server import PASSWORD, RedisServer, running_cluster, running_redis
from tests.unit.router.conftest import StartRouter
from tests.unit.router.engine_scripts import hanging
from tests.unit.router.harness import count_of, eventually
from tests.unit.router.test_api_key_requests import KEY, WriteKeys, ask_as, entry, keys

pytestmark = pytest.mark.slow  # a Redis server

__all__ = ["keys"]
LIMITED = ApiKey("a", "0" * 64, None, 60, 6000, 2)


@pytest.fixture(autouse=True)
def empty(redis: RedisServer) -> None:
    redis.cli("flushall")


def failures() -> Counter:
    return Counter("errors", "", ("operation", "result"), registry=None)


@contextlib.asynccontextmanager
async def ledger_at(
    server: RedisServer,
    errors: Counter | None = None,
    scheme: str = "redis",
    lease: float = LEASE_S,
) -> AsyncIterator[RedisQuotaLedger]:
    url = server.url.replace("redis", scheme, 1)
    made = RedisQuotaLedger(url, lambda: PASSWORD, 2.0, errors or failures(), Deadlines())
    made.lease = lease
    yield made
    await made.close()


async def until_granted(ledger: RedisQuotaLedger, key: ApiKey = LIMITED) -> None:
    async with asyncio.timeout(10):
        while (await ledger.take(key, "late", 0)).refused:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_two_routers_count_as_one(redis: RedisServer) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()

    def refilled(per_minute: int) -> int:
        """The most that may have come back since the begin, by a clock that may differ a little."""
        return int(per_minute / 60 * (loop.time() - began + 0.1))

    async with ledger_at(redis) as one, ledger_at(redis) as other:
        first = await one.take(LIMITED, "1", 1000)
        second = await other.take(LIMITED, "2", 1000)
        assert first.requests is not None
        assert second.requests is not None
        assert second.tokens is not None
        assert first.requests.remaining == 59
        assert 58 <= second.requests.remaining <= 58 + refilled(60)
        assert 4000 <= second.tokens.remaining <= 4000 + refilled(6000)
        assert (await one.take(LIMITED, "3", 1000)).refused == "concurrency"
        assert await other.end(LIMITED, "2", 1000)
        third = await one.take(LIMITED, "3", 1000)
        assert not third.refused
        assert third.tokens is not None
        assert 2000 <= third.tokens.remaining <= 2000 + refilled(6000)
        await one.end(LIMITED, "1", 0)
        assert (await one.take(LIMITED, "4", 6000)).refused == "tokens"


async def test_a_limit_is_kept_to_the_one_however_many_ask_at_once(redis: RedisServer) -> None:
    key = ApiKey("b", "0" * 64, None, 10)
    async with ledger_at(redis) as one, ledger_at(redis) as other:
        told = await asyncio.gather(
            *(ledger.take(key, f"{n}", 0) for n in range(40) for ledger in (one, other))
        )
    assert sum(not verdict.refused for verdict in told) == 10
    assert all(0 < verdict.wait <= 6.1 for verdict in told if verdict.refused)


async def test_what_is_kept_ends_by_itself_and_has_no_key_in_it(redis: RedisServer) -> None:
    async with ledger_at(redis, lease=0.05) as ledger:
        await ledger.take(LIMITED, "1", 6000)
        await ledger.take(LIMITED, "2", 0)
        names = redis.keys()
        assert len(names) == 2
        assert all(0 < int(redis.cli("ttl", name)) <= 121 for name in names)
        await until_granted(ledger)


async def test_an_end_that_comes_twice_or_too_late_harms_nobody(redis: RedisServer) -> None:
    async with ledger_at(redis) as ledger:
        for more in (10**15, -(10**15), 0):
            assert await ledger.end(LIMITED, "never", more)
        verdict = await ledger.take(LIMITED, "1", 0)
        assert verdict.tokens is not None
        assert verdict.tokens.reset <= 3600


async def test_a_place_lasts_as_long_as_its_router_lives_and_its_request_runs(
    redis: RedisServer, keys: WriteKeys
) -> None:
    """However long that is: many leases, here. And a Redis that was killed hears of it again."""
    path = keys(entry("a", KEY, concurrency=2))
    places = "disagg-router:limits:{a}:running"
    lease = 2.0
    async with ledger_at(redis, lease=lease) as shared, ledger_at(redis) as other:
        authenticator = Authenticator(Keyring(path), "authorization", shared)
        key = next(iter(authenticator.keyring.keys.values()))
        stays = [await authenticator.acquire(key, 0) for _ in "ab"]
        lives = asyncio.create_task(authenticator.renew_leases())
        first = redis.scores(places)
        await eventually(lambda: min(redis.scores(places)) > max(first) + lease)
        assert (await other.take(LIMITED, "late", 0)).refused == "concurrency"

        redis.cli("flushall")
        await eventually(lambda: len(redis.scores(places)) == 2)
        assert (await other.take(LIMITED, "late", 0)).refused == "concurrency"

        assert isinstance(stays[0], QuotaPermit)
        authenticator.release(stays[0], 0)
        await eventually(lambda: len(redis.scores(places)) == 1)

        lives.cancel()  # killed: it gives nothing back, and nobody else has to know
        await asyncio.gather(lives, return_exceptions=True)
        await until_granted(other, ApiKey("a", "0" * 64, concurrency=1))


@pytest.mark.parametrize("kind", ["string", "set", "nonsense"])
async def test_what_others_put_there_is_a_failure_and_no_fault(
    redis: RedisServer, kind: str
) -> None:
    name = "disagg-router:limits:{a}"
    if kind == "string":
        redis.cli("set", name, "x")
    elif kind == "set":
        redis.cli("sadd", f"{name}:running", "x")
    else:
        redis.cli("hset", name, "r", "abc", "t", "nan")
    errors = failures()
    async with ledger_at(redis, errors) as ledger:
        if kind == "nonsense":
            assert not (await ledger.take(LIMITED, "1", 1)).refused
        else:
            with pytest.raises(LedgerUnavailableError):
                await ledger.take(LIMITED, "1", 1)
            assert count_of(errors, "take", "failed") == 1


async def test_a_cluster_does_it_too() -> None:
    with running_cluster() as server:
        async with ledger_at(server, scheme="redis+cluster") as ledger:
            assert not (await ledger.take(LIMITED, "1", 1)).refused
            assert await ledger.end(LIMITED, "1", 1)


# In whole routers.


def options(server: RedisServer) -> dict[str, Any]:
    url = server.url.replace("://", f"://:{PASSWORD.replace(' ', '%20')}@")
    return {"key_limits_store": url, "conversation_store_timeout": 5}


async def test_two_routers_grant_a_key_its_limit_once(
    start_router: StartRouter, keys: WriteKeys, redis: RedisServer
) -> None:
    path = keys(entry("one", KEY, requests_per_minute=4, concurrency=3))
    routers = [await start_router(api_keys_file=path, **options(redis)) for _ in "ab"]
    statuses = [(await ask_as(router)).status_code for _ in range(3) for router in routers]
    assert statuses == [200] * 4 + [429] * 2
    await eventually(lambda: redis.cli("zcard", "disagg-router:limits:{one}:running") == "0\n")


async def test_a_client_that_leaves_gives_its_place_back_to_all(
    start_router: StartRouter, keys: WriteKeys, redis: RedisServer, p: MockEngine
) -> None:
    entered = asyncio.Event()
    path = keys(entry("one", KEY, concurrency=1))
    one, other = [await start_router(api_keys_file=path, **options(redis)) for _ in "ab"]
    p.scripts.append(hanging(asked=entered))
    leaves = asyncio.create_task(ask_as(one))
    await entered.wait()
    assert (await ask_as(other)).status_code == 429
    leaves.cancel()
    await asyncio.gather(leaves, return_exceptions=True)
    await eventually(lambda: redis.cli("zcard", "disagg-router:limits:{one}:running") == "0\n")
    assert (await ask_as(other)).status_code == 200


async def test_without_redis_each_router_counts_alone_and_no_request_fails(
    start_router: StartRouter, keys: WriteKeys, caplog: pytest.LogCaptureFixture
) -> None:
    path = keys(entry("one", KEY, requests_per_minute=3))
    with running_redis() as own:
        given = options(own) | {"conversation_store_timeout": 2}
        router = await start_router(api_keys_file=path, **given)
        assert (await ask_as(router)).status_code == 200
        own.freeze()
        assert (await ask_as(router)).status_code == 200  # after the store's timeout
        started = asyncio.get_running_loop().time()
        assert (await ask_as(router)).status_code == 200
        assert asyncio.get_running_loop().time() - started < 1.5  # and it is not waited for again
        assert (await ask_as(router)).status_code == 429
        own.thaw()
    assert router.metric("key_limit_errors_total", operation="take", result="failed") == 1
    assert router.metric("key_limit_errors_total", operation="take", result="skipped") == 1
    assert caplog.text.count("each router counts on its own") == 1


async def test_a_redis_that_was_never_there_is_no_reason_not_to_serve(
    start_router: StartRouter, keys: WriteKeys, tmp_path: Path
) -> None:
    path = keys(entry("one", KEY, concurrency=2))
    router = await start_router(api_keys_file=path, key_limits_store="redis://127.0.0.1:1")
    assert (await ask_as(router)).status_code == 200


async def test_a_client_that_leaves_while_redis_is_silent_leaves_nothing_behind(
    start_router: StartRouter, keys: WriteKeys
) -> None:
    path = keys(entry("one", KEY, concurrency=1, tokens_per_minute=6000))
    with running_redis() as own:
        given = options(own) | {"conversation_store_timeout": 3.0}
        router = await start_router(api_keys_file=path, **given)
        authenticator = router.gateway.authenticator
        assert authenticator is not None
        assert (await ask_as(router)).status_code == 200
        await eventually(lambda: not authenticator.running("one"))
        own.freeze()
        leaves = asyncio.create_task(ask_as(router))
        await eventually(lambda: authenticator.running("one"))
        leaves.cancel()
        await asyncio.gather(leaves, return_exceptions=True)
        await eventually(lambda: not router.gateway.tasks.running)
        own.thaw()
        await eventually(lambda: not authenticator.running("one"))
        await eventually(lambda: own.cli("zcard", "disagg-router:limits:{one}:running") == "0\n")
        assert (await ask_as(router)).status_code == 200
