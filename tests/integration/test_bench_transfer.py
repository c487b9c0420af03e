"""The benchmark measures what it says; how fast is not a test's business."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_transfer.py"
TINY = ["--rounds", "2", "--layers", "2", "--block-kib", "4", "--blocks", "4,8"]
TINY += ["--descriptors", "64", "--handover-blocks", "1", "--requests", "2"]
TINY += ["--prefill-seconds", "0.01", "--tracked", "3", "--idle-seconds", "0.2"]


pytestmark = pytest.mark.timeout(300)  # Seconds of work, in many processes, on busy machines too.

QUICK = ["throughput", "copy", "handshake", "handover", "step", "request"]


def run(*options: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, str(SCRIPT), *options], capture_output=True, text=True, timeout=280
    )


def measure(directory: Path, *sections: str) -> dict[str, Any]:
    file = directory / "bench.json"
    done = run("--only", *sections, *TINY, "--json", str(file))
    assert done.returncode == 0, done.stderr
    assert "machine:" in done.stdout
    content: dict[str, Any] = json.loads(file.read_text())
    return content


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return measure(tmp_path_factory.mktemp("bench"), *QUICK)


def cases(report: dict[str, Any], section: str) -> list[str]:
    return [row["case"] for row in report["rows"] if row["section"].startswith(section)]


def test_every_case_of_every_section_is_reported(report: dict[str, Any]) -> None:
    orders = ("ascending", "descending", "random")
    assert cases(report, "throughput") == [f"{n} blocks {one}" for n in (4, 8) for one in orders]
    assert cases(report, "copy") == ["4 blocks", "8 blocks"]
    assert cases(report, "handshake") == ["64 descriptors", "64 descriptors, shared secret"]
    assert cases(report, "hand-over") == ["pull 1 blocks", "push 1 blocks"]
    assert cases(report, "step") == ["P, 3 leases", "D, 3 tracked"]
    assert len(cases(report, "request")) == 4


def test_idle_processes_are_measured_with_and_without_leases(tmp_path: Path) -> None:
    assert len(cases(measure(tmp_path, "idle"), "idle")) == 6


def test_figures_are_positive_numbers_and_rows_say_how_sure_they_are(
    report: dict[str, Any],
) -> None:
    assert report["schema"] == 1
    assert report["machine"]["cores"] >= 1
    for row in report["rows"]:
        assert row["figures"]
        assert all(type(value) is float and value >= 0 for value in row["figures"].values())
        assert row["rounds"] == 2
        assert row["noisy"] == (row["spread"] > report["max_spread"])
        assert (row["aim"] is None) == (row["met"] is None)


def test_what_does_not_fit_the_memory_is_refused_in_one_line() -> None:
    done = run("--only", "throughput", "--layers", "4000", "--block-kib", "1024")
    assert done.returncode == 1
    assert done.stderr.startswith("bench_transfer: error: the two sides need ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("options", [["--rounds", "0"], ["--blocks", "1,x"], ["--only", "speed"]])
def test_a_wrong_option_is_refused(options: list[str]) -> None:
    assert run(*options).returncode == 2
