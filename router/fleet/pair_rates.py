"""The rates at which pairs of engines move KV, from what engines report. Pure; time is passed in.

Engines with our extension list bytes and times of their transfers by the other engine's id, as
totals since their start (`moved` at `/disagg/leases`). Stock vLLM has the sums of its histograms,
which do not name the other engine: such an engine is a pair with the source UNKNOWN. What was moved
from one report to the next is added up with a weight that halves in HALF_LIFE_S.

A pair is *slow* if it moves less than a third of the bytes per second that its *neighbours* move in
the median, and its transfers take more than three times as long: short transfers have low rates and
long ones long times where nothing is wrong. They must also take MIN_DELAY_S longer: milliseconds
may be the engine's own, whose one thread polls the transfers of a slow pair as well. Neighbours
have the same source or the same target.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from operator import itemgetter
from statistics import median_high, median_low
from types import MappingProxyType
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta, Struct

from router.fleet.capabilities import strip_dp_rank
from router.fleet.metrics_page import find_lines

# The page of an engine's transfers. The query leaves out its leases, which no one reads here.
TRANSFERS_PATH = "/disagg/leases?request_id=-"
# At most this many pairs are recorded. A new pair takes the place of one that is not used any more.
MAX_PAIRS = 1024
MAX_SHOWN_PAIRS = 256
HALF_LIFE_S = 15.0
# A pair without a transfer for this long counts as unknown.
STALE_S = 300.0
# The transfers after which a rate is known.
MIN_TRANSFERS = 4
SLOW_FACTOR = 3.0
MIN_DELAY_S = 0.02
# The most neighbours that are compared on each side of a pair.
MAX_NEIGHBOURS = 8
# The slow pairs are found once in this time.
COMPARISON_INTERVAL_S = 5.0
UNKNOWN = ""
STOCK_SECONDS, STOCK_COUNT, STOCK_BYTES = STOCK_METRICS = (
    b"vllm:nixl_xfer_time_seconds_sum",
    b"vllm:nixl_xfer_time_seconds_count",
    b"vllm:nixl_bytes_transferred_sum",
)
_STOCK_SAMPLE = re.compile(
    rb"^(%b)(?:\{[^\n]{0,4096}\})? ([0-9.eE+-]{1,32})$" % b"|".join(STOCK_METRICS), re.MULTILINE
)

Pair = tuple[str, str]
"""The names of the engine that has the KV, and of the engine that gets it."""
Count = Annotated[int, Meta(ge=0, lt=2**60)]
Seconds = Annotated[float, Meta(ge=0, lt=1e12)]


class TransferTotals(NamedTuple):
    """The totals of a pair's transfers since one of its engines started."""

    transfers: float = 0.0
    bytes: float = 0.0
    seconds: float = 0.0
    """The durations of all transfers, added up."""
    busy_seconds: float = 0.0
    """The time in which at least one of them ran."""

    def plus(self, other: TransferTotals, weight: float = 1.0) -> TransferTotals:
        return TransferTotals(*(a + weight * b for a, b in zip(self, other, strict=True)))

    def scaled(self, weight: float) -> TransferTotals:
        return TransferTotals(*(weight * value for value in self))


NOTHING = TransferTotals()


class PairRate(NamedTuple):
    bytes_per_second: float
    """While transfers run."""
    transfer_seconds: float
    """The mean time of a transfer."""


class SlowPair(NamedTuple):
    rate: PairRate
    usual: float
    """The bytes per second of its neighbours, in the median."""

    @property
    def slowness(self) -> float:
        """How many times as long its transfers take as those of its neighbours."""
        return self.usual / self.rate.bytes_per_second

    def describe(self, pair: Pair) -> str:
        """Return a sentence for operators."""
        rate, usual = rate_text(self.rate.bytes_per_second), rate_text(self.usual)
        return f"{pair_name(pair)} moves KV at {rate}, its neighbours at {usual}"


SLOW_CURE = "look at the network between the engines, and at UCX_TLS and UCX_NET_DEVICES of both"
NO_PAIRS: Mapping[Pair, SlowPair] = MappingProxyType({})


class _RecordedPair(Struct):
    totals: TransferTotals
    """The last totals that an engine has reported."""
    moved_at: float
    """The time of the last report of a new transfer, else that of the first report."""
    recent: TransferTotals = NOTHING
    """Differences of totals, each with the weight of its age at `moved_at`."""
    transfers: float = 0.0
    """Since the pair was first reported."""

    def rate(self, now: float) -> PairRate | None:
        seconds = self.recent.busy_seconds or self.recent.seconds
        if self.transfers < MIN_TRANSFERS or now > self.moved_at + STALE_S or not seconds:
            return None
        recent = self.recent
        return PairRate(recent.bytes / seconds, recent.seconds / recent.transfers)


class PairRates:
    """The recorded pairs. Other threads may read `slow`, `rates` and `slowest`."""

    def __init__(self) -> None:
        self._reporting: set[str] = set()
        """The engines that have reported before: what they then list for the first time is new."""
        self._pairs: dict[Pair, _RecordedPair] = {}
        self._names: dict[str, str] = {}
        """The engines' names by their engine ids, without data-parallel ranks."""
        self._compared_at = self._full_until = -math.inf
        self.slow: Mapping[Pair, SlowPair] = NO_PAIRS

    def slowness(self, source: str, target: str) -> float:
        """Return how many times as long a transfer takes as between the pair's neighbours; 1 for a
        pair that is not slow."""
        found = self.slow.get((source, target))
        return 1.0 if found is None else found.slowness

    def note_ids(self, engine: str, ids: Iterable[str]) -> None:
        """The engine's pages were read: its ranks have these engine ids."""
        self._names.update((strip_dp_rank(one), engine) for one in ids)

    def note_page(self, engine: str, page: bytes, now: float) -> None:
        """Read the engine's answer at TRANSFERS_PATH. A page that makes no sense has no effect."""
        is_new = engine in self._reporting
        self._reporting.add(engine)
        for (operation, peer), totals in totals_in(page).items():
            name = self._names.get(peer)
            if name is not None and name != engine:
                pair = (engine, name) if operation == "WRITE" else (name, engine)
                self.note(pair, totals, now, is_new)

    def note(self, pair: Pair, totals: TransferTotals, now: float, is_new: bool = False) -> None:
        """The pair has moved this much since the reporting engine's start. Totals that have shrunk
        are those of another process. `is_new`: a pair that was not recorded had moved nothing
        until lately."""
        known = self._pairs.get(pair)
        if known is None:
            if not self._has_room(now):
                return
            known = _RecordedPair(NOTHING if is_new else totals, now)
            self._pairs[pair] = known
        has_restarted = any(new < old for new, old in zip(totals, known.totals, strict=True))
        more = totals if has_restarted else totals.plus(known.totals, -1.0)
        known.totals = totals
        if more.transfers > 0:
            weight = 0.5 ** (max(0.0, now - known.moved_at) / HALF_LIFE_S)
            known.recent = known.recent.scaled(weight).plus(more)
            known.moved_at = now
            known.transfers += more.transfers
        if now >= self._compared_at + COMPARISON_INTERVAL_S:
            self._compared_at = now
            self.slow = find_slow(self.rates(now))

    def rates(self, now: float) -> dict[Pair, PairRate]:
        """Return the known rates. Safe in any thread."""
        found = ((pair, one.rate(now)) for pair, one in list(self._pairs.items()))
        return {pair: rate for pair, rate in found if rate is not None}

    def slowest(self, now: float) -> list[tuple[Pair, PairRate]]:
        """Return the MAX_SHOWN_PAIRS lowest known rates, lowest first. Safe in any thread."""
        return sorted(self.rates(now).items(), key=itemgetter(1))[:MAX_SHOWN_PAIRS]

    def forget(self, engine: str) -> None:
        """The engine was removed or lost."""
        self._pairs = {pair: one for pair, one in self._pairs.items() if engine not in pair}
        self._reporting.discard(engine)
        self._names = {peer: name for peer, name in self._names.items() if name != engine}
        self.slow = {pair: one for pair, one in self.slow.items() if engine not in pair}

    def _has_room(self, now: float) -> bool:
        if len(self._pairs) < MAX_PAIRS:
            return True
        if now <= self._full_until:
            return False
        oldest = min(self._pairs, key=lambda pair: self._pairs[pair].moved_at)
        self._full_until = self._pairs[oldest].moved_at + STALE_S
        if now <= self._full_until:
            return False
        del self._pairs[oldest]
        return True


def find_slow(rates: Mapping[Pair, PairRate]) -> Mapping[Pair, SlowPair]:
    """Return the pairs that are slow beside their neighbours."""
    by_source: defaultdict[str, list[Pair]] = defaultdict(list)
    by_target: defaultdict[str, list[Pair]] = defaultdict(list)
    for pair in rates:
        by_source[pair[0]].append(pair)
        by_target[pair[1]].append(pair)
    found: dict[Pair, SlowPair] = {}
    for pair, rate in rates.items():
        sides = by_source[pair[0]], by_target[pair[1]]
        near = [rates[p] for side in sides for p in _some(side, pair)]
        if not near:
            continue
        # Of two in the middle the faster one: with two engines on each side, a slow interface of
        # one of them makes half of the neighbours slow.
        usual = median_high(one.bytes_per_second for one in near)
        usual_seconds = median_low(one.transfer_seconds for one in near)
        is_slow = rate.bytes_per_second * SLOW_FACTOR < usual
        limit = max(SLOW_FACTOR * usual_seconds, usual_seconds + MIN_DELAY_S)
        if is_slow and rate.transfer_seconds > limit:
            found[pair] = SlowPair(rate, usual)
    return found


def _some(pairs: Iterable[Pair], but: Pair) -> Iterator[Pair]:
    return islice((pair for pair in pairs if pair != but), MAX_NEIGHBOURS)


class _Moved(Struct):
    what: str
    engine_id: str
    transfers: Count
    bytes: Count
    seconds: Seconds = 0.0
    busy_seconds: Seconds = 0.0


class _Rank(Struct):
    engine_id: str = ""
    moved: list[_Moved] = []


class _Page(Struct):
    ranks: list[_Rank] = []


_decoder = msgspec.json.Decoder(_Page)


def totals_in(page: bytes) -> dict[tuple[str, str], TransferTotals]:
    """Return an engine's totals by operation and its peer's engine id, without data-parallel ranks.
    Empty if the page makes no sense."""
    by_rank: dict[tuple[str, str, str], TransferTotals] = {}
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
        for rank in _decoder.decode(page).ranks:
            for one in rank.moved:
                key = one.what, one.engine_id, rank.engine_id
                old = by_rank.get(key, NOTHING)
                # Tensor ranks move parts of the same blocks at the same time.
                by_rank[key] = TransferTotals(
                    max(old.transfers, one.transfers),
                    old.bytes + one.bytes,
                    max(old.seconds, one.seconds),
                    max(old.busy_seconds, one.busy_seconds),
                )
    found: dict[tuple[str, str], TransferTotals] = {}
    for (operation, peer, _), totals in by_rank.items():
        flow = operation, strip_dp_rank(peer)
        found[flow] = found.get(flow, NOTHING).plus(totals)
    return found


def stock_totals(page: bytes) -> TransferTotals | None:
    """Return the sums of stock vLLM's histograms of transfers; None without such metrics."""
    sums: dict[bytes, float] = {}
    for name, digits in _STOCK_SAMPLE.findall(find_lines(page, STOCK_METRICS)):
        with contextlib.suppress(ValueError):
            value = float(digits)
            if 0 <= value < 2**60:
                sums[name] = sums.get(name, 0.0) + value
    if len(sums) < len(STOCK_METRICS):
        return None
    return TransferTotals(sums[STOCK_COUNT], sums[STOCK_BYTES], sums[STOCK_SECONDS])


def pair_name(pair: Pair) -> str:
    source, target = pair
    return f"{source} -> {target}" if source else target


def rate_text(bytes_per_second: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if bytes_per_second >= size:
            return f"{bytes_per_second / size:.3g} {unit}/s"
    return f"{bytes_per_second / 1e3:.3g} kB/s"
