"""What engines say of the KV they have moved: how many bytes a second between which, and whose.

Who reads says it of a pull, who writes of a push. Stock engines do not say it.
"""

from __future__ import annotations

import contextlib
import re
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, Field, ValidationError

from router.fleet.engine_spec import EngineRole
from router.http_client.deadlines import now
from router.ui.live_requests import WINDOW, EngineLink
from router.ui.request_view import RequestSummary

MOST_RANKS = 64
# Of one rank's page.
MOST_ENTRIES = 512
MOST_WAITING = 512
# Seconds in which an engine should have said what it moved for a request that has ended.
LATEST = 5.0
FOREIGN = re.compile(r"[^A-Za-z0-9._-]")


Count = Annotated[int, Field(ge=0, lt=2**50)]
Seconds = Annotated[float, Field(ge=0, lt=1e9, allow_inf_nan=False)]
What = Literal["READ", "WRITE"]


class MovedBytes(BaseModel):
    """As an engine's page has it, like the next."""

    what: What
    engine_id: str
    bytes: Count


class EndedTransfer(BaseModel):
    what: What
    found_by: str
    blocks: Count
    bytes: Count
    seconds: Seconds
    age_seconds: Seconds


E = TypeVar("E", MovedBytes, EndedTransfer)


class TransferFlow(NamedTuple):
    """`what` was done by the engine that says so, `peer` is the other side's engine id."""

    what: str
    peer: str


@dataclass(frozen=True, slots=True)
class Transfer:
    """What one engine moved for one request. `ended`: when, by our clock."""

    blocks: int
    bytes: int
    seconds: float
    ended: float


@dataclass(frozen=True, slots=True)
class TransferPage:
    """One engine's, read `at` that time: its ranks' ids, bytes since its start, the latest
    transfers by what was done and what they are found by."""

    at: float
    ids: frozenset[str] = frozenset()
    moved: Mapping[TransferFlow, int] = field(default_factory=dict)
    transfers: Mapping[tuple[str, str], Transfer] = field(default_factory=dict)


NOTHING = TransferPage(0.0)


class TransferView(BaseModel):
    """`ended` is in milliseconds since the request came."""

    blocks: int
    bytes: int
    ms: float
    ended: float


class RequestTransfers(BaseModel):
    """Of a request: what a decoder got of a prefiller, and what that got of the last turn."""

    prompt: TransferView | None = None
    turn: TransferView | None = None


def found_by(request_id: str) -> str:
    """As engines call it (see engine_ext.pages.leases)."""
    return blake2b(FOREIGN.sub("-", request_id).encode(), digest_size=8).hexdigest()


def page_in(content: object, at: float) -> TransferPage:
    """Total: what makes no sense is not there."""
    ids: set[str] = set()
    moved: dict[TransferFlow, int] = {}
    transfers: dict[tuple[str, str], Transfer] = {}
    for rank in islice(_dicts(content, "ranks"), MOST_RANKS):
        if isinstance(rank.get("engine_id"), str):
            ids.add(rank["engine_id"])
        for one in _said(MovedBytes, rank, "moved"):
            flow = TransferFlow(one.what, one.engine_id)
            moved[flow] = moved.get(flow, 0) + one.bytes
        for key, more in _of_rank(rank, at).items():
            transfers[key] = _beside(transfers[key], more) if key in transfers else more
    return TransferPage(at, frozenset(ids), moved, transfers)


def _of_rank(rank: Mapping[str, Any], at: float) -> dict[tuple[str, str], Transfer]:
    """A request of several prompts has several, one after the other."""
    found: dict[tuple[str, str], Transfer] = {}
    for one in _said(EndedTransfer, rank, "transfers"):
        transfer = Transfer(one.blocks, one.bytes, one.seconds, at - one.age_seconds)
        key = one.what, one.found_by
        found[key] = _after(found[key], transfer) if key in found else transfer
    return found


def _after(known: Transfer, one: Transfer) -> Transfer:
    blocks, count = known.blocks + one.blocks, known.bytes + one.bytes
    ended = max(known.ended, one.ended)
    return Transfer(blocks, count, known.seconds + one.seconds, ended)


def _beside(known: Transfer, one: Transfer) -> Transfer:
    """Ranks move parts of the same blocks at the same time."""
    return Transfer(
        max(known.blocks, one.blocks),
        known.bytes + one.bytes,
        max(known.seconds, one.seconds),
        max(known.ended, one.ended),
    )


def _said(kind: type[E], rank: Mapping[str, Any], name: str) -> Iterator[E]:
    for entry in islice(_dicts(rank, name), MOST_ENTRIES):
        with contextlib.suppress(ValidationError):
            yield kind.model_validate(entry)


def _dicts(within: object, name: str) -> Iterator[dict[str, Any]]:
    entries = within.get(name) if isinstance(within, dict) else None
    if isinstance(entries, list):
        yield from (entry for entry in entries if isinstance(entry, dict))


class TransferHistory:
    """The pages of the last seconds, by engine."""

    def __init__(self) -> None:
        self._pages: dict[str, deque[TransferPage]] = {}

    def note(self, engine: str, page: TransferPage) -> None:
        pages = self._pages.setdefault(engine, deque())
        pages.append(page)
        while len(pages) > 2 and pages[1].at <= page.at - WINDOW:
            pages.popleft()

    def keep(self, engines: Iterable[str]) -> None:
        """The others are gone."""
        self._pages = {name: self._pages[name] for name in engines if name in self._pages}

    def latest(self, oldest: float) -> dict[str, TransferPage]:
        """Of those that have answered since `oldest`."""
        return {name: p[-1] for name, p in self._pages.items() if p[-1].at >= oldest}

    def rates(self, roles: Mapping[str, EngineRole], oldest: float) -> dict[EngineLink, float]:
        """Bytes a second over each way on which anything moved."""
        latest = self.latest(oldest)
        names = {peer: name for name, page in latest.items() for peer in page.ids}
        found: dict[EngineLink, float] = {}
        for name in latest:
            for flow, rate in _rates(self._pages[name]):
                other = names.get(flow.peer)
                if other is None or other == name:
                    continue
                start, end = (other, name) if flow.what == "READ" else (name, other)
                way = start, end, "turn" if roles.get(end) == "prefill" else "prompt"
                found[way] = round(found.get(way, 0.0) + rate, 1)
        return found


def _rates(pages: deque[TransferPage]) -> Iterator[tuple[TransferFlow, float]]:
    first, last = pages[0], pages[-1]
    if last.at <= first.at:
        return
    for flow, count in last.moved.items():
        more = count - first.moved.get(flow, 0)
        if more > 0:
            yield flow, more / (last.at - first.at)


@dataclass(slots=True)
class AwaitedRequest:
    seen: RequestSummary
    name: str
    since: float
    told: RequestTransfers = field(default_factory=RequestTransfers)

    def hears(self, pages: Mapping[str, TransferPage], unix: float) -> RequestTransfers:
        """Of pages that are younger than its end; what is known stays as it was told."""
        seen = self.seen
        young = {name: page for name, page in pages.items() if page.at > self.since}
        p, d = (young.get(one, NOTHING).transfers for one in (seen.prefiller, seen.decoder))
        prompt = d.get(("READ", self.name)) or p.get(("WRITE", self.name))
        turn = p.get(("READ", self.name)) if seen.reused_from else None
        return RequestTransfers(
            prompt=self.told.prompt or _move(prompt, seen.at - unix),
            turn=self.told.turn or _move(turn, seen.at - unix),
        )

    def is_over(self, now: float) -> bool:
        is_whole = self.told.prompt and (self.told.turn or not self.seen.reused_from)
        return bool(is_whole) or now - self.since > LATEST


class TransferMatcher:
    """Requests that have ended, until engines have said what they moved for them."""

    def __init__(self, clock: Callable[[], float] = now) -> None:
        self._clock = clock
        self._waiting: OrderedDict[str, AwaitedRequest] = OrderedDict()

    def expect(self, ended: Iterable[RequestSummary]) -> None:
        since = self._clock()
        for seen in ended:
            if seen.prefiller and seen.decoder:
                waiting = AwaitedRequest(seen, found_by(seen.id), since)
                self._waiting[seen.key] = waiting
        while len(self._waiting) > MOST_WAITING:
            self._waiting.popitem(last=False)

    def take(self, pages: Mapping[str, TransferPage], unix: float) -> dict[str, RequestTransfers]:
        """What is new, by the requests' keys; `unix` is when our clock began."""
        found: dict[str, RequestTransfers] = {}
        for key, one in list(self._waiting.items()):
            moves = one.hears(pages, unix)
            if moves not in (one.told, RequestTransfers()):
                one.told = found[key] = moves
            if one.is_over(self._clock()):
                del self._waiting[key]
        return found


def _move(transfer: Transfer | None, came: float) -> TransferView | None:
    if transfer is None:
        return None
    return TransferView(
        blocks=transfer.blocks,
        bytes=transfer.bytes,
        ms=round(transfer.seconds * 1000, 2),
        ended=round((transfer.ended - came) * 1000, 1),
    )
