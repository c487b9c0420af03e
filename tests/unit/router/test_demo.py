"""`disagg-router demo`, with fake engines: what it starts it also stops."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from router.cli import main
from tests.conftest import find_free_ports

SCRIPT = Path(__file__).with_name("fake_demo.py")


def wait_for(condition: Callable[[], object], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not reached in time"
        time.sleep(0.02)


def family_of(pid: int) -> set[int]:
    """The process and all its descendants."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found, waiting = set(), [pid]
    while waiting:
        parent = waiting.pop()
        found.add(parent)
        waiting += children.get(parent, [])
    return found


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextlib.contextmanager
def demo(mode: str, port: int, output: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, str(SCRIPT), "demo", str(port), mode]
    root = str(SCRIPT.parents[3])
    with output.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": root}
        )
    try:
        yield process
    finally:
        family = family_of(process.pid)
        process.kill()
        process.wait()
        wait_for(lambda: not any(map(lives, family)))


@pytest.mark.parametrize(
    ("mode", "number"),
    [("good", signal.SIGINT), ("stubborn", signal.SIGTERM), ("good", signal.SIGKILL)],
)
def test_the_demo_serves_and_leaves_no_process_behind(
    tmp_path: Path, mode: str, number: signal.Signals
) -> None:
    port, output = find_free_ports(1)[0], tmp_path / "output"
    with demo(mode, port, output) as process:
        wait_for(lambda: "Ready. Try" in output.read_text() or process.poll() is not None)
        said = output.read_text()
        assert process.poll() is None, said
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "x"})
        assert answer.json()["got"]["kv_transfer_params"]["remote_port"].isdigit()
        family = family_of(process.pid)
        assert len(family) == 5, "the demo, three engines, a router"
        process.send_signal(number)
        assert process.wait(20) == (-number if number == signal.SIGKILL else 0)
        wait_for(lambda: not any(map(lives, family)))
    for text in ("gibberish", "--model DIR", "prefill engine 2 is ready", "/v1/chat/completions"):
        assert text in said
    assert said.count("curl ") == 2


def test_an_engine_that_dies_ends_the_demo_with_its_last_words(tmp_path: Path) -> None:
    output = tmp_path / "output"
    with demo("dying", find_free_ports(1)[0], output) as process:
        assert process.wait(30) == 1
    # Whichever of the three is looked at first.
    assert re.search(
        r"engine \d ended with status 1; its last words:\n  no such device", output.read_text()
    )


def test_a_taken_port_ends_the_demo_before_it_starts_anything(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["demo", "--port", str(port)]) == 1
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith(f"disagg-router demo: error: cannot listen on 127.0.0.1:{port}")


@pytest.mark.parametrize(
    "arguments", [["--prefillers", "0"], ["--model", "/nowhere"], ["--device", "tpu"], ["--prot"]]
)
def test_a_bad_demo_option_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["demo", *arguments])
    assert left.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("disagg-router demo: error: ")
