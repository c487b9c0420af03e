"""Asks every engine again and again whether it is alive: GET /health, the way that requests go.

Nothing that an engine answers, nor a fault of ours while reading it, ends a watch: the others, and
the same one the next time, are asked all the same. Each question has one deadline for all of it,
and an answer is read up to a bound. What engines say of themselves is asked here, too.

A frozen engine is found within one interval and as many timeouts as failures are tolerated, for a
question that met silence is asked again at once. An engine whose bytes still arrive on any
connection is busy, not dead.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from router.fleet.engine import Engine, Health
from router.fleet.fleet import Fleet
from router.http_client.deadlines import now
from router.http_client.errors import (
    ConnectRefusedError,
    ConnectTimeoutError,
    EngineLostError,
    LocalError,
    SilenceError,
    UpstreamError,
)
from router.http_client.pool import CompleteAnswer

logger = logging.getLogger("disagg_router.fleet")

IMPATIENT = 1.0
ANSWER_LIMIT = 1024 * 1024
# Seconds between two questions for what an engine says of itself: adapters come and go, and a quick
# restart may go unseen.
LEARNED_AGE = 10.0
MOST_MODELS = 10_000
# Seconds that an engine may refuse connections and say nothing to whoever waits, before its legs
# are given up: one that drains answers what it has by then, and one whose core has died, as vLLM's
# may on SIGTERM, never does.
LEAVING = 120.0
# The same for streams that another engine can go on with: nothing is lost by that, and an engine
# which answers says a token sooner.
LEAVING_STREAMS = 5.0
# Seconds after which a watch that has not looked is taken for dead.
PATIENCE = 10.0


Model = dict[str, Any]


@dataclass(slots=True, eq=False)
class EngineProbe:
    """One engine's: when it was looked at, and when it said who it is and which models it has."""

    looked_at: float
    identity_at: float = -math.inf
    models_at: float = -math.inf
    task: asyncio.Task[None] | None = None


class Prober:
    """One supervised task per engine. An engine that is not healthy is asked at least every
    IMPATIENT seconds."""

    def __init__(
        self,
        fleet: Fleet,
        interval: float,
        timeout: float,
        clock: Callable[[], float] = now,
    ) -> None:
        self._fleet = fleet
        self._interval = interval
        self._timeout = timeout
        self._clock = clock
        self._watches: dict[Engine, EngineProbe] = {}
        # Since when an engine refuses connections in silence, and what was heard of it by then.
        self._refusing: dict[Engine, tuple[float, int]] = {}
        self._death = ""

    async def run(self) -> None:
        """Keeps a watch on every engine there is; ends only when it is cancelled."""
        try:
            while True:
                self._supervise()
                await asyncio.sleep(min(self._interval, IMPATIENT))
        except BaseException as error:
            self._death = f"{type(error).__name__}: {error}"
            if isinstance(error, Exception):
                logger.exception("the prober died: engines are not watched any more")
            raise
        finally:
            for watch in self._watches.values():
                _cancel(watch)

    def problem(self) -> str:
        """Why engines are not watched as they should be; empty if they are."""
        if self._death:
            return f"died: {self._death}"
        patience = self._interval + 3 * self._timeout + PATIENCE
        late = [
            engine.name
            for engine, watch in self._watches.items()
            if self._clock() - watch.looked_at > patience
        ]
        return f"does not look at {', '.join(late)}" if late else ""

    async def probe(self, engine: Engine) -> bool:
        """True when it met silence, which is worth another look at once."""
        heard = engine.pool.reads
        try:
            told = await self._ask(engine, "/health")
        except ConnectRefusedError as error:
            self._fleet.note_unreachable(engine, f"no connection: {error}")
            self._note_refusal(engine)
        except LocalError as error:
            self._not_probed(engine, error)
        except (SilenceError, ConnectTimeoutError) as error:
            if engine.pool.reads == heard:
                self._fleet.note_probe_failed(engine, f"/health: {error}", is_silent=True)
                return True
            self._fleet.note_busy(engine)
        except UpstreamError as error:
            self._fleet.note_probe_failed(engine, f"/health: {type(error).__name__}: {error}")
        else:
            self._refusing.pop(engine, None)
            if _is_success(told):
                if engine.health is not Health.HEALTHY:
                    await self.fetch_identity(engine)  # so its group is known before it is asked
                self._fleet.note_probe_passed(engine)
            else:
                self._fleet.note_probe_failed(engine, f"/health says {told.status}")
        return False

    def _note_refusal(self, engine: Engine) -> None:
        moment, heard = self._clock(), engine.pool.reads
        since, before = self._refusing.get(engine, (moment, heard))
        if heard != before:
            since = moment
        self._refusing[engine] = since, heard
        error = EngineLostError(f"{engine.name} left, and answers nobody")
        if moment - since > LEAVING:
            engine.pool.fail_legs(error)
        elif moment - since > LEAVING_STREAMS:
            engine.pool.fail_resumable(error)

    def _not_probed(self, engine: Engine, error: LocalError) -> None:
        """Our own trouble says nothing of an engine; but who was never reached is not there."""
        logger.warning("%s engine %s was not probed: %s", engine.role, engine.name, error)
        if engine.health is Health.UNKNOWN:
            self._fleet.note_unreachable(engine, f"not probed: {error}")

    async def fetch_identity(self, engine: Engine) -> bool:
        """What our engines say of themselves; others have no such page, or an absurd one. False
        where there was no answer, so that it is asked again."""
        try:
            told = await self._ask(engine, "/disagg/identity")
        except UpstreamError:
            return False
        engine.capabilities.is_identity_known = True
        content = json_of(told)
        if isinstance(content, dict):
            try:
                engine.capabilities.note_identity(content)
            except Exception:
                logger.exception("%s says strange things of itself", engine.name)
            self._fleet.note_identity(engine)
        return True

    async def fetch_models(self, engine: Engine) -> bool:
        """Which models it serves; not known where it does not tell us, as with a key of its own.
        False where there was no answer, so that it is asked again."""
        try:
            told = await self._ask(engine, "/v1/models")
        except UpstreamError:
            return False
        models = models_in(json_of(told))
        if models:
            models = models[:MOST_MODELS]
            names = frozenset([model["id"] for model in models])
            self._fleet.note_models(engine, names, contexts_in(models))
        return True

    def _supervise(self) -> None:
        engines = self._fleet.engines
        for engine in self._watches.keys() - set(engines):
            _cancel(self._watches.pop(engine))
            self._refusing.pop(engine, None)
        for engine in engines:
            watch = self._watches.setdefault(engine, EngineProbe(self._clock()))
            if watch.task is None or watch.task.done():
                watch.looked_at = self._clock()
                watch.task = asyncio.get_running_loop().create_task(self._watch(engine, watch))

    async def _watch(self, engine: Engine, watch: EngineProbe) -> None:
        while True:
            met_silence = False
            try:
                met_silence = await self.probe(engine)
                await self._learn(engine, watch)
            except Exception as error:
                logger.warning("%s engine %s: %r", engine.role, engine.name, error)
            watch.looked_at = self._clock()
            is_healthy = engine.health is Health.HEALTHY
            if not (met_silence and is_healthy):
                pause = self._interval if is_healthy else min(self._interval, IMPATIENT)
                await asyncio.sleep(pause)

    async def _learn(self, engine: Engine, watch: EngineProbe) -> None:
        if engine.health is not Health.HEALTHY:
            watch.models_at = watch.identity_at = -math.inf
            return
        if engine.capabilities.is_identity_known and watch.identity_at == -math.inf:
            watch.identity_at = self._clock()  # before it was found healthy
        is_old = self._clock() - watch.identity_at > LEARNED_AGE
        is_due = not engine.capabilities.is_identity_known or (
            engine.capabilities.lists_capabilities and is_old
        )
        if is_due and await self.fetch_identity(engine):
            watch.identity_at = self._clock()
        is_due = not engine.spec.models and self._clock() - watch.models_at > LEARNED_AGE
        if is_due and await self.fetch_models(engine):
            watch.models_at = self._clock()

    async def _ask(self, engine: Engine, path: str) -> CompleteAnswer:
        """Raises UpstreamError."""
        return await engine.get(path, now() + self._timeout, ANSWER_LIMIT)


def _cancel(watch: EngineProbe) -> None:
    if watch.task is not None:
        watch.task.cancel()


def _is_success(told: CompleteAnswer) -> bool:
    return 200 <= told.status < 300


def json_of(told: CompleteAnswer) -> object:
    """The JSON that an engine told, None if it is none."""
    try:
        return orjson.loads(told.body) if _is_success(told) else None
    except orjson.JSONDecodeError:
        return None


def contexts_in(models: list[Model]) -> dict[str, int]:
    """How long a prompt and its answer may be together, of those models that tell (as vLLM's)."""
    told = [(model["id"], model.get("max_model_len")) for model in models]
    return {name: tokens for name, tokens in told if type(tokens) is int and tokens > 0}


def models_in(content: object) -> list[Model] | None:
    """Those of GET /v1/models that have a name; None where it is no list of models."""
    data = content.get("data") if isinstance(content, dict) else None
    if not isinstance(data, list):
        return None
    return [m for m in data if isinstance(m, dict) and isinstance(m.get("id"), str)]
