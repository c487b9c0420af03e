"""The router's benchmark may be believed: who is compared with whom, and what is counted."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import httptools
import orjson
import pytest

from scripts.bench.errors import BenchError, NotInterleavedError
from scripts.router_bench import compare, saturate
from scripts.router_bench.accounting import usage
from scripts.router_bench.cases import cases
from scripts.router_bench.contestants import Engines
from scripts.router_bench.runs import Run, Runs, percentiles, take_turns
from scripts.router_bench.session import Contestant, Session

RUN = Run("s", 0, "unary", "ours", 100, 1, 1.0, 0.02, 0, (0.001, 0.002), (0.001, 0.002))


def runs(*contestants: str) -> list[Run]:
    return [replace(RUN, place=place, contestant=name) for place, name in enumerate(contestants)]


def test_a_ratio_is_of_what_one_request_costs() -> None:
    """Where cores are full all use as much, and answer more or fewer."""
    ours, peer = runs("ours", "peer")
    assert Runs("unary", [replace(ours, requests=400), peer]).ratio("ours", "peer") == 0.25


SAID = "  {made} requests in 2.00s, 1MB read\n{trouble}Requests/sec: 1\n"


@pytest.mark.parametrize(
    ("trouble", "is_fine"),
    [
        ("", True),
        ("  Socket errors: connect 0, read 0, write 0, timeout 3\n", True),
        ("  Socket errors: connect 0, read 7, write 0, timeout 0\n", False),
        ("  Non-2xx or 3xx responses: 5\n", False),
    ],
)
async def test_what_wrk_says_is_what_was_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str, is_fine: bool
) -> None:
    said = SAID.format(made=800, trouble=trouble)
    wrk = tmp_path / "wrk"
    wrk.write_text(f"#!/bin/sh\ncat <<'E'\n{said}E\n")
    wrk.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    session = Session(Engines(1, 2), [Contestant("ours", 80, os.getpid()), Contestant("direct")])
    case = saturate.saturated()["unary"]
    if is_fine:
        made = [run async for run in saturate.measure_full(session, case, 2, 2)]
        assert [(run.contestant, run.requests, run.elapsed) for run in made] == [
            ("ours", 800, 2.0)
        ] * 2
    else:
        with pytest.raises(BenchError, match="does not answer as it should"):
            [run async for run in saturate.measure_full(session, case, 1, 2)]


async def test_who_answers_nothing_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrk = tmp_path / "wrk"
    wrk.write_text(f"#!/bin/sh\ncat <<'E'\n{SAID.format(made=0, trouble='')}E\n")
    wrk.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    session = Session(Engines(1, 2), [Contestant("peer", 80, os.getpid())])
    with pytest.raises(BenchError, match=r"^peer answered nothing in 2.00s$"):
        [run async for run in saturate.measure_full(session, saturate.saturated()["unary"], 1, 2)]


def test_the_ratio_is_the_median_over_pairs_that_followed_each_other() -> None:
    costs = [(1.0, 2.0), (3.0, 3.0), (1.0, 4.0)]
    made: list[Run] = []
    for pair in costs:
        for name, cpu in zip(("ours", "peer"), pair, strict=True):
            made.append(replace(RUN, place=len(made), contestant=name, cpu=cpu))
    assert Runs("unary", made).ratio("ours", "peer") == 0.5


@pytest.mark.parametrize(
    "order", [["ours", "ours", "peer", "peer"], ["ours", "peer", "ours"], ["ours", "ours"]]
)
def test_runs_that_did_not_take_turns_are_not_compared(order: list[str]) -> None:
    made = Runs("unary", runs(*order))
    with pytest.raises(NotInterleavedError, match="did not take turns"):
        take_turns(made.of("ours"), made.of("peer"))


def test_runs_of_two_sessions_are_not_compared() -> None:
    ours, peer = runs("ours", "peer")
    with pytest.raises(NotInterleavedError):
        take_turns([ours], [replace(peer, session="another")])


def written(directory: Path, name: str, ratio: float | None) -> Path:
    path = directory / name
    path.write_text(json.dumps({"cases": [{"case": "unary", "ratio": ratio}]}))
    return path


def test_two_files_are_compared_by_their_ratios_to_the_peer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compare.main(written(tmp_path, "a", 0.5), written(tmp_path, "b", 0.4))
    assert "0.50 -> 0.40" in capsys.readouterr().out


def test_two_files_without_a_peer_are_not_compared(tmp_path: Path) -> None:
    with pytest.raises(NotInterleavedError, match="not to be compared"):
        compare.main(written(tmp_path, "a", None), written(tmp_path, "b", 0.4))


def test_another_programs_file_is_an_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("[]")
    with pytest.raises(BenchError, match="not a file of this program"):
        compare.main(tmp_path / "a", tmp_path / "a")


BURN = "x = 0\nwhile x < 3_000_000: x += 1\n"
# Whoever has burnt says so and stays, because what has ended is not counted.
STAY = "print('done', flush=True)\nimport time\ntime.sleep(60)\n"
IN_A_THREAD = f"import threading\nthreading.Thread(target=exec, args=({BURN + STAY!r},)).start()"
IN_A_CHILD = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BURN + STAY!r}])"


@pytest.mark.parametrize("program", [BURN + STAY, IN_A_THREAD, IN_A_CHILD])
def test_cpu_time_of_threads_and_children_is_counted(program: str) -> None:
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"done\n"
        used = usage(process.pid)
        os.killpg(process.pid, signal.SIGKILL)
    assert used.cpu > 0.05
    assert used.peak > 1024 * 1024


@pytest.mark.parametrize("name", cases())
def test_every_case_asks_in_valid_http(name: str) -> None:
    pieces: list[bytes] = []
    complete: list[bool] = []

    class Parsed:
        def on_body(self, piece: bytes) -> None:
            pieces.append(piece)

        def on_message_complete(self) -> None:
            complete.append(True)

    parser = httptools.HttpRequestParser(Parsed())
    parser.feed_data(cases()[name].requests(3, 5))
    assert complete == [True]
    assert orjson.loads(b"".join(pieces))["model"] == "m"


def test_percentiles_are_values_that_were_measured() -> None:
    assert percentiles([3.0, 1.0, 2.0]) == (2.0, 3.0)
    assert percentiles([1.0]) == (1.0, 1.0)
