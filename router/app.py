"""Wires the rooms together. Nothing else imports everything."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from importlib.metadata import version
from typing import Any

import httpx
from fastapi import FastAPI

from router.api import failures, models, openai, operations
from router.conversations.breaker import Breaker
from router.conversations.conversations import Conversations
from router.conversations.identity import Identity
from router.conversations.memory_store import MemoryStore
from router.conversations.store import Store
from router.fleet.engine import Engine, Role, State
from router.fleet.fleet import Fleet
from router.fleet.probes import Prober
from router.flows.gateway import Gateway
from router.settings import Settings, SettingsError
from router.telemetry.metrics import Metrics
from router.upstream.deadlines import Deadlines
from router.upstream.pool import EnginePool, PoolLimits

HEALTH_VALUES = {State.HEALTHY: 1, State.UNHEALTHY: 0, State.UNKNOWN: -1}


def build(settings: Settings) -> FastAPI:
    """The application: serves everything under any ASGI server, and the hot endpoints faster when
    uvicorn runs it with RouterProtocol. Engines are probed while its lifespan runs."""
    deadlines, metrics = Deadlines(), Metrics()
    fleet = _fleet(settings, deadlines, metrics)
    gateway = Gateway(settings, fleet, metrics, _conversations(settings, metrics))
    metrics.in_flight.set_function(lambda: len(gateway.running))

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[dict[str, Any]]:
        probing = asyncio.create_task(_prober(settings, fleet, client).run())
        try:
            yield {"gateway": gateway, "deadlines": deadlines}
        finally:
            probing.cancel()
            await asyncio.gather(probing, return_exceptions=True)
            await gateway.close()
            fleet.close()
            await client.aclose()

    # Engines speak plain HTTP, and are never behind the proxy of HTTP_PROXY.
    client = httpx.AsyncClient(trust_env=False, verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    app = FastAPI(
        title="disagg-router",
        version=version("disagg-router"),
        lifespan=lifespan,
        redirect_slashes=False,
    )
    app.state.gateway, app.state.client = gateway, client
    app.state.exposition = metrics.exposition
    for room in (openai, models, operations):
        app.include_router(room.router)
    failures.install(app)
    return app


def _conversations(settings: Settings, metrics: Metrics) -> Conversations | None:
    """Raises SettingsError."""
    if settings.conversation_store == "off":
        return None
    if settings.conversation_store == "memory":
        memory = MemoryStore(settings.conversation_max_entries, settings.conversation_max_bytes)
        metrics.conversation_entries.set_function(lambda: len(memory))
        store: Store = memory
    else:
        store = Breaker(_redis(settings), metrics.conversation_store_errors)
    identity = Identity(settings.conversation_ids, settings.tenant_header)
    return Conversations(store, identity, settings.conversation_ttl)


def _redis(settings: Settings) -> Store:
    from router.conversations.redis_store import RedisStore  # slow to import, and seldom needed

    try:
        return RedisStore(
            settings.conversation_store,
            settings.store_password(),
            settings.conversation_store_timeout,
        )
    except ValueError as error:
        raise SettingsError([f"--conversation-store: {error}"]) from error


def _prober(settings: Settings, fleet: Fleet, client: httpx.AsyncClient) -> Prober:
    return Prober(fleet, client, settings.health_interval, settings.health_timeout)


def _fleet(settings: Settings, deadlines: Deadlines, metrics: Metrics) -> Fleet:
    limits = PoolLimits(
        connect_timeout=settings.connect_timeout,
        idle_connections=settings.engine_idle_connections,
        idle_age=settings.engine_idle_age,
        header_limit=settings.max_header_size,
    )
    known = [(Role.PREFILL, address) for address in settings.prefillers]
    known += [(Role.DECODE, address) for address in settings.decoders]
    engines = [
        Engine(role, address, EnginePool(address.host, address.port, limits, deadlines))
        for role, address in known
    ]
    for engine in engines:
        _publish(engine, metrics)

    def on_change(engine: Engine) -> None:
        metrics.engine_healthy.labels(engine.role, engine.name).set(HEALTH_VALUES[engine.state])

    return Fleet(engines, settings.health_failures, on_change)


def _publish(engine: Engine, metrics: Metrics) -> None:
    labels = (engine.role, engine.name)
    metrics.engine_healthy.labels(*labels).set(HEALTH_VALUES[engine.state])
    metrics.engine_in_flight.labels(*labels).set_function(lambda: engine.in_flight)
