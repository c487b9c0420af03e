"""Polls engines once a second, while somebody looks, for their KV usage and their KV transfers.

A failed poll does not affect an engine's health, which only probes determine.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from time import monotonic as now
from typing import NamedTuple

from pydantic import BaseModel

from router.fleet.engine import Engine, Health
from router.fleet.fleet import Fleet
from router.fleet.probes import json_of
from router.http_client.errors import UpstreamError
from router.http_client.pool import CompleteAnswer
from router.ui.live_requests import EngineLink
from router.ui.transfers import TransferHistory, TransferPage, dicts_in, parse_transfers

logger = logging.getLogger("disagg_router.ui")
POLL_INTERVAL_S = 1.0
POLL_TIMEOUT_S = 2.0  # for one round of all engines
MAX_AGE_S = 5.0  # of an engine's last answer
MAX_CONCURRENT_POLLS = 32
MAX_ANSWER_BYTES = 4 * 1024 * 1024
LEASES_PATH = "/disagg/leases"
METRICS_PATH = "/metrics"
# The names of vLLM, of older releases of vLLM, and of the reference engine.
SAMPLE = re.compile(
    rb"^(vllm:kv_cache_usage_perc|vllm:gpu_cache_usage_perc|vllm:num_requests_waiting"
    rb"|vllm:nixl_bytes_transferred_sum|disagg_engine_blocks|disagg_engine_blocks_free"
    rb"|disagg_engine_requests_waiting)(?:\{[^\n]{0,4096}\})? ([0-9.eE+-]{1,32})",
    re.MULTILINE,
)
KV_USAGE = (b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc")
WAITING = (b"vllm:num_requests_waiting", b"disagg_engine_requests_waiting")
TRANSFERRED_BYTES = b"vllm:nixl_bytes_transferred_sum"


class EngineGauge(BaseModel):
    """An engine's gauges; None for what it does not report.

    `kv_usage` is a share of 1. `leases` counts requests whose KV other engines may still read, and
    `quarantined` those whose blocks it cannot free yet.
    """

    kv_usage: float | None = None
    waiting: int | None = None
    leases: int | None = None
    quarantined: int | None = None
    bytes_per_second: float | None = None


class PolledGauge(NamedTuple):
    at: float
    gauge: EngineGauge
    num_bytes: float | None
    """KV bytes transferred since the engine started."""


class EnginePoller:
    """The gauges and transfers that the engines of a fleet reported lately, by engine name."""

    def __init__(self, fleet: Fleet, clock: Callable[[], float] = now) -> None:
        self._fleet = fleet
        self._clock = clock
        self._polled: dict[str, PolledGauge] = {}
        self._transfers = TransferHistory()

    async def run(self) -> None:
        while True:
            try:
                await self.poll_all()
            except Exception:
                logger.exception("the dashboard could not poll the engines")
            await asyncio.sleep(POLL_INTERVAL_S)

    async def poll_all(self) -> None:
        """Poll every engine once, except those that do not answer in time."""
        permits = asyncio.Semaphore(MAX_CONCURRENT_POLLS)
        engines = [one for one in self._fleet.engines if one.health is not Health.UNHEALTHY]
        known = {engine.name for engine in self._fleet.engines}
        self._polled = {name: one for name, one in self._polled.items() if name in known}
        self._transfers.keep(known)
        try:
            async with asyncio.timeout(POLL_TIMEOUT_S):
                polls = (self._poll(engine, permits) for engine in engines)
                await asyncio.gather(*polls, return_exceptions=True)
        except TimeoutError:
            pass

    def gauges(self) -> dict[str, EngineGauge]:
        oldest = self._clock() - MAX_AGE_S
        return {name: one.gauge for name, one in self._polled.items() if one.at >= oldest}

    def pages(self) -> dict[str, TransferPage]:
        return self._transfers.latest(self._clock() - MAX_AGE_S)

    def byte_rates(self) -> dict[EngineLink, float]:
        """Return bytes per second by link, where engines report them."""
        roles = {engine.name: engine.role for engine in self._fleet.engines}
        return self._transfers.byte_rates(roles, self._clock() - MAX_AGE_S)

    async def _poll(self, engine: Engine, permits: asyncio.Semaphore) -> None:
        async with permits:
            answer = await _get(engine, METRICS_PATH)
            if answer is None:
                return
            asked, leases = self._clock(), None
            if engine.capabilities.lists_capabilities:
                leases = await _get(engine, LEASES_PATH)
        gauge, num_bytes = parse_metrics(answer.body)
        content = None if leases is None else json_of(leases)
        gauge.leases, gauge.quarantined = count_leases(content)
        page = parse_transfers(content, asked)
        if page != TransferPage(asked):
            self._transfers.note(engine.name, page)
        at, before = self._clock(), self._polled.get(engine.name)
        if before and before.num_bytes is not None and num_bytes is not None and at > before.at:
            moved = max(0.0, num_bytes - before.num_bytes)
            gauge.bytes_per_second = round(moved / (at - before.at), 1)
        self._polled[engine.name] = PolledGauge(at, gauge, num_bytes)


def parse_metrics(text: bytes) -> tuple[EngineGauge, float | None]:
    """Read an engine's metrics: its gauges, and the KV bytes transferred since its start.

    Never raises; values that make no sense are left out.
    """
    sums: dict[bytes, float] = {}
    highest: dict[bytes, float] = {}
    for name, digits in SAMPLE.findall(text):
        try:
            value = float(digits)
        except ValueError:
            continue
        if 0 <= value < 1e18:
            sums[name] = sums.get(name, 0.0) + value
            highest[name] = max(highest.get(name, 0.0), value)
    usage = next((highest[name] for name in KV_USAGE if name in highest), None)
    blocks = sums.get(b"disagg_engine_blocks")
    free = sums.get(b"disagg_engine_blocks_free")
    if usage is None and blocks and free is not None:
        usage = 1 - free / blocks
    waiting = next((sums[name] for name in WAITING if name in sums), None)
    gauge = EngineGauge(
        kv_usage=None if usage is None else round(min(1.0, max(0.0, usage)), 3),
        waiting=None if waiting is None else int(waiting),
    )
    return gauge, sums.get(TRANSFERRED_BYTES)


def count_leases(page: object) -> tuple[int | None, int | None]:
    """Return the leases and the quarantined requests of all ranks together; never raises."""
    ranks = list(dicts_in(page, "ranks"))

    def total(name: str) -> int | None:
        counts = [rank[name] for rank in ranks if type(rank.get(name)) is int]
        return sum(counts) if counts else None

    return total("num_leases"), total("num_quarantined")


async def _get(engine: Engine, path: str) -> CompleteAnswer | None:
    try:
        answer = await engine.get(path, now() + POLL_TIMEOUT_S, MAX_ANSWER_BYTES)
    except UpstreamError:
        return None
    return answer if answer.status == 200 else None
