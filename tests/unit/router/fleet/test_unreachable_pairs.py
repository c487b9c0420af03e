"""Pairs of engines that cannot exchange KV: avoided, tried by one request, cleared by a load."""

from router.fleet.unreachable_pairs import (
    FIRST_AVOIDANCE_S,
    MAX_AVOIDANCE_S,
    MAX_PAIRS,
    UnreachablePairs,
)

P, D = "p:1", "d:1"


def pairs() -> UnreachablePairs:
    """Without jitter."""
    return UnreachablePairs(random_share=lambda: 0.5)


def test_only_the_failing_pair_is_avoided_for_a_while() -> None:
    known = pairs()
    assert not known
    assert known.record_failure(P, D, now=0) == FIRST_AVOIDANCE_S
    assert known
    assert known.is_avoided(P, D, now=FIRST_AVOIDANCE_S - 0.1)
    assert not known.is_avoided(P, D, now=FIRST_AVOIDANCE_S)
    assert not known.is_avoided(P, "d:2", now=1)
    assert not known.is_avoided("p:2", D, now=1)
    assert not known.is_avoided(D, P, now=1)
    assert list(known.avoided(now=1)) == [(P, D)]
    assert list(known.avoided(now=FIRST_AVOIDANCE_S)) == []


def test_failures_of_earlier_requests_count_once() -> None:
    known = pairs()
    known.record_failure(P, D, now=0)
    assert known.record_failure(P, D, now=1) is None
    assert not known.is_avoided(P, D, now=FIRST_AVOIDANCE_S)


def test_after_the_pause_one_request_tries_and_a_failure_doubles_the_pause() -> None:
    known, now, pause = pairs(), 0.0, FIRST_AVOIDANCE_S
    known.record_failure(P, D, now)
    while pause < MAX_AVOIDANCE_S:
        now += pause
        assert not known.is_avoided(P, D, now)
        known.note_load_started(P, D, now)
        assert known.is_avoided(P, D, now), "others wait for what comes of it"
        pause = min(2 * pause, MAX_AVOIDANCE_S)
        assert known.record_failure(P, D, now + 1) == pause
        now += 1
    assert known.record_failure(P, D, now + MAX_AVOIDANCE_S) == MAX_AVOIDANCE_S


def test_a_try_without_a_result_is_repeated_later() -> None:
    known = pairs()
    known.record_failure(P, D, now=0)
    known.note_load_started(P, D, now=FIRST_AVOIDANCE_S)
    known.note_load_started(P, D, now=FIRST_AVOIDANCE_S + 1)
    assert known.is_avoided(P, D, now=2 * FIRST_AVOIDANCE_S - 1)
    assert not known.is_avoided(P, D, now=2 * FIRST_AVOIDANCE_S)


def test_a_load_that_works_clears_the_pair() -> None:
    known = pairs()
    known.record_failure(P, D, now=0)
    assert known.record_success(P, D)
    assert not known.record_success(P, D)
    assert not known
    assert known.record_failure(P, D, now=1) == FIRST_AVOIDANCE_S


def test_wrong_kv_is_cleared_only_by_a_compared_load_and_its_pauses_go_on_doubling() -> None:
    known = pairs()
    assert known.record_failure(P, D, now=0, is_silent=True) == FIRST_AVOIDANCE_S
    assert known.is_silent(P, D)
    assert not known.record_success(P, D)
    assert known.record_success(P, D, is_compared=True)
    assert not known
    assert known.record_failure(P, D, now=99, is_silent=True) == 2 * FIRST_AVOIDANCE_S
    assert known.record_success(P, D, is_compared=True)
    assert known.record_failure(P, D, now=199) == FIRST_AVOIDANCE_S, "a load that fails is another"
    known.forget(P)
    assert known.record_failure(P, D, now=299, is_silent=True) == FIRST_AVOIDANCE_S


def test_a_removed_engine_is_forgotten_on_either_side() -> None:
    known = pairs()
    for prefiller, decoder in ((P, D), (P, "d:2"), ("p:2", D), ("p:2", "d:2")):
        known.record_failure(prefiller, decoder, now=0)
    known.forget(P)
    known.forget("d:2")
    assert list(known.avoided(now=1)) == [("p:2", D)]


def test_pairs_are_bounded_and_the_latest_stay() -> None:
    known = pairs()
    for number in range(MAX_PAIRS + 5):
        known.record_failure(P, f"d:{number}", now=0)
    assert len(list(known.avoided(now=1))) == MAX_PAIRS
    assert not known.is_avoided(P, "d:4", now=1)
    assert known.is_avoided(P, "d:5", now=1)
