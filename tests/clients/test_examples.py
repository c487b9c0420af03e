"""Each example of a client runs, where the client is installed. Those of agents are in
test_agents.py."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.conftest import CLIENTS, MODEL, Stack

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
AGENTS = {"claude_code.sh", "codex.sh", "open_webui.sh", "opencode.sh"}
# The folder has folders with other examples.
NAMES = {path.name for path in EXAMPLES.iterdir() if path.is_file()}
RUN_HERE = sorted(NAMES - AGENTS)


def command_for(example: Path) -> list[str]:
    match example.suffix:
        case ".py":
            return [sys.executable, str(example)]
        case ".mjs":
            if not shutil.which("node"):
                pytest.skip("Node is not installed")
            return ["node", str(shutil.copy(example, CLIENTS))]  # imports are resolved from there
        case _:
            return [str(example)]


@pytest.mark.parametrize("name", RUN_HERE)
def test_example_prints_an_answer(stack: Stack, name: str) -> None:
    # What is random ends by the limit of an answer in the examples, or by the model's context.
    variables = {**os.environ, "ROUTER_URL": stack.router.url, "MODEL": MODEL}
    done = subprocess.run(
        command_for(EXAMPLES / name),
        env=variables,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_page_shows_the_examples_as_they_are() -> None:
    page = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
    shown: set[str] = set()
    for section in page.split("\n## ")[1:]:
        found = re.search(r"`examples/(\S+)`.*```\w+\n(.*)```", section, re.DOTALL)
        assert found, section
        name, block = found.groups()
        assert block in (EXAMPLES / name).read_text(encoding="utf-8"), name
        shown.add(name)
    assert shown == NAMES
