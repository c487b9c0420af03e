"""Build the router: the only place that knows all of its parts."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from time import monotonic as now
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.types import Lifespan

from router.auth.api_keys import Keyring, KeysByDigest
from router.auth.authenticator import Authenticator
from router.common.deadlines import Deadlines
from router.common.tls import TlsContext
from router.common.watched_file import WatchedFiles
from router.conversations.conversations import Conversations
from router.conversations.store import MemoryStore, SignedStore, Store, ValueSigner
from router.conversations.stored_responses import ResponseStore
from router.coordination.demand import EngineDemand
from router.coordination.exchange import PeerExchange, Transport, WorkerSockets
from router.coordination.peers import PeerRouters
from router.coordination.role_balance import RoleKeeper
from router.fleet.consistency import count_groups
from router.fleet.engine import (
    CLOSED,
    DECODE,
    HALF_OPEN,
    OPEN,
    PREFILL,
    Engine,
    EngineSpec,
    Health,
    Intent,
)
from router.fleet.fleet import Fleet
from router.fleet.kv_protocol import KvProtocol
from router.fleet.partners import find_duplicate_ids
from router.fleet.probes import Prober
from router.fleet.registry import EngineRegistry, WatchedSource
from router.fleet.sources.factory import make_sources
from router.http_client.answer_limits import MemoryBudget
from router.http_client.connecting import EngineTls
from router.http_client.pool import EnginePool, PoolLimits
from router.openai import fastapi_errors
from router.proxy.gateway import Gateway
from router.proxy.migration import StreamMigrator
from router.proxy.warmup import EAGER, EngineWarmer
from router.server import index_page, proxied_endpoints, router_endpoints
from router.server.middleware import AccessMiddleware, HttpMethodsMiddleware
from router.server.router_state import RouterState
from router.settings import BrokenFileError, Settings, SettingsError, read_secret
from router.telemetry.metric_types import Reading
from router.telemetry.metrics import Metrics
from router.telemetry.request_metrics import RecordBatches
from router.telemetry.tracing import tracer_of
from router.ui.hub import DashboardHub
from router.ui.site import dashboard_routes
from router.ui.snapshot import SnapshotSource

if TYPE_CHECKING:
    from router.auth.redis_quota_ledger import RedisQuotaLedger

logger = logging.getLogger("disagg_router")
# How long requests wait at start for service discovery.
DISCOVERY_TIMEOUT_S = 3.0
FIRST_PROBES_TIMEOUT_S = 3.0
CIRCUIT_VALUES = {CLOSED: 0, HALF_OPEN: 1, OPEN: 2}
Work = Callable[[], Coroutine[Any, Any, object]]
HEALTH_VALUES = {Health.HEALTHY: 1, Health.UNHEALTHY: 0, Health.UNKNOWN: -1}


def build(settings: Settings, shared: Path | None = None) -> FastAPI:
    """Build the router as a FastAPI application, with a RouterState on `app.state.router`.

    uvicorn has to serve it with RouterProtocol, which answers the proxied endpoints itself. Engines
    are discovered and probed while the application's lifespan runs. `shared` is the folder that the
    worker processes of one router share. Raises SettingsError.
    """
    deadlines, metrics = Deadlines(), Metrics()
    watched: dict[str, WatchedFiles] = {}
    certificates: dict[str, TlsContext] = {}
    secured = functools.cache(settings.engine_tls)  # the system's authorities take a while to read
    has_own = settings.engine_ca_file or settings.engine_certfile
    if has_own and (pair := secured().files) is not None:  # fail at start if a file is invalid
        watched["engine_tls"], certificates["engine_tls"] = pair, secured()
    answers = MemoryBudget(settings.max_held_answers)
    fleet = _fleet(settings, deadlines, secured, answers)
    fleet.starts_engines_cold = settings.warm_up == EAGER
    fleet.set_group_weights(settings.weights)
    registry = EngineRegistry(fleet, make_sources(settings, shared), settings.request_timeout)
    demand = EngineDemand(settings.target_itl)
    _connect_gauges(metrics, fleet, registry, demand)
    metrics.requests.known_models = lambda: fleet.snapshot.by_model
    prober = Prober(
        fleet,
        settings.health_interval,
        settings.health_timeout,
        settings.engine_idle_age,
        None if settings.kv_protocol == "auto" else KvProtocol(settings.kv_protocol),
        settings.bootstrap_port,
    )
    store = _conversation_store(settings, metrics, deadlines)
    tracer = tracer_of(os.environ)
    authenticator = _authenticator(settings, metrics, deadlines)
    if authenticator is not None:
        watched["api_keys"] = authenticator.keyring.file
    conversations = None if store is None else _conversations(settings, store, fleet)
    gateway = Gateway(settings, fleet, metrics, conversations, tracer, authenticator, answers)
    metrics.in_flight.set_function(lambda: len(gateway.tasks.running))
    metrics.held_bodies.set_function(lambda: gateway.memory.bodies.size)
    metrics.held_answers.set_function(lambda: answers.size)
    metrics.file_trouble.read = lambda: [((n,), bool(f.trouble)) for n, f in watched.items()]
    metrics.certificate_end.read = lambda: [
        ((name,), one.expires_at) for name, one in certificates.items() if one.expires_at
    ]
    exchange = _peer_exchange(settings, gateway, store, shared, deadlines)
    transport = None if exchange is None else exchange.transport
    backends = {"conversation store": store, "key limits": authenticator, "routers": transport}
    state = RouterState(
        gateway=gateway,
        deadlines=deadlines,
        prober=prober,
        registry=registry,
        stored_responses=_stored_responses(settings, store),
        signed_store=store if isinstance(store, SignedStore) else None,
        exposition=partial(_current_metrics, gateway.records, metrics),
        watched_files=watched,
        certificates=certificates,
        failures=lambda: {
            name: one.failure for name, one in backends.items() if one is not None and one.failure
        },
        dashboard_port=settings.ui_port,
    )
    if settings.ui:
        source = SnapshotSource(gateway, registry, prober, watched, certificates)
        state.dashboard = DashboardHub(gateway, source)
    background: list[Work] = [lambda: demand.sample(lambda: fleet.engines)]
    if authenticator is not None:
        background.append(authenticator.renew_leases)
    if exchange is not None:
        background.append(exchange.exchange_forever)
    if settings.target_itl:
        background.append(RoleKeeper(fleet, settings.target_itl).run)
    lifespan = partial(_running, state, settings, background, transport, shared is not None)
    return _application(state, settings, lifespan)


@contextlib.asynccontextmanager
async def _running(
    state: RouterState,
    settings: Settings,
    background: Iterable[Work],
    transport: Transport | None,
    is_worker: bool,
    app: FastAPI,
) -> AsyncIterator[dict[str, Any]]:
    """Run the work in the background until the block ends; enter when engines are known."""
    loop = asyncio.get_running_loop()
    state.deadlines.start(loop)
    files = (file.run for file in state.watched_files.values())
    migrator = StreamMigrator(state.gateway)
    work = [state.registry.run, state.prober.run, migrator.run, *files, *background]
    tasks = [loop.create_task(each()) for each in work]
    try:
        await state.registry.wait_for_sources(DISCOVERY_TIMEOUT_S)
        if is_worker:
            # The other workers still answer. What connects to this one waits for its first
            # probes instead of being told that no engine is known.
            await state.prober.wait_for_first_results(FIRST_PROBES_TIMEOUT_S)
        if settings.warm_up != "off":
            tasks.append(loop.create_task(EngineWarmer(state.gateway, settings.warm_up).run()))
        yield {"router": state}
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await state.gateway.close()
        if transport is not None:
            await transport.close()
        state.gateway.fleet.close()


def _application(state: RouterState, settings: Settings, lifespan: Lifespan[FastAPI]) -> FastAPI:
    """Return the application with its endpoints and middleware. Raises SettingsError."""
    app = FastAPI(
        title="disagg-router",
        version=version("disagg-router"),
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
    )
    app.state.router = state
    for endpoints in (index_page, proxied_endpoints, router_endpoints):
        app.include_router(endpoints.router)
    if settings.metrics_port is None:
        app.include_router(router_endpoints.metrics_router)
    if state.dashboard is not None:
        app.include_router(dashboard_routes(state.dashboard, read_secret(settings, "ui_token")))
    app.add_middleware(AccessMiddleware, state=state)
    # Outermost, so that 401 answers have CORS headers, too.
    app.add_middleware(HttpMethodsMiddleware, known=app, origins=settings.cors_origins)
    fastapi_errors.install(app)
    return app


def _current_metrics(records: RecordBatches, metrics: Metrics) -> bytes:
    """Return the metrics with all requests that have ended. Called in a thread."""
    records.flush_from_thread()
    return metrics.exposition()


def _authenticator(
    settings: Settings, metrics: Metrics, deadlines: Deadlines
) -> Authenticator | None:
    """Raises SettingsError."""
    path = settings.api_keys_file
    if path is None:
        return None
    keyring = _keyring(settings, path)
    is_alone = settings.limits_store == "memory"
    shared = None if is_alone else _shared_ledger(settings, metrics, deadlines)
    return Authenticator(keyring, settings.tenant_header, shared)


def _keyring(settings: Settings, path: Path) -> Keyring:
    """Raises SettingsError."""
    is_divided = settings.workers > 1 and settings.limits_store == "memory"
    try:
        return Keyring(path, _require_no_limits if is_divided else lambda keys: None)
    except ValueError as error:
        raise BrokenFileError([f"--api-keys-file {path}: {error}"]) from None


def check_files(settings: Settings) -> None:
    """Raise SettingsError if a file that the router would watch is invalid now."""
    settings.served_tls()
    if settings.engine_ca_file or settings.engine_certfile:
        settings.engine_tls()
    if settings.api_keys_file is not None:
        _keyring(settings, settings.api_keys_file)


def _require_no_limits(keys: KeysByDigest) -> None:
    """Raise ValueError if a key has limits, which worker processes cannot count in memory.

    The kernel spreads a client's connections over the workers. With a share of the limit at each
    worker, a client with one connection would get only that share; with the whole limit at each, a
    client would get a multiple of it.
    """
    for key in keys.values():
        if key.has_limits:
            raise ValueError(
                f"key {key.name} has limits, which several workers cannot count together: set "
                "--key-limits-store to a Redis URL"
            )


def _shared_ledger(settings: Settings, metrics: Metrics, deadlines: Deadlines) -> RedisQuotaLedger:
    """Raises SettingsError."""
    from router.auth.redis_quota_ledger import RedisQuotaLedger  # slow to import, and seldom needed

    try:
        return RedisQuotaLedger(
            settings.limits_store,
            settings.limits_password,
            settings.conversation_store_timeout,
            metrics.key_limit_errors,
            deadlines,
        )
    except ValueError as error:
        raise SettingsError([f"--key-limits-store: {error}"]) from error


def _peer_exchange(
    settings: Settings,
    gateway: Gateway,
    store: Store | None,
    shared: Path | None,
    deadlines: Deadlines,
) -> PeerExchange | None:
    """Return the exchange of load with other routers that share a Redis, or else with the other
    workers of this router, in the folder `shared`."""
    if not settings.share_routing:
        return None
    peers, errors = PeerRouters(gateway.routes.index), gateway.metrics.peer_exchange_errors
    gateway.metrics.peer_routers.set_function(lambda: len(peers))
    transport: Transport
    if isinstance(store, SignedStore):
        from router.coordination.redis_stream import RedisStream  # slow to import, seldom needed

        transport = RedisStream(
            store,
            settings.conversation_store,
            partial(read_secret, settings, "conversation_store_password"),
            settings.conversation_store_timeout,
            errors,
            deadlines,
        )
    elif shared is not None:
        transport = WorkerSockets(shared, peers.name)
    else:
        return None
    return PeerExchange(peers, gateway.fleet.places, transport, errors)


def _conversation_store(settings: Settings, metrics: Metrics, deadlines: Deadlines) -> Store | None:
    """Raises SettingsError."""
    if settings.conversation_store == "off":
        return None
    if settings.conversation_store == "memory":
        memory = _memory_store(settings)
        metrics.conversation_entries.set_function(lambda: len(memory))
        return memory
    from router.conversations.redis_store import RedisStore  # slow to import, and seldom needed

    password = partial(read_secret, settings, "conversation_store_password")
    errors = metrics.conversation_store_errors
    try:
        redis = RedisStore(
            settings.conversation_store,
            password,
            settings.conversation_store_timeout,
            errors,
            deadlines,
        )
    except ValueError as error:
        raise SettingsError([f"--conversation-store: {error}"]) from error
    signer = ValueSigner(with_store_keys(settings).store_keys())
    return SignedStore(redis, signer, errors, settings.conversation_ttl)


def _conversations(settings: Settings, store: Store, fleet: Fleet) -> Conversations:
    ids, tenants, ttl = settings.conversation_ids, settings.tenant_header, settings.conversation_ttl
    return Conversations(store, ids, tenants, ttl, fleet=fleet)


def _stored_responses(settings: Settings, store: Store | None) -> ResponseStore:
    # In memory, responses have a store of their own, so that they do not evict turns.
    is_in_memory = settings.conversation_store == "memory"
    own = _memory_store(settings) if is_in_memory else store
    return ResponseStore(own, settings.tenant_header, settings.responses_ttl)


def _memory_store(settings: Settings) -> MemoryStore:
    return MemoryStore(settings.conversation_max_entries, settings.conversation_max_bytes)


def with_store_keys(settings: Settings) -> Settings:
    """Return the settings with the keys that sign entries of a shared store, a random one if none
    is given. Raises SettingsError.

    Called before the worker processes start, so that they use the same key. A second call changes
    nothing.
    """
    if settings.conversation_store in ("memory", "off"):
        return settings
    keys = settings.store_keys()
    if not keys:
        logger.warning(
            "no --conversation-store-key: turns in Redis are reused only within this router, and "
            "until it ends"
        )
        keys = [secrets.token_urlsafe(32).encode()]
    return settings.with_store_keys(keys)


def _fleet(
    settings: Settings,
    deadlines: Deadlines,
    secured: Callable[[], TlsContext],
    answers: MemoryBudget,
) -> Fleet:
    """`secured` is called only if an engine uses TLS."""
    limits = PoolLimits(
        connect_timeout_s=settings.connect_timeout,
        max_idle_connections=settings.engine_idle_connections,
        max_idle_s=settings.engine_idle_age,
        max_head_bytes=settings.max_header_size,
    )
    name = settings.engine_tls_name or ""

    def make_pool(spec: EngineSpec) -> EnginePool:
        tls = EngineTls(secured().context, name) if spec.tls else None
        address = spec.address
        return EnginePool(address.host, address.port, limits, deadlines, tls, answers)

    secret = read_secret(settings, "engine_api_key")
    credential = "" if secret is None else f"Bearer {secret}"
    return Fleet(make_pool, settings.health_failures, credential=credential)


def _connect_gauges(
    metrics: Metrics, fleet: Fleet, registry: EngineRegistry, demand: EngineDemand
) -> None:
    """Set what the gauges read. The metrics' thread calls these functions, so each reads only
    objects that are replaced as a whole."""

    def of_engines(value: Callable[[Engine], float]) -> Callable[[], Iterator[Reading]]:
        return lambda: (((engine.role, engine.name), value(engine)) for engine in fleet.engines)

    def of_sources(value: Callable[[WatchedSource], float]) -> Callable[[], Iterator[Reading]]:
        return lambda: (((one.source.name,), value(one)) for one in registry.sources)

    def shared_ids() -> Iterator[Reading]:
        shared = find_duplicate_ids(fleet.engines)
        return (((one.role, one.name), 1) for one in fleet.engines if one.name in shared)

    def degraded() -> Iterator[Reading]:
        reasons = fleet.report.reasons
        known = (engine for engine in fleet.engines if engine.name in reasons)
        return (((one.role, one.name, reasons[one.name]), 1) for one in known)

    def prefill_rates() -> Iterator[Reading]:
        known = ((one, one.prefill_tokens_per_second) for one in fleet.engines)
        return (((one.role, one.name), rate) for one, rate in known if rate)

    def preferred_roles() -> Iterator[Reading]:
        chosen = (one for one in fleet.engines if one.role_reason and one.is_available)
        why = fleet.form_reasons
        return (
            ((one.group, one.name, one.preferred_role, why.get(one.group, "")), 1) for one in chosen
        )

    metrics.engine_preferred_role.read = preferred_roles
    metrics.role_changes.read = lambda: (((g,), n) for g, n in list(fleet.role_changes.items()))
    metrics.engines_needed.read = lambda: demand.read(fleet.engines, now()).items()
    metrics.engine_prefill_rate.read = prefill_rates
    metrics.engine_healthy.read = of_engines(lambda engine: HEALTH_VALUES[engine.health])
    metrics.engine_in_flight.read = of_engines(lambda engine: engine.in_flight)
    metrics.engine_holding.read = of_engines(lambda engine: engine.kv_leases)
    metrics.engine_draining.read = of_engines(lambda engine: engine.intent is Intent.DRAINING)
    metrics.engine_shares_id.read = shared_ids
    metrics.engine_degraded.read = degraded
    metrics.engine_circuit.read = of_engines(lambda engine: CIRCUIT_VALUES[engine.breaker.circuit])
    avoided = fleet.unreachable_pairs.avoided
    metrics.pair_avoided.read = lambda: ((pair, 1.0) for pair in avoided(now()))
    rates = fleet.pair_rates
    metrics.pair_rate.read = lambda: (
        (pair, one.bytes_per_second) for pair, one in rates.slowest(now())
    )
    metrics.pair_seconds.read = lambda: (
        (pair, one.transfer_seconds) for pair, one in rates.slowest(now())
    )
    metrics.pair_slowness.read = lambda: ((p, one.slowness) for p, one in rates.slow.items())
    metrics.fleet_changes.read = lambda: (((what,), n) for what, n in registry.counts.items())
    metrics.source_engines.read = of_sources(lambda standing: len(standing.listed))
    metrics.source_trouble.read = of_sources(lambda standing: bool(standing.problem))
    metrics.source_told.read = of_sources(lambda standing: standing.listed_at)
    metrics.group_weight.read = lambda: (
        ((name,), group.weight) for name, group in count_groups(fleet).items()
    )
    metrics.group_engines.read = lambda: (
        ((name, role), count)
        for name, group in count_groups(fleet).items()
        for role, count in ((PREFILL, group.prefillers), (DECODE, group.decoders))
    )
