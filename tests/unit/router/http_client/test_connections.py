"""What an engine may do to a connection, at any moment."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from router.http_client import pool as pool_module
from router.http_client.connecting import SOCKET_OPTIONS
from router.http_client.errors import (
    BrokenAnswerError,
    DisconnectedError,
    StaleConnectionError,
    UpstreamError,
)
from router.http_client.pool import STALE_WITHIN_S, EngineConnection, EnginePool
from scripts.mock_engine import STREAM_HEAD, MockEngine, Peer, Received, chunk
from tests.unit.router.engine_scripts import reset
from tests.unit.router.harness import eventually, post
from tests.unit.router.http_client.asking import (
    LIMIT,
    OK,
    REQUEST,
    WHOLE,
    ask,
    body_of,
    saying,
    saying_and_waiting,
    soon,
)
from tests.unit.router.http_client.conftest import HEADER_LIMIT, StartPool
from tests.unit.router.mock_engine import event

CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n" + chunk(b"{}") + b"0\r\n\r\n"
MUCH = post(b" " * 16 * 1024 * 1024)
Handler = Callable[[asyncio.StreamWriter], Awaitable[None]]


@pytest.mark.parametrize("script", [saying(b""), reset])
async def test_a_kept_connection_lost_before_an_answer_is_stale_and_not_retried(
    pool: EnginePool, engine: MockEngine, script: Callable[[Received, Peer], Awaitable[None]]
) -> None:
    await body_of(pool)
    engine.scripts = [script]
    with pytest.raises(StaleConnectionError):
        await ask(pool)
    assert len(engine.requests) == 2
    assert {request.connection for request in engine.requests} == {1}


@pytest.mark.parametrize("script", [saying(b""), reset])
async def test_a_kept_connection_that_is_lost_late_is_not_stale(
    pool: EnginePool,
    engine: MockEngine,
    monkeypatch: pytest.MonkeyPatch,
    script: Callable[[Received, Peer], Awaitable[None]],
) -> None:
    """The engine had the request for as long as it takes to work on it."""

    async def late(request: Received, peer: Peer) -> None:
        monkeypatch.setattr(pool_module, "STALE_WITHIN_S", 0.0)
        await script(request, peer)

    await body_of(pool)
    engine.scripts = [late]
    with pytest.raises(DisconnectedError) as caught:
        await ask(pool)
    assert type(caught.value) is DisconnectedError


async def test_connection_is_stale_although_the_router_stood_still_after_the_request(
    start_pool: StartPool,
) -> None:
    """It reads the engine's FIN late, whose connection was closed before."""

    def serve_one(listener: socket.socket) -> socket.socket:
        peer, _ = listener.accept()
        peer.recv(65536)
        peer.sendall(WHOLE)
        return peer

    with socket.create_server(("127.0.0.1", 0)) as listener:
        pool = start_pool(listener.getsockname()[1])
        serving = asyncio.create_task(asyncio.to_thread(serve_one, listener))
        await body_of(pool)
        await eventually(lambda: pool.idle_count == 1)
        (await serving).close()
        answer = pool.send_on_idle(REQUEST, soon())
        assert answer is not None
        time.sleep(2 * STALE_WITHIN_S)  # noqa: ASYNC251 # nothing of this process runs meanwhile
        await answer.ready()
        assert isinstance(answer.error, StaleConnectionError)
        answer.close()


async def test_a_kept_connection_whose_engine_reads_nothing_of_a_body_is_not_stale(
    start_pool: StartPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the same engine would be asked again, and be waited for twice."""
    last, name, _ = SOCKET_OPTIONS[-1]
    assert name == socket.TCP_USER_TIMEOUT
    options = (*SOCKET_OPTIONS[:-1], (last, name, 1000))
    monkeypatch.setattr("router.http_client.connecting.SOCKET_OPTIONS", options)

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(WHOLE)

    async with deaf_engine(answer) as port:
        pool = start_pool(port)
        await body_of(pool)
        assert pool.idle_count
        async with asyncio.timeout(8):
            with pytest.raises(DisconnectedError) as caught:
                await pool.request(MUCH, soon())
        assert type(caught.value) is DisconnectedError


async def test_a_fresh_connection_is_never_stale(pool: EnginePool, engine: MockEngine) -> None:
    await body_of(pool)
    engine.scripts = [reset]
    with pytest.raises(DisconnectedError) as caught:
        await ask(pool, fresh=True)
    assert type(caught.value) is DisconnectedError
    assert engine.connections == 2
    assert pool.idle_count == 1, "the kept one stays"


async def test_a_connection_that_was_idle_for_too_long_is_not_used(
    pool: EnginePool, engine: MockEngine
) -> None:
    await body_of(pool)
    assert pool.send_on_idle(REQUEST, soon(), max_idle_s=0.0) is None
    assert pool.idle_count == 1, "it stays for others"
    answer = pool.send_on_idle(REQUEST, soon(), max_idle_s=3.0)
    assert answer is not None
    await answer.ready()
    answer.close()
    assert engine.connections == 1


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("answer", [WHOLE, CHUNKED], ids=["length", "chunked"])
async def test_wherever_an_engine_closes_the_leg_ends_once(
    pool: EnginePool, engine: MockEngine, answer: bytes, is_kept: bool
) -> None:
    unheard = StaleConnectionError if is_kept else DisconnectedError
    for cut in range(len(answer)):
        if is_kept:
            await body_of(pool)
        engine.scripts = [saying(answer[:cut])]
        with pytest.raises(UpstreamError) as caught:
            await body_of(pool)
        assert type(caught.value) is (BrokenAnswerError if cut else unheard)
    engine.scripts = [saying(answer)]
    assert await body_of(pool) == b"{}"
    await eventually(lambda: pool.open_count == pool.idle_count)


async def test_a_connection_lost_before_the_request_is_an_error(
    pool: EnginePool, engine: MockEngine
) -> None:
    loop = asyncio.get_running_loop()
    transport, connection = await loop.create_connection(
        lambda: EngineConnection(pool, HEADER_LIMIT, loop), "127.0.0.1", engine.port
    )
    transport.abort()
    await eventually(lambda: connection.transport is None)
    answer = connection.send(REQUEST, soon(), pool.deadlines, None)
    with pytest.raises(DisconnectedError):
        answer.raise_if_failed()


@contextlib.asynccontextmanager
async def deaf_engine(handler: Handler) -> AsyncIterator[int]:
    """Reads the head of a request and no more; gives its port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await reader.readuntil(b"\r\n\r\n")
        await handler(writer)

    writers: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()
    for writer in writers:
        writer.transport.abort()


async def test_an_engine_that_answers_and_does_not_read_keeps_no_connection(
    start_pool: StartPool,
) -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(WHOLE)

    async with deaf_engine(answer) as port:
        pool = start_pool(port)
        leg = await pool.request(MUCH, soon())
        assert await leg.read(LIMIT) == b"{}"
        await eventually(lambda: not pool.open_count)


async def test_an_engine_that_ends_its_side_and_does_not_read_is_disconnected_at_once(
    start_pool: StartPool,
) -> None:
    async def end(writer: asyncio.StreamWriter) -> None:
        writer.write_eof()

    async with deaf_engine(end) as port:
        pool = start_pool(port)
        async with asyncio.timeout(5):
            with pytest.raises(DisconnectedError):
                await pool.request(MUCH, soon())
        await eventually(lambda: not pool.open_count)


async def test_an_answer_without_length_ends_with_the_engines_side(start_pool: StartPool) -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(OK + b"\r\n{}")
        writer.write_eof()

    async with deaf_engine(answer) as port:
        pool = start_pool(port)
        leg = await pool.request(MUCH, soon())
        assert await leg.read(LIMIT) == b"{}"


async def test_a_leg_that_is_cancelled_leaves_no_connection(start_pool: StartPool) -> None:
    asked = asyncio.Event()

    async def note(writer: asyncio.StreamWriter) -> None:
        asked.set()

    async with deaf_engine(note) as port:
        pool = start_pool(port)
        leg = asyncio.create_task(pool.request(MUCH, soon()))
        await asked.wait()
        leg.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leg
        await eventually(lambda: not pool.open_count)


async def test_every_read_is_a_sign_of_life(pool: EnginePool, engine: MockEngine) -> None:
    step = asyncio.Event()

    async def script(request: Received, peer: Peer) -> None:
        await peer.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        await step.wait()
        await peer.send(STREAM_HEAD + chunk(event("a")))
        await peer.wait_left()

    engine.scripts = [script]
    assert pool.reads == 0
    asking = asyncio.create_task(ask(pool))
    await eventually(lambda: pool.reads == 1)
    step.set()
    answer = await asking
    assert pool.reads == 2
    answer.close()


async def test_unexpected_bytes_are_a_sign_of_life(pool: EnginePool, engine: MockEngine) -> None:
    left, taken = asyncio.Event(), asyncio.Event()

    async def script(request: Received, peer: Peer) -> None:
        await peer.send(WHOLE)
        await taken.wait()
        await peer.send(WHOLE)
        await peer.wait_left()
        left.set()

    engine.scripts = [script]
    await body_of(pool)
    taken.set()
    await asyncio.wait_for(left.wait(), 5)
    assert pool.reads == 2
    assert pool.idle_count == 0


@pytest.mark.parametrize(
    "lines",
    [
        b"content-length: +5",
        b"content-length: -5",
        b"content-length: 5_0",
        b"content-length: 5 0",
        b"content-length: 5, 5",
        b"content-length: 0x5",
        b"content-length: \xb2",
        b"content-length:",
        b"content-length:\r\n 5",
        b"content-length : 5",
        b"content-length: 99999999999999999999",
        b"content-length: 5\r\ncontent-length: 6",
        b"content-length: 5\r\nContent-Length: 5",
        b"content-length: 5\r\ntransfer-encoding: chunked",
        b"transfer-encoding: chunked\r\ncontent-length: 5",
    ],
)
async def test_a_length_is_one_number_of_digits(
    pool: EnginePool, engine: MockEngine, lines: bytes
) -> None:
    engine.scripts = [saying_and_waiting(OK + lines + b"\r\n\r\n12345")]
    with pytest.raises(BrokenAnswerError):
        await body_of(pool)
    await eventually(lambda: not pool.open_count)


@pytest.mark.parametrize(
    "line", [b"content-length:  5", b"Content-Length: \t5\t", b"content-length:05"]
)
async def test_space_around_a_length_is_ignored(
    pool: EnginePool, engine: MockEngine, line: bytes
) -> None:
    engine.scripts = [saying_and_waiting(OK + line + b"\r\n\r\n12345")]
    answer = await ask(pool)
    assert answer.length == 5
    assert await answer.read(LIMIT) == b"12345"


@pytest.mark.parametrize("piece", [HEADER_LIMIT * 8, 1000])
@pytest.mark.parametrize("kind", ["head", "interim", "trailer"])
async def test_no_number_of_headers_is_beyond_the_limit(
    pool: EnginePool, engine: MockEngine, kind: str, piece: int
) -> None:
    many = b"a:\r\n" * (HEADER_LIMIT // 4 + 8)
    begun = {
        "head": OK,
        "interim": b"HTTP/1.1 103 Early\r\n",
        "trailer": OK + b"transfer-encoding: chunked\r\n\r\n0\r\n",
    }
    data = begun[kind] + many

    async def script(request: Received, peer: Peer) -> None:
        for at in range(0, len(data), piece):
            await peer.send(data[at : at + piece])
        await peer.wait_left()

    engine.scripts = [script]
    with pytest.raises(BrokenAnswerError, match="headers of more than"):
        await body_of(pool)


async def test_headers_up_to_the_limit_are_taken(pool: EnginePool, engine: MockEngine) -> None:
    number = HEADER_LIMIT // 8
    engine.scripts = [saying_and_waiting(OK + b"a:\r\n" * number + WHOLE[len(OK) :])]
    answer = await ask(pool)
    assert len(answer.headers) == number
