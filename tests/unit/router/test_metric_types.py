"""Histograms that gather first and sort later say the same as if each value were sorted at once."""

from __future__ import annotations

from bisect import bisect_left

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from router.telemetry.metric_types import LocalHistogram
from router.telemetry.metrics import Metrics
from router.telemetry.model_metrics import MAX_UNSORTED
from router.telemetry.record import Record

BOUNDS = (0.5, 1, 2)
VALUES = st.floats(0, 3) | st.sampled_from(BOUNDS)


@given(st.lists(st.lists(VALUES, max_size=20), max_size=4))
def test_a_histogram_is_the_same_however_often_it_sorts(batches: list[list[float]]) -> None:
    histogram = LocalHistogram("x", "text", (), BOUNDS, CollectorRegistry())
    series = histogram.series()
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


def test_what_waits_to_be_sorted_is_bounded_though_nobody_reads() -> None:
    metrics = Metrics()
    for number in range(3 * MAX_UNSORTED):
        record = Record("/v1/completions", 0.0, str(number))
        record.first_byte = record.ended = 1.0
        metrics.finish(record)
        assert len(metrics.request_seconds.unsorted) <= MAX_UNSORTED
        assert len(metrics.ttft_seconds.unsorted) <= MAX_UNSORTED
    text = metrics.exposition().decode()
    assert f"disagg_router_request_seconds_count {3.0 * MAX_UNSORTED}" in text
