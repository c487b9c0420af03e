"""disagg-router bench: what is asked, what is counted, and what an absurd answer comes to."""

import asyncio
import json
import signal
import sys
from itertools import count, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.commands.bench.chats import ChatStreamReader, Figures, LoadPlan, Sample, chats
from router.commands.bench.command import main
from router.telemetry.metric_types import nearest_rank
from scripts.mock_engine import DONE, MockEngine, Peer, Received
from tests.unit.router.conftest import StartRouter
from tests.unit.router.engine_scripts import answer_after
from tests.unit.router.harness import Router, eventually

TEXTS = (b"Hel", b"lo", b"", b"!")
USAGE = {
    "prompt_tokens": 10,
    "completion_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 8},
}


def chunk_of(text: bytes) -> bytes:
    content = {"choices": [{"index": 0, "delta": {"content": text.decode()}}]}
    return b"data: " + json.dumps(content).encode() + b"\n\n"


LAST = b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode() + b"\n\n" + DONE
ANSWER = b"".join(map(chunk_of, TEXTS)) + LAST


async def talking(received: Received, peer: Peer) -> None:
    await peer.stream(*map(chunk_of, TEXTS), LAST)


def reader(figures: Figures) -> ChatStreamReader:
    return ChatStreamReader(0.0, figures, clock=map(float, count(1)).__next__)


@given(st.lists(st.integers(0, len(ANSWER)), max_size=20), st.booleans())
def test_an_answer_is_counted_however_it_is_cut(places: list[int], has_crlf: bool) -> None:
    figures = Figures()
    read = reader(figures)
    whole = ANSWER.replace(b"\n", b"\r\n") if has_crlf else ANSWER
    for start, end in pairwise(sorted({0, *places, len(ANSWER), len(whole)})):
        read.write(whole[start:end])
    read.end(100.0)
    assert "".join(read.texts) == "Hello!"
    assert (figures.answered, figures.first.count, figures.gaps.count) == (1, 1, 2)
    assert (figures.prompt_tokens, figures.completion_tokens, figures.cached_tokens) == (10, 3, 8)


@given(st.binary(max_size=200) | st.lists(st.sampled_from(TEXTS)).map(b"\n\ndata: ".join))
def test_nothing_that_comes_ends_it_badly(block: bytes) -> None:
    read = reader(Figures())
    read.write(b"data: " + block + b"\n\n")
    read.write(ANSWER)


def test_chats_are_the_same_for_a_seed_and_as_many_as_were_asked_for() -> None:
    plan = LoadPlan("m", requests=7, turns=3, words=5, tokens=4, seed=1)
    made = list(chats(plan, "r"))
    assert [len(chat.questions) for chat in made] == [3, 3, 1]
    assert made == list(chats(plan, "r"))
    assert len({chat.name for chat in made} | {chat.name for chat in chats(plan, "s")}) == 6
    assert made[0].questions != made[1].questions


@given(st.lists(st.floats(0, 100), min_size=1))
def test_percentiles_are_by_nearest_rank(values: list[float]) -> None:
    ordered = sorted(values)
    for share in (0.5, 0.9, 0.99):
        found = nearest_rank(ordered, share)
        below = sum(value < found for value in ordered)
        assert below < share * len(ordered) + 1e-9
        assert sum(value <= found for value in ordered) >= share * len(ordered) - 1e-9


def test_a_sample_is_bounded_and_fair() -> None:
    sample = Sample(max_size=100)
    for value in range(10_000):
        sample.add(float(value))
    found = sample.quantiles()
    assert found is not None
    assert sample.count == 10_000
    assert len(sample.values) == 100
    assert 3000 < found["p50"] < 7000


async def test_a_load_goes_through_a_router(
    start_router: StartRouter, d: MockEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    d.usual = talking
    router = await start_router()
    arguments = [router.url, "--model", "m", "--requests", "10", "--turns", "2", "--json"]
    assert await asyncio.to_thread(main, [*arguments, "--concurrency", "3"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert (content["answered"], content["failed"]) == (10, 0)
    assert (content["prompt_tokens"], content["cached_tokens"]) == (100, 80)
    assert set(content["first_token_seconds"]) == {"p50", "p90", "p99"}
    asked = [r.json for r in d.requests if r.path == "/v1/chat/completions"]
    assert sorted(len(body["messages"]) for body in asked) == [1] * 5 + [3] * 5
    second = next(body for body in asked if len(body["messages"]) == 3)
    assert second["messages"][1] == {"role": "assistant", "content": "Hello!"}


async def test_an_answer_that_is_late_is_counted_with_its_url(
    start_router: StartRouter, d: MockEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    gate = asyncio.Event()
    d.usual = answer_after(gate, talking)
    router = await start_router()
    arguments = [router.url, "--model", "m", "--requests", "1", "--timeout", "0.2"]
    assert await asyncio.to_thread(main, arguments) == 1
    gate.set()
    assert f"1 times: {router.url}: no answer in 0.2 s" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("form", ["--json", "--seed=1"])
async def test_ctrl_c_prints_what_was_measured(
    start_router: StartRouter, d: MockEngine, form: str
) -> None:
    d.scripts = [talking] * 3
    d.usual = answer_after(asyncio.Event(), talking)
    router = await start_router()
    command = [sys.executable, "-m", "router.commands.cli", "bench", router.url, form]
    command += ["--model", "m", "--requests", "9", "--concurrency", "1"]
    pipe = asyncio.subprocess.PIPE
    bench = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    try:
        await eventually(lambda: len(d.requests) == 4, 60)
        bench.send_signal(signal.SIGINT)
        output, errors = await asyncio.wait_for(bench.communicate(), 60)
    finally:
        if bench.returncode is None:
            bench.kill()
            await bench.wait()
    assert (bench.returncode, errors) == (130, b"")
    if form == "--json":
        report = json.loads(output)
        assert (report["answered"], report["failed"], report["interrupted"]) == (3, 0, True)
        assert set(report["first_token_seconds"]) == {"p50", "p90", "p99"}
    else:
        lines = output.decode().splitlines()
        assert lines[0] == "Interrupted: 6 of 9 requests had not ended."
        assert lines[1].startswith("3 answered, 0 failed in ")


async def test_what_fails_is_counted_by_its_reason(
    router: Router, p: MockEngine, d: MockEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    await p.stop()
    await d.stop()
    arguments = [router.url, "--model", "m", "--requests", "4", "--concurrency", "2"]
    assert await asyncio.to_thread(main, arguments) == 1
    said = capsys.readouterr().out
    assert "0 answered, 4 failed" in said
    assert "times: 503" in said


@pytest.mark.parametrize(
    "arguments",
    [["https://x"], ["ftp://x"], ["http://x/v1"], ["x", "--requests", "0"], ["x", "--timeout=0"]],
)
def test_wrong_usage_is_one_line_and_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_nobody_there_is_one_line_and_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["http://127.0.0.1:1"]) == 1
    assert "http://127.0.0.1:1/v1/models: connection refused" in capsys.readouterr().err
    assert main(["http://127.0.0.1:1", "--model", "m", "--requests", "2"]) == 1
    assert "2 times: http://127.0.0.1:1: connection refused" in capsys.readouterr().out
