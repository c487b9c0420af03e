"""Whose fault it is that there is no connection."""

import asyncio
import contextlib
import errno
import os
import resource
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from time import monotonic as now
from types import SimpleNamespace
from typing import Any, cast

import pytest

from router.common.deadlines import TICK_S, Deadlines
from router.http_client.connecting import (
    LOCAL_ERRNOS,
    RECEIVE_BUFFER_BYTES,
    ConnectAttempt,
    _numeric_host,
)
from router.http_client.errors import (
    AnswerTimeoutError,
    ConnectError,
    ConnectRefusedError,
    ConnectTimeoutError,
    EngineLostError,
    LocalError,
    UnresolvedError,
    UpstreamError,
)
from scripts.mock_engine import MockEngine
from tests.unit.router.http_client.asking import REQUEST, body_of, soon
from tests.unit.router.http_client.conftest import StartPool

SHORT, LONG = 0.1, 10.0


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    lowest = os.dup(0)
    os.close(lowest)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def deaf_port() -> Iterator[int]:
    """Of a listener whose backlog is full: whoever connects waits."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


class Loop:
    """Resolves a name to as many addresses as there are failures, one for each."""

    def __init__(self, *failures: BaseException, is_silent: bool = False) -> None:
        self._failures = list(failures)
        self._is_silent = is_silent

    async def getaddrinfo(self, host: str, port: int, **kind: Any) -> list[Any]:
        if self._is_silent:
            await asyncio.Event().wait()
        return [(0, 0, 0, "", ("127.0.0.1", port)) for _ in self._failures]

    async def create_connection(self, factory: Any, host: str, port: int) -> Any:
        raise self._failures.pop(0)


def running_deadlines() -> Deadlines:
    deadlines = Deadlines()
    deadlines.start(asyncio.get_running_loop())
    return deadlines


async def failure_of(loop: Loop, deadline: float = LONG, timeout_s: float = LONG) -> UpstreamError:
    attempt = ConnectAttempt("engine", 1, now() + deadline, timeout_s, running_deadlines())
    with pytest.raises(UpstreamError) as caught:
        await attempt.run(cast(asyncio.AbstractEventLoop, loop), asyncio.Protocol)
    return caught.value


@pytest.mark.parametrize(
    ("host", "kinds"), [("127.0.0.1", {"local"}), ("localhost", {"local", "dns"})]
)
async def test_a_lack_of_descriptors_is_a_local_error(
    start_pool: StartPool, engine: MockEngine, host: str, kinds: set[str]
) -> None:
    pool = start_pool(engine.port, host)
    with no_descriptor_left(), pytest.raises(LocalError) as caught:
        await pool.request(REQUEST, soon())
    assert caught.value.kind in kinds, "a resolver needs files too"
    assert engine.connections == 0
    assert b"cmpl-1" in await body_of(pool), "and it passes"


@pytest.mark.parametrize("number", sorted(LOCAL_ERRNOS), ids=errno.errorcode.get)
async def test_local_errnos_are_local_errors(number: int) -> None:
    error = await failure_of(Loop(OSError(number, "no")))
    assert type(error) is LocalError


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ECONNREFUSED, ConnectRefusedError),
        (errno.ECONNRESET, ConnectRefusedError),
        (errno.EHOSTUNREACH, ConnectRefusedError),
        (errno.ENETUNREACH, ConnectRefusedError),
        (errno.ETIMEDOUT, ConnectTimeoutError),
    ],
)
async def test_other_errnos_are_connect_errors(number: int, kind: type[ConnectError]) -> None:
    assert type(await failure_of(Loop(OSError(number, "no")))) is kind


@pytest.mark.parametrize(
    ("numbers", "kind"),
    [
        ((errno.EADDRNOTAVAIL, errno.ECONNREFUSED), ConnectRefusedError),
        ((errno.ECONNREFUSED, errno.EADDRNOTAVAIL), ConnectRefusedError),
        ((errno.EADDRNOTAVAIL, errno.EMFILE), LocalError),
    ],
)
async def test_a_refusing_address_outweighs_a_local_failure(
    numbers: tuple[int, ...], kind: type[UpstreamError]
) -> None:
    assert type(await failure_of(Loop(*[OSError(n, "no") for n in numbers]))) is kind


async def test_a_closed_port_is_refused(start_pool: StartPool, engine: MockEngine) -> None:
    await engine.stop()
    with pytest.raises(ConnectRefusedError):
        await start_pool(engine.port).request(REQUEST, soon())


@pytest.mark.parametrize("host", ["nowhere.invalid", "x" * 70, "a..b"])
async def test_a_name_without_an_address_is_unresolved(start_pool: StartPool, host: str) -> None:
    with pytest.raises(UnresolvedError) as caught:
        await start_pool(1, host).request(REQUEST, soon())
    assert caught.value.kind == "dns"


async def test_a_name_that_is_not_resolved_in_time_is_not_the_engines_fault() -> None:
    assert type(await failure_of(Loop(is_silent=True), timeout_s=SHORT)) is UnresolvedError
    assert type(await failure_of(Loop(is_silent=True), deadline=SHORT)) is UnresolvedError


async def test_a_scope_stays_with_its_address() -> None:
    assert _numeric_host(("fe80::1", 80, 0, 7)) == "fe80::1%7"
    assert _numeric_host(("::1", 80, 0, 0)) == "::1"
    assert _numeric_host(("10.0.0.1", 80)) == "10.0.0.1"


async def test_an_engine_that_does_not_accept_is_to_blame(
    start_pool: StartPool, deaf_port: int
) -> None:
    with pytest.raises(ConnectTimeoutError):
        await start_pool(deaf_port, connect_timeout=SHORT).request(REQUEST, soon())


@pytest.mark.parametrize("deadline", [SHORT, 0.0, -1.0])
async def test_a_request_past_its_deadline_is_no_connect_error(
    start_pool: StartPool, deaf_port: int, deadline: float
) -> None:
    with pytest.raises(AnswerTimeoutError):
        await start_pool(deaf_port).request(REQUEST, now() + deadline)


async def test_an_engine_that_dies_ends_the_connect_at_once_with_nothing_sent(
    start_pool: StartPool, deaf_port: int
) -> None:
    pool = start_pool(deaf_port, connect_timeout=LONG)
    legs = [asyncio.create_task(pool.request(REQUEST, soon())) for _ in range(3)]
    await asyncio.sleep(0)  # they begin
    began = now()
    pool.fail_legs(EngineLostError("two probes failed"))
    pool.fail_legs(EngineLostError("and again"))
    for leg in legs:
        with pytest.raises(ConnectError, match="and again"):
            await leg
    assert now() - began < LONG / 2


async def test_an_engine_that_dies_as_its_connect_succeeds_is_left_at_once(
    engine: MockEngine,
) -> None:
    class Dying:
        """The engine is found dead when its connection is there, and nobody knows that yet."""

        getaddrinfo = asyncio.get_running_loop().getaddrinfo

        async def create_connection(self, *where: Any) -> Any:
            made = await asyncio.get_running_loop().create_connection(*where)
            attempt.fail(EngineLostError("gone"))
            transports.append(made[0])
            return made

    transports: list[asyncio.Transport] = []
    attempt = ConnectAttempt("127.0.0.1", engine.port, soon(), LONG, running_deadlines())
    with pytest.raises(ConnectError, match="gone"):
        await attempt.run(cast(asyncio.AbstractEventLoop, Dying()), asyncio.Protocol)
    assert transports[0].is_closing()


async def test_an_engine_that_dies_after_the_time_is_over_changes_nothing(deaf_port: int) -> None:
    loop = asyncio.get_running_loop()
    attempt = ConnectAttempt("127.0.0.1", deaf_port, soon(), 0.0, running_deadlines())
    running = asyncio.create_task(attempt.run(loop, asyncio.Protocol))
    while not attempt._limit.has_expired:  # noqa: ASYNC110 # its task has yet to hear of it
        await asyncio.sleep(0)
    attempt.fail(EngineLostError("gone"))
    with pytest.raises(ConnectError):
        await running


async def test_an_engine_is_not_blamed_for_a_time_in_which_the_router_stood_still(
    engine: MockEngine,
) -> None:
    class Stalling:
        getaddrinfo = asyncio.get_running_loop().getaddrinfo

        async def create_connection(self, *where: Any) -> Any:
            time.sleep(3 * TICK_S)  # noqa: ASYNC251 # nothing of this process runs meanwhile
            made.append(await asyncio.get_running_loop().create_connection(*where))
            return made[0]

    made: list[tuple[asyncio.Transport, asyncio.Protocol]] = []
    attempt = ConnectAttempt("127.0.0.1", engine.port, soon(), 2 * TICK_S, running_deadlines())
    await attempt.run(cast(asyncio.AbstractEventLoop, Stalling()), asyncio.Protocol)
    made[0][0].abort()


async def test_engine_sockets_notice_a_vanished_host(engine: MockEngine) -> None:
    made: list[asyncio.Transport] = []

    class Connected(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            made.append(cast(asyncio.Transport, transport))

    attempt = ConnectAttempt("127.0.0.1", engine.port, soon(), LONG, running_deadlines())
    await attempt.run(asyncio.get_running_loop(), Connected)
    sock = made[0].get_extra_info("socket")
    tcp = [
        sock.getsockopt(socket.IPPROTO_TCP, option)
        for option in (
            socket.TCP_NODELAY,
            socket.TCP_KEEPIDLE,
            socket.TCP_KEEPINTVL,
            socket.TCP_KEEPCNT,
            socket.TCP_USER_TIMEOUT,
        )
    ]
    assert tcp == [1, 5, 2, 3, 20_000]
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) == 2 * RECEIVE_BUFFER_BYTES, (
        "as Linux has"
    )
    made[0].abort()


def raising(error: Exception) -> Callable[..., Awaitable[Any]]:
    async def fail(*_: object, **__: object) -> None:
        raise error

    return fail


async def error_of_connect(loop: object) -> type[Exception]:
    attempt = ConnectAttempt("localhost", 1, soon(), LONG, Deadlines())
    with pytest.raises(UpstreamError) as caught:
        await attempt.run(cast(asyncio.AbstractEventLoop, loop), asyncio.Protocol)
    return type(caught.value)


async def test_resolver_errors_are_unresolved_errors() -> None:
    """Without a descriptor left it may say EINVAL."""
    loop = SimpleNamespace(getaddrinfo=raising(OSError(errno.EINVAL, "Invalid argument")))
    assert await error_of_connect(loop) is UnresolvedError
    loop.getaddrinfo = asyncio.get_running_loop().getaddrinfo
    loop.create_connection = raising(OSError(errno.ECONNREFUSED, "refused"))
    assert await error_of_connect(loop) is ConnectRefusedError
