"""Requests as they come and go: bounded, and each looker has its own."""

from typing import Any

import pytest

from router.telemetry.record import Record, Tokens
from router.telemetry.request_metrics import tokens_of
from router.ui.live_requests import (
    MAX_ENDED,
    MAX_RUNNING,
    RATE_WINDOW_S,
    REFUSAL_WINDOW_S,
    LiveRequests,
    RequestFeed,
    links_of,
    summarize_request,
)


def record(**fields: object) -> Record:
    made = Record("/v1/completions", 100.0, "id")
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_what_is_held_has_bounds_and_what_did_not_fit_is_counted() -> None:
    live, feed = LiveRequests(), RequestFeed()
    live.feeds.append(feed)
    many = [record() for _ in range(2 * MAX_RUNNING)]
    for each in many:
        live.opened(each)
    assert len(live.running) == MAX_RUNNING
    for each in many:
        live.closed(each)
    assert not live.running
    fresh, missed = feed.take(0.0)
    assert list(fresh) == many[-MAX_ENDED:]
    assert missed == len(many) - MAX_ENDED
    assert feed.take(1.0) == ([], 0)


def test_to_look_at_a_request_that_runs_takes_none_of_its_tokens() -> None:
    running = record(prefill_usage=b'{"prompt_tokens":46}')
    assert summarize_request(running, "w", 0.0).prompt_tokens == 46
    running.usage, running.ended = b'{"prompt_tokens":46,"completion_tokens":5}', 101.0
    assert tokens_of(running) == Tokens(46, 5, None), "the access line and metrics have all of them"
    assert summarize_request(running, "w", 0.0).completion_tokens == 5


@pytest.mark.parametrize(
    ("known", "count", "counted"),
    [
        ({"usage": b'{"completion_tokens":7}', "streamed_tokens": 6}, 7, "usage"),
        ({"streamed_tokens": 6, "streamed_events": 5}, 6, "token ids"),
        ({"streamed_events": 5}, 5, "events"),
        ({"streamed_events": -1}, None, "events"),
    ],
)
def test_output_is_counted_by_usage_or_token_ids_or_events(
    known: dict[str, Any], count: int | None, counted: str
) -> None:
    told = summarize_request(record(**known), "w", 0.0)
    assert (told.completion_tokens, told.counted) == (count, counted)


def test_one_that_looks_takes_nothing_from_another() -> None:
    live = LiveRequests()
    live.feeds += [RequestFeed(), RequestFeed()]
    live.closed(one := record())
    assert [feed.take(0.0)[0] for feed in live.feeds] == [[one], [one]]


def test_rates_are_of_the_last_seconds() -> None:
    feed, way = RequestFeed(), ("p", "d", "prompt")
    for _ in range(8):
        feed.note(record(prefiller="p", decoder="d", first_byte=101.0))
    feed.take(0.0)
    assert feed.rates() == {way: 8 / RATE_WINDOW_S}
    feed.take(RATE_WINDOW_S - 0.1)
    assert feed.rates() == {way: 8 / RATE_WINDOW_S}
    feed.take(RATE_WINDOW_S)
    assert feed.rates() == {}


def test_links_of_a_request_are_those_over_which_its_kv_moved() -> None:
    done = record(prefiller="p", decoder="d", first_byte=101.0, reused_from="e", stage="done")
    assert list(links_of(done)) == [("p", "d", "prompt"), ("e", "p", "turn")]
    assert list(links_of(record(prefiller="p"))) == []
    borrowing = record(prefiller="p", borrowed_from="q", borrowed_tokens=4096)
    assert list(links_of(borrowing)) == [("q", "p", "loan")]
    assert list(links_of(record(decoder="d", borrowed_from="e"))) == [("e", "d", "loan")]


def test_what_a_record_says() -> None:
    made = record(
        prefill_started=100.01,
        prefill_done=100.2,
        ended=101.0,
        outcome="ok",
        usage=b'{"prompt_tokens":446,"completion_tokens":7,"cached_tokens":412}',
        failures=("decode at x: timeout; retried on another engine",),
        error="E: " + "x" * 9000,
    )
    told = summarize_request(made, "7", 1e9)
    assert told.at == 1e9 + 100
    assert told.ms == {
        "queued": None,
        "admitted": None,
        "prefill_started": 10,
        "prefill_done": 200,
        "decode_started": None,
        "first_byte": None,
        "ended": 1000,
    }
    assert (told.prompt_tokens, told.completion_tokens, told.cached_tokens) == (446, 7, 412)
    assert len(told.error) < 1000
    assert told.failures == ["decode at x: timeout; retried on another engine"]
    assert summarize_request(record(), "7", 0).outcome == "running"


def test_refusals_are_counted_by_status_and_reason_for_ten_seconds() -> None:
    full = {"status": 503, "outcome": "failed", "error": "OverloadError: the queue is full"}
    feed = RequestFeed([record(ended=100.0, **full)])  # a viewer that comes late sees it, too
    for _ in range(2):
        feed.note(record(ended=105.0, **full))
    feed.note(record(ended=106.0, status=200, outcome="broken_stream", error="EngineError: gone"))
    feed.note(record(ended=106.0, status=429, outcome="refused"))
    for status, outcome in (
        (200, "ok"),
        (404, "refused"),
        (499, "disconnected"),
        (503, "disconnected"),
    ):
        feed.note(record(ended=106.0, status=status, outcome=outcome))

    def refusals(at: float) -> list[tuple[int, str, int]]:
        return [(one.status, one.text, one.count) for one in feed.refusals(at)]

    engines_own = (429, "", 1)
    broken = (200, "gone", 1)
    assert refusals(107.0) == [(503, "the queue is full", 3), broken, engines_own]
    assert refusals(100.0 + REFUSAL_WINDOW_S + 1) == [
        (503, "the queue is full", 2),
        broken,
        engines_own,
    ]
    assert refusals(106.0 + REFUSAL_WINDOW_S + 1) == []


def test_resumed_streams_are_marked() -> None:
    lines = (
        "prefill at p: status_5xx; retried on another engine",
        "decode at d: disconnected; resumed on another engine",
    )
    assert summarize_request(record(failures=lines), "w", 0.0).resumes == 1
    assert summarize_request(record(), "w", 0.0).resumes == 0
