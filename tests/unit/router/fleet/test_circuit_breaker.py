"""A circuit breaker against what it promises: every order of successes, failures and pauses."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.fleet.engine import BreakerRules, CircuitBreaker, CircuitState

RULES = BreakerRules(
    consecutive_failures=3, failure_rate=0.5, min_sample=6, first_pause_s=1.0, max_pause_s=10.0
)
LEAST, MOST = 0.75, 1.25


class AnyOrder(RuleBasedStateMachine):
    """The router's part: a pause ends once, and the first leg of a half-open circuit is its
    trial."""

    def __init__(self) -> None:
        super().__init__()
        self.chance = 0.0
        self.breaker = CircuitBreaker(RULES, lambda: self.chance)
        self.openings = 0
        self.bad_in_a_row = 0

    @rule()
    def succeeds(self) -> None:
        was = self.breaker.circuit
        assert self.breaker.record_success() == (was is not CircuitState.CLOSED)
        assert self.breaker.circuit is CircuitState.CLOSED
        self.bad_in_a_row = 0
        if was is not CircuitState.CLOSED:
            self.openings = 0

    @rule(chance=st.floats(0, 1, exclude_max=True))
    def fails(self, chance: float) -> None:
        self.chance = chance
        was, opened = self.breaker.circuit, self.breaker.times_opened
        self.bad_in_a_row += 1
        pause = self.breaker.record_failure()
        assert (pause is not None) == (self.breaker.times_opened == opened + 1)
        if was is CircuitState.OPEN:
            assert pause is None
        if was is CircuitState.HALF_OPEN or (was is CircuitState.CLOSED and self.bad_in_a_row >= 3):
            assert pause is not None
        if pause is not None:
            usual = min(RULES.first_pause_s * 2**self.openings, RULES.max_pause_s)
            assert LEAST * usual <= pause <= MOST * usual
            assert self.breaker.circuit is CircuitState.OPEN
            self.openings += 1

    @rule()
    def pause_ends(self) -> None:
        was = self.breaker.circuit
        self.breaker.half_open()
        assert self.breaker.circuit is (CircuitState.HALF_OPEN if was is CircuitState.OPEN else was)

    @precondition(
        lambda self: self.breaker.circuit is CircuitState.HALF_OPEN and self.breaker.allows_requests
    )
    @rule()
    def trial_begins(self) -> None:
        self.breaker.trial = object()

    @precondition(lambda self: self.breaker.trial is not None)
    @rule()
    def trial_is_left(self) -> None:
        self.breaker.trial = None
        assert self.breaker.allows_requests

    @invariant()
    def one_may_try_and_then_nobody(self) -> None:
        circuit, trial = self.breaker.circuit, self.breaker.trial
        expected = circuit is CircuitState.CLOSED or (
            circuit is CircuitState.HALF_OPEN and trial is None
        )
        assert self.breaker.allows_requests == expected
        assert trial is None or circuit is CircuitState.HALF_OPEN


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_pauses_grow_to_a_limit_and_start_over_after_a_success() -> None:
    breaker = CircuitBreaker(RULES, lambda: 0.5)

    def next_pause() -> float:
        breaker.half_open()
        pauses = [breaker.record_failure() for _ in range(3)]
        return next(pause for pause in pauses if pause is not None)

    assert [next_pause() for _ in range(6)] == [1, 2, 4, 8, 10, 10]
    for _ in range(2000):
        next_pause()
    breaker.half_open()
    assert breaker.record_success()
    assert next_pause() == 1


@pytest.mark.parametrize("good_before", [0, 5, 1000, 100_000])
def test_failures_of_half_the_legs_open_the_circuit_whatever_the_past(good_before: int) -> None:
    breaker = CircuitBreaker(BreakerRules())
    for _ in range(good_before):
        breaker.record_success()
    legs = 0
    while breaker.record_failure() is None:
        breaker.record_success()
        legs += 2
        assert legs < 400
    assert breaker.circuit is CircuitState.OPEN
    assert good_before or legs + 1 >= BreakerRules().min_sample, "a few legs say nothing"


def test_failures_of_a_quarter_of_the_legs_do_not_open_the_circuit() -> None:
    breaker = CircuitBreaker(BreakerRules())
    for _ in range(1000):
        assert breaker.record_failure() is None
        for _ in range(3):
            breaker.record_success()
