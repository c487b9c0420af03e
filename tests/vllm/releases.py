"""Other releases of vLLM than the build that most tests run in: scripts/install_vllm."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.vllm.servers import Fleet

BUILD = "0.32.0"
"""The CPU build."""
WHEELS = Path(__file__).parents[2] / "scripts" / "vllm_wheels.txt"
LAID_OVER = re.findall(r"^vllm\S*==(\S+)", WHEELS.read_text(), re.MULTILINE)
"""The others, whose Python runs on its compiled parts."""
NEXT = LAID_OVER[-1]
"""The newest that is supported."""
RELEASES = [BUILD, pytest.param(NEXT, marks=pytest.mark.nightly)]
LENGTHS = (1, 31, 32, 33, 64, 100, 257, 700, 1500)
"""Of prompts."""


def python_of(fleet: Fleet, release: str) -> Path:
    if release == BUILD:
        return fleet.python
    python = fleet.python.parents[2] / f"vllm-{release}" / "bin" / "python"
    assert python.exists(), f"{python} is missing: run scripts/install_vllm {release}"
    return python


def of_next(fleet: Fleet) -> Fleet:
    return replace(fleet, python=python_of(fleet, NEXT))
