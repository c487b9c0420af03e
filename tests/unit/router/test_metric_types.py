"""Histograms that gather first and sort later say the same as if each value were sorted at once."""

from bisect import bisect_left

from hypothesis import given
from hypothesis import strategies as st

from router.telemetry.metric_types import LocalHistogram
from router.telemetry.metrics import Metrics
from router.telemetry.record import Record
from router.telemetry.request_metrics import MAX_BATCH_RECORDS, MAX_UNSORTED

BOUNDS = (0.5, 1, 2)
VALUES = st.floats(0, 3) | st.sampled_from(BOUNDS)


@given(st.lists(st.lists(VALUES, max_size=20), max_size=4))
def test_a_histogram_is_the_same_however_often_it_sorts(batches: list[list[float]]) -> None:
    histogram = LocalHistogram("x", "text", (), BOUNDS)
    series = histogram.series[()]
    expected = [0] * (len(BOUNDS) + 1)
    for batch in batches:
        for value in batch:
            series.observe(value)
            expected[bisect_left(BOUNDS, value)] += 1
        series.fold()
    samples = {
        sample.labels.get("le", sample.name): sample.value
        for family in histogram.collect()
        for sample in family.samples
    }
    told = [samples[str(float(bound))] for bound in BOUNDS] + [samples["+Inf"]]
    assert told == [sum(expected[: place + 1]) for place in range(len(expected))]
    total = sum(sum(batch) for batch in batches)
    assert abs(samples["x_sum"] - total) < 1e-9 * max(1, total)


def test_values_that_wait_to_be_sorted_are_bounded_without_a_scrape() -> None:
    metrics = Metrics()
    for _ in range(6):
        ended = [
            Record("/v1/completions", 0.0, first_byte=1.0, ended=1.0)
            for _ in range(MAX_BATCH_RECORDS)
        ]
        metrics.requests.add_records(ended)
        assert len(metrics.requests.request_seconds.unsorted) < MAX_UNSORTED
        assert len(metrics.requests.ttft_seconds.unsorted) < MAX_UNSORTED
    text = metrics.exposition().decode()
    assert f"disagg_router_request_seconds_count {6.0 * MAX_BATCH_RECORDS}" in text
