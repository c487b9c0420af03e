"""Rates of pairs of engines: from totals that engines report, decaying, and compared."""

import json
from typing import Any

import pytest

from engine_ext.common.inspection import Inspection, MovedSeen
from engine_ext.http import leases
from router.fleet.pair_rates import (
    HALF_LIFE_S,
    MAX_PAIRS,
    STALE_S,
    Pair,
    PairRate,
    PairRates,
    TransferTotals,
    find_slow,
    stock_totals,
    totals_in,
)

P, D = "p:1", "d:1"
GB = 10**9
INTERVAL_S = 20.0


class Traffic:
    """A pair that moves ten transfers of a gigabyte in each interval."""

    def __init__(self, rates: PairRates, pair: Pair = (P, D)) -> None:
        self.rates, self.pair = rates, pair
        self.totals, self.now = TransferTotals(), 0.0
        rates.note(pair, self.totals, self.now)

    def move(self, rate: float, intervals: int = 1) -> "Traffic":
        for _ in range(intervals):
            self.now += INTERVAL_S
            seconds = 10 * GB / rate
            self.totals = self.totals.plus(TransferTotals(10, 10 * GB, seconds, seconds))
            self.rates.note(self.pair, self.totals, self.now)
        return self

    def rate(self) -> float:
        return self.rates.rates(self.now)[self.pair].bytes_per_second


def test_a_rate_is_that_of_what_moved_between_two_reports() -> None:
    rates = PairRates()
    rates.note((P, D), TransferTotals(1000, 1, 9000.0, 9000.0), 0.0)
    assert rates.rates(0.0) == {}, "it may have been long ago"
    rates.note((P, D), TransferTotals(1010, 1 + 8 * GB, 9004.0, 9002.0), 20.0)
    assert rates.rates(20.0) == {(P, D): PairRate(4 * GB, 0.4)}


def test_a_few_transfers_are_no_rate() -> None:
    rates = PairRates()
    rates.note((P, D), TransferTotals(), 0.0)
    rates.note((P, D), TransferTotals(3, GB, 1.0, 1.0), 20.0)
    assert rates.rates(20.0) == {}
    rates.note((P, D), TransferTotals(4, 2 * GB, 2.0, 2.0), 40.0)
    assert rates.rates(40.0)[P, D].bytes_per_second == pytest.approx(GB)


def test_a_pair_that_becomes_slow_is_slow_within_a_minute_and_recovers_as_fast() -> None:
    traffic = Traffic(PairRates()).move(40 * GB, 100)
    assert traffic.move(4 * GB, 2).rate() < 40 * GB / 3
    traffic.move(4 * GB, 100)
    assert traffic.move(40 * GB, 3).rate() > 40 * GB / 3


def test_a_report_without_transfers_changes_nothing_until_the_rate_is_stale() -> None:
    traffic = Traffic(PairRates()).move(40 * GB)
    moved_at, rates = traffic.now, traffic.rates
    for later in range(1, 10):
        rates.note((P, D), traffic.totals, moved_at + later * HALF_LIFE_S)
    assert rates.rates(moved_at + STALE_S)[P, D].bytes_per_second == pytest.approx(40 * GB)
    assert rates.rates(moved_at + STALE_S + 1) == {}


def test_after_a_restart_of_the_engine_its_totals_count_from_zero() -> None:
    traffic = Traffic(PairRates()).move(40 * GB)
    traffic.totals = TransferTotals()
    assert traffic.move(40 * GB).rate() == pytest.approx(40 * GB)


def test_a_lost_engine_is_forgotten_with_its_pairs() -> None:
    rates = PairRates()
    fast, slow = Traffic(rates), Traffic(rates, (P, "d:2"))
    fast.move(40 * GB)
    slow.move(GB)
    fast.move(40 * GB)
    assert list(rates.slow) == [(P, "d:2")]
    rates.forget("d:2")
    assert not rates.slow
    assert list(rates.rates(fast.now)) == [(P, D)]


def test_a_new_pair_takes_the_place_of_an_unused_one_only() -> None:
    rates = PairRates()
    for number in range(MAX_PAIRS + 5):
        rates.note((P, f"d:{number}"), TransferTotals(), 0.0)
    last = (P, f"d:{MAX_PAIRS + 4}")

    def is_recorded(at: float) -> bool:
        rates.note(last, TransferTotals(), at)
        rates.note(last, TransferTotals(9, GB, 1.0, 1.0), at)
        return last in rates.rates(at)

    assert not is_recorded(STALE_S)
    assert is_recorded(STALE_S + 1)


def rate(gigabytes: float, seconds: float = 0.0) -> PairRate:
    return PairRate(gigabytes * GB, seconds or 1 / gigabytes)


def test_a_pair_below_a_third_of_its_neighbours_is_slow() -> None:
    known = {(p, d): rate(40.0) for p in ("p1", "p2") for d in ("d1", "d2", "d3")}
    assert find_slow(known) == {}
    known["p1", "d2"] = rate(14.0)
    assert find_slow(known) == {}
    known["p1", "d2"] = rate(1.25)
    ((pair, slow),) = find_slow(known).items()
    assert pair == ("p1", "d2")
    assert slow.slowness == 32
    assert slow.describe(pair) == "p1 -> d2 moves KV at 1.25 GB/s, its neighbours at 40 GB/s"


def test_all_pairs_of_an_engine_behind_a_slow_interface_are_slow() -> None:
    known = {(p, d): rate(40.0) for p in ("p1", "p2") for d in ("d1", "d2")}
    known |= {(p, "d2"): rate(2.0) for p in ("p1", "p2")}
    assert {*find_slow(known)} == {("p1", "d2"), ("p2", "d2")}


def test_short_transfers_are_not_slow_because_their_rate_is_low() -> None:
    known = {("p", "d1"): rate(40.0, 0.1), ("p", "d2"): rate(1.0, 0.005)}
    assert find_slow(known) == {}
    known["p", "d2"] = rate(1.0, 0.4)
    assert [*find_slow(known)] == [("p", "d2")]


def test_another_pair_of_the_engine_that_reads_over_a_slow_pair_is_not_slow() -> None:
    """The thread that polls the slow READs notices the ends of the others some milliseconds
    late."""
    rates, moved = PairRates(), {("p1", "d1"): 0.003, ("p2", "d1"): 0.003, ("p1", "d2"): 2.0}
    for at in (0.0, INTERVAL_S, 2 * INTERVAL_S):
        for pair, seconds in (moved | {("p2", "d2"): 0.012}).items():
            num = 10 * at / INTERVAL_S
            totals = TransferTotals(num, num * 400_000, num * seconds, num * seconds)
            rates.note(pair, totals, at)
    assert [*find_slow(rates.rates(2 * INTERVAL_S))] == [*rates.slow] == [("p1", "d2")]


def test_pairs_without_an_engine_in_common_are_not_compared() -> None:
    assert find_slow({("p1", "d1"): rate(40.0), ("p2", "d2"): rate(1.0)}) == {}


def page(*ranks: Inspection) -> bytes:
    return json.dumps(leases.page([leases.rank(one, b"key") for one in ranks])).encode()


def rank(engine_id: str, *moved: MovedSeen) -> Inspection:
    return Inspection(0, engine_id=engine_id, moved=moved)


def test_tensor_ranks_move_together_and_data_parallel_ranks_one_by_one() -> None:
    moved = MovedSeen("READ", "engine-p_dp1", 4, 100, 2.0, 1.0)
    both = [rank("engine-d_dp0", moved), rank("engine-d_dp0", moved._replace(busy_seconds=1.5))]
    flow = "READ", "engine-p"
    assert totals_in(page(*both)) == {flow: TransferTotals(4, 200, 2.0, 1.5)}
    several = page(*both, rank("engine-d_dp1", moved._replace(engine_id="engine-p_dp0")))
    assert totals_in(several) == {flow: TransferTotals(8, 300, 4.0, 2.5)}


@pytest.mark.parametrize(
    ("operation", "pair"), [("READ", (P, D)), ("LOAN", (P, D)), ("WRITE", (D, P))]
)
def test_the_reader_reports_a_read_and_the_writer_a_write(operation: str, pair: Pair) -> None:
    rates = PairRates()
    rates.note_page(D, page(), 0.0)
    rates.note_ids(P, ["engine-p_dp0", "engine-p_dp1"])
    rates.note_ids(D, ["engine-d"])
    strangers = MovedSeen(operation, "unknown", 4, 100, 2.0, 1.0)
    moved = strangers._replace(engine_id="engine-p_dp1"), strangers._replace(engine_id="engine-d")
    rates.note_page(D, page(rank("engine-d", strangers, *moved)), 0.0)
    assert [*rates.rates(0.0)] == [pair]


def test_a_pair_that_an_engine_lists_for_the_first_time_counts_from_its_start() -> None:
    rates, moved = PairRates(), MovedSeen("READ", "engine-p", 4, 100, 2.0, 1.0)
    rates.note_ids(P, ["engine-p"])
    rates.note_page(D, page(rank("engine-d")), 0.0)
    rates.note_page("d:2", page(rank("engine-2", moved)), 20.0)
    rates.note_page(D, page(rank("engine-d", moved)), 20.0)
    assert [*rates.rates(20.0)] == [(P, D)], "the other one may have moved it long ago"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"ranks": 5}',
        b'{"ranks": [{"moved": [{"what": "READ"}]}]}',
        b'{"ranks": [{"moved": [{"what": "READ", "engine_id": "p", "transfers": -1, "bytes": 1}]}'
        b"]}",
        b'{"ranks": [{"engine_id": "\xff"}]}',
        b'{"ranks": [{"moved": [{"what": "READ", "engine_id": "p", "transfers": 1, "bytes": 1e99}'
        b"]}]}",
    ],
)
def test_a_page_that_makes_no_sense_has_no_totals(content: bytes) -> None:
    assert totals_in(content) == {}


def test_totals_of_an_engine_that_reports_no_times_are_no_rate() -> None:
    rates = PairRates()
    rates.note_page(D, page(), 0.0)
    rates.note_ids(P, ["p"])
    moved: dict[str, Any] = {"what": "READ", "engine_id": "p", "transfers": 9, "bytes": 9}
    rates.note_page(D, json.dumps({"ranks": [{"moved": [moved]}]}).encode(), 0.0)
    assert rates.rates(0.0) == {}


METRICS = b"""\
vllm:nixl_xfer_time_seconds_sum{engine="0"} 2.5
vllm:nixl_xfer_time_seconds_sum{engine="1"} 1.5
vllm:nixl_xfer_time_seconds_count{engine="0"} 30.0
vllm:nixl_xfer_time_seconds_count{engine="1"} 10.0
vllm:nixl_bytes_transferred_sum{engine="0"} 3e+09
vllm:nixl_bytes_transferred_sum{engine="1"} 1e+09
"""


def test_a_stock_engine_has_the_sums_of_its_histograms() -> None:
    totals = stock_totals(METRICS)
    assert totals == TransferTotals(40, 4 * GB, 4.0)
    assert stock_totals(METRICS.replace(b"bytes_transferred", b"other")) is None
    rates = PairRates()
    rates.note(("", D), totals, 0.0, is_new=True)
    rates.note(("", "d:2"), TransferTotals(40, 40 * GB, 1.0), 0.0, is_new=True)
    known = rates.rates(0.0)
    assert known["", D] == PairRate(GB, 0.1)
    (text,) = (slow.describe(pair) for pair, slow in find_slow(known).items())
    assert text == f"{D} moves KV at 1 GB/s, its neighbours at 40 GB/s"
