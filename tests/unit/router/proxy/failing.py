"""Every kind of failure, provoked at a mock engine, and what a router then does with a request."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from router.fleet.engine import Engine, EngineRole
from router.http_client.connecting import EngineTls
from router.http_client.errors import EngineLostError
from scripts.mock_engine import MockEngine, Peer, Received, Script, is_release
from tests.unit.router.engine_scripts import (
    answering,
    hang,
    raw,
    reset,
    usual_decode,
    usual_prefill,
)
from tests.unit.router.harness import Router, eventually
from tests.unit.router.mock_engine import USUAL, running_engine

LOST = EngineLostError("declared dead")


@dataclass
class Asked:
    """A router before two engines of a role, the first of which is asked first and fails."""

    router: Router
    role: EngineRole
    first: MockEngine
    other: MockEngine
    ps: list[MockEngine]
    ds: list[MockEngine]

    @property
    def engine(self) -> Engine:
        return self.router.engine(self.first)

    def legs(self, engine: MockEngine) -> list[Received]:
        return [request for request in engine.requests if not is_release(request)]

    def prefills(self) -> list[Received]:
        return [leg for engine in self.ps for leg in self.legs(engine)]

    def decodes(self) -> list[Received]:
        return [leg for engine in self.ds for leg in self.legs(engine)]

    def releases(self) -> list[Received]:
        return [r for engine in self.ds for r in engine.requests if is_release(r)]


@contextlib.asynccontextmanager
async def two_of(
    role: EngineRole,
    p: MockEngine,
    d: MockEngine,
    start: Callable[..., Awaitable[Router]],
    **changes: object,
) -> AsyncIterator[Asked]:
    is_prefill = role is EngineRole.PREFILL
    async with running_engine(usual_prefill if is_prefill else usual_decode) as other:
        ps, ds = ([p, other], [d]) if is_prefill else ([p], [d, other])
        router = await start(ps=ps, ds=ds, health_interval=60, **changes)
        await router.knows_its_engines()
        yield Asked(router, role, p if is_prefill else d, other, ps, ds)


@contextlib.asynccontextmanager
async def deaf(port: int) -> AsyncIterator[None]:
    """A listener whose backlog is full: whoever connects waits."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield


# What makes the next leg at the first engine fail, by the kind of its failure.
Fault = Callable[[Asked], contextlib.AbstractAsyncContextManager[None]]


def scripted(script: Script, is_fresh: bool = False) -> Fault:
    @contextlib.asynccontextmanager
    async def fault(asked: Asked) -> AsyncIterator[None]:
        asked.first.scripts = [script]
        if is_fresh:
            asked.engine.pool.close()
        yield

    return fault


@contextlib.asynccontextmanager
async def refusing(asked: Asked) -> AsyncIterator[None]:
    await asked.first.stop()
    await eventually(lambda: not asked.engine.pool.open_count)
    yield


@contextlib.asynccontextmanager
async def not_accepting(asked: Asked) -> AsyncIterator[None]:
    async with refusing(asked), deaf(asked.first.port):
        yield


@contextlib.asynccontextmanager
async def lost_in_connect(asked: Asked) -> AsyncIterator[None]:
    async def lose() -> None:
        await eventually(lambda: asked.engine.pool.connecting_count)
        asked.engine.pool.fail_legs(LOST)

    async with not_accepting(asked):
        losing = asyncio.create_task(lose())
        yield
        await losing


@contextlib.asynccontextmanager
async def unresolved(asked: Asked) -> AsyncIterator[None]:
    asked.engine.pool.close()
    asked.engine.pool.host = "nowhere.invalid"
    yield


@contextlib.asynccontextmanager
async def speaking_no_tls(asked: Asked) -> AsyncIterator[None]:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await reader.read(1)
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        asked.engine.pool.close()
        asked.engine.pool.port = server.sockets[0].getsockname()[1]
        asked.engine.pool.tls = EngineTls(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        yield


@contextlib.asynccontextmanager
async def lost(asked: Asked) -> AsyncIterator[None]:
    async def is_lost(request: Received, peer: Peer) -> None:
        asked.engine.pool.fail_legs(LOST)
        await peer.wait_left()

    asked.first.scripts = [is_lost]
    yield


async def too_large(request: Received, peer: Peer) -> None:
    """For a prefiller an answer; a decoder's are held whole only where they reject."""
    status = 200 if request.json["max_tokens"] == 1 else 400
    await peer.answer({**USUAL, "x": "y" * 10_000}, status)


FAULTS: dict[str, Fault] = {
    "connect_refused": refusing,
    "connect_timeout": not_accepting,
    "connect": lost_in_connect,
    "dns": unresolved,
    "tls": speaking_no_tls,
    "stale": scripted(reset),
    "disconnected": scripted(reset, is_fresh=True),
    "engine_lost": lost,
    "timeout": scripted(hang),
    "broken_answer": scripted(raw(b"no http at all\r\n\r\n")),
    "status_5xx": scripted(answering(500, {"error": {"message": "CUDA died"}})),
    "overloaded": scripted(answering(503, {"error": {"message": "busy"}}, retry_after="5")),
    "unserved_model": scripted(
        answering(404, {"error": {"message": "The model `m` does not exist.", "param": "model"}})
    ),
    "answer_too_large": scripted(too_large),
}
LIMITS = {
    "connect_timeout": {"connect_timeout": 0.1},
    "connect": {"connect_timeout": 10},
    "timeout": {"prefill_timeout": 0.2, "decode_first_byte_timeout": 0.2},
    "answer_too_large": {"max_answer_size": 5000},
}
