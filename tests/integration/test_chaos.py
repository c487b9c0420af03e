"""Engines die, freeze and talk nonsense under load, and clients see no more of it than they may.

The short form of `make chaos`; it breaks engines in every way that docs/failures.md lists.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.scenarios import SHORT

PROGRAM = Path(__file__).resolve().parents[2] / "scripts" / "bench.py"
TIMES = ("a client waited", "a stream stood still")


@pytest.mark.timeout(450)
def test_clients_see_no_more_of_a_failure_than_they_may(tmp_path: Path) -> None:
    """A machine that stands still makes clients wait too, so drills that missed only a time run
    once more, without the other drills beside them."""
    runs = drill(tmp_path, "--short")
    assert len(runs) == len(SHORT)
    late = [run for run in runs if run["missed"] and all(map(is_time, run["missed"]))]
    if late:
        names = {run["scenario"] for run in late}
        runs = [run for run in runs if run["scenario"] not in names]
        runs += drill(tmp_path, "--short", "--at-once", "1", "--only", *names)
    assert not {f"{run['scenario']} {run['mode']}": run["missed"] for run in runs if run["missed"]}


@pytest.mark.parametrize("protocol", ["mooncake", "sglang"])
def test_engines_of_other_protocols_fail_without_an_error_at_a_client(
    tmp_path: Path, protocol: str
) -> None:
    names = ("kill-p", "kill-d", "restart-p", "error-d", "silent-p")
    runs = drill(tmp_path, "--kv-protocol", protocol, "--seconds", "2", "--only", *names)
    assert len(runs) == 8
    assert not {run["scenario"]: run["errors"] for run in runs if run["errors"]}
    assert all(run["requests"] == run["ok"] for run in runs)


def drill(directory: Path, *options: str) -> list[dict[str, Any]]:
    written = directory / "chaos.json"
    command = [sys.executable, str(PROGRAM), "chaos", "--json", str(written)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    runs: list[dict[str, Any]] = json.loads(written.read_text())["runs"]
    return runs


def is_time(missed: str) -> bool:
    return missed.startswith(TIMES)
