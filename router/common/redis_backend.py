"""A Redis that the router can do without for a while, and the URLs that name one.

    redis://[user:password@]host[:6379][/db]        rediss:// for TLS
    redis+cluster://host[:6379]                     one node of a cluster; rediss+cluster://
    redis+sentinel://host[:26379],host/name[/db]    the master `name`; rediss+sentinel://

Options behind a "?" go to redis-py, as in rediss://host?ssl_ca_certs=/ca.pem. If the sentinels need
the password as well: ?sentinel_auth=true.

If a password is not percent-encoded, a parser takes a part of it for the port or the path. So no
error shows any part of a URL, and an "@" behind the host is an error.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from time import monotonic as now
from typing import Any, ClassVar, NamedTuple, TypeVar
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from prometheus_client import Counter
from redis.asyncio import BlockingConnectionPool, Redis, RedisCluster, Sentinel
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisClusterException, RedisError

from router.common.deadlines import Deadlines, TimeLimit

SENTINEL_PORT = 26379
# Per server. A burst of requests shares them, because connections, above all with TLS, cost both
# sides more than the commands.
MAX_CONNECTIONS = 16
SENTINEL_OPTIONS = ("socket_timeout", "socket_connect_timeout", "retry")
# After a failure the router sends Redis nothing for this time.
PAUSE_AFTER_FAILURE_S = 5.0
AUTHORITY = re.compile(r"[^/?#]*")
ENCODE = (
    "in the user, the password and the options, write %40 for @, %2F for /, %23 for #, %3F for ?"
)
T = TypeVar("T")


class RedisClients(NamedTuple):
    """The client for commands, and other clients to close with it."""

    main: Redis | RedisCluster
    others: tuple[Redis, ...] = ()


class RedisBackend:
    """The base of what uses a Redis. It has a circuit breaker, so that a dead Redis costs one
    timeout per `pause` seconds.

    No operation lasts longer than `timeout` seconds, unless the process stood still (`deadlines`),
    and none is retried. A failed one raises `error`. While the breaker is open, every operation
    raises it at once. After `pause` seconds one operation tries Redis again; the others do not wait
    for it. `errors` counts failed and skipped operations. A subclass sets `error`, `logger` and
    what to log.
    """

    error: ClassVar[type[Exception]]
    logger: ClassVar[logging.Logger]
    failed_message: ClassVar[str]
    recovered_message: ClassVar[str]

    def __init__(
        self,
        url: str,
        password: str | None,
        timeout: float,
        errors: Counter,
        deadlines: Deadlines,
        pause: float = PAUSE_AFTER_FAILURE_S,
        clock: Callable[[], float] = now,
    ) -> None:
        """Raises ValueError for an invalid URL."""
        self._client, self._others = create_redis_clients(url, password)
        self._timeout = timeout
        self._errors = errors
        self._deadlines = deadlines
        self._pause = pause
        self._clock = clock
        self._open_until: float | None = None

    @property
    def failure(self) -> str:
        """The message about the failure while the breaker is open; empty otherwise."""
        is_open = self._open_until is not None and self._clock() < self._open_until
        return self.failed_message if is_open else ""

    async def run(self, operation: str, call: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `call`, which sends commands. Raises `error`."""
        moment = self._clock()
        if self._open_until is not None:
            if moment < self._open_until:
                self._errors.labels(operation, "skipped").inc()
                raise self.error("not tried again so soon after a failure")
            self._open_until = moment + self._pause
        try:
            async with self._limit():
                result = await _cancellable(call)
        except TimeoutError as error:
            raise self._failure(operation, f"no answer within {self._timeout:g} s") from error
        except (RedisError, RedisClusterException, OSError) as error:
            raise self._failure(operation, f"{type(error).__name__}: {error}") from error
        if self._open_until is not None:
            self.logger.info(self.recovered_message)
            self._open_until = None
        return result

    def _limit(self) -> TimeLimit:
        return TimeLimit(self._deadlines, now() + self._timeout)

    def _failure(self, operation: str, why: object) -> Exception:
        self._errors.labels(operation, "failed").inc()
        if self._open_until is None:
            self.logger.warning("%s: %s", self.failed_message, why)
        self._open_until = self._clock() + self._pause
        return self.error(str(why))

    async def close(self) -> None:
        for client in (self._client, *self._others):
            try:
                async with self._limit():
                    await client.aclose()
            except (RedisError, OSError) as error:
                self.logger.debug("closing Redis: %s", error)


async def _cancellable(call: Callable[[], Awaitable[T]]) -> T:
    """Return the result of `call`; end with CancelledError if the task was cancelled meanwhile.

    With a socket_timeout in the URL, redis-py sends with asyncio.wait_for, which in Python 3.11
    ignores a cancellation that arrives when the bytes have just been sent. The task would go on,
    and a shutdown wait for ever.
    """
    task = asyncio.current_task()
    cancellations = task.cancelling() if task else 0
    try:
        return await call()
    finally:
        if task and task.cancelling() > cancellations:
            raise asyncio.CancelledError


def create_redis_clients(url: str, password: str | None) -> RedisClients:
    """Return clients, not connected yet. They have no timeouts, so that the caller's deadline is
    the only one. Raises ValueError for an invalid URL."""
    scheme, _, rest = url.partition("://")
    if "@" in AUTHORITY.sub("", rest, count=1):
        raise ValueError(ENCODE)
    transport, _, topology = scheme.partition("+")
    options: dict[str, Any] = {
        "socket_timeout": None,
        "socket_connect_timeout": None,
        "retry": Retry(NoBackoff(), 0),
    }
    if password is not None:
        options["password"] = password
    if topology == "sentinel":
        return _by_sentinel(url, options, tls=transport == "rediss")
    plain = f"{transport}://{rest}"
    _port_in(plain, 0)
    if topology == "cluster":
        return RedisClients(RedisCluster.from_url(plain, **options))
    pool = BlockingConnectionPool.from_url(
        plain, max_connections=MAX_CONNECTIONS, timeout=None, **options
    )
    return RedisClients(Redis.from_pool(pool))


def _by_sentinel(url: str, options: dict[str, Any], tls: bool) -> RedisClients:
    parts = _split(url)
    name, _, database = parts.path.strip("/").partition("/")
    if not name:
        raise ValueError("the URL ends with the master's name, as in redis+sentinel://host/main")
    given, _, hosts = parts.netloc.rpartition("@")
    user, _, secret = given.partition(":")
    given_options = dict(parse_qsl(parts.query))
    wants_password = given_options.pop("sentinel_auth", "").lower() == "true"
    if database and not database.isdecimal():
        raise ValueError("the database behind the master's name is not a number")
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
    host = _split(f"//{text}").hostname
    if not host:
        raise ValueError("a sentinel is not a host with a port")
    return host, _port_in(f"//{text}", SENTINEL_PORT)


def _port_in(url: str, default: int) -> int:
    try:
        return _split(url).port or default
    except ValueError:
        raise ValueError("the port is not a number from 1 to 65535") from None


def _split(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError:
        raise ValueError(f"not a URL: [ and ] enclose an IPv6 address; {ENCODE}") from None
