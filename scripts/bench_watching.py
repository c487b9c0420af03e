"""scripts/bench_watching.py: what CPU it costs to count a request, and to show it to who looks.

By themselves, in this process. What they are beside a whole request is scripts/bench_router.py's
to say, with the peers "ui", "page" and "traces".
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from router.telemetry.metrics import Metrics
from router.telemetry.record import Record
from router.telemetry.token_usage import tokens_of
from router.ui.live_requests import LiveRequests, RequestFeed
from router.ui.request_view import Origin, summarize_request

REQUESTS, BATCH, ROUNDS = 20_000, 256, 5
USAGE = (
    b'{"prompt_tokens":446,"completion_tokens":64,"prompt_tokens_details":{"cached_tokens":412}}'
)


def main() -> None:
    records = [_record(number) for number in range(REQUESTS)]
    for record in records:
        tokens_of(record)  # the access line reads them anyway
    metrics = Metrics()
    metrics.by_model.known = lambda: ("m",)
    watch = LiveRequests()
    watch.looks.append(look := RequestFeed())
    origin = Origin("1", 0.0)
    show("counted as it ends", lambda: _finish(metrics, records))
    show("counted by model, in batches", lambda: _in_batches(metrics, records))
    show("noted for who looks", lambda: _note(watch, records))
    show(
        "made ready to be told",
        lambda: [summarize_request(one, origin).model_dump() for one in records],
    )
    taken = best(lambda: [metrics.exposition() for _ in range(20)]) / 20
    size = len(metrics.exposition()) / 1000
    print(f"/metrics read once: {taken * 1000:.1f} ms, {size:.0f} kB")
    look.take(0.0)


def show(what: str, work: Callable[[], object]) -> None:
    print(f"a request {what}: {best(work) / REQUESTS * 1e6:.1f} us")


def best(work: Callable[[], object]) -> float:
    """CPU seconds of the best round: what neighbours add is nobody's."""
    times = []
    for _ in range(ROUNDS):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return min(times)


def _finish(metrics: Metrics, records: list[Record]) -> None:
    for record in records:
        metrics.finish(record)


def _note(watch: LiveRequests, records: list[Record]) -> None:
    for record in records:
        watch.opened(record)
        watch.closed(record)


def _in_batches(metrics: Metrics, records: list[Record]) -> None:
    for start in range(0, REQUESTS, BATCH):
        metrics.by_model.add_records(records[start : start + BATCH])


def _record(number: int) -> Record:
    return Record(
        "/v1/chat/completions",
        100.0,
        f"request-{number}",
        flow="pull",
        outcome="ok",
        status=200,
        prefiller="p:1",
        decoder="d:1",
        prefill_started=100.1,
        prefill_done=100.2,
        decode_started=100.2,
        first_byte=100.3,
        ended=101.0,
        usage=USAGE,
        model="m",
        group="g",
    )


if __name__ == "__main__":
    main()
