"""Asks every engine again and again whether it is alive: GET /health, off the hot path.

What an engine answers, or a fault of ours while reading it, ends no watch: the others, and the same
one the next time, are asked all the same. Each question has one deadline for all of it, and an
answer is read up to a bound.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import NamedTuple

import httpx

from router.fleet.engine import Engine, State
from router.fleet.fleet import Fleet

logger = logging.getLogger("disagg_router.fleet")

IMPATIENT = 1.0
ANSWER_LIMIT = 1024 * 1024


class Answer(NamedTuple):
    status: int
    body: bytes

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300


class AnswerTooLongError(Exception):
    pass


class Prober:
    """One task per engine. An engine that is not healthy is asked at least every IMPATIENT s."""

    def __init__(
        self, fleet: Fleet, client: httpx.AsyncClient, interval: float, timeout: float
    ) -> None:
        self._fleet = fleet
        self._client = client
        self._interval = interval
        self._timeout = timeout

    async def run(self) -> None:
        """Ends only when it is cancelled."""
        async with asyncio.TaskGroup() as group:
            for engine in self._fleet.engines:
                group.create_task(self._watch(engine))

    async def probe(self, engine: Engine) -> None:
        try:
            answer = await self._ask(engine, "/health")
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            self._fleet.unreachable(engine, f"no connection: {error or 'timeout'}")
        except Exception as error:
            self._fleet.probe_failed(engine, f"{type(error).__name__}: {error}")
        else:
            if answer.is_success:
                self._fleet.probe_passed(engine)
            else:
                self._fleet.probe_failed(engine, f"/health says {answer.status}")

    async def ask_identity(self, engine: Engine) -> None:
        """What our engines say of themselves; others have no such page, or an absurd one."""
        try:
            answer = await self._ask(engine, "/disagg/identity")
        except (httpx.HTTPError, TimeoutError):
            return  # Asked again.
        engine.learned.asked = True
        content = json.loads(answer.body) if answer.is_success else None
        if isinstance(content, dict):
            engine.learned.note_identity(content)

    async def _ask(self, engine: Engine, path: str) -> Answer:
        """Raises httpx.HTTPError, TimeoutError, AnswerTooLongError."""
        async with (
            asyncio.timeout(self._timeout),
            self._client.stream("GET", engine.url + path, timeout=self._timeout) as answer,
        ):
            body = bytearray()
            async for chunk in answer.aiter_bytes():
                body += chunk
                if len(body) > ANSWER_LIMIT:
                    raise AnswerTooLongError(f"{path} answers more than {ANSWER_LIMIT} bytes")
            return Answer(answer.status_code, bytes(body))

    async def _watch(self, engine: Engine) -> None:
        while True:
            try:
                await self._look(engine)
            except Exception as error:
                logger.warning("%s engine %s: %r", engine.role, engine.name, error)
            is_healthy = engine.state is State.HEALTHY
            await asyncio.sleep(self._interval if is_healthy else min(self._interval, IMPATIENT))

    async def _look(self, engine: Engine) -> None:
        await self.probe(engine)
        learned = engine.learned
        if engine.state is State.HEALTHY and learned.wanted and not learned.asked:
            await self.ask_identity(engine)
