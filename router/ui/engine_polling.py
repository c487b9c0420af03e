"""What engines say of their KV: asked once a second while somebody looks.

Whatever an engine answers, or does not, is no news of its health: that is for probes to find.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from pydantic import BaseModel

from router.fleet.engine import Engine, Health
from router.fleet.fleet import Fleet
from router.fleet.probes import json_of
from router.http_client.deadlines import now
from router.http_client.errors import UpstreamError
from router.http_client.pool import CompleteAnswer
from router.ui.live_requests import EngineLink
from router.ui.transfers import NOTHING, TransferHistory, TransferPage, page_in

logger = logging.getLogger("disagg_router.page")
EVERY = 1.0
# Seconds for one round, of all engines; and how old an engine's last word may be.
PATIENCE = 2.0
OLDEST = 5.0
AT_ONCE = 32
MOST_BYTES = 4 * 1024 * 1024
LEASES = "/disagg/leases"
METRICS = "/metrics"
# vLLM's names, older vLLM's, and those of the reference engine.
SAMPLE = re.compile(
    rb"^(vllm:kv_cache_usage_perc|vllm:gpu_cache_usage_perc|vllm:num_requests_waiting"
    rb"|vllm:nixl_bytes_transferred_sum|disagg_engine_blocks|disagg_engine_blocks_free"
    rb"|disagg_engine_requests_waiting)(?:\{[^\n]{0,4096}\})? ([0-9.eE+-]{1,32})",
    re.MULTILINE,
)
USAGE = (b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc")
WAITING = (b"vllm:num_requests_waiting", b"disagg_engine_requests_waiting")
MOVED = b"vllm:nixl_bytes_transferred_sum"


class EngineGauge(BaseModel):
    """None: the engine does not say. `kv_usage` is a share, `leases` counts what it keeps for
    others to read, `quarantined` what it cannot let go of yet."""

    kv_usage: float | None = None
    waiting: int | None = None
    leases: int | None = None
    quarantined: int | None = None
    bytes_per_second: float | None = None


@dataclass(slots=True)
class PolledGauge:
    at: float
    gauge: EngineGauge
    moved: float | None


@dataclass(frozen=True, slots=True)
class PolledMetrics:
    usage: float | None
    waiting: int | None
    moved: float | None


class EnginePoller:
    """`told` are the gauges of those that have answered lately, by name."""

    def __init__(self, fleet: Fleet, clock: Callable[[], float] = now) -> None:
        self._fleet = fleet
        self._clock = clock
        self._said: dict[str, PolledGauge] = {}
        self._traffic = TransferHistory()

    async def run(self) -> None:
        """Ends only when it is cancelled."""
        while True:
            try:
                await self.ask_all()
            except Exception:
                logger.exception("engines could not be asked for their gauges")
            await asyncio.sleep(EVERY)

    async def ask_all(self) -> None:
        """One round; who has not answered when it is over is not waited for."""
        room = asyncio.Semaphore(AT_ONCE)
        engines = [one for one in self._fleet.engines if one.health is not Health.UNHEALTHY]
        known = {engine.name for engine in self._fleet.engines}
        self._said = {name: said for name, said in self._said.items() if name in known}
        self._traffic.keep(known)
        try:
            async with asyncio.timeout(PATIENCE):
                asks = (self._ask(engine, room) for engine in engines)
                await asyncio.gather(*asks, return_exceptions=True)
        except TimeoutError:
            pass

    def told(self) -> dict[str, EngineGauge]:
        oldest = self._clock() - OLDEST
        return {name: said.gauge for name, said in self._said.items() if said.at >= oldest}

    def pages(self) -> dict[str, TransferPage]:
        """What those say of their transfers that have, lately."""
        return self._traffic.latest(self._clock() - OLDEST)

    def rates(self) -> dict[EngineLink, float]:
        """Bytes a second, as far as engines tell."""
        roles = {engine.name: engine.role for engine in self._fleet.engines}
        return self._traffic.rates(roles, self._clock() - OLDEST)

    async def _ask(self, engine: Engine, room: asyncio.Semaphore) -> None:
        async with room:
            metrics = await _get(engine, METRICS)
            if metrics is None:
                return
            asked, answer = self._clock(), None
            if engine.capabilities.lists_capabilities:
                answer = await _get(engine, LEASES)
        figures = figures_in(metrics.body)
        content = None if answer is None else json_of(answer)
        leases, quarantined = leases_in(content)
        page = page_in(content, asked)
        if page != replace(NOTHING, at=asked):
            self._traffic.note(engine.name, page)
        at, before = self._clock(), self._said.get(engine.name)
        gauge = EngineGauge(
            kv_usage=figures.usage,
            waiting=figures.waiting,
            leases=leases,
            quarantined=quarantined,
            bytes_per_second=_speed(before, figures.moved, at),
        )
        self._said[engine.name] = PolledGauge(at, gauge, figures.moved)


def figures_in(metrics: bytes) -> PolledMetrics:
    """Total: what makes no sense is not there."""
    sums: dict[bytes, float] = {}
    highest: dict[bytes, float] = {}
    for name, digits in SAMPLE.findall(metrics):
        value = _number(digits)
        if value is not None:
            sums[name] = sums.get(name, 0.0) + value
            highest[name] = max(highest.get(name, 0.0), value)
    usage = next((highest[name] for name in USAGE if name in highest), None)
    blocks = sums.get(b"disagg_engine_blocks")
    free = sums.get(b"disagg_engine_blocks_free")
    if usage is None and blocks and free is not None:
        usage = 1 - free / blocks
    waiting = next((sums[name] for name in WAITING if name in sums), None)
    return PolledMetrics(
        None if usage is None else round(min(1.0, max(0.0, usage)), 3),
        None if waiting is None else int(waiting),
        sums.get(MOVED),
    )


def leases_in(page: object) -> tuple[int | None, int | None]:
    """How many leases and how many quarantined requests all ranks have together."""
    if not isinstance(page, dict) or not isinstance(page.get("ranks"), list):
        return None, None
    ranks = [rank for rank in page["ranks"] if isinstance(rank, dict)]

    def total(name: str) -> int | None:
        counts = [rank[name] for rank in ranks if type(rank.get(name)) is int]
        return sum(counts) if counts else None

    return total("num_leases"), total("num_quarantined")


def _number(digits: bytes) -> float | None:
    try:
        value = float(digits)
    except ValueError:
        return None
    return value if 0 <= value < 1e18 else None


def _speed(before: PolledGauge | None, moved: float | None, at: float) -> float | None:
    if before is None or before.moved is None or moved is None or at <= before.at:
        return None
    return round(max(0.0, moved - before.moved) / (at - before.at), 1)


async def _get(engine: Engine, path: str) -> CompleteAnswer | None:
    try:
        answer = await engine.get(path, now() + PATIENCE, MOST_BYTES)
    except UpstreamError:
        return None
    return answer if answer.status == 200 else None
