"""The simulated fleet replays from its seed, and reads published traces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.benchmarks.fleet import main
from scripts.benchmarks.traces import published


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """60 requests in ticks of three seconds; every second one repeats an earlier prompt."""
    lines = []
    for number in range(60):
        first = 1000 * (number // 2)
        entry = {"timestamp": 3000 * (number // 6), "input_length": 2100, "output_length": 20}
        lines.append(json.dumps(entry | {"hash_ids": [first, first + 1, first + 2, first + 3]}))
    path = tmp_path / "published.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def rows(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[list[str]]:
    """The lines without the measured times of a choice."""
    assert main(arguments) == 0
    return [line.split()[:-2] for line in capsys.readouterr().out.splitlines()[1:]]


def test_trace_is_replayed_at_its_own_times(trace: Path) -> None:
    arrivals = published(trace, speed=1, spread=False)
    assert [at for at, _ in arrivals] == [3.0 * (number // 6) for number in range(60)]
    assert len(arrivals[0][1].chunks) == 2100 // 256
    assert arrivals[0][1].chunks == arrivals[1][1].chunks != arrivals[2][1].chunks
    spread = [at for at, _ in published(trace, speed=2, spread=True)]
    assert spread[:7] == [0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5]
    assert spread == sorted(spread)


def test_policy_that_knows_prefixes_finds_them_in_the_trace(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--trace", str(trace), "--prefillers", "3", "--decoders", "1")
    found = rows(capsys, *arguments, "--prefill-policy", "round_robin", "prefix")
    assert [row[2] for row in found] == ["round_robin", "prefix"]
    hits = [int(row[10].rstrip("%")) for row in found]
    assert hits[0] == 0
    assert hits[1] > 0
    assert found == rows(capsys, *arguments, "--prefill-policy", "round_robin", "prefix")


def test_goals_that_nothing_meets_have_no_goodput(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--trace", str(trace), "--prefill-policy", "prefix", "--prefillers", "2")
    assert rows(capsys, *arguments)[0][5] == "1.000"
    assert rows(capsys, *arguments, "--tpot-goal", "0.001")[0][5] == "0.000"
    assert rows(capsys, *arguments, "--ttft-goal", "0.001")[0][5] == "0.000"


def test_several_routers_find_as_much_as_one_if_they_share(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shape = ("--shape", "chat", "--requests", "1200", "--prefill-policy", "prefix")
    fleet = ("--prefillers", "4", "--decoders", "2")
    one, four = rows(capsys, *shape, *fleet, "--routers", "1", "4")
    (sharing,) = rows(capsys, *shape, *fleet, "--routers", "4", "--share-interval", "0.2")
    hits = [int(row[10].rstrip("%")) for row in (one, four, sharing)]
    assert hits[1] < hits[2] - 3
    assert hits[2] >= hits[0] - 3


@pytest.mark.parametrize(
    "line", ["", "[]", "{}", '{"timestamp": "soon", "input_length": 1}', "\x00"]
)
def test_file_that_is_no_trace_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(f"{line}\n")
    assert main(["--trace", str(path)]) == 2
    error = capsys.readouterr().err
    assert f"{path}, line 1: not a request of a trace" in error
    assert error.count("\n") == 1
    assert main(["--trace", str(tmp_path / "none")]) == 2
