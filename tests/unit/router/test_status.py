"""disagg-router status: what a router's metrics say, as a value, as a table and as JSON."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st

from router.commands.console import paint
from router.commands.status import (
    EngineStatus,
    GroupState,
    NotMetricsError,
    PairStatus,
    lines,
    main,
    parse_metrics,
)
from router.server.router_state import state_of
from scripts.mock_engine import MockEngine
from tests.unit.router.conftest import StartRouter
from tests.unit.router.harness import Router, eventually

METRICS = """\
# TYPE disagg_router_requests_in_flight gauge
disagg_router_requests_in_flight 3.0
# TYPE disagg_router_workers gauge
disagg_router_workers 2.0
# TYPE disagg_router_engine_healthy gauge
disagg_router_engine_healthy{engine="d:1",role="decode"} 1.0
disagg_router_engine_healthy{engine="p:1",role="prefill"} 0.0
disagg_router_engine_healthy{engine="p:2",role="prefill"} -1.0
# TYPE disagg_router_engine_draining gauge
disagg_router_engine_draining{engine="d:1",role="decode"} 1.0
# TYPE disagg_router_engine_prefill_tokens_per_second gauge
disagg_router_engine_prefill_tokens_per_second{engine="p:1",role="prefill"} 31000.4
disagg_router_engine_prefill_tokens_per_second{engine="p:2",role="prefill"} 9800.0
# TYPE disagg_router_pair_bytes_per_second gauge
disagg_router_pair_bytes_per_second{source="p:1",target="d:1"} 4e+10
disagg_router_pair_bytes_per_second{source="",target="d:2"} 1.2e+09
# TYPE disagg_router_pair_transfer_seconds gauge
disagg_router_pair_transfer_seconds{source="p:1",target="d:1"} 0.01
# TYPE disagg_router_pair_slowness gauge
disagg_router_pair_slowness{source="",target="d:2"} 32.0
# TYPE disagg_router_engine_holding gauge
disagg_router_engine_holding{engine="p:1",role="prefill"} 4.0
# TYPE disagg_router_group_weight gauge
disagg_router_group_weight{group="blue"} 2.0
# TYPE disagg_router_group_engines gauge
disagg_router_group_engines{group="blue",role="prefill"} 2.0
disagg_router_group_engines{group="blue",role="decode"} 0.0
# TYPE disagg_router_requests counter
disagg_router_requests_total{endpoint="/a",flow="pull",outcome="ok",status="200"} 10.0
disagg_router_requests_total{endpoint="/b",flow="pull",outcome="ok",status="200"} 5.0
disagg_router_requests_total{endpoint="/b",flow="pull",outcome="failed",status="502"} 1.0
# TYPE disagg_router_conversation_turns counter
disagg_router_conversation_turns_total{outcome="new",reason=""} 4.0
disagg_router_conversation_turns_total{outcome="hit",reason=""} 3.0
disagg_router_conversation_turns_total{outcome="mismatch",reason="model"} 1.0
# TYPE disagg_router_prefix_loans counter
disagg_router_prefix_loans_total{outcome="granted"} 7.0
disagg_router_prefix_loans_total{outcome="refused"} 2.0
# TYPE disagg_router_prefix_loan_tokens counter
disagg_router_prefix_loan_tokens_total 28672.0
# TYPE disagg_router_recent_answers gauge
disagg_router_recent_answers 1200.0
# TYPE disagg_router_recent_time_to_first_byte_seconds gauge
disagg_router_recent_time_to_first_byte_seconds{percentile="p50"} 0.5
disagg_router_recent_time_to_first_byte_seconds{percentile="p90"} 0.9
disagg_router_recent_time_to_first_byte_seconds{percentile="p99"} 1.34
"""


def test_metrics_become_a_status() -> None:
    status = parse_metrics(METRICS)
    assert status.engines == (
        EngineStatus("p:1", "prefill", "unhealthy", False, 0, 4),
        EngineStatus("p:2", "prefill", "not probed", False, 0, 0),
        EngineStatus("d:1", "decode", "healthy", True, 0, 0),
    )
    assert status.groups == (GroupState("blue", 2.0, 2, 0),)
    assert (status.in_flight, status.workers, status.queued) == (3, 2, 0)
    assert status.requests == {"failed": 1, "ok": 15}
    assert status.turns == {"hit": 3, "mismatch": 1, "new": 4}
    assert status.first_byte == {"p50": 0.5, "p90": 0.9, "p99": 1.34}
    assert status.recent_answers == 1200
    assert status.pairs == (
        PairStatus("", "d:2", 1.2e9, 0.0, 32.0),
        PairStatus("p:1", "d:1", 4e10, 0.01),
    )


def test_a_table_says_it_to_people() -> None:
    status = parse_metrics(METRICS)
    said = "\n".join(lines(status, None, 0))
    assert "3 requests in flight, 0 waiting, 0 connections, 2 workers" in said
    assert "prefill  p:1     unhealthy           0          4" in said
    assert "decode   d:1     draining" in said
    assert "incomplete: used only if no group is complete" in said
    assert "engines needed" not in said
    assert "1 failed, 15 ok" in said
    assert "75% of next turns reuse KV" in said
    assert "prefix loans   7 granted, 2 refused (28,672 tokens borrowed)" in said
    assert "first byte     p50 500 ms, p90 900 ms, p99 1.34 s (1,200 last answers)" in said
    assert "role     engine  state       in flight  KV leases" in said
    assert "KV transfers   1.2 GB/s (d:2) to 40 GB/s (p:1 -> d:1)" in said
    assert "d:2 moves KV at 1.2 GB/s, its neighbours at 38.4 GB/s" in said
    assert "prefill rate   9,800 (p:2) to 31,000 (p:1) tokens/s" in said
    assert "\x1b" not in said
    assert "\x1b[31m" in "\n".join(lines(status, None, 0, paint))


BOTH = """
disagg_router_engine_healthy{engine="b:1",role="both"} 1.0
disagg_router_engine_healthy{engine="b:2",role="both"} 1.0
disagg_router_engine_healthy{engine="b:3",role="both"} 1.0
disagg_router_engine_preferred_role{engine="b:1",group="blue",preferred="prefill",reason="slow"} 1.0
disagg_router_engine_preferred_role{engine="b:2",group="blue",preferred="decode",reason="slow"} 1.0
disagg_router_engines_needed{group="blue",role="prefill"} 1.26
disagg_router_engines_needed{group="blue",role="decode"} 0.5
"""


def test_the_engines_that_each_group_needs_are_shown() -> None:
    needed = [line for line in BOTH.splitlines() if "needed" in line]
    shown = list(lines(parse_metrics("\n".join([METRICS, *needed, ""])), None, 0))
    assert "group blue: engines needed: prefill 1.3, decode 0.5" in shown
    assert not any("both roles" in line for line in shown)
    need = 'disagg_router_engines_needed{group="blue",role="decode"} '
    idle = list(lines(parse_metrics(f"{METRICS}{need}0.0004\n"), None, 0))
    assert not any("needed" in line for line in idle)
    shown = list(lines(parse_metrics(f"{METRICS}{need}0.004\n"), None, 0))
    assert "group blue: engines needed: decode <0.1" in shown


def test_engines_of_both_roles_are_shown_with_what_they_do_now() -> None:
    status = parse_metrics(METRICS + BOTH)
    prefers = {one.name: one.prefers for one in status.engines if one.role == "both"}
    assert prefers == {"b:1": ("prefill",), "b:2": ("decode",), "b:3": ()}
    [group] = json.loads(json.dumps(asdict(status)))["groups"]
    assert group["preferred"] == {"prefill": 1, "decode": 1}
    assert group["needed"] == {"prefill": 1.26, "decode": 0.5}
    shown = list(lines(status, None, 0))
    roles = [line.partition(" b:")[0].rstrip() for line in shown if " b:" in line]
    assert roles == ["both, now prefill", "both, now decode", "both"]
    text = "group blue: engines of both roles: 1 prefill, 1 decode; boundary, since slow"
    assert text in shown
    free = BOTH.replace('preferred="decode"', 'preferred="both"').replace("slow", "it is cheap")
    shown = list(lines(parse_metrics(METRICS + free), None, 0))
    assert any(line.startswith("both, by cost ") for line in shown)
    assert any(line.endswith(" 1 by cost, since it is cheap") for line in shown)
    differ = BOTH + BOTH.splitlines()[5].replace("decode", "prefill")
    assert "both, now decode or now prefill" in "\n".join(
        lines(parse_metrics(METRICS + differ), None, 0)
    )
    assert "of both roles" not in "\n".join(lines(parse_metrics(METRICS), None, 0))


def test_a_rate_is_of_what_ended_since_the_last_look() -> None:
    before = parse_metrics(METRICS)
    after = parse_metrics(METRICS.replace('status="200"} 10.0', 'status="200"} 30.0'))
    assert "10.0 requests/s" in next(lines(after, before, 2.0))
    assert "0.0 requests/s" in next(lines(before, after, 2.0))  # it began anew


@pytest.mark.parametrize("text", ["", "<html>", "up 1", "disagg_router_requests_in_flight{ 1"])
def test_what_is_no_router_is_named(text: str) -> None:
    with pytest.raises(NotMetricsError):
        parse_metrics(text)


@given(st.text() | st.text(alphabet='disagg_router_{}="\n 1.0#'))
def test_nothing_that_is_read_ends_it_badly(text: str) -> None:
    for given_text in (text, METRICS + text):
        try:
            status = parse_metrics(given_text)
        except NotMetricsError:
            continue
        assert "\n".join(lines(status, status, 1.0))
        json.dumps(asdict(status))


def _page(engine_id: str, host: str, port: int) -> dict[str, Any]:
    """GET /disagg/identity of an engine of one rank."""
    at = {"remote_engine_id": engine_id, "remote_host": host, "remote_port": port}
    return {"capabilities": [], "ranks": [{"dp_rank": 0, **at}]}


async def test_engines_with_one_engine_id_are_shown_counted_and_logged_once(
    start_router: StartRouter,
    p: MockEngine,
    d: MockEngine,
    d2: MockEngine,
    d3: MockEngine,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    p.identity, d.identity = _page("e", "10.0.0.1", 5600), _page("e", "10.0.0.2", 5600)
    d2.identity = _page("d2", "10.0.0.2", 5601)
    d3.identity = _page("d2", "10.0.0.2", 5601)  # the same engine, known by two names
    router = await start_router(ds=[d, d2, d3])
    await router.knows_its_engines()
    sharing = sorted(router.engine(mock).name for mock in (p, d))

    def logged() -> list[str]:
        return [r.getMessage() for r in caplog.records if "the same engine_id" in r.getMessage()]

    await eventually(logged)
    shared = {
        name: router.metric("engine_shares_id", engine=name, role=role)
        for name, role in ((one.name, one.role) for one in router.gateway.fleet.engines)
    }
    assert sorted(name for name, value in shared.items() if value) == sharing
    assert len(shared) == 4
    assert await asyncio.to_thread(main, [router.url]) == 0
    (line,) = [one for one in capsys.readouterr().out.splitlines() if "engine_id" in one]
    assert all(name in line for name in sharing)
    assert router.engine(d2).name not in line
    (message,) = logged()
    assert all(name in message for name in sharing)
    d.identity = _page("d", "10.0.0.2", 5600)
    router.engine(d).capabilities.note_identity(d.identity)
    assert not any(
        router.metric("engine_shares_id", engine=one.name, role=one.role)
        for one in router.gateway.fleet.engines
    )


async def test_a_router_is_shown_as_it_is(
    router: Router, d: MockEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (await router.complete()).status_code == 200
    await d.stop()
    await eventually(lambda: not router.engine(d).is_available)
    assert await asyncio.to_thread(main, [router.url, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    states = {one["role"]: one["health"] for one in content["engines"]}
    assert states == {"prefill": "healthy", "decode": "unhealthy"}
    assert content["requests"] == {"ok": 1}
    assert await asyncio.to_thread(main, [f"127.0.0.1:{router.port}/metrics"]) == 0
    assert "unhealthy" in capsys.readouterr().out


async def test_watching_goes_on_when_the_router_does_not_answer(
    router: Router, capsys: pytest.CaptureFixture[str]
) -> None:
    loop, looks = asyncio.get_running_loop(), iter(range(3))

    def sleep(seconds: float) -> None:
        match next(looks):
            case 0:
                asyncio.run_coroutine_threadsafe(_deaf(router.app), loop).result(10)
            case 2:
                raise KeyboardInterrupt

    arguments = [router.url, "--watch", "--interval", "0.5"]
    assert await asyncio.to_thread(main, arguments, _ticks().__next__, sleep) == 130
    said = capsys.readouterr().out
    assert said.count("requests in flight") == 1
    assert said.count("answers 500") == 2


async def _deaf(app: FastAPI) -> None:
    def broken() -> bytes:
        raise RuntimeError

    state_of(app).exposition = broken


def _ticks() -> Iterator[float]:
    moment = 0.0
    while True:
        moment += 0.01
        yield moment


@pytest.mark.parametrize("arguments", [["ftp://x"], ["http://"], ["x", "--interval", "0"]])
def test_wrong_usage_is_one_line_and_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_no_answer_is_one_line_and_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["http://127.0.0.1:1"]) == 1
    assert "http://127.0.0.1:1/metrics: connection refused" in capsys.readouterr().err
