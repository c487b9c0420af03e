"""Commands that a newcomer runs, with real engines: the comparison, and a chat whose engine
is killed in mid-answer."""

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from router.commands.chat.command import RequestRoutes
from router.commands.chat.conversation import Conversation
from router.common.child_processes import ChildProcesses
from scripts.benchmarks.compare import compare
from scripts.benchmarks.latency import Launcher
from tests.conftest import find_free_ports
from tests.integration.processes import wait_for

CLI = [sys.executable, "-m", "router.commands.cli"]


@pytest.mark.timeout(300)
def test_the_comparison_measures_real_engines(model: Path, tmp_path: Path) -> None:
    launcher = Launcher(ChildProcesses(tmp_path), str(model))
    try:
        found = asyncio.run(compare(launcher, rounds=2, round_s=3.0))
    finally:
        launcher.family.stop()
    alone, split = found.values()
    for setup in (alone, split):
        short, long = setup["short chats"], setup["long prompts"]
        assert short.failed == long.failed == long.cached_tokens == 0
        assert short.completion_tokens == 40 * short.answered
        assert short.first.count == short.answered > 1
    assert alone["short chats"].prompt_tokens == split["short chats"].prompt_tokens


@contextmanager
def demo(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Run the demo with a random model; yield the router's URL and the demo's output."""
    (port,) = find_free_ports(1)
    output = tmp_path / "output"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [*CLI, "demo", "--model", "tiny", "--port", str(port)],
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_for(lambda: "Ready." in output.read_text(), output.read_text, 110)
        yield f"http://127.0.0.1:{port}", output
    finally:
        process.terminate()
        process.wait(30)


def is_busy(engine: str) -> bool:
    return "disagg_engine_requests_running 1.0" in httpx.get(f"{engine}/metrics").text


@pytest.mark.timeout(300)
def test_a_chat_shows_its_engines_and_survives_the_kill_of_one(tmp_path: Path) -> None:
    with demo(tmp_path) as (url, output):
        done = subprocess.run(
            [*CLI, "chat", url, "--max-tokens", "16"],
            input="hello there, what do you know about rivers and bridges?\nand about winters?\n",
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        first, second = done.stderr.splitlines()
        for line in (first, second):
            assert re.search(r"prefill \S+, decode \S+, KV moved \(\d+ blocks?\)", line)
        reused = re.search(r"(\d+) of \d+ prompt tokens from a cache", second)
        assert reused
        assert int(reused[1]) > 32

        # The random model would end its answers soon.
        fields = {"max_tokens": 1500, "temperature": 0, "ignore_eos": True}
        conversation = Conversation(url, "tiny-random", {}, fields, timeout_s=60)
        pieces = conversation.ask("a long story")
        next(pieces)
        pattern = r"decode engine \d +(\S+) +to kill it: kill -9 (\d+)"
        engines = re.findall(pattern, output.read_text())
        os.kill(next(int(pid) for engine, pid in engines if is_busy(engine)), 9)
        for _ in pieces:
            pass
        assert conversation.answer.completion_tokens == 1500
        route = RequestRoutes(url).find(conversation.answer.request_id)
        assert route[-1] == "resumed on another engine"
