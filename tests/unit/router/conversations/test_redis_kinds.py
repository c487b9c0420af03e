"""Every kind of Redis that a URL can name, as real servers."""

import asyncio
import subprocess
from pathlib import Path

import pytest

from router.common.redis_backend import create_redis_clients
from router.conversations.store import StoreError
from tests.redis_server import (
    PASSWORD,
    running_cluster,
    running_redis,
    running_sentinel,
    running_tls_redis,
)
from tests.unit.router.conversations.test_stores import redis_store

pytestmark = pytest.mark.slow  # a Redis server

SECONDS = 20.0


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Its own authority, for 127.0.0.1, and its key."""
    directory = tmp_path_factory.mktemp("tls")
    paths = directory / "certificate.pem", directory / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-out", str(paths[0]), "-keyout", str(paths[1])]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    return paths


async def assert_keeps_once(url: str, password: str | None = PASSWORD) -> None:
    """Two clients with one URL: what one puts, one of many takers gets."""
    one, two = redis_store(url, password, SECONDS), redis_store(url, password, SECONDS)
    try:
        await one.put("key", b"value", 100)
        takers = [(one, two)[number % 2].take("key") for number in range(50)]
        taken = await asyncio.gather(*takers)
        assert sorted(filter(None, taken)) == [b"value"]
    finally:
        await one.close()
        await two.close()


async def test_a_server_with_tls(certificate: tuple[Path, Path]) -> None:
    with running_tls_redis(*certificate) as server:
        url = f"rediss://127.0.0.1:{server.port}"
        await assert_keeps_once(f"{url}?ssl_ca_certs={certificate[0]}")
        store = redis_store(url, PASSWORD, SECONDS)
        with pytest.raises(StoreError, match=r"(?i)certificate"):
            await store.take("key")
        await store.close()


async def test_a_cluster() -> None:
    with running_cluster() as server:
        await assert_keeps_once(f"redis+cluster://127.0.0.1:{server.port}")


async def test_a_sentinel_names_the_master_of_that_name(tmp_path: Path) -> None:
    with running_redis() as wrong, running_redis() as right:
        masters = {"wrong": wrong, "right": right}
        with running_sentinel(tmp_path, masters) as sentinel:
            url = f"redis+sentinel://127.0.0.1:1,127.0.0.1:{sentinel.port}"
            await assert_keeps_once(f"{url}/right")
            store = redis_store(f"{url}/right/3", PASSWORD, SECONDS)
            await store.put("key", b"value", 100)
            await store.close()
            assert "db" not in wrong.cli("info", "keyspace")
            assert "db3" in right.cli("info", "keyspace")


async def test_a_sentinel_with_a_password(tmp_path: Path) -> None:
    with running_redis() as master:
        options = ["--requirepass", PASSWORD]
        with running_sentinel(tmp_path, {"main": master}, *options) as sentinel:
            url = f"redis+sentinel://127.0.0.1:{sentinel.port}/main"
            await assert_keeps_once(f"{url}?sentinel_auth=true")
            store = redis_store(url, PASSWORD, SECONDS)
            with pytest.raises(StoreError):
                await store.take("key")
            await store.close()


async def test_a_sentinel_that_knows_no_such_master_is_a_store_error(tmp_path: Path) -> None:
    with running_redis() as master, running_sentinel(tmp_path, {"main": master}) as sentinel:
        store = redis_store(f"redis+sentinel://127.0.0.1:{sentinel.port}/other", PASSWORD, SECONDS)
        with pytest.raises(StoreError):
            await store.take("key")
        await store.close()


@pytest.mark.slow
async def test_a_cluster_that_comes_back_is_used_again() -> None:
    with running_cluster() as first:
        store = redis_store(f"redis+cluster://127.0.0.1:{first.port}", PASSWORD, SECONDS)
        await store.put("key", b"value", 100)
        port = first.port
    with pytest.raises(StoreError):
        await store.take("key")
    with running_cluster(port):
        await store.put("key", b"other", 100)
        assert await store.take("key") == b"other"
    await store.close()


@pytest.mark.parametrize("scheme", ["redis", "rediss+cluster", "redis+sentinel"])
@pytest.mark.parametrize(
    "rest",
    [
        ":pa55#pa55@host/main",
        "user:pa55/pa55@host/main",
        ":pa55?pa55=x@host/main",
        ":pa55@pa55/pa55@host/main",
        ":6379/pa55@host/main",
        ":pa[pa55]55@host/main",
        ":pa55\u2100@host/main",
        ":pa55/main",
        "user:pa55@host:pa55/main",
        "user:pa55@[::1/main",
    ],
)
def test_no_part_of_a_password_is_in_the_error_of_a_url(scheme: str, rest: str) -> None:
    with pytest.raises(ValueError, match=r"write|number|host") as raised:
        create_redis_clients(f"{scheme}://{rest}", None)
    assert "pa55" not in str(raised.value)


@pytest.mark.parametrize("by", ["url", "setting"])
async def test_a_password_may_be_anywhere(by: str) -> None:
    with running_redis() as server:
        secret = PASSWORD.replace(" ", "%20")
        given = f":{secret}@" if by == "url" else ""
        url = f"redis://{given}127.0.0.1:{server.port}/2"
        await assert_keeps_once(url, None if by == "url" else PASSWORD)
