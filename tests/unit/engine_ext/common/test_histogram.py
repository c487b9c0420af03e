import pickle
from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from engine_ext.common.histogram import Histogram
from engine_ext.common.types import ConnectorStats

BOUNDS = (1.0, 2.0, 5.0)
VALUES = st.lists(st.floats(0, 10))


def histogram(values: list[float]) -> Histogram:
    made = Histogram(BOUNDS)
    for value in values:
        made.observe(value)
    return made


@given(VALUES)
def test_below_each_bound_lie_the_values_that_do_not_exceed_it(values: list[float]) -> None:
    below = list(accumulate(bucket.times for bucket in histogram(values).buckets()))
    for bound, count in zip((*BOUNDS, float("inf")), below, strict=True):
        assert count == sum(value <= bound for value in values)


@given(VALUES)
def test_the_mean_of_a_bucket_lies_in_it(values: list[float]) -> None:
    """But for rounding."""
    limits = (0.0, *BOUNDS, 10.0)
    for place, (times, total) in enumerate(histogram(values).buckets()):
        if times:
            assert limits[place] - 1e-9 <= total / times <= limits[place + 1] + 1e-9


def test_a_snapshot_stays_as_it_was_and_pickles() -> None:
    stats = ConnectorStats(pulls_ok=1)
    stats.handshake_seconds.observe(0.1)
    taken = stats.snapshot()
    assert taken == stats
    stats.pulls_ok += 1
    stats.handshake_seconds.observe(0.2)
    assert taken.pulls_ok == 1
    assert sum(bucket.times for bucket in taken.handshake_seconds.buckets()) == 1
    assert pickle.loads(pickle.dumps(taken)) == taken
    assert taken != stats
