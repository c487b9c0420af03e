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
from typing import NamedTuple

import orjson

from router.fleet.engine import Engine, Health
from router.fleet.fleet import Fleet
from router.upstream.deadlines import now
from router.upstream.errors import (
    AnswerTimeoutError,
    ConnectRefusedError,
    ConnectTimeoutError,
    LocalError,
    StaleConnectionError,
    UpstreamError,
)

logger = logging.getLogger("disagg_router.fleet")

IMPATIENT = 1.0
ANSWER_LIMIT = 1024 * 1024
# Seconds between two questions for what an engine says of itself: adapters come and go, and a quick
# restart may go unseen.
LEARNED_AGE = 10.0
MOST_MODELS = 10_000
# Seconds after which a watch that has not looked is taken for dead.
PATIENCE = 10.0


class SilenceError(AnswerTimeoutError):
    """Not even the beginning of an answer came in time."""


class Told(NamedTuple):
    status: int
    body: bytes

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300


class Watch:
    """One engine's: when it was looked at, and when its models were asked for."""

    def __init__(self, engine: Engine, task: asyncio.Task[None], moment: float) -> None:
        self.engine = engine
        self.task = task
        self.looked_at = moment


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
        self._watches: dict[Engine, Watch] = {}
        self._models_at: dict[Engine, float] = {}
        self._identity_at: dict[Engine, float] = {}
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
                watch.task.cancel()

    def trouble(self) -> str:
        """Why engines are not watched as they should be; empty if they are."""
        if self._death:
            return f"died: {self._death}"
        patience = self._interval + 3 * self._timeout + PATIENCE
        late = [
            watch.engine.name
            for watch in self._watches.values()
            if self._clock() - watch.looked_at > patience
        ]
        return f"does not look at {', '.join(late)}" if late else ""

    async def probe(self, engine: Engine) -> bool:
        """True when it met silence, which is worth another look at once."""
        heard = engine.pool.heard
        try:
            told = await self._ask(engine, "/health")
        except ConnectRefusedError as error:
            self._fleet.unreachable(engine, f"no connection: {error}")
        except LocalError as error:
            self._not_probed(engine, error)
        except SilenceError as error:
            if engine.pool.heard == heard:
                self._fleet.probe_failed(engine, f"/health: {error}", is_silent=True)
                return True
            self._fleet.is_busy(engine)
        except UpstreamError as error:
            self._fleet.probe_failed(engine, f"/health: {type(error).__name__}: {error}")
        else:
            if told.is_success:
                self._fleet.probe_passed(engine)
            else:
                self._fleet.probe_failed(engine, f"/health says {told.status}")
        return False

    def _not_probed(self, engine: Engine, error: LocalError) -> None:
        """Our own trouble says nothing of an engine; but who was never reached is not there."""
        logger.warning("%s engine %s was not probed: %s", engine.role, engine.name, error)
        if engine.health is Health.UNKNOWN:
            self._fleet.unreachable(engine, f"not probed: {error}")

    async def ask_identity(self, engine: Engine) -> None:
        """What our engines say of themselves; others have no such page, or an absurd one."""
        try:
            told = await self._ask(engine, "/disagg/identity")
        except UpstreamError:
            return  # Asked again.
        engine.learned.asked = True
        self._identity_at[engine] = self._clock()
        content = _read(told)
        if content is not None:
            engine.learned.note_identity(content)

    async def ask_models(self, engine: Engine) -> None:
        """Which models it serves; not known where it does not tell us, as with a key of its own."""
        try:
            told = await self._ask(engine, "/v1/models")
        except UpstreamError:
            return
        self._models_at[engine] = self._clock()
        models = models_in(_read(told))
        if models:
            self._fleet.serves(engine, frozenset(models[:MOST_MODELS]))

    def _supervise(self) -> None:
        engines = self._fleet.engines
        for engine in self._watches.keys() - set(engines):
            self._watches.pop(engine).task.cancel()
            self._models_at.pop(engine, None)
            self._identity_at.pop(engine, None)
        for engine in engines:
            watch = self._watches.get(engine)
            if watch is None or watch.task.done():
                task = asyncio.get_running_loop().create_task(self._watch(engine))
                self._watches[engine] = Watch(engine, task, self._clock())

    async def _watch(self, engine: Engine) -> None:
        while True:
            met_silence = False
            try:
                met_silence = await self.probe(engine)
                await self._learn(engine)
            except Exception as error:
                logger.warning("%s engine %s: %r", engine.role, engine.name, error)
            self._watches[engine].looked_at = self._clock()
            is_healthy = engine.health is Health.HEALTHY
            if not (met_silence and is_healthy):
                pause = self._interval if is_healthy else min(self._interval, IMPATIENT)
                await asyncio.sleep(pause)

    async def _learn(self, engine: Engine) -> None:
        if engine.health is not Health.HEALTHY:
            self._models_at.pop(engine, None)
            return
        is_old = self._clock() - self._identity_at.get(engine, -math.inf) > LEARNED_AGE
        if not engine.learned.asked or (engine.learned.told and is_old):
            await self.ask_identity(engine)
        asked_at = self._models_at.get(engine, -math.inf)
        if not engine.spec.models and self._clock() - asked_at > LEARNED_AGE:
            await self.ask_models(engine)

    async def _ask(self, engine: Engine, path: str) -> Told:
        """Raises UpstreamError."""
        deadline = now() + self._timeout
        message = f"GET {path} HTTP/1.1\r\nhost: {engine.name}\r\n\r\n".encode("ascii")
        try:
            return await _tell(engine, message, deadline)
        except StaleConnectionError:
            return await _tell(engine, message, deadline, fresh=True)


async def _tell(engine: Engine, message: bytes, deadline: float, fresh: bool = False) -> Told:
    try:
        answer = await engine.pool.send(message, deadline, fresh)
    except (AnswerTimeoutError, ConnectTimeoutError) as error:
        raise SilenceError(f"no connection: {error}") from error
    try:
        body = await answer.read(ANSWER_LIMIT)
        return Told(answer.status, body)
    except AnswerTimeoutError as error:
        raise error if answer.status else SilenceError("not a word") from error
    finally:
        answer.close()


def _read(told: Told) -> dict[str, object] | None:
    try:
        content = orjson.loads(told.body) if told.is_success else None
    except orjson.JSONDecodeError:
        return None
    return content if isinstance(content, dict) else None


def models_in(content: dict[str, object] | None) -> list[str]:
    """The ids of GET /v1/models."""
    data = None if content is None else content.get("data")
    if not isinstance(data, list):
        return []
    ids = [model.get("id") for model in data if isinstance(model, dict)]
    return [name for name in ids if isinstance(name, str)]
