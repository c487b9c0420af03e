"""What every flow works with: the engines, the policies, and the books."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Container, Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from msgspec import structs

from router.auth.api_keys import ApiKey
from router.auth.authenticator import Authenticator
from router.conversations.conversations import Conversations
from router.fleet.engine import Engine
from router.fleet.engine_spec import EngineRole
from router.fleet.fleet import Fleet
from router.fleet.snapshot import GroupPool, Snapshot
from router.http_client.answer_memory import AnswerMemory
from router.http_client.errors import UpstreamError
from router.openai.errors import EngineError, NoEngineError, UnknownModelError
from router.proxy.admission import Admission, Held, has_limits
from router.proxy.request import Request
from router.proxy.request_limits import Limits
from router.proxy.retry import RetryBudget
from router.routing.load_policies import LoadBound
from router.routing.policy import RoutingQuery
from router.routing.prompt_chunks import TOKENS_PER_CHUNK, hash_chunks
from router.routing.route import GroupPolicies, Route, route
from router.settings import Settings
from router.telemetry.access_log import write_lines
from router.telemetry.logs import LogThrottle, is_short
from router.telemetry.metrics import Metrics
from router.telemetry.record import Record, RecordBatches, RecordReader
from router.telemetry.trace_export import FLUSH_TIMEOUT_S, Tracer

PARTING = 2.0
# A prefiller works at one prompt after the other: with two, the second one waits already.
PREFILL_FLOOR = 2


class Watch(Protocol):
    """Somebody looks at requests as they come and go."""

    def opened(self, record: Record) -> None: ...
    def closed(self, record: Record) -> None: ...


class Gateway:
    """`running` holds the tasks of all requests; `draining` says that no new ones are wanted.
    `settings` are those in force, `watch` is None as long as nobody looks."""

    def __init__(
        self,
        settings: Settings,
        fleet: Fleet,
        metrics: Metrics,
        conversations: Conversations | None = None,
        tracer: Tracer | None = None,
        authenticator: Authenticator | None = None,
        answers: AnswerMemory | None = None,
    ) -> None:
        """Raises SettingsError for an engine's key that cannot be read."""
        self.settings = settings
        self.watch: Watch | None = None
        self.limits = Limits.of(settings)
        self.fleet = fleet
        self.metrics = metrics
        self.conversations = conversations
        self.authenticator = authenticator
        if authenticator is not None:
            authenticator.spawn = self.spawn
        secret = settings.engine_secret()
        # What engines are shown; and whether what clients show is for the router alone.
        shown = b"" if secret is None else secret.encode()
        self.engine_line = b"authorization: Bearer %b\r\n" % shown if shown else b""
        self.hides_credentials = authenticator is not None or secret is not None
        self.load_bound = LoadBound(settings.affinity_load_factor, settings.affinity_load_floor)
        self.budget = RetryBudget()
        self.admission = Admission(settings, fleet, metrics) if has_limits(settings) else None
        self.held = Held(settings.max_held_bodies)
        self.answers = AnswerMemory(settings.max_held_answers) if answers is None else answers
        self.resume_memory = Held(settings.max_resume_memory)
        readers: list[RecordReader] = [metrics.by_model.add_records]
        if settings.access_log:
            readers.append(write_lines)
        if tracer is not None:
            readers.append(tracer.add_records)
        # For whom it is said how much was moved: each request's params would be kept for it.
        self.tells_moved = settings.access_log and is_short(settings.log_format)
        self.tracer = tracer
        self.records = RecordBatches(readers)
        self.running: set[asyncio.Task[None]] = set()
        self.draining = False
        self.interrupted = False
        self.throttle = LogThrottle(logging.getLogger("disagg_router.flows"))
        floor = min(PREFILL_FLOOR, self.load_bound.floor)
        prefill_bound = LoadBound(self.load_bound.factor, floor)
        self._prefill = GroupPolicies(settings.prefill_policy, prefill_bound)
        self._decode = GroupPolicies(settings.decode_policy, self.load_bound)
        self._prefill_turn = self._decode_turn = 0
        self._looked_at: Snapshot | None = None
        self._wants = False
        fleet.on_lost = self._forget
        fleet.on_new_groups = self._keep
        self._background: set[asyncio.Task[None]] = set()

    def tune(self, settings: Settings) -> None:
        """Takes over those limits that may change while requests run; they meet new ones."""
        self.settings = settings
        self.limits = replace(
            self.limits,
            max_body_size=settings.max_body_size,
            max_connections=settings.max_connections,
        )
        self.held.limit = settings.max_held_bodies
        self.answers.limit = settings.max_held_answers
        self.resume_memory.limit = settings.max_resume_memory
        if self.admission is not None:
            self.admission.tune(settings)
        elif has_limits(settings):
            self.admission = Admission(settings, self.fleet, self.metrics)

    def identify(self, headers: Sequence[tuple[bytes, bytes]]) -> ApiKey | str | None:
        """Return the API key of a request, MISSING or INCORRECT for a request without a valid one,
        or None if the router has no API keys."""
        return None if self.authenticator is None else self.authenticator.identify(headers)

    def route(
        self, request: Request, home: Engine | None = None, but: Container[str] = ()
    ) -> Route:
        """Who may serve this request, in order of preference; the decoder `home` before others, and
        nobody of the groups `but`.

        Raises UnknownModelError, NoEngineError.
        """
        pools = self.pools(request.body.get("model"))
        if but:
            pools = [pool for pool in pools if pool.group not in but]
        session = "" if request.turn is None else request.turn.conversation.session
        tokens = request.tokens
        chunks = (
            hash_chunks(request.body) if tokens >= TOKENS_PER_CHUNK and self._wants_chunks() else ()
        )
        turn = self._decode_turn
        self._decode_turn = turn + 1
        decoder = RoutingQuery(turn, tokens, session, chunks)
        prefiller = None
        if not request.alone:
            same = turn == self._prefill_turn  # as long as nobody needed a decoder alone
            prefiller = decoder if same else structs.replace(decoder, turn=self._prefill_turn)
            self._prefill_turn += 1
        return route(pools, self._prefill, self._decode, (prefiller, decoder), home)

    def others(self, request: Request, planned: Route, role: EngineRole) -> Iterable[Engine]:
        """Who else of the planned group may be asked, as things are now."""
        for pool in self.fleet.snapshot.pools(request.model):
            if pool.group == planned.group:
                yield from pool.by_role(role)

    def pools(self, model: object) -> Sequence[GroupPool]:
        """Raises UnknownModelError, NoEngineError."""
        pools = self.fleet.snapshot.pools(model)
        if pools:
            return pools
        if self.fleet.may_serve(model):
            raise NoEngineError("no decode engine is healthy")
        raise UnknownModelError(model)

    def shares_loads(self, model: object) -> bool:
        """Whether each decoder of it reads once for several answers."""
        pools = self.fleet.snapshot.pools(model)
        return all(one.capabilities.shares_kv_loads for pool in pools for one in pool.decoders)

    async def finish(self, work: Coroutine[Any, Any, None]) -> None:
        """Waits for something that goes on even if its request does not."""
        await asyncio.shield(self.spawn(work))

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs something that outlives its request; it must end by itself, soon."""
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def close(self) -> None:
        """Lets what still runs and what outlived its request end, then closes the conversations."""
        if left := self.running | self._background:
            _, late = await asyncio.wait(left, timeout=PARTING)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        if self.conversations is not None:
            await self.conversations.close()
        if self.authenticator is not None:
            await self.authenticator.close()
        self.records.flush()
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close, FLUSH_TIMEOUT_S)

    def interrupt(self) -> None:
        """Ends every running request; each tells its client so."""
        self.interrupted = True
        for task in list(self.running):
            task.cancel()

    def _wants_chunks(self) -> bool:
        """Whether a policy remembers who holds what, and has a choice: asked once a snapshot."""
        snapshot = self.fleet.snapshot
        if snapshot is not self._looked_at:
            prefill, decode = self._prefill.uses_feedback, self._decode.uses_feedback
            # A single decoder's cache tells whether it needs a prefiller.
            least = 1 if self.limits.min_remote_prefill_tokens else 2
            self._looked_at, self._wants = (
                snapshot,
                any(
                    (prefill and len(pool.prefillers) > 1)
                    or (decode and len(pool.decoders) >= least)
                    for pool in snapshot.any_model
                ),
            )
        return self._wants

    def _forget(self, engine: Engine) -> None:
        self.fleet.unreachable_pairs.forget(engine.name)
        for policies in (self._prefill, self._decode):
            policies.forget(engine.name, engine.group)

    def _keep(self) -> None:
        """Nothing of groups that are gone."""
        for policies in (self._prefill, self._decode):
            policies.keep_only(self.fleet.groups)

    def note_failure(
        self, engine: Engine, role: EngineRole, error: UpstreamError | EngineError
    ) -> None:
        """Names the engine's role in the error, counts it, and logs it now and then."""
        error.role = role
        self.metrics.upstream_errors.labels(role, error.kind).inc()
        self.throttle.warn(f"{role} engine {engine.name} {error.phrase}", str(error))
