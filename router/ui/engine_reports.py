"""Poll engines for KV usage, bytes per second by link, and the transfers of a request.

The dashboard polls once a second while it has viewers. A failed poll does not affect an engine's
health, which only probes determine. The reader reports a pull, the writer a push. Stock engines
report neither.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from math import inf
from time import monotonic as now
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, Field, ValidationError

from router.fleet.engine import Engine, EngineRole, Health
from router.fleet.fleet import Fleet
from router.fleet.metrics_page import MAX_METRICS_BYTES, METRICS_PATH, find_lines
from router.fleet.probes import json_of
from router.http_client.errors import AnswerTooLargeError, UpstreamError
from router.http_client.pool import CompleteAnswer
from router.telemetry.logs import LogThrottle
from router.ui.live_requests import RATE_WINDOW_S, EngineLink, RequestSummary

MAX_SHOWN_RANKS = 64
MAX_ENTRIES = 512  # of each kind, on one rank's page
MAX_AWAITED_REQUESTS = 512
# How long after a request's end an engine may take to report its transfers.
REPORT_TIMEOUT_S = 5.0
FOREIGN_CHARACTERS = re.compile(r"[^A-Za-z0-9._-]")

POLL_INTERVAL_S = 1.0
POLL_TIMEOUT_S = 2.0  # for one round of all engines
MAX_AGE_S = 5.0  # of an engine's last answer
MAX_CONCURRENT_POLLS = 32
LEASES_PATH = "/disagg/leases"
# The names of vLLM, of older releases of vLLM, and of the reference engine.
KV_USAGE = (b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc")
WAITING = (b"vllm:num_requests_waiting", b"disagg_engine_requests_waiting")
TRANSFERRED_BYTES = b"vllm:nixl_bytes_transferred_sum"
BLOCKS, FREE_BLOCKS = b"disagg_engine_blocks", b"disagg_engine_blocks_free"
READ_METRICS = (*KV_USAGE, *WAITING, TRANSFERRED_BYTES, BLOCKS, FREE_BLOCKS)
SAMPLE = re.compile(
    rb"^(%b)(?:\{[^\n]{0,4096}\})? ([0-9.eE+-]{1,32})" % b"|".join(READ_METRICS), re.MULTILINE
)

logger = logging.getLogger("disagg_router.ui")
_throttle = LogThrottle(logger)
Count = Annotated[int, Field(ge=0, lt=2**50)]
Seconds = Annotated[float, Field(ge=0, lt=1e9, allow_inf_nan=False)]
Operation = Literal["READ", "LOAN", "WRITE"]


class MovedBytes(BaseModel):
    """An entry of an engine's page: bytes to or from another engine since the start."""

    what: Operation
    engine_id: str
    bytes: Count


class EndedTransfer(BaseModel):
    """An entry of an engine's page: one transfer of a request."""

    what: Operation
    found_by: str
    blocks: Count
    bytes: Count
    seconds: Seconds
    age_seconds: Seconds


E = TypeVar("E", MovedBytes, EndedTransfer)


class Transfer(NamedTuple):
    """The KV that one engine moved for one request. `ended` is a time of the router's clock."""

    blocks: int
    bytes: int
    seconds: float
    ended: float


NOTHING = Transfer(0, 0, 0.0, -inf)


@dataclass(frozen=True, slots=True)
class TransferPage:
    """One engine's transfers, as read at the time `at`.

    `ids` are the engine ids of its ranks. `moved` are bytes since its start, by its operation and
    its peer's engine id. `transfers` are the latest ones, by operation and hashed request id.
    """

    at: float
    ids: frozenset[str] = frozenset()
    moved: Mapping[tuple[str, str], int] = field(default_factory=dict)
    transfers: Mapping[tuple[str, str], Transfer] = field(default_factory=dict)


class TransferView(BaseModel):
    """A transfer as the dashboard shows it. `ended` is in milliseconds since the request came."""

    blocks: int
    bytes: int
    ms: float
    ended: float


class RequestTransfers(BaseModel):
    """The transfers of a request: prefiller to decoder; and to the prefiller, from the last turn's
    decoder or as a loan."""

    prompt: TransferView | None = None
    turn: TransferView | None = None


def hash_request_id(request_id: str) -> str:
    """Return the hash by which engines report a request (see engine_ext.http.leases)."""
    return blake2b(FOREIGN_CHARACTERS.sub("-", request_id).encode(), digest_size=8).hexdigest()


def parse_transfers(content: object, at: float) -> TransferPage:
    """Read the transfers of an engine's page, without what makes no sense; never raises."""
    ids: set[str] = set()
    moved: dict[tuple[str, str], int] = {}
    transfers: dict[tuple[str, str], Transfer] = {}
    for rank in islice(dicts_in(content, "ranks"), MAX_SHOWN_RANKS):
        if isinstance(rank.get("engine_id"), str):
            ids.add(rank["engine_id"])
        for one in _entries(MovedBytes, rank, "moved"):
            flow = one.what, one.engine_id
            moved[flow] = moved.get(flow, 0) + one.bytes
        of_rank: dict[tuple[str, str], Transfer] = {}
        for each in _entries(EndedTransfer, rank, "transfers"):
            key: tuple[str, str] = each.what, each.found_by
            old = of_rank.get(key, NOTHING)  # a request of several prompts moves one by one
            of_rank[key] = Transfer(
                old.blocks + each.blocks,
                old.bytes + each.bytes,
                old.seconds + each.seconds,
                max(old.ended, at - each.age_seconds),
            )
        for key, more in of_rank.items():
            old = transfers.get(key, NOTHING)  # ranks move parts of the same blocks together
            transfers[key] = Transfer(
                max(old.blocks, more.blocks),
                old.bytes + more.bytes,
                max(old.seconds, more.seconds),
                max(old.ended, more.ended),
            )
    return TransferPage(at, frozenset(ids), moved, transfers)


def _entries(kind: type[E], rank: Mapping[str, Any], name: str) -> Iterator[E]:
    for entry in islice(dicts_in(rank, name), MAX_ENTRIES):
        with contextlib.suppress(ValidationError):
            yield kind.model_validate(entry)


def dicts_in(within: object, name: str) -> Iterator[dict[str, Any]]:
    entries = within.get(name) if isinstance(within, dict) else None
    if isinstance(entries, list):
        yield from (entry for entry in entries if isinstance(entry, dict))


class TransferHistory:
    """The engines' pages of the last seconds, by engine name."""

    def __init__(self) -> None:
        self._pages: dict[str, deque[TransferPage]] = {}

    def note(self, engine: str, page: TransferPage) -> None:
        pages = self._pages.setdefault(engine, deque())
        pages.append(page)
        while len(pages) > 2 and pages[1].at <= page.at - RATE_WINDOW_S:
            pages.popleft()

    def keep(self, engines: Iterable[str]) -> None:
        self._pages = {name: self._pages[name] for name in engines if name in self._pages}

    def latest(self, oldest: float) -> dict[str, TransferPage]:
        """Return the last page of each engine that has answered since `oldest`."""
        return {name: p[-1] for name, p in self._pages.items() if p[-1].at >= oldest}

    def byte_rates(self, roles: Mapping[str, EngineRole], oldest: float) -> dict[EngineLink, float]:
        """Return bytes per second over each link on which anything moved."""
        latest = self.latest(oldest)
        names = {peer: name for name, page in latest.items() for peer in page.ids}
        found: dict[EngineLink, float] = {}
        for name, last in latest.items():
            first = self._pages[name][0]
            for flow, count in last.moved.items():
                more = count - first.moved.get(flow, 0)
                operation, other = flow[0], names.get(flow[1])
                if last.at <= first.at or more <= 0 or other is None or other == name:
                    continue
                start, end = (name, other) if operation == "WRITE" else (other, name)
                kind = "turn" if roles.get(end) == "prefill" else "prompt"
                if operation == "LOAN":
                    kind = "loan"
                link = start, end, kind
                rate = more / (last.at - first.at)
                found[link] = round(found.get(link, 0.0) + rate, 1)
        return found


@dataclass(slots=True)
class AwaitedRequest:
    """An ended request, and what engines have reported of its transfers."""

    request: RequestSummary
    ended: float
    found: RequestTransfers = field(default_factory=RequestTransfers)

    def search(self, pages: Mapping[str, TransferPage], unix: float) -> RequestTransfers:
        """Return the transfers found so far. Only pages that are younger than its end count."""
        request, digest = self.request, hash_request_id(self.request.id)
        young = {name: page.transfers for name, page in pages.items() if page.at > self.ended}
        p, d = young.get(request.prefiller, {}), young.get(request.decoder, {})
        prompt = d.get(("READ", digest)) or p.get(("WRITE", digest))
        operation = "LOAN" if request.borrowed_from else "READ"
        turn = p.get((operation, digest)) if _has_source(request) else None
        return RequestTransfers(
            prompt=self.found.prompt or _view(prompt, request.at - unix),
            turn=self.found.turn or _view(turn, request.at - unix),
        )


class TransferMatcher:
    """Matches ended requests with the transfers that engines report a little later."""

    def __init__(self, clock: Callable[[], float] = now) -> None:
        self._clock = clock
        self._awaited: OrderedDict[str, AwaitedRequest] = OrderedDict()

    def expect(self, ended: Iterable[RequestSummary]) -> None:
        at = self._clock()
        for request in ended:
            if request.prefiller and request.decoder:
                self._awaited[request.key] = AwaitedRequest(request, at)
        while len(self._awaited) > MAX_AWAITED_REQUESTS:
            self._awaited.popitem(last=False)

    def take(self, pages: Mapping[str, TransferPage], unix: float) -> dict[str, RequestTransfers]:
        """Return what is new, by the requests' keys. `unix` is the Unix time of clock zero."""
        new: dict[str, RequestTransfers] = {}
        for key, one in list(self._awaited.items()):
            found = one.search(pages, unix)
            if found != one.found:
                one.found = new[key] = found
            is_whole = found.prompt and (found.turn or not _has_source(one.request))
            if is_whole or self._clock() - one.ended > REPORT_TIMEOUT_S:
                del self._awaited[key]
        return new


def _has_source(request: RequestSummary) -> bool:
    """Return True if the prefill engine has read KV."""
    return bool(request.reused_from or request.borrowed_from)


def _view(transfer: Transfer | None, came: float) -> TransferView | None:
    if transfer is None:
        return None
    return TransferView(
        blocks=transfer.blocks,
        bytes=transfer.bytes,
        ms=round(transfer.seconds * 1000, 2),
        ended=round((transfer.ended - came) * 1000, 1),
    )


class EngineGauge(BaseModel):
    """An engine's gauges; None for what it does not report.

    `kv_usage` is a share of 1.
    """

    kv_usage: float | None = None
    waiting: int | None = None
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
            answer = await get_page(engine, METRICS_PATH)
            if answer is None:
                return
            asked, transfers = self._clock(), None
            if engine.capabilities.lists_capabilities:
                transfers = await get_page(engine, LEASES_PATH)
        gauge, num_bytes = parse_metrics(answer.body)
        page = parse_transfers(None if transfers is None else json_of(transfers), asked)
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
    for name, digits in SAMPLE.findall(find_lines(text, READ_METRICS)):
        try:
            value = float(digits)
        except ValueError:
            continue
        if 0 <= value < 1e18:
            sums[name] = sums.get(name, 0.0) + value
            highest[name] = max(highest.get(name, 0.0), value)
    usage = next((highest[name] for name in KV_USAGE if name in highest), None)
    blocks, free = sums.get(BLOCKS), sums.get(FREE_BLOCKS)
    if usage is None and blocks and free is not None:
        usage = 1 - free / blocks
    waiting = next((sums[name] for name in WAITING if name in sums), None)
    gauge = EngineGauge(
        kv_usage=None if usage is None else round(min(1.0, max(0.0, usage)), 3),
        waiting=None if waiting is None else int(waiting),
    )
    return gauge, sums.get(TRANSFERRED_BYTES)


async def get_page(engine: Engine, path: str) -> CompleteAnswer | None:
    """Return an engine's page, None if it has none or does not answer in time."""
    try:
        answer = await engine.get(path, now() + POLL_TIMEOUT_S, MAX_METRICS_BYTES)
    except AnswerTooLargeError as error:
        _throttle.warn(f"{engine.role.engine} {engine.name}: {path} cannot be read", str(error))
        return None
    except UpstreamError:
        return None
    return answer if answer.status == 200 else None
