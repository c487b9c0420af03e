"""A Redis that the router can do without for a while, and the URLs that name one.

    redis://[user:password@]host[:6379][/db]        rediss:// for TLS
    redis+cluster://host[:6379]                     one node of a cluster; rediss+cluster://
    redis+sentinel://host[:26379],host/name[/db]    the master `name`; rediss+sentinel://

Options behind a "?" go to redis-py, as in rediss://host?ssl_ca_certs=/ca.pem. If the sentinels need
the password as well: ?sentinel_auth=true.

If a password is not percent-encoded, a parser takes a part of it for the port or the path. So no
error shows any part of a URL, and an "@" behind the host is an error.

Circuit breakers keep a Redis that fails from costing each request a timeout:

    a node is silent        A connection failed or an operation got no answer in time, and the node
                            has answered no other operation meanwhile. All operations on this node
                            pause.
    an operation is refused The node answered with an error: it has no memory, may not write, or the
                            user lacks a permission. The node lives, so that only this operation
                            pauses there.

A cluster has several nodes, any other Redis one. Nothing pauses for a transfer of megabytes, which
delays other operations on a slow link.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections import Counter as Tally
from collections.abc import Awaitable, Callable
from time import monotonic as now
from typing import Any, ClassVar, NamedTuple, TypeVar
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from prometheus_client import Counter
from redis.asyncio import BlockingConnectionPool, Redis, RedisCluster, Sentinel
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    ClusterError,
    MaxConnectionsError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
    SlotNotCoveredError,
)

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
# An operation may last this much longer for its value: one second per MiB.
MIN_BYTES_PER_S = 1024 * 1024
# On a slow link, a value of this size delays other operations.
LARGE_VALUE_BYTES = 256 * 1024
# Errors that a server has sent.
REFUSALS = (ResponseError, AuthenticationError, AuthorizationError, BusyLoadingError, ClusterError)
# Refusals by a server to which the name of the Redis may no longer belong: a master that became a
# replica, or a new server. The command was not executed.
STALE_SERVER = (ReadOnlyError, AuthenticationError, BusyLoadingError)
# Begins an error about one key, which says nothing about others.
WRONG_TYPE = "WRONGTYPE"
T = TypeVar("T")


class RedisClients(NamedTuple):
    """The client for commands, and other clients to close with it."""

    main: Redis | RedisCluster
    others: tuple[Redis, ...] = ()


class _Breaker(NamedTuple):
    """An operation on a node, or all operations on the node if `operation` is empty."""

    node: str
    operation: str = ""


class RedisBackend:
    """The base of what uses a Redis, with the circuit breakers that the top of this file describes.

    No operation lasts longer than `timeout` seconds, and MIN_BYTES_PER_S for a value, unless the
    process stood still (`deadlines`). Only an operation that a stale server refused is retried,
    once, on a new connection. A failed one raises `error`. While a breaker is open, its operations
    raise `error` at once. After `pause` seconds one operation tries Redis again; the others do not
    wait for it. `errors` counts failed and skipped operations. A subclass sets `error`, `logger`
    and what to log.
    """

    error: ClassVar[type[Exception]]
    logger: ClassVar[logging.Logger]
    failed_message: ClassVar[str]
    recovered_message: ClassVar[str]

    def __init__(
        self,
        url: str,
        password: Callable[[], str | None],
        timeout: float,
        errors: Counter,
        deadlines: Deadlines,
        pause: float = PAUSE_AFTER_FAILURE_S,
        clock: Callable[[], float] = now,
    ) -> None:
        """`password` is called now, and again when Redis refuses it.

        Raises ValueError for an invalid URL, and what `password` raises.
        """
        self._url, self._password = url, password
        self._clients = create_redis_clients(url, password())
        # The number of running calls by client.
        self._calls: Tally[RedisClients] = Tally()
        self._timeout = timeout
        self._errors = errors
        self._deadlines = deadlines
        self._pause = pause
        self._clock = clock
        self._open_until: dict[_Breaker, float] = {}
        # By node: when it has last answered, and the number of large values on their way.
        self._answered: dict[str, float] = {}
        self._large_values: Tally[str] = Tally()

    @property
    def failure(self) -> str:
        """The message about the failure while a breaker is open; empty otherwise."""
        moment = self._clock()
        open_now = [one for one, until in self._open_until.items() if moment < until]
        refused = sorted({one.operation for one in open_now})
        if not refused:
            return ""
        what = "" if not refused[0] else f" (refused: {', '.join(refused)})"
        return f"{self.failed_message}{what}"

    async def run(
        self, operation: str, call: Callable[[], Awaitable[T]], key: str = "", num_bytes: int = 0
    ) -> T:
        """Return the result of `call`, which sends commands about `key`. Raises `error`.

        `num_bytes`: the size of the value that the commands send or receive, if it may be large.
        """
        node, began = self._node_of(key), self._clock()
        is_silent = self._admit(operation, node, began)
        seconds = self._timeout + num_bytes / MIN_BYTES_PER_S
        is_large = num_bytes >= LARGE_VALUE_BYTES
        self._large_values[node] += is_large
        try:
            async with TimeLimit(self._deadlines, now() + seconds):
                if is_silent and isinstance(self._client, RedisCluster):
                    # Another node may have its keys by now. redis-py asks only after errors.
                    await self._client.nodes_manager.initialize()
                result = await self._call(call)
        except TimeoutError as error:
            raise self._lost(operation, node, began, f"no answer within {seconds:g} s") from error
        except REFUSALS as error:
            raise self._refused(operation, node, f"{type(error).__name__}: {error}") from error
        except MaxConnectionsError as error:  # a limit of this process, not of Redis
            raise self._failed(operation, error) from error
        except (RedisError, RedisClusterException, OSError) as error:
            raise self._lost(operation, node, began, f"{type(error).__name__}: {error}") from error
        finally:
            self._large_values[node] -= is_large
        self._note_answer(node)
        self._close_breaker(_Breaker(node, operation))
        return result

    @property
    def _client(self) -> Redis | RedisCluster:
        return self._clients.main

    async def _call(self, call: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `call`. If a stale server refuses it, call it once more with new
        connections, which ask for the address of the name again."""
        is_repeated = False
        while True:
            used = self._clients
            self._calls[used] += 1
            try:
                return await _cancellable(call)
            except (*STALE_SERVER, RedisClusterException) as error:
                if is_repeated or not self._is_cured_by_new_clients(error):
                    raise
                is_repeated = True
                if used is self._clients:
                    self._renew_clients()
            finally:
                self._calls[used] -= 1
                if used is not self._clients and not self._calls[used]:
                    del self._calls[used]
                    await _close(used)

    def _is_cured_by_new_clients(self, error: Exception) -> bool:
        """A cluster's client finds its masters itself, but keeps a password."""
        if not isinstance(self._client, RedisCluster):
            return isinstance(error, STALE_SERVER)
        return any(isinstance(one, AuthenticationError) for one in (error, error.__cause__))

    def _renew_clients(self) -> None:
        """Make new connections, with the password that is in its file by now."""
        try:
            self._clients = create_redis_clients(self._url, self._password())
        except Exception as error:  # the file is being replaced
            self.logger.warning("%s: %s", self.failed_message, error)

    def _node_of(self, key: str) -> str:
        """Return the name of the cluster's node that has the key; empty if that is not known."""
        if isinstance(self._client, RedisCluster):
            with contextlib.suppress(SlotNotCoveredError):  # it was not asked for its nodes yet
                node = self._client.get_node_from_key(key)
                return "" if node is None else node.name
        return ""

    def _admit(self, operation: str, node: str, moment: float) -> bool:
        """Return True if the operation tries a node that was silent. Raises `error` if it has to
        pause."""
        both = _Breaker(node), _Breaker(node, operation)
        known = [one for one in both if one in self._open_until]
        if any(moment < self._open_until[one] for one in known):
            self._errors.labels(operation, "skipped").inc()
            raise self.error("not tried again so soon after a failure")
        for one in known:
            self._open_until[one] = moment + self._pause
        return _Breaker(node) in known

    def _lost(self, operation: str, node: str, began: float, why: object) -> Exception:
        """Return the error for an operation without an answer. The node is silent unless it has
        answered another one since `began`, or large values delay its answers."""
        if self._answered.get(node, -1.0) <= began and not self._large_values[node]:
            self._open_breaker(_Breaker(node), self.failed_message, why)
        return self._failed(operation, why)

    def _refused(self, operation: str, node: str, why: str) -> Exception:
        """Return the error for an operation that the node refused."""
        self._note_answer(node)
        if WRONG_TYPE not in why:
            message = f"Redis refuses the operation {operation!r}"
            self._open_breaker(_Breaker(node, operation), message, why)
        return self._failed(operation, why)

    def _failed(self, operation: str, why: object) -> Exception:
        self._errors.labels(operation, "failed").inc()
        return self.error(str(why))

    def _note_answer(self, node: str) -> None:
        self._answered[node] = self._clock()
        self._close_breaker(_Breaker(node))

    def _open_breaker(self, breaker: _Breaker, message: str, why: object) -> None:
        if breaker not in self._open_until:
            self.logger.warning("%s: %s", message, why)
        self._open_until[breaker] = self._clock() + self._pause

    def _close_breaker(self, breaker: _Breaker) -> None:
        if self._open_until.pop(breaker, None) is not None:
            self.logger.info(self.recovered_message)

    async def close(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with TimeLimit(self._deadlines, now() + self._timeout):
                await _close(self._clients)


async def _close(clients: RedisClients) -> None:
    for client in (clients.main, *clients.others):
        with contextlib.suppress(RedisError, OSError):
            await client.aclose()


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
