"""Stores: one taker gets an entry, bounds hold, a dead store costs one call in a while."""

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator

import pytest
from prometheus_client import Counter

from router.common.deadlines import Deadlines
from router.common.redis_backend import create_redis_clients
from router.conversations.redis_store import NAMESPACE, RedisStore
from router.conversations.store import MemoryStore, Store, StoreError
from tests.redis_server import RedisServer
from tests.unit.router.harness import count_of


def redis_store(url: str, password: str | None, timeout: float) -> RedisStore:
    errors = Counter("errors", "", ("operation", "result"), registry=None)
    return RedisStore(url, lambda: password, timeout, errors, Deadlines(), pause=0)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.slow)])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    made: Store = MemoryStore(100, 10_000)
    if request.param == "redis":
        server: RedisServer = request.getfixturevalue("redis")
        made = redis_store(server.url, server.password, 20.0)
    yield made
    await made.close()


async def test_what_is_read_stays(store: Store) -> None:
    await store.put("read", b"x", 10)
    assert [await store.read("read") for _ in range(3)] == [b"x"] * 3
    assert await store.take("read") == b"x"
    assert await store.read("read") is None


@pytest.mark.slow
async def test_what_lies_in_redis_and_is_no_value_is_read_as_none_of_ours(
    redis: RedisServer,
) -> None:
    store = redis_store(redis.url, redis.password, 20.0)
    client = create_redis_clients(redis.url, redis.password).main
    await client.rpush(NAMESPACE + "list", "a")
    assert await store.read("list") == b""
    await client.aclose()
    await store.close()


async def test_the_latest_put_counts(store: Store) -> None:
    assert await store.put("twice", b"old", 10) == []
    assert await store.put("twice", b"\x00 new \xff", 10) == [b"old"]
    assert await store.take("twice") == b"\x00 new \xff"
    assert await store.take("twice") is None


async def test_of_fifty_takers_one_gets_it(store: Store) -> None:
    await store.put("contended", b"x", 10)
    taken = await asyncio.gather(*(store.take("contended") for _ in range(50)))
    assert [value for value in taken if value is not None] == [b"x"]


@pytest.mark.slow
async def test_of_fifty_takers_in_two_clients_one_gets_it(redis: RedisServer) -> None:
    stores = [redis_store(redis.url, redis.password, 20.0) for _ in range(2)]
    await stores[0].put("shared", b"x", 10)
    taken = await asyncio.gather(*(stores[i % 2].take("shared") for i in range(50)))
    assert [value for value in taken if value is not None] == [b"x"]
    for store in stores:
        await store.close()


@pytest.mark.slow
async def test_redis_forgets_by_itself(redis: RedisServer) -> None:
    store = redis_store(redis.url, redis.password, 2.0)
    await store.put("short", b"x", 7)
    client = create_redis_clients(redis.url, redis.password).main
    assert 0 < await client.pttl(NAMESPACE + "short") <= 7000
    await client.aclose()
    await store.close()


async def test_memory_forgets_what_is_too_old() -> None:
    clock = Clock()
    store = MemoryStore(10, 1000, clock)
    await store.put("a", b"x", 5)
    clock.now += 5
    assert await store.read("a") is None
    assert await store.take("a") is None


async def test_memory_stays_within_its_bounds_and_keeps_the_youngest() -> None:
    store = MemoryStore(3, 25)
    for number in range(10):
        lost = await store.put(str(number), b"%d" % number * 10, 100)
        assert lost == ([] if number < 2 else [b"%d" % (number - 2) * 10])
        assert len(store) <= 3
        assert store.num_bytes <= 25
    assert [await store.take(str(n)) is not None for n in range(10)] == [False] * 8 + [True] * 2
    assert (len(store), store.num_bytes) == (0, 0)


async def test_memory_drops_what_is_expired_before_what_lives() -> None:
    """A response lives for an hour, and the turns behind it for minutes."""
    clock = Clock()
    store = MemoryStore(3, 1000, clock)
    await store.put("response", b"r", 3600)
    await store.put("turn", b"t", 450)
    await store.put("other turn", b"o", 450)
    clock.now += 450
    assert await store.put("next turn", b"n", 450) == []
    assert len(store) == 2
    assert await store.read("response") == b"r"


async def test_memory_is_bounded_however_often_a_value_is_replaced() -> None:
    clock = Clock()
    store = MemoryStore(10, 1000, clock)
    for number in range(1000):
        await store.put(f"turn {number % 3}", b"x", 450)
        await store.take(f"turn {number % 2}")
    clock.now += 100
    await store.put("turn 2", b"x", 450)
    clock.now += 350  # the values before would be expired now
    await store.put("turn 0", b"x", 450)
    assert await store.read("turn 2") == b"x"
    assert len(store) == 2


async def test_memory_refuses_what_can_never_fit() -> None:
    store = MemoryStore(3, 25)
    await store.put("small", b"x", 100)
    assert await store.put("large", b"x" * 26, 100) == [b"x" * 26]
    assert await store.take("small") == b"x"
    assert await store.take("large") is None


async def test_memory_drops_what_has_expired() -> None:
    clock = Clock()
    store = MemoryStore(10, 1000, clock)
    for name in "abc":
        await store.put(name, b"x", 5)
    clock.now += 6
    await store.put("d", b"x", 5)
    assert len(store) == 1


class Failing:
    """A command that fails until `broken` is False."""

    def __init__(self) -> None:
        self.calls = 0
        self.broken = True

    async def __call__(self) -> bytes:
        self.calls += 1
        if self.broken:
            raise ConnectionError("no connection")
        return b"x"


async def test_a_failing_store_is_asked_once_in_a_while_and_again_when_it_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    clock, command = Clock(), Failing()
    errors = Counter("errors", "", ("operation", "result"), registry=None)
    store = RedisStore(
        "redis://127.0.0.1:1", lambda: None, 2.0, errors, Deadlines(), pause=5, clock=clock
    )
    for _ in range(20):
        with pytest.raises(StoreError):
            await store.run("take", command)
    assert command.calls == 1
    clock.now += 5
    with pytest.raises(StoreError):
        await store.run("put", command)
    assert command.calls == 2
    command.broken = False
    clock.now += 5
    assert await store.run("take", command) == b"x"
    assert await store.run("take", command) == b"x"
    said = [record.levelname for record in caplog.records]
    assert said == ["WARNING", "INFO"], "one line when it goes, one when it is back"
    assert count_of(errors, "take", "failed") == 1
    assert count_of(errors, "take", "skipped") == 19


async def test_only_one_call_tries_a_store_that_may_be_back() -> None:
    clock, command = Clock(), Failing()
    errors = Counter("errors", "", ("operation", "result"), registry=None)
    store = RedisStore(
        "redis://127.0.0.1:1", lambda: None, 2.0, errors, Deadlines(), pause=5, clock=clock
    )
    with pytest.raises(StoreError):
        await store.run("take", command)
    clock.now += 5
    outcomes = await asyncio.gather(
        *(store.run("take", command) for _ in range(10)), return_exceptions=True
    )
    assert all(isinstance(outcome, StoreError) for outcome in outcomes)
    assert command.calls == 2


async def test_a_redis_that_does_not_answer_costs_its_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store = redis_store(f"redis://127.0.0.1:{silent.getsockname()[1]}", None, 0.1)
        started = asyncio.get_running_loop().time()
        with pytest.raises(StoreError):
            await store.take("k")
        assert asyncio.get_running_loop().time() - started < 2
        await store.close()


async def test_answer_that_arrives_while_the_router_stands_still_is_used() -> None:
    is_asked, is_answered = threading.Event(), threading.Event()

    def serve(listener: socket.socket) -> None:
        peer, _ = listener.accept()
        with peer:
            while command := peer.recv(65536):
                is_ours = b"GETDEL" in command
                if is_ours:
                    is_asked.set()
                    may_answer.wait()
                peer.sendall(b"$1\r\nx\r\n" if is_ours else b"+OK\r\n" * command.count(b"*"))
                if is_ours:
                    is_answered.set()

    timeout, may_answer = 1.0, threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.create_task(asyncio.to_thread(serve, listener))
        address = f"redis://127.0.0.1:{listener.getsockname()[1]}?protocol=2"
        store = redis_store(address, None, timeout)
        taking = asyncio.create_task(store.take("k"))
        await asyncio.to_thread(is_asked.wait)
        may_answer.set()
        is_answered.wait()  # nothing of the router runs meanwhile
        time.sleep(timeout)  # noqa: ASYNC251
        assert await taking == b"x"
        await store.close()
        await serving


@pytest.mark.parametrize("timeout", [0.05, 60.0])
@pytest.mark.parametrize("outcome", [b"sent", StoreError("closed")])
async def test_a_client_that_ignores_a_cancellation_does_not_keep_its_task_running(
    timeout: float, outcome: bytes | Exception
) -> None:
    """As asyncio.wait_for of Python 3.11 does when what it waits for has just ended."""
    store, asked = redis_store("redis://127.0.0.1:1", None, timeout), asyncio.Event()

    async def send() -> bytes:
        asked.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    asking = asyncio.create_task(store.run("take", send))
    await asked.wait()
    expected: type[BaseException] = StoreError  # by its own deadline
    if timeout > 1:
        asking.cancel()
        expected = asyncio.CancelledError
    with pytest.raises(expected):
        await asking
    assert asking.cancelled() == (timeout > 1)


@pytest.mark.slow
async def test_a_redis_that_is_not_there_or_refuses_is_a_store_error(redis: RedisServer) -> None:
    for url, password in (("redis://127.0.0.1:1", None), (redis.url, "wrong")):
        store = redis_store(url, password, 2.0)
        with pytest.raises(StoreError):
            await store.put("k", b"x", 1)
        await store.close()


@pytest.mark.parametrize(
    "url",
    [
        "redis://host",
        "rediss://user:pw@host:1/2",
        "redis+cluster://host:7000",
        "rediss+cluster://host",
        "redis+sentinel://a:26379,b,c/main/1",
        "rediss+sentinel://:pw@a/main",
    ],
)
async def test_every_kind_of_url_makes_a_client(url: str) -> None:
    clients = create_redis_clients(url, None)
    for client in (clients.main, *clients.others):
        await client.aclose()


def test_a_sentinel_url_needs_a_master() -> None:
    with pytest.raises(ValueError, match="master"):
        create_redis_clients("redis+sentinel://host", None)


def test_a_store_that_does_not_wait_is_done_at_once() -> None:
    """What a turn leaves is kept without a task then, so nothing could cut it off in between."""
    store = MemoryStore(10, 1000)
    assert not store.does_io
    for work in (store.put("k", b"v", 5), store.read("k"), store.take("k"), store.close()):
        with pytest.raises(StopIteration):
            work.send(None)
