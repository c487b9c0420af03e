"""The arithmetic of limits, against a bucket that is filled step by step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.auth.api_keys import ApiKey
from router.auth.quota_ledger import (
    MAX_DEBT_S,
    QuotaLedger,
    format_duration,
    limit_status,
    settle,
    take,
)

KEY = ApiKey("a", "0" * 64, None, 60, 600, 2)


def test_a_full_bucket_gives_a_minutes_worth_at_once_and_then_as_time_passes() -> None:
    ledger, key = QuotaLedger(), ApiKey("a", "0" * 64, None, 60)
    assert all(not ledger.take(key, 0, 0.0).refused for _ in range(60))
    refused = ledger.take(key, 0, 0.0)
    assert (refused.refused, round(refused.wait, 3)) == ("requests", 1.0)
    assert ledger.take(key, 0, 0.99).refused
    granted = ledger.take(key, 0, 1.0)
    assert not granted.refused
    assert granted.requests is not None
    assert granted.requests.remaining == 0
    assert granted.requests.reset == pytest.approx(60.0)


@given(
    limit=st.integers(1, 10**6),
    steps=st.lists(st.tuples(st.floats(0, 30), st.integers(0, 10**6)), max_size=30),
)
def test_it_is_the_bucket_that_one_would_fill_by_hand(
    limit: int, steps: list[tuple[float, int]]
) -> None:
    level, moment, full_at = float(limit), 0.0, 0.0
    for pause, wanted in steps:
        cost = min(wanted, limit)
        moment += pause
        level = min(limit, level + pause * limit / 60)
        told = limit_status(limit, full_at, moment, cost)
        assert told.remaining == pytest.approx(level, abs=1 + limit * 1e-6)
        if abs(level - cost) > limit * 1e-6:  # not on the edge, where rounding decides
            assert (told.wait == 0) == (level >= cost)
        if not told.wait:
            level -= cost
            full_at = take(limit, full_at, moment, cost)


def test_a_request_larger_than_the_limit_gets_in_when_all_is_there() -> None:
    told = limit_status(100, 0.0, 0.0, 10_000)
    assert told.wait == 0
    full_at = take(100, 0.0, 0.0, 100)
    assert limit_status(100, full_at, 30.0, 10_000).wait == pytest.approx(30)


def test_what_was_used_counts_as_if_it_had_been_known_at_first() -> None:
    full_at = take(100, 0.0, 0.0, 100)
    full_at = settle(100, full_at, 20.0, -50)
    assert limit_status(100, full_at, 20.0).remaining == pytest.approx(83, abs=1)
    assert limit_status(100, settle(100, full_at, 20.0, 1000), 20.0).remaining == 0


def test_an_absurd_count_of_tokens_locks_nobody_out_for_ever() -> None:
    for more in (10**15, 10**300):
        full_at = settle(1, 0.0, 5.0, more)
        assert limit_status(1, full_at, 5.0).reset <= MAX_DEBT_S


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (-1, "0s"),
        (0.0004, "1ms"),
        (0.02, "20ms"),
        (1, "1s"),
        (8.64, "8.64s"),
        (60, "1m0s"),
        (360, "6m0s"),
        (61.5, "1m1.5s"),
        (3600, "1h0m0s"),
        (59.9999, "1m0s"),
    ],
)
def test_durations_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_what_is_refused_costs_nothing() -> None:
    ledger = QuotaLedger()
    assert not ledger.take(KEY, 600, 0.0).refused
    for _ in range(100):
        assert ledger.take(KEY, 600, 1.0).refused == "tokens"
    assert not ledger.take(KEY, 10, 1.0).refused
    assert ledger.take(KEY, 1, 30.0).refused == "concurrency"
    ledger.end(KEY, 0, 30.0)
    assert not ledger.take(KEY, 1, 30.0).refused


def test_what_is_undone_was_never_taken() -> None:
    ledger, fresh = QuotaLedger(), QuotaLedger()
    for _ in range(200):
        assert not ledger.take(KEY, 600, 7.0).refused
        ledger.end(KEY, -600, 7.0, requests=-1)
    for one in (ledger, fresh):
        one.take(KEY, 5, 8.0)
    assert ledger.take(KEY, 5, 8.0) == fresh.take(KEY, 5, 8.0)


def test_nothing_is_kept_of_keys_that_are_gone() -> None:
    ledger = QuotaLedger()
    for number in range(1000):
        key = ApiKey(f"k{number}", "0" * 64, None, 60)
        ledger.take(key, 0, 0.0)
        if number:
            ledger.end(key, 0, 0.0)
    ledger.keep({"k5"})
    assert len(ledger) == 2  # and the one that runs
    assert ledger.running("k0") == 1


def test_who_ends_twice_or_was_never_there_changes_nothing() -> None:
    ledger = QuotaLedger()
    ledger.end(KEY, 5, 0.0)
    ledger.take(KEY, 0, 0.0)
    ledger.end(KEY, 0, 0.0)
    ledger.end(KEY, 0, 0.0)
    assert ledger.running("a") == 0
