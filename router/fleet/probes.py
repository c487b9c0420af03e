"""Asks every engine again and again whether it is alive: GET /health, off the hot path."""

from __future__ import annotations

import asyncio

import httpx

from router.fleet.engine import Engine, State
from router.fleet.fleet import Fleet

IMPATIENT = 1.0


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
        async with asyncio.TaskGroup() as group:
            for engine in self._fleet.engines:
                group.create_task(self._watch(engine))

    async def probe(self, engine: Engine) -> None:
        try:
            answer = await self._client.get(f"{engine.url}/health", timeout=self._timeout)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            self._fleet.unreachable(engine, f"no connection: {error or 'timeout'}")
        except Exception as error:  # whatever it was, the probing must go on
            self._fleet.probe_failed(engine, f"{type(error).__name__}: {error}")
        else:
            if answer.is_success:
                self._fleet.probe_passed(engine)
            else:
                self._fleet.probe_failed(engine, f"/health says {answer.status_code}")

    async def ask_identity(self, engine: Engine) -> None:
        """What our engines say of themselves; others have no such page."""
        learned = engine.learned
        try:
            answer = await self._client.get(f"{engine.url}/disagg/identity", timeout=self._timeout)
            learned.asked = True
            content = answer.json() if answer.is_success else None
        except (httpx.HTTPError, ValueError):
            return
        if isinstance(content, dict):
            learned.note_identity(content)

    async def _watch(self, engine: Engine) -> None:
        while True:
            await self.probe(engine)
            healthy = engine.state is State.HEALTHY
            if healthy and engine.learned.wanted and not engine.learned.asked:
                await self.ask_identity(engine)
            await asyncio.sleep(self._interval if healthy else min(self._interval, IMPATIENT))
