"""scripts/gpu_check.sh, on the one device that is here: the same steps, small."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from engine_ext.reference.tiny_model import TinyModel, write_tiny_model
from scripts import gpu_steps
from scripts.benchmarks.common import BenchError
from scripts.gpu_steps import Step
from tests.gpu import equality
from tests.gpu.equality import EngineProcess, Setup
from tests.integration.processes import wait_for

ROOT = Path(__file__).parents[2]
BENCH = "--only copy --rounds 1 --layers 2 --block-kib 4 --blocks 4"
pytestmark = [pytest.mark.timeout(300), pytest.mark.nightly]


def check(out: Path, *options: str, device: str = "cpu") -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHON": sys.executable, "DEVICE": device, "OUT": str(out)}
    return subprocess.run(
        [str(ROOT / "scripts" / "gpu_check.sh"), "--lengths", "33,300", *options],
        capture_output=True,
        text=True,
        timeout=280,
        env=environment,
    )


def test_all_steps_end_well_and_are_told(tmp_path: Path) -> None:
    done = check(tmp_path, "--bench", BENCH, "--without-vllm")
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads((tmp_path / "check.json").read_text())
    assert [step["outcome"] for step in said["steps"]] == ["ok"] * 5
    assert all("every token equal" in step["said"] for step in said["steps"][:4])
    (row,) = said["figures"]["rows"]
    assert row["figures"]["of_copy"] > 0
    assert f"  {row['case']} " in done.stdout
    assert [line[:2] for line in done.stdout.splitlines()[-5:]] == ["ok"] * 5
    logs = sorted(path.parent.name for path in tmp_path.glob("logs/pushed/*/engine.log"))
    assert logs == ["alone", "d", "p"]


def test_an_engine_of_other_weights_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = write_tiny_model(tmp_path / "other", TinyModel(seed=1))

    def start(directory: Path, setup: Setup) -> EngineProcess:
        is_alone = directory.name == "alone"
        return EngineProcess(directory, replace(setup, model=other) if is_alone else setup)

    monkeypatch.setitem(equality.ENGINES, "reference", start)
    with pytest.raises(BenchError, match="prompt of 33 tokens: tokens "):
        equality.compare(Setup(0), lengths=(33,), logs=tmp_path)


@pytest.mark.parametrize(
    ("code", "seconds", "said"),
    [
        ("raise SystemExit('another token')", 60, "another token"),
        ("raise SystemExit(3)", 60, "exit code 3"),
        ("while True: pass", 0.5, "it took longer than 0.5 s"),
    ],
)
def test_a_step_that_fails_is_named_and_the_others_run(
    code: str,
    seconds: float,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    well = Step("the other", ("-c", "print('it is')"), 60)
    monkeypatch.setattr(gpu_steps, "steps", lambda _: [Step("one", ("-c", code), seconds), well])
    assert gpu_steps.main(["--out", str(tmp_path), "--without-vllm"]) == 1
    assert f"gpu_check: failed: one: {said}" in capsys.readouterr().err
    told = json.loads((tmp_path / "check.json").read_text())["steps"]
    assert [step["outcome"] for step in told] == ["failed", "ok"]


@pytest.mark.parametrize(("options", "status"), [((), 0), (("--strict",), 3)])
def test_a_model_that_vllm_cannot_run_is_no_pass(
    options: tuple[str, ...],
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = "import sys; print('no such kernel', file=sys.stderr); sys.exit(4)"
    monkeypatch.setattr(gpu_steps, "steps", lambda _: [Step("one", ("-c", code), 60)])
    assert gpu_steps.main(["--out", str(tmp_path), "--without-vllm", *options]) == status
    assert "gpu_check: not run: one: no such kernel" in capsys.readouterr().err
    (told,) = json.loads((tmp_path / "check.json").read_text())["steps"]
    assert told["outcome"] == "not run"


def test_a_step_that_takes_too_long_is_ended_with_what_it_has_started(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """And what it said in the meantime was passed on."""
    child = "import subprocess, sys; print('here', file=sys.stderr, flush=True)\n"
    child += "one = subprocess.Popen([sys.executable, '-c', 'while True: pass'])\n"
    child += f"open({str(tmp_path / 'pid')!r}, 'w').write(str(one.pid))\none.wait()"
    done = gpu_steps.run(Step("one", ("-c", child), 3))
    assert done.outcome == "failed"
    assert "here" in capfd.readouterr().err
    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: _has_ended(pid), "its child has ended")


def _has_ended(pid: int) -> bool:
    """Or waits for its new parent to notice."""
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or ") Z " in status.read_text()


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a CUDA device")
def test_without_a_gpu_it_says_so_at_once(tmp_path: Path) -> None:
    done = check(tmp_path, device="cuda")
    assert done.returncode == 1
    assert done.stderr.startswith("gpu_check: error: no nvidia-smi")
