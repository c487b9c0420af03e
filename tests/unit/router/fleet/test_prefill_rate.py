"""The prefill rate that a router learns from an engine's legs."""

import random
from statistics import fmean

import pytest

from router.fleet.engine import (
    MAX_SAMPLES,
    MIN_SAMPLES,
    SAMPLE_TOKENS,
    STALE_S,
    EngineLoad,
    PrefillRate,
)
from router.routing.prefix_cache import MAX_SLOWNESS, compare_paces

PACE = 1 / 16_384


def _rate(samples: int = MAX_SAMPLES) -> PrefillRate:
    """An engine that was sent one leg after another."""
    rate = PrefillRate()
    for number in range(samples):
        rate.note_leg(10.0 * number, 10.0 * number + SAMPLE_TOKENS * PACE, SAMPLE_TOKENS)
    return rate


def test_rate_is_unknown_until_there_are_enough_samples() -> None:
    assert _rate(MIN_SAMPLES - 1).token_seconds == 0
    assert _rate(MIN_SAMPLES).token_seconds == pytest.approx(PACE)


def test_engine_that_is_always_busy_is_measured_by_what_it_answers() -> None:
    """Twenty legs wait at any time, and the engine answers four at once, in any order."""
    rate, chance = PrefillRate(), random.Random(1)
    waiting, now = [(0.0, chance.randrange(10, 4000)) for _ in range(20)], 0.0
    for _ in range(200):
        batch = [waiting.pop(chance.randrange(8)) for _ in range(4)]
        now += PACE * sum(tokens for _, tokens in batch)
        for sent, tokens in batch:
            rate.note_leg(sent, now, tokens)
            waiting.append((now, chance.randrange(10, 4000)))
    assert rate.token_seconds == pytest.approx(PACE, rel=0.1)


def test_share_of_time_that_other_routers_use_does_not_count() -> None:
    load, now = EngineLoad(), 0.0
    load.add_load(3, 3000)
    load.set_load_elsewhere(9, 9000)
    for _ in range(2000):
        now += 4000 * PACE  # three legs of other routers, and one of this router
        load.note_prefill(0.0, now, 1000)
    assert load.prefill_rate.token_seconds == pytest.approx(PACE)


@pytest.mark.parametrize(("seconds", "tokens"), [(600.0, 9000), (0.0, 10**9), (0.0, 0)])
def test_absurd_answers_move_the_rate_little(seconds: float, tokens: int) -> None:
    rate, chance = PrefillRate(), random.Random(2)
    for number in range(200):
        now, most = 1000.0 * number, SAMPLE_TOKENS * PACE * chance.uniform(0.8, 1.2)
        if number % 10 == 9:
            rate.note_leg(now, now + seconds, tokens)
        else:
            rate.note_leg(now, now + most, SAMPLE_TOKENS)
    assert rate.token_seconds == pytest.approx(PACE, rel=0.15)


def test_failed_legs_and_cached_prompts_say_nothing_about_the_rate() -> None:
    rate = _rate()
    for number in range(10_000, 20_000):
        rate.note_leg(number, number + 0.5, None)
        rate.note_leg(number + 0.6, number + 0.7, 16)
    assert rate.token_seconds == pytest.approx(PACE)


def test_rate_of_an_engine_without_legs_is_unknown_after_a_while() -> None:
    rate = _rate()
    assert rate.pace_at(rate.ended + STALE_S - 1) == rate.token_seconds > 0
    assert rate.pace_at(rate.ended + STALE_S) == 0


def test_equal_engines_are_not_told_apart() -> None:
    chance = random.Random(3)
    assert not compare_paces([PACE * chance.uniform(0.9, 1.1) for _ in range(500)])
    assert not compare_paces([0.0, 0.0])
    assert not compare_paces([PACE, 0.0])


def test_unequal_engines_are_compared_with_their_mean() -> None:
    compared = compare_paces([1.0, 3.1, 0.0, 1.1, 0.9, 2.9])
    assert compared == pytest.approx([1.0, 3.0, 1.8, 1.0, 1.0, 3.0])


def test_difference_from_the_mean_is_bounded() -> None:
    slow, fast = [1.0] * 99 + [1e6], [1e-6, 1.0]
    assert compare_paces(slow)[-1] == pytest.approx(MAX_SLOWNESS * fmean(slow))
    assert compare_paces(fast)[0] == pytest.approx(fmean(fast) / MAX_SLOWNESS)
