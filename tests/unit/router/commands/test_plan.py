"""disagg-router plan: what it reads, what it estimates, and how close that is to the simulation."""

import asyncio
import contextlib
import json
import random
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.commands.console import CommandError
from router.commands.plan.command import FleetPlan, main
from router.commands.plan.estimate import EngineCosts, Latencies, decode, needs, prefill
from router.commands.plan.trace import TracedRequest, read_trace, with_cache
from router.fleet.step_model import StepModel
from router.telemetry.logs import AccessLine
from router.telemetry.record import Record, Tokens
from scripts.benchmarks.fleet_simulation import Setup, Simulation
from scripts.benchmarks.simulated_engine import SPEEDS
from scripts.benchmarks.traces import published
from scripts.mock_engine import MockEngine

# 1 ms a prompt token, 100 ms a step.
COSTS = EngineCosts(StepModel(0.1, 1e-3, 0.0, 0.0), 10**6, 1000, 0, 10, 1e12)
OPTIONS = ("--prefill-tokens-per-second", "1000", "--decode-step-ms", "10", "--kv-tokens", "9999")
STEP_MODEL = {"base_ms": 10.0, "token_us": 50.0, "token_context_ns": 0.0, "context_ns": 0.0}


def entry(at: int, prompt: int = 1024, output: int = 10, *blocks: int) -> bytes:
    fields = {"timestamp": at, "input_length": prompt, "output_length": output}
    return json.dumps(fields | {"hash_ids": blocks}).encode()


def written(path: Path, *lines: bytes) -> Path:
    path.write_bytes(b"\n".join(lines))
    return path


def test_traces_and_access_logs_are_read_by_arrival(tmp_path: Path) -> None:
    path = written(tmp_path / "trace", entry(3000, 700, 9, 1, 2), b"no JSON", b"{}", entry(1000))
    assert read_trace(path)[0] == [
        TracedRequest(0.0, 1024, 10, 0, []),
        TracedRequest(2.0, 700, 9, 0, [1, 2]),
    ]
    first = Record("/v1/chat/completions", 10.0, ended=15.0, tokens=Tokens(100, 7, 30))
    second = Record("/v1/chat/completions", 11.5, ended=12.0, tokens=Tokens(50, 3, None))
    unknown = Record("/v1/chat/completions", 11.0, ended=12.0, outcome="ok", decoder="d:1")
    other = Record("/v1/models", 11.0, ended=12.0, outcome="ok")
    lines = [
        f'{{"time":"2026-11-30T10:00:{record.ended:02.0f}.000Z",{AccessLine(record, 0).json()}}}'
        for record in (first, second, unknown, other)
    ]
    path = written(tmp_path / "log", b'{"message":"starts"}', *map(str.encode, lines))
    assert read_trace(path) == (
        [TracedRequest(0.0, 100, 7, 30), TracedRequest(1.5, 50, 3, 0)],
        1,  # which told no tokens
    )


@given(st.lists(st.binary(max_size=60) | st.sampled_from([entry(1), entry(2), entry(-5)])))
def test_whatever_a_file_has_it_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]
) -> None:
    path = written(tmp_path_factory.mktemp("trace") / "any", *lines)
    with contextlib.suppress(CommandError):
        assert read_trace(path)[0][0].at == 0


def test_a_prefix_cache_holds_the_latest_prompts() -> None:
    asked = [TracedRequest(0.0, 1100, 1, 0, blocks) for blocks in ([1, 2], [1, 3], [4, 5], [1, 2])]
    assert [one.cached for one in with_cache(asked, 2048)] == [0, 512, 0, 512]
    assert [one.cached for one in with_cache(asked, 10**6)] == [0, 512, 0, 1024]
    assert [one.cached for one in with_cache(asked, 0)] == [0, 0, 0, 0]


def test_prompts_queue_and_answers_wait_for_room() -> None:
    asked = [TracedRequest(0.0, 400, 11, 0), TracedRequest(0.0, 400, 11, 0)]
    asked.append(TracedRequest(9.0, 400, 101, 0))
    one, two = (prefill(asked, number, COSTS) for number in (1, 2))
    assert [end for end, _ in one.ends] == pytest.approx([0.503, 1.003, 9.503])
    assert [end for end, _ in two.ends] == pytest.approx([0.503, 0.503, 9.503])
    assert one.busy == pytest.approx(1.5 / 9.5)
    # 411 tokens of 1000 each: two fit. Of 800, one fits, and the other waits for its end.
    for each in decode(two, 1, COSTS).latencies:
        assert each == pytest.approx(Latencies(0.503, 0.1))
    found = decode(two, 1, replace(COSTS, kv_tokens=800)).latencies
    assert [one.ttft for one in found] == pytest.approx([0.503, 1.503, 0.503])
    found = decode(two, 1, replace(COSTS, max_num_seqs=1)).latencies
    assert [one.ttft for one in found] == pytest.approx([0.503, 1.503, 0.503])


def test_steps_are_longer_with_more_contexts_and_shared_among_engines() -> None:
    costs = replace(COSTS, model=StepModel(0.1, 1e-3, 0.0, 1e-4), kv_tokens=10**6)
    asked = [TracedRequest(0.0, 1000, 2, 0)] * 10 + [TracedRequest(50.0, 1, 2, 0)]
    ready = prefill(asked, 10, costs)
    for engines, step in ((1, 1.1), (10, 0.2)):
        found = decode(ready, engines, costs)
        assert found.latencies[0].itl == pytest.approx(step, rel=0.01)
        (first, *_) = needs(asked, ready, found, costs, 0.4, 2)
        assert first.prefill == pytest.approx(10 * 1.1 / 25.5 / 0.8, rel=0.05)
        assert first.decode == pytest.approx(5500 * 1e-4 / (0.2 - 0.1), rel=0.1)


@pytest.mark.parametrize(("prefillers", "decoders"), [(2, 1), (3, 1), (3, 2), (5, 2)])
def test_the_estimate_is_near_the_simulation(
    tmp_path: Path, prefillers: int, decoders: int
) -> None:
    """Poisson arrivals, prompts of 2,000 to 20,000 tokens, a third of which repeat one."""
    dice, at, lines = random.Random(4), 0.0, []
    for number in range(800):
        at += dice.expovariate(3.5) * 1000
        prompt = dice.randint(2000, 20_000)
        base = 100 * (number if number % 3 else max(0, number - 3))
        blocks = [base + part for part in range(prompt // 512 + 1)]
        lines.append(entry(round(at), prompt, dice.randint(50, 600), *blocks))
    path = written(tmp_path / "trace.jsonl", *lines)
    speed = SPEEDS["qwen3-32b-h200"]
    model = StepModel(speed.base, speed.token, speed.token_context, speed.context)
    costs = EngineCosts(model, 8192, speed.kv_tokens, 2_000_000, 256, speed.nic_tokens_per_s)
    estimated = FleetPlan(read_trace(path)[0], costs, 1.0, 0.03).goodput(prefillers, decoders)
    setup = Setup("uniform", prefillers, decoders, 0, "prefix", "prefix", speed=speed,
        cache_tokens=2_000_000, arrivals=published(path, spread=False))  # fmt: skip
    answers = Simulation(setup).run().answers
    simulated = mean(one.ttft <= 1.0 and one.tpot <= 0.03 for one in answers)
    assert estimated == pytest.approx(simulated, abs=0.08)


def test_the_smallest_fleet_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "t.jsonl", *(entry(100 * n, 500, 20) for n in range(100)))
    assert main([str(path), *OPTIONS, "--ttft", "1", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    # 10 prompts a second, each of which takes 0.51 s.
    assert (content["prefill_engines"], content["decode_engines"]) == (5, 1)
    goods = {(one["prefill"], one["decode"]): one["goodput"] for one in content["table"]}
    assert goods[4, 1] < 0.9 <= goods[5, 1] == content["goodput"]
    assert main([str(path), *OPTIONS, "--ttft", "1"]) == 0
    page = capsys.readouterr().out
    assert "ITL 50 ms: 5 prefill, 1 decode" in page
    assert len(page.splitlines()) == 14
    assert main([str(path), *OPTIONS, "--ttft", "0.4"]) == 1
    assert "no number of engines reaches" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main([str(path)])
    assert ended.value.code == 2


async def test_the_costs_are_those_that_an_engine_has_measured(
    p: MockEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(written(tmp_path / "t.jsonl", entry(0, 1000, 20), entry(9000, 1000, 20)))
    url = f"http://127.0.0.1:{p.port}"
    assert await asyncio.to_thread(main, [path, "--engine", url]) == 1
    assert "has no /disagg/identity" in capsys.readouterr().err
    rank = {"step_model": STEP_MODEL, "max_num_seqs": 64}
    p.identity = {"capabilities": [], "ranks": [rank]}
    arguments = [path, "--engine", url, "--kv-tokens", "9999", "--ttft", "0.07", "--json"]
    assert await asyncio.to_thread(main, arguments) == 0
    assert json.loads(capsys.readouterr().out)["prefill_engines"] == 1
