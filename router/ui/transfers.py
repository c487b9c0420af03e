"""The KV transfers that engines report: bytes per second by link, and the transfers of a request.

The reader reports a pull, the writer a push. Stock engines report neither.
"""

from __future__ import annotations

import contextlib
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

from router.fleet.engine import EngineRole
from router.ui.live_requests import RATE_WINDOW_S, EngineLink, RequestSummary

MAX_RANKS = 64
MAX_ENTRIES = 512  # of each kind, on one rank's page
MAX_AWAITED_REQUESTS = 512
# How long after a request's end an engine may take to report its transfers.
REPORT_TIMEOUT_S = 5.0
FOREIGN_CHARACTERS = re.compile(r"[^A-Za-z0-9._-]")

Count = Annotated[int, Field(ge=0, lt=2**50)]
Seconds = Annotated[float, Field(ge=0, lt=1e9, allow_inf_nan=False)]
Operation = Literal["READ", "WRITE"]


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
    """The transfers of a request: prefiller to decoder, and last turn's decoder to prefiller."""

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
    for rank in islice(dicts_in(content, "ranks"), MAX_RANKS):
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
                start, end = (other, name) if operation == "READ" else (name, other)
                link = start, end, "turn" if roles.get(end) == "prefill" else "prompt"
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
        turn = p.get(("READ", digest)) if request.reused_from else None
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
            is_whole = found.prompt and (found.turn or not one.request.reused_from)
            if is_whole or self._clock() - one.ended > REPORT_TIMEOUT_S:
                del self._awaited[key]
        return new


def _view(transfer: Transfer | None, came: float) -> TransferView | None:
    if transfer is None:
        return None
    return TransferView(
        blocks=transfer.blocks,
        bytes=transfer.bytes,
        ms=round(transfer.seconds * 1000, 2),
        ended=round((transfer.ended - came) * 1000, 1),
    )
