"""What of ours fits each release of vLLM, found without a model: 0.31 is refused by name."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.vllm.releases import BUILD, LAID_OVER, NEXT, python_of
from tests.vllm.servers import ENVIRONMENT, Fleet


class Fits(NamedTuple):
    protocol: int
    """The version of stock's, as it counts them."""
    refused: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


RELEASES = {
    "0.31.0": Fits(
        13, ("connector",), ("pages", "load_failures", "resume", "step_model", "step_budget")
    ),
    "0.32.0": Fits(14),
    "0.33.0": Fits(15),
}
"""What is off with each."""


def test_each_release_that_is_installed_is_looked_at() -> None:
    assert set(RELEASES) == {BUILD, *LAID_OVER}


def run_inside(python: Path, *arguments: str) -> None:
    command = [str(python), "-m", *arguments]
    subprocess.run(command, check=True, env={**os.environ, **ENVIRONMENT}, timeout=500)


def results_inside(python: Path, folder: Path, *arguments: str) -> dict[str, Any]:
    """Return the results that a module writes as JSON into its last argument."""
    results = folder / "results.json"
    run_inside(python, *arguments, str(results))
    found: dict[str, Any] = json.loads(results.read_text())
    return found


@pytest.mark.parametrize("release", RELEASES)
def test_what_we_touch_of_a_release_is_as_we_know_it(
    fleet: Fleet, tmp_path: Path, release: str
) -> None:
    found = results_inside(python_of(fleet, release), tmp_path, "tests.vllm.inside.contract")
    protocol, refused, missing = RELEASES[release]
    assert (found["version"], found["protocol"]) == (release, str(protocol))
    assert found["cases"] == dict.fromkeys(found["cases"])
    assert (set(found["refused"]), set(found["missing"])) == (set(refused), set(missing)), found


def test_no_fault_in_a_hook_ends_the_next_releases_scheduler(fleet: Fleet, tmp_path: Path) -> None:
    arguments = ("tests.vllm.inside.cases", str(fleet.model))
    cases = results_inside(python_of(fleet, NEXT), tmp_path, *arguments)
    assert len(cases) > 200
    assert {name: problem for name, problem in cases.items() if problem} == {}


@pytest.mark.parametrize("release", [BUILD, NEXT])
def test_tokenize_reads_the_reasoning_of_a_history_like_a_chat(fleet: Fleet, release: str) -> None:
    run_inside(python_of(fleet, release), "tests.vllm.inside.reasoning")
