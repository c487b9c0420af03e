"""The objects that all requests of a router process share.

`RouteFinder` gives the routing policies, which are pure, what they look at: the snapshot of the
fleet, the request's prompt, and counters for round robin.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Container, Coroutine, Iterable, Sequence, Set
from dataclasses import dataclass, replace
from random import random
from typing import Any, Protocol

from msgspec import structs

from router.auth.api_keys import CREDENTIALS, ApiKey
from router.auth.authenticator import Authenticator
from router.conversations.conversations import Conversations
from router.fleet.engine import Engine, EngineRole
from router.fleet.fleet import Fleet, GroupPool, Snapshot
from router.fleet.readiness import Readiness, assess_readiness, describe_lack
from router.fleet.token_proofs import TokenProofs
from router.http_client.answer_limits import MemoryBudget
from router.http_client.errors import UpstreamError
from router.openai.errors import EngineError, NoEngineError, UnknownModelError
from router.proxy.aborts import AbortableRequests
from router.proxy.admission import Admission, has_engine_limits
from router.proxy.internal_fields import ROUTING_HEADERS
from router.proxy.large_bodies import Pacer
from router.proxy.messages import NOT_TO_ENGINE
from router.proxy.model_aliases import ModelAliases
from router.proxy.release import KvReleaser
from router.proxy.request import Request
from router.proxy.request_limits import RequestLimits
from router.routing.chunk_index import ChunkIndex
from router.routing.holders import HolderFinder
from router.routing.policy import LoadBound, RoutingQuery
from router.routing.prefix_cache import PrefixAffinity
from router.routing.prompt_chunks import MAX_CHUNKS, TOKENS_PER_CHUNK, adapter_chunk, hash_chunks
from router.routing.route import POLICIES, PREFILL_POLICIES, GroupPolicies, Route, route
from router.settings import Settings, read_secret
from router.telemetry.logs import LogOnce, LogThrottle, is_short, write_lines
from router.telemetry.metrics import Metrics
from router.telemetry.record import Record
from router.telemetry.request_metrics import RecordBatches, RecordReader
from router.telemetry.tracing import FLUSH_TIMEOUT_S, TRACE_HEADERS, Tracer

# A prefill engine works on one prompt at a time, so a second request there has to wait already.
PREFILL_LOAD_FLOOR = 2
BY_LOAD = ("least_loaded", "power_of_two")


class RouteFinder:
    """The routing policies of both roles, and the fleet that they choose from.

    `load_bound` decides when an engine that affinity prefers is too busy. `names_models`: clients
    may know of models that are not theirs.
    """

    def __init__(
        self,
        settings: Settings,
        fleet: Fleet,
        aliases: ModelAliases,
        names_models: bool = True,
    ) -> None:
        self._names_models = names_models
        self._aliases = aliases
        self.load_bound = LoadBound(settings.affinity_load_factor, settings.affinity_load_floor)
        floor = min(PREFILL_LOAD_FLOOR, self.load_bound.floor)
        prefill_bound = LoadBound(self.load_bound.factor, floor)
        self._fleet = fleet
        self.index = ChunkIndex(settings.max_prefix_memory, settings.host_cache_tokens)
        self.holders = HolderFinder(self.index) if settings.share_prefix_cache else None
        # With one decode engine, its cache still decides whether a prompt needs a prefill engine.
        self._least_decoders = 1 if settings.min_remote_prefill_tokens else 2
        self._has_target_itl = settings.target_itl > 0
        self._shows_divergence = settings.ui
        self._lone_decoders: Sequence[Engine] = ()
        prefill, decode = (
            PREFILL_POLICIES[settings.prefill_policy],
            POLICIES[settings.decode_policy],
        )
        self.prefill = GroupPolicies(prefill, prefill_bound, self.index)
        self.decode = GroupPolicies(decode, self.load_bound, self.index)
        # Requests for adapters need a policy that remembers prompts, instead of one by load alone.
        self._adapter_prefill, self._adapter_decode = self.prefill, self.decode
        if settings.prefill_policy in BY_LOAD:
            self._adapter_prefill = GroupPolicies(PrefixAffinity, prefill_bound, self.index)
        if settings.decode_policy in BY_LOAD:
            self._adapter_decode = GroupPolicies(PrefixAffinity, self.load_bound, self.index)
        self._prefill_turn = self._decode_turn = 0
        self._looked_at: Snapshot | None = None
        self._needs_chunks = False
        fleet.on_lost = self._forget_engine
        fleet.on_new_groups = self._forget_old_groups

    def find(
        self,
        request: Request,
        home: Engine | None = None,
        but: Container[str] = (),
    ) -> Route:
        """Return the engines that may serve the request, best first.

        The decode engine `home` comes before others, if it serves the model. Groups in `but` are
        left out. Raises UnknownModelError, NoEngineError.
        """
        pools = self.pools(request)
        if but:
            pools = [pool for pool in pools if pool.group not in but]
        if home is not None and not _serves(home, request.model):
            home = None
        session = "" if request.turn is None else request.turn.session
        is_long = request.tokens >= TOKENS_PER_CHUNK
        chunks = hash_chunks(request.body) if is_long and self._chunks_matter() else ()
        prefill, decode, tokens, marks = self.prefill, self.decode, request.tokens, 0
        adapters = self._fleet.snapshot.adapters
        if adapters and isinstance(request.model, str) and request.model in adapters:
            prefill, decode, marks = self._adapter_prefill, self._adapter_decode, self.index.stride
            chunks = ((adapter_chunk(request.model),) * marks + chunks)[:MAX_CHUNKS]
            tokens += marks * TOKENS_PER_CHUNK
        if chunks and self._shows_divergence:
            found = self.index.describe_divergence(request.body, chunks, marks)
            request.record.diverges_in = found or request.record.diverges_in
        turn = self._decode_turn
        self._decode_turn = turn + 1
        decoder = RoutingQuery(turn, session, chunks, tokens, marks)
        prefiller = None
        if not request.decode_only_reason:
            same = turn == self._prefill_turn  # as long as no request needed a decode engine alone
            prefiller = decoder if same else structs.replace(decoder, turn=self._prefill_turn)
            self._prefill_turn += 1
        rates = self._fleet.pair_rates
        slowness = rates.slowness if rates.slow else None
        return route(pools, prefill, decode, (prefiller, decoder), home, random, slowness)

    def others(self, request: Request, planned: Route, role: EngineRole) -> Iterable[Engine]:
        """Yield the engines of the planned group as they are now: first those for the role, then
        those of both roles that prefer the other one."""
        for pool in self._fleet.snapshot.pools(request.model):
            if pool.group == planned.group:
                yield from pool.by_role(role)
                yield from (one for one in pool.by_role(role.other) if one.role.plays(role))

    def pools(self, request: Request) -> Sequence[GroupPool]:
        """Return the groups that serve the request's model. Raises UnknownModelError,
        NoEngineError."""
        snapshot, model = self._fleet.snapshot, request.model
        pools = snapshot.by_model.get(model) if type(model) is str else None
        pools = pools or snapshot.pools(model)
        if pools:
            return pools
        if self._fleet.may_serve(request.model):
            raise self.lack_of(EngineRole.DECODE, request.model)
        served = self._aliases.served(request.exchange.caller)
        raise UnknownModelError(request.requested_model, served)

    def lack_of(self, role: EngineRole, model: object, addition: str = "") -> NoEngineError:
        """Return the error for a request whose model has no engine of a role that could serve."""
        lack = describe_lack(self._fleet, model, role, self._names_models)
        return NoEngineError(f"{lack}{addition}")

    def is_model_ambiguous(self) -> bool:
        """Return True if a request without a model may reach engines of several models: no engine's
        models are known, and there is a choice of engines."""
        pools = self._fleet.snapshot.unknown_models
        return any(len(pool.prefillers) > 1 or len(pool.decoders) > 1 for pool in pools)

    def shares_kv_loads(self, model: object) -> bool:
        """Return True if each decode engine of a model loads KV once for several answers."""
        pools = self._fleet.snapshot.pools(model)
        return all(one.capabilities.shares_kv_loads for pool in pools for one in pool.decoders)

    def _chunks_matter(self) -> bool:
        """Return True if a policy remembers prompts and has a choice or shows what it remembers, or
        if a lone decode engine may compute prompts by load."""
        snapshot = self._fleet.snapshot
        if snapshot is not self._looked_at:
            least = 1 if self._shows_divergence else 2
            prefill, decode = self.prefill.uses_feedback, self.decode.uses_feedback
            self._looked_at, self._needs_chunks = (
                snapshot,
                any(
                    (prefill and len(pool.prefill_places or pool.prefillers) >= least)
                    or (decode and len(pool.decode_places or pool.decoders) >= self._least_decoders)
                    for pool in snapshot.any_model
                )
                or (self.holders is not None and bool(snapshot.lenders)),
            )
            may_be_local = decode and self._has_target_itl
            self._lone_decoders = [
                engine for pool in snapshot.any_model if may_be_local for engine in pool.decoders
            ]
        if self._needs_chunks:
            return True
        return any(engine.capabilities.max_step_tokens for engine in self._lone_decoders)

    def _forget_engine(self, engine: Engine) -> None:
        self._fleet.unreachable_pairs.forget(engine.name)
        if self.holders is not None:
            self.holders.forget(engine.name)
        for name in (engine.name, *(rank.name for rank in engine.ranks or ())):
            self.index.forget(name)  # whose group may be gone
            for policies in self._policies():
                policies.forget(name, engine.group)

    def _policies(self) -> Iterable[GroupPolicies]:
        return self.prefill, self.decode, self._adapter_prefill, self._adapter_decode

    def _forget_old_groups(self) -> None:
        for policies in self._policies():
            policies.keep_only(self._fleet.groups)


def _serves(engine: Engine, model: object) -> bool:
    return engine.models is None or model in engine.models


# Seconds for tasks to end by themselves when the router stops.
CLOSE_TIMEOUT_S = 2.0


class RequestTasks:
    """`running` are the tasks of requests, `background` those that outlive one.

    `is_draining`: the router stops, and new requests are not wanted. `is_interrupted`: running
    requests are cancelled, and answer their clients with an error. `abortable`: those that clients
    may end by their ids.
    """

    def __init__(self) -> None:
        self.running: set[asyncio.Task[None]] = set()
        self.background: set[asyncio.Task[None]] = set()
        self.abortable = AbortableRequests()
        self.is_draining = False
        self.is_interrupted = False

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run work that outlives its request. The work must end soon, without being cancelled."""
        task = asyncio.get_running_loop().create_task(work)
        self.background.add(task)
        task.add_done_callback(self.background.discard)
        return task

    async def finish(self, work: Coroutine[Any, Any, None]) -> None:
        """Wait for work that continues even if its request is cancelled."""
        await asyncio.shield(self.spawn(work))

    def interrupt(self) -> None:
        """End every running request with an error for its client."""
        self.is_interrupted = True
        for task in list(self.running):
            task.cancel()

    async def close(self) -> None:
        """Wait CLOSE_TIMEOUT_S for all tasks, then cancel those that are left."""
        if left := self.running | self.background:
            _, late = await asyncio.wait(left, timeout=CLOSE_TIMEOUT_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)


class RetryBudget:
    """Allow retries for a `share` of the requests of the last seconds, and for `floor` requests in
    any case, so that retries cannot double the load of an outage.

    `window` is in seconds. The budget counts in two halves of the window.
    """

    def __init__(self, share: float = 0.2, floor: int = 100, window: float = 10.0) -> None:
        self._share = share
        self._floor = floor
        self._half = window / 2
        self._turns_at = 0.0
        self._requests = [0, 0]
        self._retries = [0, 0]

    def note_request(self, now: float) -> None:
        if now >= self._turns_at:
            self._turn(now)
        self._requests[0] += 1

    def take(self, now: float) -> bool:
        """Return True, and count the retry, if one more leg may be sent at time `now`."""
        if not self.is_left(now):
            return False
        self._retries[0] += 1
        return True

    def is_left(self, now: float) -> bool:
        if now >= self._turns_at:
            self._turn(now)
        return sum(self._retries) < max(self._floor, self._share * sum(self._requests))

    def _turn(self, now: float) -> None:
        is_long_ago = now >= self._turns_at + self._half
        self._requests = [0, 0 if is_long_ago else self._requests[0]]
        self._retries = [0, 0 if is_long_ago else self._retries[0]]
        self._turns_at = now + self._half


class RequestWatch(Protocol):
    """The dashboard, which follows requests from their begin to their end."""

    def opened(self, record: Record) -> None: ...
    def closed(self, record: Record) -> None: ...


@dataclass(slots=True)
class MemoryLimits:
    """The limits on memory that all requests hold together."""

    bodies: MemoryBudget
    answers: MemoryBudget
    resume_buffers: MemoryBudget


class Gateway:
    """The parts that requests share, each with one owner: `routes` finds engines, `tasks` are the
    running requests, `admission` and `budget` limit what engines get, `memory` what requests hold,
    `releaser` releases KV that no engine will read, and `pacer` spreads work on large bodies.

    `settings` are those in force. `watch` is None while the dashboard is not open.
    """

    def __init__(
        self,
        settings: Settings,
        fleet: Fleet,
        metrics: Metrics,
        conversations: Conversations | None = None,
        tracer: Tracer | None = None,
        authenticator: Authenticator | None = None,
        answers: MemoryBudget | None = None,
    ) -> None:
        """Raises SettingsError for an engine's key that cannot be read."""
        self.settings = settings
        self.watch: RequestWatch | None = None
        # The names of engines whose streams move elsewhere when they drain.
        self.migrating: Set[str] = frozenset()
        self.limits = RequestLimits.of(settings)
        self.fleet = fleet
        self.metrics = metrics
        self.conversations = conversations
        self.authenticator = authenticator
        secret = read_secret(settings, "engine_api_key")
        # The credential for engines; and whether clients' credentials are for the router alone.
        shown = b"" if secret is None else secret.encode()
        self.engine_line = b"authorization: Bearer %b\r\n" % shown if shown else b""
        self.hides_credentials = authenticator is not None or secret is not None
        # With a tracer, each leg has trace headers of its own.
        self.not_to_engine = NOT_TO_ENGINE
        if not settings.trust_client_kv_params:
            self.not_to_engine |= ROUTING_HEADERS
        if self.hides_credentials:
            self.not_to_engine |= CREDENTIALS
        if tracer is not None:
            self.not_to_engine |= TRACE_HEADERS
        self.tasks, self.pacer = RequestTasks(), Pacer()
        self.throttle = LogThrottle(logging.getLogger("disagg_router.proxy"))
        # What other dialects than chat completions cannot translate and leave out.
        self.left_out = LogOnce(logging.getLogger("disagg_router.proxy"))
        self.aliases = ModelAliases(settings.model_alias, fleet)
        self.routes = RouteFinder(settings, fleet, self.aliases, authenticator is None)
        if authenticator is not None:
            authenticator.spawn = self.tasks.spawn
        self.budget = RetryBudget()
        self.token_proofs = TokenProofs()
        self.admission = (
            Admission(settings, fleet, metrics) if has_engine_limits(settings) else None
        )
        self.memory = MemoryLimits(
            bodies=MemoryBudget(settings.max_held_bodies),
            answers=MemoryBudget(settings.max_held_answers) if answers is None else answers,
            resume_buffers=MemoryBudget(settings.max_resume_memory),
        )
        self.releaser = KvReleaser(
            fleet,
            metrics,
            self.memory.answers,
            self.throttle,
            self.tasks.spawn,
            settings.max_answer_size,
            self.budget.take,
        )
        readers: list[RecordReader] = [metrics.requests.add_records]
        if settings.access_log:
            readers.append(write_lines)
        if tracer is not None:
            readers.append(tracer.add_records)
        # The short access log reports how much KV was moved, from the params of each request.
        self.logs_moved_blocks = settings.access_log and is_short(settings.log_format)
        self.tracer = tracer
        self.records = RecordBatches(readers)

    def tune(self, settings: Settings) -> None:
        """Apply the settings that may change while requests run. They hold for new requests."""
        self.settings = settings
        self.limits = replace(
            self.limits,
            changing_prompt_lines=settings.changing_prompt_lines,
            max_body_size=settings.max_body_size,
            max_connections=settings.max_connections,
        )
        self.memory.bodies.limit = settings.max_held_bodies
        self.memory.answers.limit = settings.max_held_answers
        self.memory.resume_buffers.limit = settings.max_resume_memory
        if self.admission is not None:
            self.admission.tune(settings)
        elif has_engine_limits(settings):
            self.admission = Admission(settings, self.fleet, self.metrics)

    def assess_readiness(self, prober_problem: str) -> Readiness:
        """Return why requests are not answered, or answered with more work than necessary.

        `prober_problem` is why engines are not probed as they should be; empty if they are.
        """
        limits = self.limits
        found = assess_readiness(
            self.fleet, limits.without_prefiller == "decode", limits.without_prefiller_tokens
        )
        reasons = dict(found.blocking)
        if prober_problem:
            reasons["prober"] = prober_problem
        if self.tasks.is_draining:
            reasons["router"] = "shutting down"
        return Readiness(reasons, found.degrading)

    def identify(self, headers: Sequence[tuple[bytes, bytes]]) -> ApiKey | str | None:
        """Return the API key of a request, MISSING or INCORRECT for a request without a valid one,
        or None if the router has no API keys."""
        return None if self.authenticator is None else self.authenticator.identify(headers)

    async def close(self) -> None:
        """Wait for what still runs, then close conversations, limits, records and traces."""
        await self.tasks.close()
        if self.conversations is not None:
            await self.conversations.close()
        if self.authenticator is not None:
            await self.authenticator.close()
        self.records.flush()
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close, FLUSH_TIMEOUT_S)

    def note_failure(
        self, engine: Engine, role: EngineRole, error: UpstreamError | EngineError
    ) -> None:
        """Name the engine's role in the error, count it, and log it at most once per period."""
        error.role = role
        self.metrics.upstream_errors.labels(role, error.kind).inc()
        self.throttle.warn(f"{role.engine} {engine.name} {error.phrase}", str(error))
