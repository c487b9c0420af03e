"""disagg-router demo --compare: equal CPU, the same requests, and an honest report."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from router.commands.bench.chats import ChatLoad, Figures, LoadPlan, Target
from router.commands.cli import main
from router.commands.console import CommandError
from router.commands.demo.compare import CompareOptions, compare, moments
from router.commands.demo.comparison import (
    ALONE,
    SETUPS,
    SPLIT,
    CompareLoad,
    Comparison,
    CpuPlan,
    RoundFigures,
    report,
)
from router.commands.demo.comparison_chart import chart
from router.commands.demo.engines import (
    DemoModel,
    DemoOptions,
    EngineBuilder,
    EngineCommands,
    usable_cores,
    write_secret,
)
from router.common.child_processes import ChildProcesses
from tests.conftest import find_free_ports
from tests.unit.router.test_demo import SCRIPT, demo, family_of, lives, wait_for

OPTIONS = DemoOptions(1, 1, "127.0.0.1", 8000, "cpu", None, vllm=False)
LOAD = CompareLoad(14.0, 1.0, 4.0, 30, 40, 600, 4)
CPU = CpuPlan((0, 1, 2, 3), 2)


def builder_of(engines: EngineCommands, directory: Path) -> EngineBuilder:
    model = DemoModel(directory / "model", "m")
    return EngineBuilder(engines, OPTIONS, model, 1, write_secret(directory))


def figures_of(ttft: float, itl: float, long_ttft: float) -> RoundFigures:
    made = RoundFigures(seconds=14.0, engine_cpu=20.0, router_cpu=0.7, generator_cpu=0.1)
    for figures, first in ((made.short, ttft), (made.long, long_ttft)):
        figures.answered = 10
        figures.prompt_tokens = 6000
        for _ in range(10):
            figures.first.add(first)
            figures.gaps.add(itl)
    return made


def comparison(
    alone: list[RoundFigures], split: list[RoundFigures], cpu: CpuPlan = CPU, busy: float = 0.1
) -> Comparison:
    rounds = {ALONE: alone, SPLIT: split}
    return Comparison(cpu, LOAD, "chat <model>", rounds, busy, "AMD & Co", "2026-11-26")


ALL_CLEAR = comparison(
    [figures_of(1.0, 0.1, 2.0), figures_of(1.2, 0.1, 2.0)],
    [figures_of(0.5, 0.09, 3.0), figures_of(0.4, 0.2, 3.0)],
)


@pytest.mark.parametrize(
    ("plan", "alone", "prefill", "decode", "threads"),
    [
        (CpuPlan((4, 7), 1), (4, 7), (4,), (7,), 2),
        (CpuPlan((0, 1, 2, 3), 2), (0, 1, 2, 3), (0, 1), (2, 3), 4),
        (CpuPlan((0, 1, 2, 3, 4), 2), (0, 1, 2, 3), (0, 1), (2, 3), 4),
        (CpuPlan((3,), 1), (3,), (3,), (3,), 1),
    ],
)
def test_the_one_engine_has_the_cores_of_both(
    plan: CpuPlan,
    alone: tuple[int, ...],
    prefill: tuple[int, ...],
    decode: tuple[int, ...],
    threads: int,
) -> None:
    assert tuple(plan.cores_of(ALONE)) == alone
    assert tuple(plan.cores_of("prefill")) == prefill
    assert tuple(plan.cores_of("decode")) == decode
    assert plan.threads_alone == threads
    assert plan.text().startswith("Equal CPU: ")


@pytest.mark.parametrize(
    ("quota", "expected"), [("100000 100000", 1), ("50000 100000", 1), ("max 100000", None)]
)
def test_a_containers_quota_limits_the_cores(
    tmp_path: Path, quota: str, expected: int | None
) -> None:
    path = tmp_path / "cpu.max"
    path.write_text(quota)
    assert len(usable_cores(path)) == (expected or len(os.sched_getaffinity(0)))


def test_a_process_runs_on_its_cores_alone(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    processes = ChildProcesses(tmp_path)
    code = "import os; print(os.sched_getaffinity(0))"
    child = processes.start("child", [sys.executable, "-c", code], "", cores=[core])
    child.process.wait(30)
    assert child.log_lines() == [str({core})]


def test_requests_come_at_the_same_moments_for_a_seed_and_in_order() -> None:
    made = moments(14.0, 1.2, seed=3)
    assert made == moments(14.0, 1.2, seed=3)
    assert made != moments(14.0, 1.2, seed=4)
    assert len(made) == 12
    assert all(0.6 <= after - before <= 1.8 for before, after in pairwise(made))


def test_a_figure_that_is_worse_is_said_to_be() -> None:
    found = {(one.name, one.share): one.change for one in ALL_CLEAR.figures()}
    assert found["TTFT of short chats", "p50"] == "60% lower"
    assert found["ITL of short chats", "p50"] == "no clear change"
    assert found["TTFT of long prompts", "p99"] == "50% higher"
    assert ALL_CLEAR.verdict() == (
        "1 prefill + 1 decode: better in 2, worse in 2 of 6 figures; 2 without a clear change."
    )


@pytest.mark.parametrize("width", [20, 59, 80, 400])
def test_the_report_fits_a_narrow_terminal(width: int) -> None:
    lines = list(report(ALL_CLEAR, width))
    assert max(map(len, lines)) <= max(width, 59)
    text = " ".join(" ".join(lines).split())
    for part in (
        "20 short chats",
        "20 long prompts",
        "2 rounds of 14 s",
        "4 cores",
        "4 threads on cores 0, 1, 2, 3",
        "5% of a core, not saturated",
        "40 s alone, 40 s as prefill and decode",
        "differ by up to 122% in p50, 122% in p99.",
    ):
        assert part in text


def test_the_bars_are_as_long_as_their_values() -> None:
    lines = list(report(ALL_CLEAR, 80, bar="#"))
    start = lines.index("TTFT of long prompts")
    alone, split = (line.count("#") for line in lines[start + 1 : start + 3])
    assert split > 40
    assert alone / split == pytest.approx(2 / 3, abs=0.02)


def test_a_busy_machine_and_a_saturated_router_are_said_to_be() -> None:
    rounds = [replace(figures_of(1, 1, 1), router_cpu=13.0, late=0.3) for _ in range(2)]
    text = " ".join(report(comparison(rounds, rounds, busy=3.5), 400))
    for part in ("busy with other work (load average 3.5)", "saturated: its", "300 ms late. That"):
        assert part in text


def test_the_chart_is_svg_with_a_bar_for_each_value() -> None:
    root = ElementTree.fromstring(chart(ALL_CLEAR))
    space = "{http://www.w3.org/2000/svg}"
    texts = " ".join(one.text or "" for one in root.iter(f"{space}text"))
    assert "AMD & Co, 4 cores; chat <model>; 2026-11-26" in texts
    assert "50% higher" in texts
    assert "better in 2, worse in 2" in (root.findtext(f"{space}desc") or "")
    # Twelve bars, two in the legend, and the background.
    assert len(list(root.iter(f"{space}rect"))) == 15


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--svg", "x.svg"], "--svg needs --compare"),
        (["--rounds", "3"], "--rounds needs --compare"),
        (["--compare", "--decoders", "3"], "--decoders cannot be used with --compare"),
        (["--compare", "--port", "8000"], "--port cannot be used with --compare"),
        (["--compare", "--vllm"], "--vllm cannot be used with --compare"),
        (["--compare", "--device", "cuda"], "leave --device out"),
        (["--compare", "--rounds", "1"], "1 is not from 2 to 100"),
        (
            ["--compare", "--json", "/nowhere/x.json"],
            "--json /nowhere/x.json: No such file or directory",
        ),
        (["--compare", "--svg", "/"], "--svg /: Is a directory"),
        (["--compaer"], "did you mean --compare?"),
    ],
)
def test_a_bad_option_is_one_line_and_starts_nothing(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["demo", *arguments])
    assert left.value.code == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("disagg-router demo: error: ")
    assert message in line
    assert captured.out == ""


def fake_engines(mode: str = "good") -> EngineCommands:
    me = [sys.executable, str(SCRIPT)]
    return EngineCommands(reference=[*me, "engine", mode], needed=("json",))


def test_a_whole_comparison_writes_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SCRIPT.parents[3]))
    (tmp_path / "model").mkdir()
    wanted = CompareOptions(2, tmp_path / "c.json", tmp_path / "c.svg", round_s=1.0)
    processes = ChildProcesses(tmp_path)
    try:
        compare(processes, builder_of(fake_engines(), tmp_path), wanted)
    finally:
        processes.stop()
    captured = capsys.readouterr()
    assert "Equal CPU: " in captured.out
    assert "written: " in captured.out
    assert re.search(r"round [12] of 2, .* s left", captured.err), "progress, now and then"
    content = json.loads((tmp_path / "c.json").read_text())
    for setup in SETUPS:
        short = [one["short_chats"] for one in content["rounds"][setup]]
        assert [one["failed"] for one in short] == [0, 0]
        assert content["rounds"][ALONE][0]["short_chats"]["answered"] == short[0]["answered"] > 1
        assert {one["completion_tokens"] / one["answered"] for one in short} == {40}
    assert len(content["figures"]) == 6
    assert ElementTree.fromstring((tmp_path / "c.svg").read_text()).tag.endswith("svg")


def test_a_request_that_fails_ends_the_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SCRIPT.parents[3]))
    (tmp_path / "model").mkdir()
    processes = ChildProcesses(tmp_path)
    wanted = CompareOptions(2, None, None, round_s=1.0)
    try:
        with pytest.raises(CommandError, match="of 1 requests failed: 500 no room"):
            compare(processes, builder_of(fake_engines("failing"), tmp_path), wanted)
    finally:
        processes.stop()


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -9)]
)
def test_a_signal_ends_the_comparison_and_its_processes(
    tmp_path: Path, number: signal.Signals, status: int
) -> None:
    output = tmp_path / "output"
    with demo("good", find_free_ports(1)[0], output, "--compare", "--model", "tiny") as process:
        wait_for(lambda: "round 1" in output.read_text() or process.poll() is not None)
        family = family_of(process.pid)
        assert len(family) == 5, output.read_text()
        process.send_signal(number)
        assert process.wait(20) == status
        wait_for(lambda: not any(map(lives, family)))
    assert "Traceback" not in output.read_text()


def test_an_engine_that_is_killed_ends_the_comparison(tmp_path: Path) -> None:
    output = tmp_path / "output"
    with demo("good", find_free_ports(1)[0], output, "--compare", "--model", "tiny") as process:
        wait_for(lambda: "round 1" in output.read_text() or process.poll() is not None)
        assert process.poll() is None, output.read_text()
        os.kill(max(family_of(process.pid) - {process.pid}), signal.SIGKILL)
        assert process.wait(30) == 1
    text = output.read_text()
    assert "Traceback" not in text
    assert "error: " in text.splitlines()[-1]


class SlowStart:
    """Counts the requests that are open at a time."""

    def __init__(self) -> None:
        self.open = self.most = 0
        self.three = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        self.most = max(self.most, self.open)
        await reader.readuntil(b"\r\n\r\n")
        if self.open == 3:
            self.three.set()
        async with asyncio.timeout(30):
            await self.three.wait()
        chunk = b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\ndata: [DONE]\n\n'
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(chunk) + chunk)
        writer.close()
        self.open -= 1


async def test_requests_are_sent_in_time_though_none_is_answered() -> None:
    slow, figures = SlowStart(), Figures()
    server = await asyncio.start_server(slow.serve, "127.0.0.1", 0)
    async with server:
        target = Target("127.0.0.1", server.sockets[0].getsockname()[1])
        load = ChatLoad(target, LoadPlan("m", 3, 1, 5, 5, 1), 30.0, figures)
        started = time.monotonic()
        late = await load.run_at([0.0, 0.1, 0.2], "r")
    assert figures.answered == 3
    assert slow.most == 3
    assert 0 <= late < time.monotonic() - started
