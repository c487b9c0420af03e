"""What is counted by model and group: rightly, in a bounded number of series, off the hot path."""

import asyncio
import json
from typing import Any

import pytest

from router.fleet.engine import BreakerRules
from router.telemetry.metrics import Metrics
from router.telemetry.record import UNKNOWN, Record, Tokens
from router.telemetry.request_metrics import (
    MAX_BATCH_RECORDS,
    MAX_LABEL_PAIRS,
    MAX_RECENT_TIMES,
    MAX_UNSORTED,
    RecordBatches,
    tokens_in,
    tokens_of,
)
from scripts.mock_engine import DONE, MockEngine, Peer, Received
from tests.unit.router.conftest import StartRouter
from tests.unit.router.harness import Router, eventually
from tests.unit.router.mock_engine import event

USAGE = b'{"prompt_tokens":40,"completion_tokens":5,"cached_tokens":8}'


def record_of(model: str = "m", group: str = "g", **more: Any) -> Record:
    record = Record("/v1/completions", 10.0, "id", outcome="ok", status=200, usage=USAGE)
    record.model, record.group = model, group
    record.first_byte, record.ended = 10.5, 12.5
    for name, value in more.items():
        setattr(record, name, value)
    record.tokens = tokens_of(record)
    return record


def recent(metrics: Metrics) -> dict[str, float]:
    name = "disagg_router_recent_time_to_first_byte_seconds"
    values = {
        share: metrics.registry.get_sample_value(name, {"percentile": share})
        for share in ("p50", "p90", "p99")
    }
    return {share: round(value, 9) for share, value in values.items() if value is not None}


def test_recent_percentiles_are_times_that_were_measured() -> None:
    metrics = Metrics()
    assert recent(metrics) == {}
    metrics.requests.add_records([record_of(first_byte=11.34)])
    assert recent(metrics) == {"p50": 1.34, "p90": 1.34, "p99": 1.34}
    metrics.requests.add_records([record_of(first_byte=10 + n / 100) for n in range(1, 100)])
    assert recent(metrics) == {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    for _ in range(MAX_RECENT_TIMES):
        metrics.requests.add_records([record_of(first_byte=10.25)])
    assert recent(metrics) == {"p50": 0.25, "p90": 0.25, "p99": 0.25}
    assert metrics.registry.get_sample_value("disagg_router_recent_answers") == MAX_RECENT_TIMES


def value(metrics: Metrics, name: str, **labels: str) -> float:
    full = f"disagg_router_model_{name}"
    return metrics.registry.get_sample_value(full, labels) or 0.0


def knowing(*models: str) -> Metrics:
    metrics = Metrics()
    metrics.requests.known_models = lambda: models
    return metrics


def test_tokens_and_times_of_a_request_are_counted_for_its_model_and_group() -> None:
    metrics = knowing("m")
    metrics.requests.add_records([record_of(streamed=True, queued=10.0, admitted=10.25)])
    at = {"model": "m", "group": "g"}
    assert value(metrics, "requests_total", **at, outcome="ok") == 1
    assert value(metrics, "prompt_tokens_total", **at) == 40
    assert value(metrics, "completion_tokens_total", **at) == 5
    assert value(metrics, "cached_tokens_total", **at) == 8
    assert value(metrics, "time_to_first_byte_seconds_sum", **at) == 0.5
    assert value(metrics, "request_seconds_sum", **at) == 2.5
    assert value(metrics, "inter_token_seconds_sum", **at) == 0.5
    assert value(metrics, "queue_seconds_sum", **at) == 0.25


def test_only_whole_streams_of_two_tokens_have_time_between_tokens() -> None:
    metrics, at = knowing("m"), {"model": "m", "group": "g"}
    one = USAGE.replace(b'_tokens":5', b'_tokens":1')
    metrics.requests.add_records([record_of(), record_of(streamed=True, usage=one)])
    metrics.requests.add_records([record_of(streamed=True, outcome="disconnected")])
    assert value(metrics, "inter_token_seconds_count", **at) == 0
    assert value(metrics, "request_seconds_count", **at) == 2
    assert value(metrics, "time_to_first_byte_seconds_count", **at) == 3


@pytest.mark.parametrize("model", ["never heard of", "", "other"])
def test_a_model_that_nobody_serves_is_other(model: str) -> None:
    metrics = knowing("m")
    metrics.requests.add_records([record_of(model)])
    assert value(metrics, "requests_total", model="other", group="g", outcome="ok") == 1


def test_a_model_that_was_served_keeps_its_name_when_its_engines_are_gone() -> None:
    metrics = knowing("m")
    metrics.requests.add_records([record_of()])
    metrics.requests.known_models = tuple
    metrics.requests.add_records([record_of()])
    assert value(metrics, "requests_total", model="m", group="g", outcome="ok") == 2


def test_series_are_bounded_whatever_clients_and_fleets_say() -> None:
    metrics = knowing(*(f"served {number}" for number in range(3 * MAX_LABEL_PAIRS)))
    for number in range(3 * MAX_LABEL_PAIRS):
        metrics.requests.add_records(
            [record_of(f"served {number}"), record_of(f"made up {number}")]
        )
    text = metrics.exposition().decode()
    assert text.count("disagg_router_model_requests_total{") <= MAX_LABEL_PAIRS + 1
    assert value(metrics, "requests_total", model="other", group="other", outcome="ok") > 0


def test_what_waits_to_be_sorted_is_bounded() -> None:
    metrics = knowing("m")
    for _ in range(5):
        metrics.requests.add_records([record_of()] * MAX_BATCH_RECORDS)
        waiting = metrics.requests._model_whole.series["m", "g"].unsorted
        assert len(waiting) < MAX_UNSORTED + MAX_BATCH_RECORDS
    assert value(metrics, "request_seconds_count", model="m", group="g") == 5 * MAX_BATCH_RECORDS


async def test_a_reader_of_the_books_that_fails_keeps_them_from_no_other() -> None:
    seen: list[Record] = []

    def broken(_: object) -> None:
        raise ValueError("a fault of ours")

    batches = RecordBatches([broken, seen.extend])
    batches.add(record_of())
    batches.flush()
    assert len(seen) == 1


async def test_a_thread_gets_all_records_that_there_are() -> None:
    seen: list[Record] = []
    batches = RecordBatches([seen.extend], max_delay_s=60)
    await asyncio.to_thread(batches.flush_from_thread)
    batches.add(record_of())
    await asyncio.to_thread(batches.flush_from_thread)
    assert len(seen) == 1
    batches.add(record_of())
    batches.flush_from_thread()  # the loop is busy
    assert len(seen) == 1
    batches.flush()


async def test_a_record_that_was_passed_on_holds_no_text_of_the_answer() -> None:
    seen: list[Record] = []
    record = Record("/v1/completions", 10.0, "id", answer_end=b'"secret", "usage":' + USAGE)
    batches = RecordBatches([seen.extend])
    batches.add(record)
    batches.flush()
    assert (record.answer_end, record.usage) == (b"", USAGE)
    assert record.tokens == tokens_in(USAGE) != UNKNOWN


@pytest.mark.parametrize("odd", ["1.0", "-1", '"1"', "[]"])
def test_a_count_that_is_none_hides_no_other(odd: str) -> None:
    counts = f'"prompt_tokens": 7, "completion_tokens": {odd}'
    usage = f'{{{counts}, "prompt_tokens_details": {{"cached_tokens": 3}}}}'
    assert tokens_in(usage.encode()) == Tokens(7, None, 3)


async def stream_with_usage(request: Received, peer: Peer) -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 3}
    last = {"id": "c", "object": "text_completion", "choices": [], "usage": usage}
    await peer.stream(event("a"), event("b"), b"data: " + json.dumps(last).encode() + b"\n\n", DONE)


async def test_a_stream_that_tells_its_usage_tells_the_time_between_its_tokens(
    router: Router, d: MockEngine
) -> None:
    d.usual = stream_with_usage
    await router.knows_its_engines()
    assert (await router.stream()).status_code == 200
    assert "m" in router.gateway.fleet.snapshot.by_model
    at = {"model": "m", "group": router.engine(d).group}
    await eventually(lambda: router.metric("model_inter_token_seconds_count", **at) == 1)
    assert router.metric("model_completion_tokens_total", **at) == 3


@pytest.mark.parametrize("model", [7, ["m"], {"m": 1}, "x" * 100_000, "never heard of"])
async def test_whatever_a_client_calls_its_model_is_other_and_is_not_kept(
    router: Router, model: object
) -> None:
    records: list[Record] = []
    router.gateway.records.add_reader(records.extend)
    await router.complete(model=model)
    router.gateway.records.flush()
    (record,) = records
    assert len(record.model) < 300
    text = router.gateway.metrics.exposition().decode()
    assert "disagg_router_model_requests_total{" in text
    assert 'model="other"' in text
    assert "never heard of" not in text


@pytest.mark.parametrize("access_log", [True, False])
async def test_requests_are_counted_with_and_without_access_lines(
    start_router: StartRouter, d: MockEngine, access_log: bool
) -> None:
    router: Router = await start_router(access_log=access_log)
    await router.knows_its_engines()
    assert (await router.complete()).status_code == 200
    labels = {"model": "m", "group": router.engine(d).group, "outcome": "ok"}
    await eventually(lambda: router.metric("model_requests_total", **labels) == 1)


async def test_the_circuit_and_the_comings_and_goings_of_engines_are_told(router: Router) -> None:
    name = router.gateway.fleet.engines[0].name
    assert router.metric("fleet_changes_total", change="joined") == 2
    assert router.metric("engine_circuit", role="prefill", engine=name) == 0
    for _ in range(BreakerRules().consecutive_failures):
        router.gateway.fleet.engines[0].breaker.record_failure()
    assert router.metric("engine_circuit", role="prefill", engine=name) == 2
