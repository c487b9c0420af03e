"""What others pay for retries is bounded, whatever happens when."""

import math

from hypothesis import given
from hypothesis import strategies as st

from router.proxy.gateway import RetryBudget

SHARE, FLOOR, WINDOW = 0.25, 3, 8.0
EVENTS = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.0, 0.01, 0.5, 1.0, 3.9, 4.0, 4.1, 8.0, 20.0]),
        st.integers(0, 12),
        st.integers(0, 6),
    ),
    max_size=60,
)


@given(EVENTS)
def test_in_no_half_window_are_more_legs_tried_again_than_its_requests_allow(
    events: list[tuple[float, int, int]],
) -> None:
    """What is remembered is a half window at least, and one and a half at most."""
    budget, now = RetryBudget(SHARE, FLOOR, WINDOW), 1000.0
    requests: list[float] = []
    retries: list[float] = []
    for pause, asked, failed in events:
        now += pause
        for _ in range(asked):
            budget.note_request(now)
            requests.append(now)
        for _ in range(failed):
            if budget.take(now):
                retries.append(now)
            else:
                recent = sum(at > now - 1.5 * WINDOW for at in retries)
                assert recent >= FLOOR, "some in any case"
        near = sum(at > now - WINDOW / 2 for at in retries)
        known = sum(at > now - 1.5 * WINDOW for at in requests)
        assert near <= math.ceil(max(FLOOR, SHARE * known))


def test_an_outage_of_everything_costs_a_fifth() -> None:
    budget, taken = RetryBudget(), 0
    for number in range(10_000):
        now = number / 1000
        budget.note_request(now)
        taken += budget.take(now) + budget.take(now)
    assert not budget.take(now)
    assert 0.15 * 10_000 < taken <= 0.2 * 10_000
