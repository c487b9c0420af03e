"""URLs of a Redis store, and the clients for them.

    redis://[user:password@]host[:6379][/db]        rediss:// for TLS
    redis+cluster://host[:6379]                     one node of a cluster; rediss+cluster://
    redis+sentinel://host[:26379],host/name[/db]    the master `name`; rediss+sentinel://

Options behind a "?" go to redis-py, as in rediss://host?ssl_ca_certs=/ca.pem. If the sentinels need
the password as well: ?sentinel_auth=true.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from redis.asyncio import BlockingConnectionPool, Redis, RedisCluster, Sentinel
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

SENTINEL_PORT = 26379
# Per server. A burst of requests shares them, because connections, above all with TLS, cost both
# sides more than the commands.
MAX_CONNECTIONS = 16
SENTINEL_OPTIONS = ("socket_timeout", "socket_connect_timeout", "retry")


class RedisClients(NamedTuple):
    """The client for commands, and other clients to close with it."""

    main: Redis | RedisCluster
    others: tuple[Redis, ...] = ()


def create_redis_clients(url: str, password: str | None, timeout: float) -> RedisClients:
    """Return clients, not connected yet. `timeout` is for each step, in seconds.

    Raises ValueError for an invalid URL.
    """
    scheme, _, rest = url.partition("://")
    transport, _, topology = scheme.partition("+")
    options: dict[str, Any] = {
        "socket_timeout": timeout,
        "socket_connect_timeout": timeout,
        "retry": Retry(NoBackoff(), 0),
    }
    if password is not None:
        options["password"] = password
    if topology == "sentinel":
        return _by_sentinel(url, options, tls=transport == "rediss")
    plain = f"{transport}://{rest}"
    if topology == "cluster":
        return RedisClients(RedisCluster.from_url(plain, **options))
    pool = BlockingConnectionPool.from_url(
        plain, max_connections=MAX_CONNECTIONS, timeout=timeout, **options
    )
    return RedisClients(Redis.from_pool(pool))


def _by_sentinel(url: str, options: dict[str, Any], tls: bool) -> RedisClients:
    parts = urlsplit(url)
    name, _, database = parts.path.strip("/").partition("/")
    if not name:
        raise ValueError("the URL ends with the master's name, as in redis+sentinel://host/main")
    given, _, hosts = parts.netloc.rpartition("@")
    user, _, secret = given.partition(":")
    given_options = dict(parse_qsl(parts.query))
    wants_password = given_options.pop("sentinel_auth", "").lower() == "true"
    options = {**given_options, **options, "db": int(database or 0), "ssl": tls}
    if user:
        options["username"] = unquote(user)
    if secret:
        options.setdefault("password", unquote(secret))
    nodes = [_node(host) for host in hosts.split(",")]
    same = (*SENTINEL_OPTIONS, *(("username", "password") if wants_password else ()))
    shared = {key: value for key, value in options.items() if key.startswith("ssl") or key in same}
    sentinel = Sentinel(  # type: ignore[no-untyped-call] # redis-py leaves it without hints
        nodes, sentinel_kwargs=shared, **options
    )
    return RedisClients(sentinel.master_for(name), tuple(sentinel.sentinels))


def _node(text: str) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError(f"{text!r} is not a host with a port")
    return parts.hostname, parts.port or SENTINEL_PORT
