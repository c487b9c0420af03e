"""A router that listens on a real socket, and a client for it."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import httpx
from fastapi import FastAPI
from prometheus_client import Counter
from uvicorn.server import ServerState

from router.fleet.engine import Engine
from router.proxy.gateway import Gateway
from router.server.app import build
from router.server.router_state import RouterState, state_of
from router.server.serve import uvicorn_config
from router.settings import Settings
from scripts.mock_engine import MockEngine


async def eventually(condition: Callable[[], object], seconds: float = 15.0) -> None:
    """Returns when the condition holds, fails when it does not come to hold in time."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 # what is waited for has no event to set
            await asyncio.sleep(0.005)


def settings_for(*, p: list[MockEngine], d: list[MockEngine], **changes: Any) -> Settings:
    quick: dict[str, Any] = {
        "health_interval": 0.05,
        "health_timeout": 1.0,
        "connect_timeout": 1.0,
        # What a prefiller does wrong is to be seen, unless a test asks for decoders alone.
        "without_prefiller": "refuse",
        "prefill_policy": "round_robin",
        "decode_policy": "round_robin",
        # Most mock engines report no log-probabilities: see proxy/test_canary.py.
        "kv_canary": 0,
        # Most mock engines report no token ids: see conversations/test_token_proofs.py.
        "conversation_unproven": "whole",
    }
    return Settings(
        prefiller_hosts=("127.0.0.1",) * len(p),
        prefiller_ports=tuple(engine.port for engine in p),
        decoder_hosts=("127.0.0.1",) * len(d),
        decoder_ports=tuple(engine.port for engine in d),
        **(quick | changes),
    )


@dataclass
class Router:
    app: FastAPI
    port: int
    client: httpx.AsyncClient

    @property
    def state(self) -> RouterState:
        return state_of(self.app)

    @property
    def gateway(self) -> Gateway:
        return self.state.gateway

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def complete(self, **fields: Any) -> httpx.Response:
        body = {"model": "m", "prompt": "hello", "max_tokens": 7} | fields
        return await self.client.post("/v1/completions", json=body)

    async def stream(self, **fields: Any) -> httpx.Response:
        return await self.complete(stream=True, **fields)

    def metric(self, name: str, **labels: str) -> float:
        self.gateway.records.flush()
        registry = self.gateway.metrics.registry
        return registry.get_sample_value(f"disagg_router_{name}", labels) or 0.0

    def engine(self, mock: MockEngine) -> Engine:
        """What the router knows of it."""
        return next(e for e in self.gateway.fleet.engines if e.spec.address.port == mock.port)

    async def settled(self) -> None:
        """Every request is over, and what outlived them too."""
        gateway = self.gateway
        await eventually(lambda: not gateway.tasks.running and not gateway.tasks.background, 10)
        engines = gateway.fleet.engines
        # Warm-ups of engines are none of these tasks.
        await eventually(
            lambda: not any(e.in_flight or e.kv_leases or e.local_prefill_tokens for e in engines),
            10,
        )

    async def knows_identities(self) -> None:
        """Each engine has been asked for its identity page."""
        engines = self.gateway.fleet.engines
        await eventually(lambda: all(e.capabilities.is_identity_known for e in engines))

    async def knows_its_engines(self) -> None:
        """Each was asked all that it is asked, and has a connection waiting."""
        engines = self.gateway.fleet.engines
        await eventually(
            lambda: all(e.capabilities.is_identity_known and e.models for e in engines)
        )
        await eventually(lambda: all(e.pool.idle_count for e in engines))

    @contextlib.asynccontextmanager
    async def socket(self) -> AsyncIterator[RawClient]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield RawClient(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


@dataclass
class RawClient:
    """Bytes to and from the router, without a client library's opinions."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> bytes:
        async with asyncio.timeout(5):
            return await self.reader.readuntil(b"\r\n\r\n")

    async def answer(self) -> tuple[bytes, bytes]:
        """A head, and a body that is framed by Content-Length."""
        head = await self.head()
        lines = head.lower().split(b"\r\n")
        length = next(int(x[15:]) for x in lines if x.startswith(b"content-length:"))
        async with asyncio.timeout(5):
            return head, await self.reader.readexactly(length)

    async def until_closed(self) -> bytes:
        async with asyncio.timeout(8):
            return await self.reader.read()


def count_of(counter: Counter, *labels: str) -> float:
    """Return the value of a counter that no registry has."""
    (metric,) = counter.labels(*labels).collect()
    return next(sample.value for sample in metric.samples if sample.name.endswith("_total"))


def status_of(head: bytes) -> int:
    return int(head.split(b" ", 2)[1])


def post(body: bytes, path: str = "/v1/completions", headers: bytes = b"") -> bytes:
    """A plain request; `headers` are whole lines."""
    length = b"content-length: %d\r\n" % len(body)
    return b"POST %s HTTP/1.1\r\nhost: x\r\n%s%s\r\n%s" % (path.encode(), headers, length, body)


@contextlib.asynccontextmanager
async def running_router(settings: Settings) -> AsyncIterator[Router]:
    """Start a router, and stop it at the end; fail if it leaves a request or a slot behind."""
    app = build(settings)
    config = uvicorn_config(settings, app, settings.served_tls())
    config.load()
    protocol_class: Any = config.http_protocol_class
    state, loop = ServerState(), asyncio.get_running_loop()
    async with app.router.lifespan_context(app) as lifespan:
        server = await loop.create_server(
            lambda: protocol_class(
                config=config, server_state=state, app_state=dict(lifespan or {}), _loop=loop
            ),
            "127.0.0.1",
            0,
        )
        port = server.sockets[0].getsockname()[1]
        plain = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # the default one takes 30 ms to make
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", timeout=10, verify=plain
        ) as client:
            router = Router(app, port, client)
            try:
                yield router
            finally:  # uvloop waits for ever for what a test that failed left open
                server.close()
                for connection in list(state.connections):
                    connection.transport.abort()
        await eventually(lambda: not state.connections)
    await eventually(lambda: not router.gateway.tasks.running)
    engines = router.gateway.fleet.engines
    assert all(engine.in_flight == 0 for engine in engines)
    assert all(not engine.admitted and not engine.admitted_tokens for engine in engines)
    assert all(not engine.kv_leases and not engine.kv_lease_tokens for engine in engines)
    assert all(
        not engine.tokens_in_flight and not engine.local_prefill_tokens for engine in engines
    )
    assert router.gateway.admission is None or not router.gateway.admission.depth
    assert not router.gateway.memory.bodies.size
    await eventually(lambda: not router.gateway.memory.answers.size)
