"""Probes each engine with GET /health on the connections that requests use.

Nothing that an engine answers, and no error of the router while reading it, ends the probing of
this or another engine. Each question has one deadline, and an answer is read up to a limit. The
prober also fetches what engines report of themselves: their models and their identity page.

A frozen engine is found within one interval plus as many timeouts as failures are tolerated, since
a probe without any answer is repeated at once. An engine whose bytes still arrive on any connection
is busy, not dead.

In a large fleet, healthy engines are probed less often, but before their kept connections expire,
since a new connection costs more than several probes. An engine with requests that sends nothing is
probed within one interval. First probes begin in batches, and intervals vary a little, so that
engines are not probed all at once. Healthy engines get quiet probes (`router.fleet.engine_probe`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from functools import partial
from time import monotonic as now
from typing import Any, NamedTuple

import orjson

from router.fleet.engine import PREFILL, Engine, Health
from router.fleet.engine_probe import (
    CROWDING,
    HEALTH_PATH,
    LEAST_BOUND,
    MAX_ANSWER_BYTES,
    TICK_S,
    TRANSFERS_INTERVAL_S,
    EngineProbe,
    ProbePace,
    spread,
)
from router.fleet.fleet import Fleet, ProcessIdentity
from router.fleet.kv_facts import (
    IDENTITY_PATH,
    READ_METRICS,
    RankFacts,
    ranks_of_metrics,
    ranks_of_page,
    start_time_in,
)
from router.fleet.kv_protocol import MODELS_PATH, WITHOUT_VLLM_FIELDS, KvProtocol, find_kv_peer
from router.fleet.metrics_page import MAX_METRICS_BYTES, METRICS_PATH, find_lines
from router.fleet.pair_rates import TRANSFERS_PATH, UNKNOWN, stock_totals
from router.http_client.errors import (
    AnswerTooLargeError,
    ConnectRefusedError,
    ConnectTimeoutError,
    EngineLostError,
    LocalError,
    SilenceError,
    UpstreamError,
)
from router.http_client.pool import CompleteAnswer
from router.telemetry.logs import LogThrottle

logger = logging.getLogger("disagg_router.fleet")

# The rate at which healthy engines are probed, all together, unless they are silent.
MAX_QUIET_PROBES_PER_S = 200
# A healthy engine is probed when this share of the time has passed after which an idle connection
# closes.
IDLE_SHARE = 0.85
# First probes start in batches.
BATCH_SIZE, BATCH_INTERVAL_S = 50, 0.01
# The longest interval between probes of an engine that is not healthy.
UNHEALTHY_INTERVAL_S = 1.0
MAX_MODELS = 10_000
BOOTSTRAP_TIMEOUT_S = 1.0
# An engine that lists its models slowly gets no requests until then, and is probed meanwhile.
MODELS_TIMEOUT_S = 30.0
# An engine may refuse connections and send nothing for this long before its legs fail. A draining
# engine answers its last legs within this time; one whose core died, as vLLM's may on SIGTERM,
# never does.
LEG_GRACE_S = 120.0
# The same for streams that another engine can continue, which loses nothing. An engine that still
# answers sends a token sooner.
STREAM_GRACE_S = 5.0
# A probe that is this much late counts as dead.
OVERDUE_S = 10.0
# A repeated error is logged again after this time.
LOG_INTERVAL_S = 60.0

# vLLM's page of its version, which has no other field.
VERSION_PATH = "/version"

Model = dict[str, Any]


class Prober:
    """Probes all engines of a fleet, with one supervised task per engine. `interval`, `timeout` and
    `max_idle_s` (of connections) are seconds; `kv_protocol` and `bootstrap_port` are for engines
    whose source names none."""

    def __init__(
        self,
        fleet: Fleet,
        interval: float,
        timeout: float,
        max_idle_s: float,
        kv_protocol: KvProtocol | None,
        bootstrap_port: int,
    ) -> None:
        self._fleet = fleet
        self._kv_protocol, self._bootstrap_port = kv_protocol, bootstrap_port
        self._interval = interval
        self._timeout, self._max_idle_s = timeout, max_idle_s
        self._probes: dict[Engine, EngineProbe] = {}
        # Since when an engine refuses connections and sends nothing, and its reads until then.
        self._refusing: dict[Engine, tuple[float, int]] = {}
        # The router's own errors, and pages that are too large, by engine.
        self._throttles: dict[Engine, LogThrottle] = {}
        self._failure = ""
        self._pace = ProbePace()
        fleet.on_stale_models = self._read_models

    async def run(self) -> None:
        """Probe all engines until cancelled."""
        try:
            while True:
                self._supervise()
                await asyncio.sleep(min(self._interval, UNHEALTHY_INTERVAL_S))
        except BaseException as error:
            self._failure = f"{type(error).__name__}: {error}"
            if isinstance(error, Exception):
                logger.exception("the prober failed, and probes have stopped")
            raise
        finally:
            for engine in list(self._probes):
                self._stop(engine)

    async def wait_for_first_results(self, timeout_s: float) -> None:
        """Wait until each known engine was probed once, or the timeout is over."""
        self._supervise()
        probes = list(self._probes.values())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for probe in probes:
                    await probe.has_result.wait()

    def problem(self) -> str:
        """Return why engines are not probed as they should be; empty if they are."""
        if self._failure:
            return f"failed: {self._failure}"
        limit = self._quiet_interval() + 3 * self._timeout + OVERDUE_S
        late = [e.name for e, probe in self._probes.items() if now() - probe.probed_at > limit]
        return f"does not probe {', '.join(late)}" if late else ""

    async def probe(self, engine: Engine, failure: UpstreamError | None = None) -> bool:
        """Probe an engine once, unless its quiet probe has just ended with `failure`. Return True
        if nothing was heard of it, so that another probe is due at once."""
        reads = engine.pool.reads
        try:
            if failure is not None:
                raise failure
            answer = await self._get(engine, HEALTH_PATH)
        except ConnectRefusedError as error:
            self._fleet.note_unreachable(engine, f"no connection: {error}")
            self._note_refusal(engine)
        except LocalError as error:
            # A problem of the router's own is no evidence about an engine, but an engine that was
            # never reached cannot be used.
            throttle = self._throttle_of(engine)
            throttle.warn(f"{engine.role.engine} {engine.name} was not probed", str(error))
            if engine.health is Health.UNKNOWN:
                self._fleet.note_unreachable(engine, f"not probed: {error}")
        except (SilenceError, ConnectTimeoutError) as error:
            if engine.pool.reads == reads:
                self._fleet.note_probe_failed(engine, f"/health: {error}", is_silent=True)
                return True
            self._fleet.note_busy(engine)
        except UpstreamError as error:
            self._fleet.note_probe_failed(engine, f"/health: {type(error).__name__}: {error}")
        else:
            self._refusing.pop(engine, None)
            if _is_success(answer):
                if engine.health is not Health.HEALTHY:
                    # Its group and models must be known before its first leg. Those of the process
                    # that was at the address before may not be those of this one.
                    try:
                        await self.fetch_models(engine, self._timeout)
                    except UpstreamError as error:
                        self._fleet.note_no_models(engine, f"/v1/models: {error}")
                    with contextlib.suppress(UpstreamError):
                        await self.fetch_identity(engine)
                self._fleet.note_probe_passed(engine)
            else:
                self._fleet.note_probe_failed(engine, f"/health returned {answer.status}")
        return False

    def _throttle_of(self, engine: Engine) -> LogThrottle:
        return self._throttles.setdefault(engine, LogThrottle(logger, LOG_INTERVAL_S))

    def _note_refusal(self, engine: Engine) -> None:
        moment, reads = now(), engine.pool.reads
        since, before = self._refusing.get(engine, (moment, reads))
        if reads != before:
            since = moment
        self._refusing[engine] = since, reads
        error = EngineLostError(f"{engine.name} refuses connections and sends nothing")
        if moment - since > LEG_GRACE_S:
            engine.pool.fail_legs(error)
        elif moment - since > STREAM_GRACE_S:
            engine.pool.fail_resumable(error)

    async def fetch_identity(self, engine: Engine) -> None:
        """Fetch the identity page. Engines other than ours have none, or a strange one; their
        metrics tell the size of their cache and their data-parallel ranks. Raises UpstreamError if
        there was no answer."""
        answer = await self._get(engine, IDENTITY_PATH)
        self._note_page(engine, IDENTITY_PATH, answer.body)
        content = json_of(answer)
        ranks: Sequence[RankFacts] = ()
        process = ProcessIdentity()
        if isinstance(content, dict):
            try:
                engine.capabilities.note_identity(content)
                ranks = ranks_of_page(content)
                endpoints = engine.capabilities.rank_endpoints.values()
                process = ProcessIdentity(frozenset([one.remote_engine_id for one in endpoints]))
            except Exception:
                logger.exception("the identity page of engine %s cannot be read", engine.name)
            self._fleet.note_identity(engine)
        capabilities = engine.capabilities
        if not capabilities.kv.has_page:
            await self.fetch_kv_peer(engine)
        capabilities.is_identity_known = True
        if not capabilities.cache_tokens or (engine.ranks is None and not ranks):
            text = await self._fetch_metrics(engine)
            if text is not None:
                process = process._replace(started=start_time_in(text))
                found = ranks_of_metrics(text)
                ranks = ranks or found
                tokens = sum(rank.cache_tokens for rank in found)
                capabilities.cache_tokens = capabilities.cache_tokens or tokens
        self._fleet.note_process(engine, process)
        self._fleet.note_ranks(engine, ranks)

    async def fetch_kv_peer(self, engine: Engine) -> None:
        """Detect the KV protocol of an engine without our identity page, and the release of a
        vLLM. Raises UpstreamError."""
        capabilities, get = engine.capabilities, partial(self._get, engine)
        port = engine.spec.bootstrap_port or self._bootstrap_port
        capabilities.kv_peer = await find_kv_peer(
            get,
            engine.spec.kv_protocol or self._kv_protocol,
            lambda path: engine.get_at_port(
                port, path, now() + BOOTSTRAP_TIMEOUT_S, MAX_ANSWER_BYTES
            ),
            port,
            engine.role.plays(PREFILL),
        )
        if capabilities.kv_peer.protocol not in WITHOUT_VLLM_FIELDS:
            page = json_of(await get(VERSION_PATH))
            capabilities.note_release(page if isinstance(page, dict) and len(page) == 1 else {})

    async def _fetch_metrics(self, engine: Engine) -> str | None:
        """Return the lines of an engine's metrics that matter here, None without an answer."""
        try:
            answer = await self._get(engine, METRICS_PATH, MAX_METRICS_BYTES)
        except AnswerTooLargeError as error:
            text = f"the cache size and ranks of {engine.name} are unknown: /metrics cannot be read"
            self._throttle_of(engine).warn(text, str(error))
            return None
        except UpstreamError:
            return None
        if not _is_success(answer):
            return None
        return find_lines(answer.body, READ_METRICS).decode("utf-8", "replace")

    async def fetch_transfers(self, engine: Engine) -> None:
        """Fetch how much KV the engine has moved, and in what time. Raises UpstreamError."""
        rates = self._fleet.pair_rates
        if engine.capabilities.lists_capabilities:
            answer = await self._get(engine, TRANSFERS_PATH)
            if _is_success(answer):
                rates.note_page(engine.name, answer.body, now())
        elif engine.capabilities.kv.has_connector:
            answer = await self._get(engine, METRICS_PATH, MAX_METRICS_BYTES)
            totals = stock_totals(answer.body) if _is_success(answer) else None
            if totals is not None:
                rates.note((UNKNOWN, engine.name), totals, now())

    async def fetch_models(self, engine: Engine, timeout: float = MODELS_TIMEOUT_S) -> None:
        """Fetch the models that the engine serves. What is known stays if it rejects the request,
        as one with an API key of its own does. Raises UpstreamError if there was no answer within
        `timeout` seconds."""
        if engine.spec.models:
            return
        answer = await engine.get(MODELS_PATH, now() + timeout, MAX_ANSWER_BYTES)
        self._note_page(engine, MODELS_PATH, answer.body)
        if models := models_in(json_of(answer)):
            self._fleet.note_models(engine, *model_facts_in(models[:MAX_MODELS]))
        elif engine.models is None or engine.health is not Health.HEALTHY:
            self._fleet.note_no_models(engine, f"/v1/models returned {answer.status}")
        elif _is_success(answer):
            self._fleet.note_no_models(engine, "/v1/models lists no models")

    def _supervise(self) -> None:
        engines = self._fleet.engines
        for engine in self._probes.keys() - set(engines):
            self._stop(engine)
        begun, interval = 0, self._quiet_interval()
        self._pace.most = max(LEAST_BOUND, int(CROWDING * len(engines) * TICK_S / interval))
        for engine in engines:
            probe = self._probes.get(engine)
            if probe is None:
                probe = self._probes[engine] = EngineProbe(engine, self._timeout, self._pace)
            probe.interval = interval
            if probe.task is None or probe.task.done():
                probe.probed_at = now()
                delay = begun // BATCH_SIZE * BATCH_INTERVAL_S
                probe.task = asyncio.create_task(self._probe_repeatedly(engine, probe, delay))
                begun += 1
            elif not engine.is_idle:
                probe.check()

    def _quiet_interval(self) -> float:
        for_all = len(self._fleet.engines) / MAX_QUIET_PROBES_PER_S
        return max(self._interval, min(for_all, self._max_idle_s * IDLE_SHARE))

    def _stop(self, engine: Engine) -> None:
        self._refusing.pop(engine, None)
        self._throttles.pop(engine, None)
        probe = self._probes.pop(engine)
        for task in (probe.task, probe.models_task):
            if task is not None:
                task.cancel()

    async def _probe_repeatedly(self, engine: Engine, probe: EngineProbe, delay: float) -> None:
        if delay:
            await asyncio.sleep(delay)
        failure: UpstreamError | None = None
        while True:
            is_silent = False
            try:
                is_silent = await self.probe(engine, failure)
                await self._fetch_what_is_due(engine, probe)
            except Exception as error:
                logger.warning("%s %s: %r", engine.role.engine, engine.name, error)
            probe.probed_at = now()
            probe.has_result.set()
            failure = None
            if engine.health is not Health.HEALTHY:
                await asyncio.sleep(spread(min(self._interval, UNHEALTHY_INTERVAL_S)))
            elif not is_silent:
                failure = await probe.watch()

    async def _fetch_what_is_due(self, engine: Engine, probe: EngineProbe) -> None:
        if engine.health is not Health.HEALTHY:
            probe.pages.clear()
            return
        capabilities, is_old = engine.capabilities, probe.is_due(IDENTITY_PATH)
        if not capabilities.is_identity_known or (capabilities.lists_capabilities and is_old):
            with contextlib.suppress(UpstreamError):
                await self.fetch_identity(engine)
        if engine.is_unread or (not engine.spec.models and probe.is_due(MODELS_PATH)):
            self._read_models(engine)
        if now() - probe.transfers_at > TRANSFERS_INTERVAL_S:
            probe.transfers_at = now()
            with contextlib.suppress(UpstreamError):
                await self.fetch_transfers(engine)

    def _read_models(self, engine: Engine) -> None:
        """Read the engine's models in the background: a slow answer delays no probe."""
        probe = self._probes.get(engine)
        if probe is None or (probe.models_task is not None and not probe.models_task.done()):
            return
        probe.note_page(MODELS_PATH, b"")

        async def read() -> None:
            try:
                await self.fetch_models(engine)
            except UpstreamError as error:
                if engine.models is None:
                    self._fleet.note_no_models(engine, f"/v1/models: {error}")
            except Exception:
                logger.exception("the models of engine %s cannot be read", engine.name)

        probe.models_task = asyncio.create_task(read())

    def _note_page(self, engine: Engine, path: str, body: bytes) -> None:
        if probe := self._probes.get(engine):
            probe.note_page(path, body)

    async def _get(
        self, engine: Engine, path: str, limit: int = MAX_ANSWER_BYTES
    ) -> CompleteAnswer:
        """Raises UpstreamError."""
        return await engine.get(path, now() + self._timeout, limit)


def _is_success(answer: CompleteAnswer) -> bool:
    return 200 <= answer.status < 300


def json_of(answer: CompleteAnswer) -> object:
    """Return the JSON of a successful answer; None if it has none."""
    try:
        return orjson.loads(answer.body) if _is_success(answer) else None
    except orjson.JSONDecodeError:
        return None


class ModelFacts(NamedTuple):
    """The facts in a list of models that `Fleet.note_models` takes."""

    names: frozenset[str]
    context_lengths: dict[str, int]
    adapters: frozenset[str]
    base_models: tuple[str, ...]


def model_facts_in(models: list[Model]) -> ModelFacts:
    """Return the facts of a list. vLLM names the base model of an adapter as its `parent`, and
    where a model comes from as its `root`, which is equal for all names of one model."""
    adapters = frozenset([m["id"] for m in models if isinstance(m.get("parent"), str)])
    base = [model for model in models if model["id"] not in adapters]
    roots = {str(model.get("root") or model["id"]) for model in base}
    lengths = [(model["id"], model.get("max_model_len")) for model in models]
    return ModelFacts(
        frozenset([model["id"] for model in models]),
        {name: tokens for name, tokens in lengths if type(tokens) is int and tokens > 0},
        adapters,
        tuple([model["id"] for model in base]) if len(roots) == 1 else (),
    )


def models_in(content: object) -> list[Model] | None:
    """Return the models with a name in an answer to GET /v1/models; None if it is no such list."""
    data = content.get("data") if isinstance(content, dict) else None
    if not isinstance(data, list):
        return None
    return [m for m in data if isinstance(m, dict) and isinstance(m.get("id"), str)]
