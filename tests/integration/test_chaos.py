"""Engines die, freeze and talk nonsense under load, and clients see no more of it than they may.

The short form of `make chaos`; it breaks engines in every way that docs/failures.md lists.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.scenarios import SHORT

PROGRAM = Path(__file__).resolve().parents[2] / "scripts" / "bench.py"


@pytest.mark.timeout(240)
def test_clients_see_no_more_of_a_failure_than_they_may(tmp_path: Path) -> None:
    written = tmp_path / "chaos.json"
    command = [sys.executable, str(PROGRAM), "chaos", "--short", "--check", "--json", str(written)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode in (0, 1), done.stderr
    runs = json.loads(written.read_text())["runs"]
    missed = {f"{run['scenario']} {run['mode']}": run["missed"] for run in runs if run["missed"]}
    assert not missed, done.stdout
    assert len(runs) == len(SHORT)
