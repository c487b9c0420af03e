"""What a collector is told of requests, on the wire; and what it costs when it does not listen."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, cast

import pytest

from router.telemetry import tracing
from router.telemetry.record import Record, Trace
from router.telemetry.tracing import parent_in
from scripts.mock_engine import DONE, MockEngine, Peer, Received
from tests.unit.router.conftest import StartRouter
from tests.unit.router.engine_scripts import answering, hang, hanging
from tests.unit.router.harness import Router, eventually, post
from tests.unit.router.mock_engine import event, running_engine
from tests.unit.router.otlp_receiver import Receiver, Seen, receiving
from tests.unit.router.processes import router_process

TRACE, ABOVE = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = f"00-{TRACE}-{ABOVE}-01"
ROOT = "POST /v1/completions"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    with receiving() as receiver:
        point_at(monkeypatch, receiver.url)
        yield receiver


def point_at(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")


def trace_of(engine: MockEngine) -> tuple[str, str, str]:
    """Trace, span and flags that an engine was last told."""
    version, trace_id, span_id, flags = (engine.last.header("traceparent") or "").split("-")
    assert version == "00"
    return trace_id, span_id, flags


async def one_request(collector: Receiver) -> dict[str, Seen]:
    """The spans of the only request so far, each of another name, two of them of legs."""
    await eventually(lambda: collector.named(ROOT) and len(collector.spans) == 4)
    found = {span.name: span for span in collector.spans}
    assert len(found) == len(collector.spans)
    assert {span.service for span in collector.spans} == {"disagg-router"}
    return found


async def stream(request: Received, peer: Peer) -> None:
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":3,'
    usage += b'"prompt_tokens_details":{"cached_tokens":4}}}\n\n'
    await peer.stream(event("a"), event("b"), usage, DONE)


async def test_a_request_is_a_span_under_its_clients_and_its_legs_are_under_it(
    collector: Receiver, start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    d.usual, router = stream, await start_router()
    headers = {"traceparent": SAMPLED, "tracestate": "vendor=1", "x-request-id": "mine"}
    body = {"model": "m", "prompt": "hello", "stream": True}
    answer = await router.client.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200
    spans = await one_request(collector)
    root, prefill, decode = spans[ROOT], spans["prefill"], spans["decode"]
    assert (root.trace_id, root.parent_id, root.raw.trace_state) == (TRACE, ABOVE, "vendor=1")
    assert {span.trace_id for span in spans.values()} == {TRACE}
    children = prefill, decode, spans["choose"]
    assert {span.parent_id for span in children} == {root.span_id}
    for engine, leg in ((p, prefill), (d, decode)):
        assert trace_of(engine) == (TRACE, leg.span_id, "01")
        assert engine.last.header("tracestate") == "vendor=1"
        assert leg.attributes["server.port"] == engine.port
        assert leg.attributes["disagg.engine"] == f"127.0.0.1:{engine.port}"
    told = root.attributes
    assert told["gen_ai.operation.name"] == "text_completion"
    assert told["gen_ai.request.model"] == "m"
    assert told["gen_ai.usage.input_tokens"] == 9
    assert told["gen_ai.usage.output_tokens"] == 3
    assert told["gen_ai.usage.cache_read.input_tokens"] == 4
    assert told["http.response.status_code"] == 200
    assert told["disagg.outcome"] == "ok"
    assert told["disagg.transfer.mode"] == told["disagg.flow"] == "pull"
    assert told["disagg.request.id"] == "mine"
    assert told["disagg.retries"] == 0
    assert "error.type" not in told


async def test_releases_and_trial_requests_belong_to_the_trace_of_their_request(
    collector: Receiver, router: Router, d: MockEngine
) -> None:
    d.scripts = [answering(400, {"error": {"message": "no"}})]
    headers, body = {"traceparent": SAMPLED}, {"model": "m", "prompt": "hello" * 2000}
    for threshold in (0, *3 * [0.5]):  # a trial follows when three answers have shown nothing
        fields = {"stream": True, "cache_hit_threshold": threshold} if threshold else {}
        await router.client.post("/v1/completions", json=body | fields, headers=headers)
    ends = {"-release", "-trial"}
    beside: dict[str, Received] = {}

    def has_both() -> bool:
        for request in d.requests:
            beside.update({(request.header("x-request-id") or "")[-n:]: request for n in (6, 8)})
        return beside.keys() >= ends

    await eventually(lambda: has_both() and len(collector.named(ROOT)) == 4)
    roots = {span.span_id for span in collector.named(ROOT)}
    for end in ends:
        _, trace_id, span_id, _ = (beside[end].header("traceparent") or "").split("-")
        assert (trace_id, span_id in roots) == (TRACE, True)


async def test_times_are_in_order_and_of_this_day(
    collector: Receiver, start_router: StartRouter, d: MockEngine
) -> None:
    d.usual, router, before = stream, await start_router(), time.time_ns()
    await router.stream()
    after = time.time_ns()
    spans = await one_request(collector)
    (began, ended), (asked, prefilled) = spans[ROOT].times, spans["prefill"].times
    decoding, decoded = spans["decode"].times
    first = spans["decode"].events["first byte"]
    order = [before, began, asked, prefilled, decoding, first, decoded, ended, after]
    slack = 20_000_000  # the clocks are read one after the other
    assert all(a <= b + slack for a, b in pairwise(order)), order


async def test_without_a_parent_a_trace_begins_here(
    collector: Receiver, router: Router, d: MockEngine
) -> None:
    await router.complete()
    root = (await one_request(collector))[ROOT]
    assert root.parent_id == ""
    assert trace_of(d)[0] == root.trace_id
    assert d.last.header("tracestate") is None


async def test_what_the_client_does_not_sample_is_passed_on_so_and_not_sent(
    collector: Receiver, router: Router, p: MockEngine, d: MockEngine
) -> None:
    parent = {"traceparent": f"00-{TRACE}-{ABOVE}-00"}
    body = {"model": "m", "prompt": "x"}
    await router.client.post("/v1/completions", json=body, headers=parent)
    for engine in (p, d):
        trace_id, span_id, flags = trace_of(engine)
        assert (trace_id, flags) == (TRACE, "00")
        assert span_id != ABOVE
    await router.complete()
    spans = await one_request(collector)
    assert spans[ROOT].trace_id != TRACE


async def test_each_try_is_a_span_with_an_id_of_its_own(
    collector: Receiver, start_router: StartRouter, p: MockEngine
) -> None:
    async with running_engine(answering(500, {"error": {"message": "out of memory"}})) as broken:
        router = await start_router(ps=[broken, p])
        assert (await router.complete()).status_code == 200
        await eventually(lambda: collector.named(ROOT))
        failed, good = sorted(collector.named("prefill"), key=lambda span: span.times)
        assert (failed.failed, good.failed) == (True, False)
        assert failed.attributes["error.type"] == "status_5xx"
        assert trace_of(broken)[1] == failed.span_id != good.span_id == trace_of(p)[1]
        (root,) = collector.named(ROOT)
        assert root.attributes["disagg.retries"] == 1
        assert not root.failed
        labels = {"role": "prefill", "kind": "status_5xx"}
        assert router.metric("retries_total", **labels) == 1


async def test_a_request_that_fails_says_so(
    collector: Receiver, router: Router, d: MockEngine
) -> None:
    d.usual = answering(500, {"error": {"message": "out of memory"}})
    assert (await router.complete()).status_code >= 500
    await eventually(lambda: collector.named(ROOT))
    (root,) = collector.named(ROOT)
    assert root.failed
    assert root.attributes["error.type"]
    assert all(span.failed for span in collector.named("decode"))


async def test_a_refused_request_and_one_nobody_can_read_are_spans_without_legs(
    collector: Receiver, router: Router
) -> None:
    assert (await router.client.post("/v1/completions", content=b"{")).status_code == 400
    await eventually(lambda: collector.named(ROOT))
    (root,) = collector.spans
    assert root.attributes["http.response.status_code"] == 400
    assert not root.failed


@pytest.mark.slow
async def test_a_client_that_leaves_ends_its_spans(
    collector: Receiver, router: Router, d: MockEngine
) -> None:
    asked = asyncio.Event()
    d.usual = hanging(asked=asked)
    async with router.socket() as client:
        await client.send(post(b'{"model":"m","prompt":"x"}'))
        await asyncio.wait_for(asked.wait(), 5)
    await eventually(lambda: collector.named(ROOT))
    assert collector.named(ROOT)[0].attributes["disagg.outcome"] == "disconnected"
    assert collector.named("decode")[0].attributes["disagg.leg.outcome"] == "cancelled"


async def test_the_standards_sampler_is_asked(
    collector: Receiver, monkeypatch: pytest.MonkeyPatch, start_router: StartRouter, d: MockEngine
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    router = await start_router()
    await router.client.post(
        "/v1/completions", json={"model": "m", "prompt": "x"}, headers={"traceparent": SAMPLED}
    )
    assert (trace_of(d)[0], trace_of(d)[2]) == (TRACE, "00")
    await router.gateway.close()
    assert not collector.spans


async def test_waiting_for_room_is_a_span(collector: Receiver, start_router: StartRouter) -> None:
    router = await start_router(max_engine_requests=1)
    both = await asyncio.gather(*(router.complete() for _ in range(4)))
    assert [answer.status_code for answer in both] == [200] * 4
    await eventually(lambda: len(collector.named(ROOT)) == 4)
    assert collector.named("queue")


async def test_in_a_push_each_engine_is_told_of_its_own_leg(
    collector: Receiver, start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    where = {"remote_engine_id": "p-1", "remote_host": "h", "remote_port": 1}
    ranks = [{"dp_rank": 0, **where, "tp_size": 1, "pp_size": 1}]
    p.identity = {"capabilities": [], "transfer_modes": ["push"], "ranks": ranks}
    d.identity = {"capabilities": [], "transfer_modes": ["push"]}
    router = await start_router(transfer_mode="push", identified=True)
    assert (await router.complete()).status_code == 200
    spans = await one_request(collector)
    assert trace_of(p)[1] == spans["prefill"].span_id
    assert trace_of(d)[1] == spans["decode"].span_id
    assert spans[ROOT].attributes["disagg.transfer.mode"] == "push"


# A collector that does not do its part.


@pytest.mark.slow
async def test_a_collector_that_hangs_holds_up_no_request_and_the_end_not_long(
    collector: Receiver, start_router: StartRouter
) -> None:
    collector.may_answer.clear()
    router = await start_router()
    await router.complete()
    await eventually(lambda: collector.asked)
    began = time.monotonic()
    for _ in range(20):
        assert (await router.complete()).status_code == 200
    assert time.monotonic() - began < 9  # one export alone would take 10
    began = time.monotonic()
    await router.gateway.close()
    assert time.monotonic() - began < 2 * tracing.FLUSH_TIMEOUT_S + 5  # it would hang for 20


@pytest.mark.slow
@pytest.mark.parametrize("listens", [True, False])
async def test_a_collector_that_is_gone_or_refuses_costs_requests_nothing(
    collector: Receiver,
    start_router: StartRouter,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    listens: bool,
) -> None:
    collector.status = 400
    if not listens:
        with socket.create_server(("127.0.0.1", 0)) as nobody:
            point_at(monkeypatch, f"http://127.0.0.1:{nobody.getsockname()[1]}")
    router = await start_router()
    for _ in range(5):
        assert (await router.complete()).status_code == 200
    await router.gateway.close()
    said = [r for r in caplog.records if "collector" in r.getMessage()]
    assert len(said) <= 2
    assert all(r.levelname == "WARNING" for r in said)
    if listens:
        assert said


class Stuck:
    """A sink whose thread is never done."""

    def __init__(self) -> None:
        self.held = threading.Event()

    def samples(self, *_: object) -> bool:
        return True

    def add_records(self, ended: object, unix: int) -> None:
        self.held.wait(10)

    def close(self) -> None:
        """Not reached in time."""


def test_what_waits_for_the_thread_is_bounded_and_what_is_dropped_is_counted() -> None:
    sink = Stuck()
    tracer = tracing.Tracer(cast(Any, sink))
    record = Record("/v1/completions", 0.0)
    record.trace = tracer.begin([], "/v1/completions", 0.0)
    for _ in range(3 * tracing.MAX_WAITING_BATCHES):
        tracer.add_records([record])
    assert tracer.dropped >= 2 * tracing.MAX_WAITING_BATCHES - 1
    began = time.monotonic()
    tracer.close(0.2)
    assert time.monotonic() - began < 5  # the sink is stuck for 10
    sink.held.set()


def test_a_sampler_that_fails_samples_nothing() -> None:
    class Broken(Stuck):
        def samples(self, *_: object) -> bool:
            raise ValueError("no")

    tracer = tracing.Tracer(cast(Any, Broken()))
    assert not tracer.begin([], "/v1/completions", 0.0).is_sampled
    tracer.close(1)


# Off.


async def test_without_a_collector_there_is_no_tracer_and_headers_pass_as_they_are(
    router: Router, d: MockEngine
) -> None:
    assert router.gateway.tracer is None
    await router.client.post(
        "/v1/completions", json={"model": "m", "prompt": "x"}, headers={"traceparent": SAMPLED}
    )
    assert d.last.header("traceparent") == SAMPLED


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": " "}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_SDK_DISABLED": "True"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_SDK_DISABLED": "no"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_TRACES_EXPORTER": "none"}, False),
    ],
)
def test_the_standards_variables_say_whether_there_are_traces(
    environ: dict[str, str], wanted: bool
) -> None:
    assert tracing.is_configured(environ) is wanted


def test_a_collector_without_the_extra_is_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracing, "NEEDED", ("surely_not.installed",))
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c"}
    assert tracing.tracer_of(environ) is None
    tracing.warn_if_missing(environ)
    (said,) = caplog.records
    assert ".[otel]" in said.getMessage()


@pytest.mark.slow
async def test_each_worker_sends_its_own_before_it_ends(
    collector: Receiver, p: MockEngine, d: MockEngine
) -> None:
    family = ("--workers=2", "--conversation-store=off", "--port=0", "--health-interval=0.1")
    async with router_process(p, d, *family) as process:
        url = (await process.until(r"disagg-router on (http://\S+)")).group(1)
        for _ in "pdpd":
            await process.until("is healthy")
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
        writer.write(post(b'{"model":"m","prompt":"x"}'))
        await reader.readuntil(b"\r\n\r\n")
        process.process.terminate()
        await process.ended()
        writer.close()
    assert [span.name for span in collector.spans].count(ROOT) == 1


@pytest.mark.slow
async def test_a_router_ends_soon_though_its_collector_hangs(
    collector: Receiver, p: MockEngine, d: MockEngine
) -> None:
    collector.may_answer.clear()
    async with router_process(p, d, "--port=0", "--health-interval=0.1") as process:
        url = (await process.until(r"disagg-router on (http://\S+)")).group(1)
        for _ in "pd":
            await process.until("is healthy")
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
        writer.write(post(b'{"model":"m","prompt":"x"}'))
        await reader.readuntil(b"\r\n\r\n")
        await eventually(lambda: collector.asked)
        writer.close()
        began = time.monotonic()
        process.process.terminate()
        assert await process.ended() == 0
        assert time.monotonic() - began < 15  # the collector would hang for 20


# The client's headers.


def headers(*values: str, **more: str) -> list[tuple[bytes, bytes]]:
    told = [(b"traceparent", value.encode()) for value in values]
    return told + [(name.encode(), value.encode("latin-1")) for name, value in more.items()]


@pytest.mark.parametrize(
    "told",
    [
        "",
        "garbage",
        f"00-{TRACE}-{ABOVE}",
        f"00-{TRACE}-{ABOVE}-01-more",
        f"ff-{TRACE}-{ABOVE}-01",
        f"00-{'0' * 32}-{ABOVE}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{ABOVE}-01",
        f"00-{TRACE}-{ABOVE}-zz",
        f"00-{TRACE}-{ABOVE}-01" * 1000,
        "00-\u00e9" + TRACE,
    ],
)
def test_a_traceparent_that_makes_no_sense_begins_a_new_trace(told: str) -> None:
    assert parent_in([(b"traceparent", told.encode("latin-1")), (b"tracestate", b"a=1")]) is None


def test_two_traceparents_are_none() -> None:
    assert parent_in(headers(SAMPLED, SAMPLED)) is None


def test_a_later_version_is_read_as_far_as_it_is_known() -> None:
    parent = parent_in(headers(f"01-{TRACE}-{ABOVE}-ff-more"))
    assert parent is not None
    assert (f"{parent.trace_id:032x}", parent.flags) == (TRACE, 3)


@pytest.mark.parametrize(
    ("told", "kept"),
    [
        ("a=1,b=2", "a=1,b=2"),
        (" a=1 ,, b=2", "a=1,b=2"),
        ("t@v=1", "t@v=1"),
        ("a=1,a=2", ""),
        ("A=1", ""),
        ("no equals sign", ""),
        ("a=\u00e9", ""),
        ("a=" + "x" * 300, ""),
        (",".join(f"k{n}=1" for n in range(33)), ""),
    ],
)
def test_a_tracestate_is_passed_on_as_the_standard_has_it_or_not_at_all(
    told: str, kept: str
) -> None:
    parent = parent_in(headers(SAMPLED, tracestate=told))
    assert parent is not None
    assert parent.state == kept


def test_a_leg_is_told_in_header_lines_that_end() -> None:
    trace = Trace(int(TRACE, 16), 1, None, 1, "a=1", 0.0)
    leg: Any = trace.add_leg("prefill", "h:1", 0.0)
    expected = f"traceparent: 00-{TRACE}-{leg.span_id:016x}-01\r\ntracestate: a=1\r\n"
    assert leg.headers == expected.encode()


async def test_of_several_that_are_asked_at_once_each_is_a_span_and_one_has_the_answer(
    collector: Receiver, start_router: StartRouter, d: MockEngine
) -> None:
    async with running_engine(hang) as other:
        d.identity = other.identity = {"capabilities": ["cache_hit_threshold"]}
        d.usual, router = stream, await start_router(ds=[d, other], hedged_decoders=2)
        await router.knows_its_engines()
        await router.stream(cache_hit_threshold=0.5)
        await eventually(lambda: collector.named(ROOT) and len(collector.spans) == 4)
        legs = {s.attributes["server.port"]: s for s in collector.spans if s.name == "decode"}
    assert trace_of(d)[1] == legs[d.port].span_id
    assert trace_of(other)[1] == legs[other.port].span_id
    outcomes = [legs[e.port].attributes["disagg.leg.outcome"] for e in (d, other)]
    assert outcomes == ["ok", "cancelled"]
    assert legs[d.port].attributes["gen_ai.usage.output_tokens"] == 3
    assert "gen_ai.usage.output_tokens" not in legs[other.port].attributes
