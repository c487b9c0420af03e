"""A refused, lost or slow Redis operation costs only itself: real servers, a cluster, slow link."""

import asyncio
import contextlib
import shutil
import time
from collections import Counter as Tally
from collections.abc import AsyncIterator, Callable

import pytest
from prometheus_client import Counter

from router.common.deadlines import Deadlines
from router.conversations.redis_store import RedisStore
from router.conversations.store import StoreError
from tests.redis_server import PASSWORD, RedisServer, running_cluster_of, running_redis

pytestmark = pytest.mark.slow  # Redis servers

KEYS = [f"key-{number}" for number in range(30)]


@contextlib.asynccontextmanager
async def connected(
    url: str,
    password: Callable[[], str] = lambda: PASSWORD,
    timeout: float = 5,
    pause: float = 60,
) -> AsyncIterator[RedisStore]:
    """A store that waits a minute after a failure, so that nothing recovers by a second try."""
    errors = Counter("errors", "", ("operation", "result"), registry=None)
    store = RedisStore(url, password, timeout, errors, Deadlines(), pause=pause)
    try:
        yield store
    finally:
        await store.close()


def fill(server: RedisServer) -> None:
    server.cli("config", "set", "maxmemory", "1")


def wait_until_refused(server: RedisServer) -> None:
    """Redis notices a failed save a moment later."""
    while server.cli("set", "probe", "x").strip() == "OK":
        time.sleep(0.01)


def stop_saving(server: RedisServer) -> None:
    server.cli("config", "set", "save", "3600 1")
    shutil.rmtree(server.cli("config", "get", "dir").split()[1])
    server.cli("bgsave")


@pytest.mark.parametrize(("fault", "error"), [(fill, "OutOfMemory"), (stop_saving, "MISCONF")])
async def test_reads_continue_while_redis_refuses_writes(
    fault: Callable[[RedisServer], None], error: str
) -> None:
    with running_redis() as server:
        async with connected(server.url) as store:
            for key in KEYS:
                await store.put(key, b"x", 100)
            fault(server)

            wait_until_refused(server)
            with pytest.raises(StoreError, match=error):
                await store.put("more", b"x", 100)
            assert [await store.read(key) for key in KEYS] == [b"x"] * len(KEYS)
            assert "put" in store.failure
        server.cli("config", "set", "save", "")  # else it does not stop


async def test_turns_are_reused_while_the_user_may_not_read_responses() -> None:
    with running_redis() as server:
        rights = ["+@all", "-get", "-strlen", "~*"]
        server.cli("acl", "setuser", "router", "on", ">secret", *rights)
        async with connected(server.url.replace("//", "//router@"), lambda: "secret") as store:
            for key in KEYS:
                with pytest.raises(StoreError):
                    await store.read(key)
                await store.put(key, b"x", 100)
                assert await store.take(key) == b"x"


@contextlib.asynccontextmanager
async def slow_link(port: Callable[[], int], bytes_per_s: int) -> AsyncIterator[int]:
    """A link to a port whose connections share the bandwidth, first come, first served. Each
    connection goes to the port that is returned at its beginning."""
    turn, running = asyncio.Lock(), set[asyncio.Task[None]]()

    async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                async with turn:
                    await asyncio.sleep(len(data) / bytes_per_s)
                    target.write(data)
        finally:
            target.transport.abort()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, ours = await asyncio.open_connection("127.0.0.1", port())
        running.update(map(asyncio.create_task, (copy(reader, ours), copy(theirs, writer))))

    async with await asyncio.start_server(connect, "127.0.0.1", 0) as server:
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)


async def test_large_value_on_a_slow_link_pauses_nothing() -> None:
    """It takes several times the timeout each way, and small values pass meanwhile."""
    large = bytes(2_000_000)
    with running_redis() as server:
        async with (
            slow_link(lambda: server.port, 4_000_000) as port,
            connected(f"redis://127.0.0.1:{port}", timeout=0.25) as store,
        ):
            for key in KEYS:
                await store.put(key, b"x", 100)
            for operation in (store.put("large", large, 100), store.read("large")):
                transfer = asyncio.create_task(operation)
                taken = Tally[object]()
                for key in KEYS:
                    try:
                        taken[await store.read(key)] += 1
                    except StoreError as error:
                        taken[str(error)] += 1
                assert set(taken) <= {b"x", "no answer within 0.25 s"}
                await transfer
                assert await store.read(KEYS[0]) == b"x"
            assert transfer.result() == large


async def test_cluster_with_a_dead_node_serves_what_the_others_hold() -> None:
    with running_cluster_of(3) as nodes:
        async with connected(f"redis+cluster://127.0.0.1:{nodes[0].port}") as store:
            for key in KEYS:
                await store.put(key, b"x", 100)
            listed = nodes[1].keys()
            lost = {key.rpartition(":")[2] for key in listed}
            assert 0 < len(lost) < len(KEYS)
            nodes[1].process.kill()
            nodes[1].process.wait()
            for _ in range(2):
                for key in KEYS:
                    try:
                        assert await store.read(key) == b"x"
                        assert key not in lost
                    except StoreError:
                        assert key in lost


@pytest.mark.nightly
async def test_cluster_finds_the_replica_that_replaced_a_silent_master() -> None:
    with running_cluster_of(3, replicates=1) as nodes:
        url = f"redis+cluster://127.0.0.1:{nodes[0].port}"
        async with connected(url, timeout=0.2, pause=0.1) as store:
            for key in KEYS:
                await store.put(key, b"x", 100)
            nodes[1].freeze()
            async with asyncio.timeout(30):
                found = 0
                while found < len(KEYS):
                    answers = [store.read(key) for key in KEYS]
                    found = (await asyncio.gather(*answers, return_exceptions=True)).count(b"x")


def demote(old: RedisServer, new: RedisServer) -> None:
    old.cli("config", "set", "masterauth", PASSWORD)
    old.cli("replicaof", "127.0.0.1", str(new.port))


def demote_with_data(old: RedisServer, new: RedisServer) -> None:
    """The old master is long in loading what the new one has."""
    old.cli("config", "set", "key-load-delay", "100000")
    old.cli("config", "set", "loading-process-events-interval-bytes", "1024")
    new.cli("eval", "for i = 1, 50 do redis.call('set', i, string.rep('x', 2000)) end", "0")
    demote(old, new)
    while "loading:1" not in old.cli("info", "persistence"):
        time.sleep(0.01)


@pytest.mark.parametrize("error", ["READONLY", "LOADING"])
async def test_first_commands_after_a_switch_of_a_service_reach_the_new_master(error: str) -> None:
    """A service moves new connections; those that exist stay at the old master."""
    options = ["--repl-diskless-sync-delay", "0", "--rdbcompression", "no"]
    with running_redis() as old, running_redis(None, *options) as new:
        backend = old.port
        async with (
            slow_link(lambda: backend, 10**9) as port,
            connected(f"redis://127.0.0.1:{port}") as store,
        ):
            await asyncio.gather(*(store.put(key, b"x", 100) for key in KEYS))
            (demote if error == "READONLY" else demote_with_data)(old, new)
            assert error in old.cli(*(["set", "a", "b"] if error == "READONLY" else ["get", "a"]))
            backend = new.port
            if error == "READONLY":
                await asyncio.gather(*(store.put(key, b"y", 100) for key in KEYS))
            found = await asyncio.gather(*map(store.read, KEYS))
            assert set(found) == {b"y" if error == "READONLY" else None}


@pytest.mark.parametrize("kind", ["one server", "cluster"])
async def test_changed_password_is_read_again(kind: str) -> None:
    """Redis closes old connections, which a cluster's client reports, and refuses new ones."""
    passwords = [PASSWORD]
    with contextlib.ExitStack() as stack:
        if kind == "cluster":
            servers = stack.enter_context(running_cluster_of(3))
        else:
            servers = [stack.enter_context(running_redis())]
        scheme = "redis+cluster" if kind == "cluster" else "redis"
        async with connected(
            f"{scheme}://127.0.0.1:{servers[0].port}", lambda: passwords[-1], pause=0
        ) as store:
            for key in KEYS:
                await store.put(key, b"x", 100)
            for server in servers:
                server.cli("config", "set", "requirepass", "another")
            passwords.append("another")
            for key in KEYS:
                async with asyncio.timeout(30):
                    while True:
                        with contextlib.suppress(StoreError):
                            assert await store.read(key) == b"x"
                            break
