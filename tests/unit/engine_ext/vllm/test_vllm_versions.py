"""Another vLLM than those that were tested: the connector refuses, the plugin does nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
REFUSAL = "engine_ext supports vLLM 0.32, this is vLLM 0.31.1"


@pytest.fixture
def other_vllm(tmp_path: Path) -> Path:
    """Nothing but a version: what else there is of another vLLM nobody can know."""
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text('__version__ = "0.31.1"\n')
    return tmp_path


def run(program: str, beside: Path) -> "subprocess.CompletedProcess[str]":
    path = os.pathsep.join([str(beside), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("name", ["DisaggConnector", "DisaggPushConnector"])
def test_the_connector_refuses_in_one_line_that_names_both_versions(
    other_vllm: Path, name: str
) -> None:
    result = run(f"from engine_ext.vllm import {name}", other_vllm)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == f"RuntimeError: {REFUSAL}"


def test_the_plugin_changes_nothing_and_says_so(other_vllm: Path) -> None:
    program = "from engine_ext.vllm import plugin; plugin.register()"
    result = run(program, other_vllm)
    assert (result.returncode, result.stdout) == (0, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith(REFUSAL)
