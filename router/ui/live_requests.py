"""Requests as they come and go, while somebody looks: all of it bounded."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from router.telemetry.record import Record

MOST_RUNNING = 512
MOST_FRESH = 256
# Seconds over which requests of a pair of engines are averaged.
WINDOW = 4.0

# From, to, and what moves: "prompt" from prefiller to decoder, "turn" the other way.
EngineLink = tuple[str, str, str]


class LinkRates:
    """How many a second over each way, of the last seconds. Time is passed in."""

    def __init__(self) -> None:
        self._counts: deque[tuple[float, dict[EngineLink, int]]] = deque()

    def add(self, at: float, ways: dict[EngineLink, int]) -> None:
        self._counts.append((at, ways))
        while self._counts[0][0] <= at - WINDOW:
            self._counts.popleft()

    def now(self) -> dict[EngineLink, float]:
        sums: dict[EngineLink, int] = {}
        for _, ways in self._counts:
            for way, count in ways.items():
                sums[way] = sums.get(way, 0) + count
        return {way: count / WINDOW for way, count in sums.items()}


class RequestFeed:
    """One that looks: what has ended since it last took it; what does not fit is only counted."""

    def __init__(self) -> None:
        self._fresh: deque[Record] = deque(maxlen=MOST_FRESH)
        self._ways: dict[EngineLink, int] = {}
        self._missed = 0
        self.rates = LinkRates()

    def note(self, record: Record) -> None:
        self._missed += len(self._fresh) == MOST_FRESH
        self._fresh.append(record)
        for way in ways_of(record):
            self._ways[way] = self._ways.get(way, 0) + 1

    def take(self, at: float) -> tuple[Sequence[Record], int]:
        """Oldest first, and how many more there were."""
        fresh, self._fresh = self._fresh, deque(maxlen=MOST_FRESH)
        missed, self._missed = self._missed, 0
        ways, self._ways = self._ways, {}
        self.rates.add(at, ways)
        return list(fresh), missed


class LiveRequests:
    """Of those who look at this process. It is asked about each request, so it does little."""

    def __init__(self) -> None:
        self._running: dict[int, Record] = {}
        self.looks: list[RequestFeed] = []

    def opened(self, record: Record) -> None:
        if len(self._running) < MOST_RUNNING:
            self._running[id(record)] = record

    def closed(self, record: Record) -> None:
        self._running.pop(id(record), None)
        for look in self.looks:
            look.note(record)

    @property
    def running(self) -> Sequence[Record]:
        """Oldest first."""
        return list(self._running.values())


def ways_of(record: Record) -> Iterable[EngineLink]:
    """Which engines' KV a request took where."""
    if record.prefiller and record.decoder and record.first_byte is not None:
        yield record.prefiller, record.decoder, "prompt"
    if record.reused_from and record.prefiller:
        yield record.reused_from, record.prefiller, "turn"


def moving(records: Iterable[Record]) -> dict[EngineLink, int]:
    """Over which ways KV goes now, as far as a router can tell: the decoder was asked for what a
    prefiller has made, and has not begun to answer."""
    found: dict[EngineLink, int] = {}
    for record in records:
        if record.stage == "decode" and record.prefiller and record.first_byte is None:
            way = record.prefiller, record.decoder, "prompt"
            found[way] = found.get(way, 0) + 1
        elif record.stage == "prefill" and record.reused_from:
            way = record.reused_from, record.prefiller, "turn"
            found[way] = found.get(way, 0) + 1
    return found
